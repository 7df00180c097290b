"""Models whose layers differ: the tokens are transformers' own, whatever drafts are accepted and whatever happens.

Some have recurrent layers, and some attention with heads of two sizes.

The workload and the events are those of workload.py. Not responsible for: the layers (see model/recurrent/), the
choice of snapshots (see core/test_state_snapshots.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gpu_engine.core.engine import Engine
from gpu_engine.model.cache_size import num_snapshots, states_of
from gpu_engine.model.loader import LoadedModel, ModelNotSupported, load_model
from tests.gpu_engine import hybrids, tiny
from tests.gpu_engine.adapters.files import save_lora
from tests.gpu_engine.beams import of_transformers, search, search_all
from tests.gpu_engine.harness import (
    Answer,
    answer_all,
    answer_each,
    ask,
    config,
    running,
    tokens,
    unguided_engine,
    with_drafts,
)
from tests.gpu_engine.model.recurrent.families import CONFIGS
from tests.gpu_engine.processor_cases import SETTING, processed
from tests.gpu_engine.toy_sidecar import guided_engine
from tests.gpu_engine.workload import EVENTS, LENGTH, UNHURRIED, WORKLOAD

PROMPTS = [tokens(count, seed, repeat=count // 3) for seed, count in enumerate((3, 20, 33, 17, 50, 40))]
LENGTHS = (30, 12, 24, 30, 9, 18)
FAST = ("lfm2", "qwen3_5", "bamba", "jamba")
"""Short convolutions, delta nets, and the mixers of Mamba 2 and 1."""
UNLIKE = ("gemma4 small", "gemma4", "gemma4 moe")
"""Attention with heads of two sizes."""
FAMILIES = [*(family for family in CONFIGS if " " not in family), *UNLIKE]
"""Without variants of a hybrid family, which the tests of its modules have."""


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a family's name to the folder of its tiny model."""

    @cache
    def folder(family: str) -> Path:
        return hybrids.save(family, tmp_path_factory.mktemp("hybrid"))

    return folder


def asked() -> list[Answer]:
    return [ask(p, max_tokens=length, ignore_eos=True) for p, length in zip(PROMPTS, LENGTHS, strict=True)]


def every(numbers: tuple[int, ...]) -> list[Any]:
    """Return each family with each number of drafts; slow but for the most drafts of one family of each layer kind."""
    return [
        pytest.param(family, n, marks=[] if family in (*FAST, UNLIKE[0]) and n == max(numbers) else [pytest.mark.slow])
        for family in FAMILIES
        for n in numbers
    ]


@pytest.mark.parametrize(("family", "num_drafts"), every((0, 3, 7)))
def test_any_pattern_of_accepted_drafts_gives_the_tokens_of_transformers(
    folders: Callable[[str], Path], family: str, num_drafts: int
) -> None:
    """One by one, which fills the prefix cache, then at once with some sequences that are cancelled."""
    folder = folders(family)
    hybrid = load_model(config(model=str(folder)))
    expected = [tiny.generate(folder, prompt, length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
    with running(hybrids.engine_of_oracle(hybrid, texts, num_drafts, num_drafts)) as engine:
        assert answer_each(engine, asked()) == expected
        ends = random.Random(num_drafts)
        kept, cancelled = asked(), asked()
        for answer in cancelled:
            at = ends.randrange(1, 12)
            answer.on_event = lambda each, at=at: cancel(engine, each, at)
        assert (
            answer_all(engine, [each for pair in zip(kept, cancelled, strict=True) for each in pair])[::2] == expected
        )
        for answer, whole in zip(cancelled, expected, strict=True):
            assert answer.tokens == whole[: len(answer.tokens)]
        stats = engine.stats()
        assert stats.cached_tokens > 60
        assert (stats.accepted_draft_tokens > 60) == (num_drafts > 0)
        assert (stats.draft_tokens > stats.accepted_draft_tokens + 20) == (num_drafts > 0)


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("qwen3_5", "none"),
        ("lfm2", "q4"),
        pytest.param("bamba", "q4", marks=pytest.mark.slow),
        pytest.param("jamba", "int8", marks=pytest.mark.slow),
        ("gemma4 small", "none"),
        pytest.param("gemma4 small", "int8", marks=pytest.mark.slow),
        pytest.param("gemma4", "q4", marks=pytest.mark.slow),
        pytest.param("gemma4 moe", "none", marks=pytest.mark.slow),
    ],
)
def test_drafts_change_no_token_of_a_rounded_model(tmp_path: Path, family: str, quantization: str) -> None:
    """With this seed a row of the first model is close to zero before a norm, so that rounding changes it a lot."""
    fields = {"dtype": "bfloat16", "quantization": quantization}
    model = load_model(config(model=str(hybrids.save(family, tmp_path, seed=2)), **fields))
    with unguided_engine(model, with_drafts(0, **fields)) as engine:
        expected = answer_each(engine, asked())
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
    with running(hybrids.engine_of_oracle(model, texts, 1, 7, **fields)) as engine:
        assert answer_all(engine, asked()) == expected
        assert engine.stats().accepted_draft_tokens > 30


