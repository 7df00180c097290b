"""Exact answers of a tiny model have its distribution given the grammar, and drafts and faults change none.

The wanted distribution comes from transformers: the model's own probability of every text of a grammar, byte by byte.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from gpu_engine.api.errors import LimitExceeded
from gpu_engine.api.request import FinishReason, GrammarExact, GrammarKind, GrammarSpec
from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import LoadedModel, load_model
from shared_mem.channel import Record
from shared_mem.layout import Stage
from tests.fakes import EOS
from tests.gpu_engine.harness import (
    PATIENCE_S,
    Answer,
    Hold,
    answer_all,
    ask,
    config,
    held,
    tokens,
    until_false,
    with_drafts,
)
from tests.gpu_engine.library_sidecars import EACH_LIBRARY, PATIENT, Sidecars, compare
from tests.gpu_engine.made_requests import changed
from tests.gpu_engine.toy_sidecar import CrashError, guided_engine

PROMPT = tokens(40, 1, repeat=20)
BOUND = GrammarExact(2000, 600.0)


def compact(values: Sequence[object]) -> list[str]:
    return [json.dumps(value, separators=(",", ":")) for value in values]


def words(alphabet: str, *lengths: int) -> list[str]:
    return ["".join(letters) for length in lengths for letters in itertools.product(alphabet, repeat=length)]


def choice(*texts: str) -> tuple[str, list[str]]:
    return f"CHOICE COMPACT {json.dumps(texts)}", list(texts)


def schema(source: object, values: Sequence[object]) -> tuple[str, list[str]]:
    return f"JSON_SCHEMA COMPACT {json.dumps(source)}", compact(values)


BOOLEANS = [list(p) for length in range(3) for p in itertools.product([True, False], repeat=length)]
OBJECTS = [{"a": 1}, {"a": 22}, *({"a": a, "b": b} for a in (1, 22) for b in (True, False))]
XYZ = ["x", "yy", "zzz"]
GRAMMARS: dict[str, list[str]] = dict(
    [
        choice("yes", "no", "maybe"),
        choice("a", "ab", "abc", "abcd"),
        choice("red", "green", "blue", "black", "grey"),
        ("REGEX COMPACT [ab]{3}", words("ab", 3)),
        ("REGEX COMPACT [ab]{0,3}", words("ab", 0, 1, 2, 3)),
        ("REGEX COMPACT a|b[0-9]", ["a", *(f"b{digit}" for digit in range(10))]),
        ("REGEX COMPACT (x|yy|zzz){1,2}", sorted({*XYZ, *map("".join, itertools.product(XYZ, repeat=2))})),
        ("REGEX COMPACT [0-3]-[0-3]", [f"{a}-{b}" for a in range(4) for b in range(4)]),
        schema({"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, BOOLEANS),
        schema({"enum": [None, True, 1, "a", "b"]}, [None, True, 1, "a", "b"]),
        schema({"type": "integer", "minimum": 0, "maximum": 12}, list(range(13))),
        schema(
            {
                "type": "object",
                "properties": {"a": {"enum": [1, 22]}, "b": {"type": "boolean"}},
                "required": ["a"],
                "additionalProperties": False,
            },
            OBJECTS,
        ),
    ]
)
"""A grammar -> every text of it."""
FEW = [name for number, name in enumerate(GRAMMARS) if number in (0, 3, 8)]


@pytest.fixture(scope="module")
def random_llama(saved: Callable[[str], Path]) -> LoadedModel:
    """A tiny Llama with random weights, whose probabilities vary by many orders of magnitude."""
    return load_model(config(model=str(saved("llama"))))


@dataclass
class Wanted:
    """The model's distribution of texts, by transformers."""

    model: torch.nn.Module
    prompt: list[int]
    temperature: float
    biases: tuple[tuple[int, float], ...]

    @torch.no_grad()
    def log_probability(self, text: str) -> float:
        """Return the logarithm of the probability of a text and the end after it."""
        ids = [*text.encode(), EOS]
        logits = self.model(torch.tensor([self.prompt + ids])).logits[0, len(self.prompt) - 1 : -1].double()
        for token, bias in self.biases:
            logits[:, token] += bias
        log_p = (logits / self.temperature).log_softmax(-1)
        return float(log_p.gather(1, torch.tensor(ids)[:, None]).sum())

    def given(self, texts: Sequence[str]) -> torch.Tensor:
        """Return the probability of each text, given that it is one of them."""
        return torch.tensor([self.log_probability(text) for text in texts], dtype=torch.float64).softmax(0)


def request(grammar: str, seed: int, *, exact: GrammarExact | None = BOUND, **values: object) -> Answer:
    """Return a request for an answer of a grammar, in the form of `LibraryGrammar`."""
    answer = ask(PROMPT, **{"max_tokens": 40, "temperature": 1.0, "seed": seed, **values})  # type: ignore[arg-type]
    spec = GrammarSpec(GrammarKind.LARK, grammar)
    answer.request = changed(answer.request, grammar=spec, grammar_exact=exact)
    return answer


def text_of(answer: Answer) -> str | None:
    return bytes(answer.tokens[:-1]).decode() if answer.finish is FinishReason.STOP else None


def distance(answers: Sequence[Answer], texts: Sequence[str], wanted: torch.Tensor) -> float:
    """Return the total variation between the answers' frequencies and a distribution."""
    found = Counter(map(text_of, answers))
    assert set(found) <= set(texts)
    frequencies = torch.tensor([found[text] / len(answers) for text in texts], dtype=torch.float64)
    return float((frequencies - wanted).abs().sum() / 2)


def noise(wanted: torch.Tensor, count: int) -> float:
    """Return the largest total variation of 200 samples of so many draws from the distribution itself."""
    generator = torch.Generator().manual_seed(count)
    draws = torch.multinomial(wanted.expand(200, -1), count, replacement=True, generator=generator)
    frequencies = torch.zeros(200, len(wanted), dtype=torch.float64)
    frequencies.scatter_add_(1, draws, torch.ones_like(draws, dtype=torch.float64))
    return float((frequencies / count - wanted).abs().sum(1).max() / 2)


SAMPLING = {"temperature": 1.3, "logit_bias": ((97, 2.0), (98, 1.0), (EOS, 3.0))}


@pytest.mark.parametrize(
    ("grammar", "count"),
    [(FEW[0], 100), (FEW[2], 100), *(pytest.param(name, 200, marks=pytest.mark.slow) for name in GRAMMARS)],
)
def test_exact_answers_have_the_models_distribution_given_the_grammar(
    random_llama: LoadedModel, grammar: str, count: int
) -> None:
    texts, model = GRAMMARS[grammar], AutoModelForCausalLM.from_pretrained(random_llama.name, dtype=torch.float32)
    wanted = Wanted(model, PROMPT, SAMPLING["temperature"], SAMPLING["logit_bias"]).given(texts)  # type: ignore[arg-type]
    exact = [request(grammar, seed, **SAMPLING) for seed in range(count)]
    local = [request(grammar, seed, exact=None, **SAMPLING) for seed in range(count)]
    settings = with_drafts(0, max_batch_size=16, max_queue_size=2 * count, **PATIENT)
    with Sidecars("llguidance", random_llama).engine(settings, logs=False) as (engine, _):
        answer_all(engine, exact)
        answer_all(engine, local)
    most = noise(wanted, count)
    assert distance(exact, texts, wanted) <= 1.1 * most
    if grammar in (FEW[0], FEW[2]):
        assert distance(local, texts, wanted) > 3 * most
    assert all(answer.telemetry.exact_tries >= 1 for answer in exact)
    assert not any(answer.telemetry.exact_tries for answer in local)


@dataclass
class Asked:
    """A request, and its exact answer."""

    grammar: str
    seed: int

    def ask(self) -> Answer:
        return request(self.grammar, self.seed, drafts=7, **SAMPLING)

    def check(self, answer: Answer) -> None:
        assert text_of(answer) in GRAMMARS[self.grammar]


@pytest.mark.parametrize("library", EACH_LIBRARY)
def test_drafts_batches_preemptions_and_the_prefix_cache_change_no_exact_answer(
    either_forward: LoadedModel, library: str, overlap: bool
) -> None:
    cases = [Asked(grammar, seed) for grammar in FEW for seed in range(6)]
    plain, drafted, uncached, small = compare(
        Sidecars(library, either_forward),
        cases,
        with_drafts(7, overlap=overlap, jump_forward_tokens=3, **PATIENT),
        with_drafts(3, prefix_cache=False, **PATIENT),
        with_drafts(2, max_model_len=80, kv_cache_tokens=80, prefix_cache=False, **PATIENT),
    )
    for one, *others in zip(plain, drafted, uncached, small, strict=True):
        numbers = {
            (t.exact_tries, t.exact_tokens, t.exact_log_mass) for t in (a.telemetry for a in (one, *others))
        }  # fmt: skip
        assert len(numbers) == 1, "the tries are the same, bit for bit"
    assert max(answer.telemetry.exact_tries for answer in plain) > 1
    assert sum(answer.telemetry.accepted_draft_tokens for answer in drafted) > 0


TOY = GrammarSpec(GrammarKind.LARK, "3")
"""Three tokens and the end, of the toy grammar: a place allows one token, every one, or some fifty."""