@pytest.mark.parametrize(
    ("family", "drafter"), [("gemma4 small", "model"), pytest.param("gemma4", "decoupled", marks=pytest.mark.slow)]
)
def test_a_model_with_heads_of_two_sizes_drafts_for_one(
    folders: Callable[[str], Path], family: str, drafter: str
) -> None:
    model = load_model(config(model=str(folders(family))))
    with unguided_engine(model, with_drafts(0)) as engine:
        expected = answer_each(engine, asked())
    settings = with_drafts(3, drafter=drafter, draft_model=str(folders("gemma4 small")))
    with unguided_engine(model, settings) as engine:
        assert answer_all(engine, asked()) == expected
        assert (engine.stats().accepted_draft_tokens > 30) == (family == "gemma4 small")
        assert engine.stats().draft_tokens > 30


def cancel(engine: Engine, answer: Answer, at: int) -> None:
    if len(answer.tokens) >= at and not answer.over:
        engine.abort(answer.request.request_id)


# -- everything that a request may have, and what may happen ----------------------------------------------------------


def made(engine: Engine) -> list[Answer]:
    """Return the answers of the workload, without prompt adapters and tensors of the model."""
    (lora,) = (use.adapter for use in engine.adapters.listed())
    answers = []
    for case in WORKLOAD:
        if not case.prompt:
            answers.append(processed(engine.processors, case.make(), *case.processors))
            answers[-1].change(lora=lora if case.lora else None)
    return answers


def rows() -> list[Any]:
    """Return events of one family of each kind of layers, with a quantization; all but one of them are slow."""
    fast = ("lfm2", "preempted", "none")
    slow = [
        *zip(FAST[1:], ("row by row", "dying", "killed in a step"), ["none"] * 3, strict=True),
        ("lfm2", "late", "none"),
        *(("lfm2", event, "q4") for event in ("preempted", "late", "killed in a step")),
        ("gemma4 small", "late", "none"),
        *((family, event, "none") for family in UNLIKE for event in ("preempted", "killed in a step", "staggered")),
    ]
    return [
        pytest.param(*row, id=", ".join(row), marks=[] if row == fast else [pytest.mark.slow])
        for row in dict.fromkeys([fast, *slow])
    ]


@pytest.mark.parametrize(("family", "event", "quantization"), rows())
def test_tokens_depend_on_no_event(
    folders: Callable[[str], Path], tmp_path: Path, family: str, event: str, quantization: str
) -> None:
    folder = folders(family)
    fields = {"model": str(folder), "adapters": (f"l={save_lora(folder, tmp_path, seed=1, gain=2.0)}",)}
    fields["quantization"] = quantization
    model, settings = load_model(config(**fields)), {**fields, "logits_processors": SETTING, "max_model_len": LENGTH}
    happens, options = EVENTS[event]
    drafts = {"drafter": "ngram", "num_draft_tokens": 3, "jump_forward_tokens": 7}
    with guided_engine(model, config(drafter="none", **settings, **UNHURRIED)) as (engine, _):
        expected = made(engine)
        answer_each(engine, expected)
    with guided_engine(model, config(**{**settings, **options, **drafts})) as (engine, grammar):
        answers = made(engine)
        happens(engine, grammar, answers)
    found, wanted = (
        [(answer.tokens, answer.finish, answer.logprobs) for answer in each] for each in (answers, expected)
    )
    assert found == wanted


@pytest.mark.parametrize("family", ["lfm2", pytest.param("gemma4 small", marks=pytest.mark.slow)])
def test_beams_are_those_of_transformers(folders: Callable[[str], Path], family: str) -> None:
    folder = folders(family)
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = load_model(config(model=str(folder)))
    searches = [search(PROMPTS[i], 2 + i % 2, max_tokens=9 + i) for i in range(1, 4)]
    with unguided_engine(model, with_drafts(0, kv_cache_tokens=256)) as engine:
        search_all(engine, searches)
    for answer in searches:
        ids, scores = of_transformers(net, answer.request)
        assert answer.tokens == ids
        assert answer.scores == pytest.approx(scores, abs=1e-4)


def test_questions_after_one_system_prompt_resume_from_its_state(folders: Callable[[str], Path]) -> None:
    model, system = load_model(config(model=str(folders("lfm2")))), tokens(70, 9)
    prompts = [system + tokens(20, seed) for seed in (1, 2, 3, 3)]

    def ask_each(*, at_once: bool = False, **fields: Any) -> tuple[list[list[int]], list[int]]:
        answers = [ask(prompt, max_tokens=40, ignore_eos=True) for prompt in prompts]
        with unguided_engine(model, config(max_batched_tokens=128, **fields)) as engine:
            found = answer_each(engine, answers[:1])
            found += (answer_all if at_once else answer_each)(engine, answers[1:])
        return found, [answer.telemetry.cached_tokens for answer in answers]

    without, cached = ask_each(prefix_cache=False)
    assert cached == [0, 0, 0, 0]
    # The second question keeps the state where it leaves the first one, after 64 tokens. The last is the third again.
    assert ask_each() == (without, [0, 0, 64, 80])
    # Each question computes the pages again that the first one has, and gives up its own while the others grow.
    assert ask_each(at_once=True, kv_cache_tokens=256)[0] == without


def test_the_start_says_what_slots_and_snapshots_take(
    folders: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(model=str(folders("bamba")), kv_cache_tokens=1_000_000)
    with caplog.at_level("INFO"):
        model = load_model(settings)
    sizes, snapshots = states_of(model.recurrent), num_snapshots(settings, model, 1_000_000 // settings.page_size)
    states, whole = sizes.of_slots(settings), sizes.of_slots(settings) + snapshots * sizes.state
    assert whole - states > 20_000_000
    assert f", {whole / 1e9:.2f} GB of recurrent states, " in caplog.text


def test_a_hybrid_drafts_for_no_model(folders: Callable[[str], Path], llama: LoadedModel) -> None:
    settings = with_drafts(3, draft_model=str(folders("lfm2")), drafter="model")
    with pytest.raises(ModelNotSupported, match=r"^draft_model: lfm2 has recurrent layers"):
        Engine(settings, llama)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: cannot be combined with the recurrent layers of lfm2"),
        ({"role": "prefill"}, "role: prefill cannot be combined with the recurrent layers of lfm2"),
        ({"drafter": "mtp"}, "drafter: mtp cannot be combined with the recurrent layers of lfm2"),
    ],
)
def test_what_recurrent_layers_refuse(folders: Callable[[str], Path], settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelNotSupported, match=f"^{reason}"):
        load_model(config(model=str(folders("lfm2")), **settings))