LEGAL = tuple((token, 12.0) for token in (65, *range(100, 256), EOS))


def toy_request(seed: int, bound: GrammarExact = BOUND) -> Answer:
    answer = ask(tokens(9, 2), max_tokens=20, temperature=2.0, seed=seed, logit_bias=LEGAL)  # type: ignore[arg-type]
    answer.request = changed(answer.request, grammar=TOY, grammar_exact=bound)
    return answer


def toy_answers(engine: Engine) -> list[Answer]:
    answers = [toy_request(seed) for seed in range(3)]
    answer_all(engine, answers)
    assert all(answer.finish is FinishReason.STOP for answer in answers)
    return answers


def test_a_killed_grammar_process_changes_no_exact_answer(random_llama: LoadedModel, overlap: bool) -> None:
    settings = with_drafts(3, overlap=overlap, **PATIENT)
    with guided_engine(random_llama, settings) as (engine, _):
        wanted = toy_answers(engine)
        assert max(answer.telemetry.exact_tries for answer in wanted) > 1
    with guided_engine(random_llama, settings) as (engine, grammar):
        kills = 0

        def die(record: Record) -> None:
            """Die three times, each time at the third try that begins anew."""
            nonlocal kills
            if kills < 3 and sum(each.stage == Stage.FORK for each in grammar.sidecar.records) == 3:
                kills += 1
                raise CrashError

        grammar.before = grammar.sidecar.before = die
        answers = [toy_request(seed) for seed in range(3)]
        for answer in answers:
            answer.submit(engine)
        for _ in range(3):
            assert grammar.sidecar.crashed.wait(PATIENCE_S)
            grammar.lose_sidecar(engine)
            grammar.restore_sidecar(engine)
        for answer in answers:
            answer.wait()
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in wanted]
    assert [a.telemetry.exact_tries for a in answers] == [a.telemetry.exact_tries for a in wanted]


LEARNED = GrammarExact(2000, 600.0, shared_tries=8, any_spelling=True)


@pytest.mark.parametrize("library", EACH_LIBRARY)
def test_an_answer_after_shared_tries_does_not_depend_on_who_made_them(
    random_llama: LoadedModel, library: str, overlap: bool
) -> None:
    def answers() -> list[Answer]:
        return [request(grammar, seed, exact=LEARNED, drafts=7, **SAMPLING) for grammar in FEW for seed in range(4)]

    sidecars = Sidecars(library, random_llama)
    runs = []
    for settings in (with_drafts(0, **PATIENT), with_drafts(7, overlap=overlap, jump_forward_tokens=3, **PATIENT)):
        with sidecars.engine(settings) as (engine, _):
            for _ in range(2):  # the second time the engine has the masses
                runs.append(answers())
                answer_all(engine, runs[-1])
            engine.grammar_restored()
            until_false(lambda: "of 0 questions" not in repr(engine.shared_masses))
    for one, *others in zip(*runs, strict=True):
        assert text_of(one) in [text for name in FEW for text in GRAMMARS[name]]
        assert (
            len({(tuple(a.tokens), a.telemetry.exact_tries, a.telemetry.exact_log_mass) for a in (one, *others)}) == 1
        )
    drawn = [sum(answer.telemetry.exact_tokens for answer in run) for run in runs]
    assert max(drawn[1], drawn[3]) < min(drawn[0], drawn[2])


def test_a_learner_that_is_aborted_or_preempted_leaves_the_shared_tries_to_the_next(random_llama: LoadedModel) -> None:
    def answers() -> list[Answer]:
        return [
            request(FEW[0], seed, exact=GrammarExact(2000, 600.0, shared_tries=30), **SAMPLING) for seed in range(4)
        ]

    sidecars = Sidecars("llguidance", random_llama)
    with sidecars.engine(with_drafts(3, **PATIENT), logs=False) as (engine, _):
        wanted = answers()
        answer_all(engine, wanted)
    assert [bool(answer.telemetry.exact_tokens > 30) for answer in wanted].count(True) == 1, "one makes the tries"
    small = with_drafts(3, max_model_len=80, kv_cache_tokens=80, prefix_cache=False, **PATIENT)
    for settings in (with_drafts(3, **PATIENT), small):
        with sidecars.engine(settings, logs=False) as (engine, _):
            aborted, *rest = answers()
            hold = Hold(engine, lambda: aborted.telemetry.exact_tokens >= 3)  # noqa: B023 - not used after the engine
            with held(engine):  # until each has its telemetry
                for answer in (aborted, *rest):
                    answer.submit(engine)
            with hold.reached():
                engine.abort(aborted.request.request_id)
            for answer in (aborted, *rest):
                answer.wait()
            assert aborted.finish is FinishReason.ABORTED
            assert [answer.tokens for answer in rest] == [answer.tokens for answer in wanted[1:]]
            engine.check_integrity()


def test_no_try_prefills_the_prompt_again(random_llama: LoadedModel) -> None:
    answers = [request(FEW[0], seed, **SAMPLING) for seed in range(4)]
    settings = with_drafts(0, prefix_cache=False, **PATIENT)
    with Sidecars("llguidance", random_llama).engine(settings, logs=False) as (engine, _):
        answer_all(engine, answers)
        assert sum(answer.telemetry.exact_tries for answer in answers) > len(answers)
        assert engine.stats().prefill_tokens == len(answers) * (len(PROMPT) - 1)
        engine.check_integrity()


def test_a_try_takes_the_matcher_back_and_needs_no_other(random_llama: LoadedModel, overlap: bool) -> None:
    with guided_engine(random_llama, with_drafts(3, overlap=overlap, **PATIENT)) as (engine, grammar):
        answers = toy_answers(engine)
        assert sum(answer.telemetry.exact_tries for answer in answers) > len(answers) + 20
        assert len(grammar.opened) == len(answers)
        engine.check_integrity()


def test_a_try_whose_record_was_lost_binds_a_matcher(random_llama: LoadedModel, overlap: bool) -> None:
    settings = with_drafts(3, overlap=overlap, **PATIENT)
    with guided_engine(random_llama, settings) as (engine, _):
        wanted = toy_answers(engine)
    with guided_engine(random_llama, settings) as (engine, grammar):
        number = itertools.count()
        grammar.sidecar.loses = lambda record: next(number) % 5 == 1
        answers = toy_answers(engine)
        assert len(grammar.opened) > len(answers)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in wanted]


def test_tokens_come_only_with_the_accepted_answer(random_llama: LoadedModel) -> None:
    answer = request(FEW[0], 1, logprobs=1, token_origins=True, prompt_logprobs=0, **SAMPLING)
    with Sidecars("llguidance", random_llama).engine(with_drafts(3, **PATIENT), logs=False) as (engine, _):
        answer_all(engine, [answer])
    (event,) = answer.events
    assert event.finish is FinishReason.STOP
    assert len(event.logprobs) == len(event.origins) == len(event.token_ids) == len(answer.tokens)
    assert event.prompt_logprobs is not None
    assert answer.telemetry.exact_tokens > len(answer.tokens)


@pytest.mark.parametrize("fails", [False, True])
def test_at_the_bound_no_token_is_sent(random_llama: LoadedModel, fails: bool) -> None:
    answers = [request(FEW[1], seed, exact=GrammarExact(1, 600.0, fails), **SAMPLING) for seed in range(20)]
    with Sidecars("llguidance", random_llama).engine(with_drafts(3, **PATIENT), logs=False) as (engine, _):
        answer_all(engine, answers)
        engine.check_integrity()
    given_up = [answer for answer in answers if answer.finish is not FinishReason.STOP]
    assert len(given_up) > 10
    for answer in given_up:
        assert answer.tokens == []
        assert answer.telemetry.exact_tries == 1
        assert answer.telemetry.exact_log_mass < 0
        if fails:
            assert isinstance(answer.error, LimitExceeded)
            assert "sampling.grammar_exact: 1 tries" in str(answer.error)
        else:
            assert answer.finish is FinishReason.GRAMMAR_INEXACT


def test_a_grammar_whose_answers_are_all_too_long_is_given_up(random_llama: LoadedModel) -> None:
    answer = request("REGEX COMPACT ab", 1, max_tokens=2, **SAMPLING)
    with Sidecars("llguidance", random_llama).engine(with_drafts(0, **PATIENT), logs=False) as (engine, _):
        answer_all(engine, [answer])
    assert answer.finish is FinishReason.GRAMMAR_INEXACT
    assert answer.telemetry.exact_log_mass == float("-inf")
    assert answer.telemetry.exact_tries == 1


def test_an_abort_sends_no_token_of_a_try(random_llama: LoadedModel) -> None:
    with guided_engine(random_llama, with_drafts(0, **PATIENT)) as (engine, grammar):
        reached, go_on = threading.Event(), threading.Event()

        def wait_at_four(record: object) -> None:
            if getattr(record, "commit_pos", 0) >= 2 and not reached.is_set():
                reached.set()
                assert go_on.wait(60)

        grammar.sidecar.before = wait_at_four
        answer = toy_request(1)
        answer.submit(engine)
        assert reached.wait(60)
        engine.abort(answer.request.request_id)
        go_on.set()
        answer.wait()
    assert answer.finish is FinishReason.ABORTED
    assert answer.tokens == []
