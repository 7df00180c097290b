"""Tries over a made-up model: accepted answers have its distribution given the grammar."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from gpu_engine.api.request import FinishReason, GrammarExact
from gpu_engine.core.exact_sampling import ExactSampler, Verdict, coin, mixed
from gpu_engine.core.prefix_masses import MAX_PREFIXES, PER_QUESTION, PrefixMasses, SharedMasses
from gpu_engine.core.scheduler import GrammarState
from kernels.step_tensors import PREFIX

END, MAX_TOKENS = 4, 4
Prefix = tuple[int, ...]


@dataclass
class Model:
    """A model of five tokens with random probabilities, and a grammar: the answers in `answers`, each with the end."""

    answers: tuple[Prefix, ...]
    number: int = 0

    def probabilities(self, prefix: Prefix) -> list[float]:
        """Return the probability of each token after a prefix; they vary by some orders of magnitude."""
        draw = random.Random(f"{self.number} {prefix}")
        weights = [math.exp(draw.gauss(0, 3)) for _ in range(5)]
        return [weight / sum(weights) for weight in weights]

    def legal(self, prefix: Prefix) -> set[int]:
        """Return the tokens that the mask allows."""
        return {answer[len(prefix)] for answer in self.answers if answer[: len(prefix)] == prefix != answer}

    def wanted(self) -> dict[Prefix, float]:
        """Return the distribution of the answers that end in time."""
        found = {
            answer: math.prod(self.probabilities(answer[:i])[token] for i, token in enumerate(answer))
            for answer in self.answers
            if len(answer) <= MAX_TOKENS
        }
        return {answer: p / sum(found.values()) for answer, p in found.items()}


@dataclass
class Sequence:
    """A learner with a slot."""

    slot: int = 0
    grammar_state: GrammarState = GrammarState.OPEN


def prefixes_in(sampler: ExactSampler) -> dict[Prefix, float]:
    """Return what a draw reads from the sampler's memory: the known prefixes but the empty one, and their masses."""
    count = len(sampler.masses)
    memory = (PREFIX.itemsize * count, sampler.masses.address)
    rows = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_char * memory[0]).from_address(memory[1])).view(PREFIX)
    found: dict[Prefix, float] = {}

    def walk(number: int, prefix: Prefix) -> None:
        child = rows[number]["child"]
        while child >= 0:
            longer = (*prefix, int(rows[child]["token"]))
            found[longer] = float(rows[child]["log_mass"])
            walk(child, longer)
            child = rows[child]["next"]

    walk(0, ())
    return found


def logarithm(p: float) -> float:
    return math.log(p) if p > 0 else -math.inf


def answer_of(
    model: Model, sampler: ExactSampler, draw: random.Random | None, tokens_per_step: int = 1
) -> Prefix | None:
    """Return the accepted answer; None when the sampler gives up. Draws as the kernel does.

    `draw` None: what is drawn depends on the try's seed, as in the kernel.
    """
    while True:
        known = prefixes_in(sampler)
        answer: Prefix = ()
        step: list[tuple[int, tuple[float, float]]] = []
        finish = None
        while finish is None:
            p, legal = model.probabilities(answer), model.legal(answer)
            mass = {token: known.get((*answer, token), 0.0) for token in legal}
            weights = [p[token] * math.exp(mass[token]) for token in legal]
            if not any(weights):
                finish = FinishReason.GRAMMAR_ERROR
                break
            (token,) = (draw or random.Random(f"{sampler.seed} {answer}")).choices(list(legal), weights)
            rest = sum(p[other] for other in legal if other != token and (*answer, other) not in known)
            step.append((token, (math.log(p[token]), logarithm(rest))))
            answer = (*answer, token)
            if token == END:
                finish = FinishReason.STOP
            elif len(answer) == MAX_TOKENS:
                finish = FinishReason.GRAMMAR_INCOMPLETE
            elif len(step) == tokens_per_step:
                verdict = sampler.take([t for t, _ in step], [m for _, m in step], None)
                step = []
                if verdict is not Verdict.GO_ON:
                    break
        else:
            verdict = sampler.take([t for t, _ in step], [m for _, m in step], finish)
        if finish is FinishReason.GRAMMAR_ERROR:
            verdict = sampler.take([t for t, _ in step], [m for _, m in step], finish)
        if verdict is Verdict.ACCEPTED:
            return answer
        if verdict is Verdict.GIVEN_UP:
            return None


EVERY_SHORT = tuple((*p, END) for n in range(3) for p in itertools.product(range(4), repeat=n))
GRAMMARS = {
    "every short one": EVERY_SHORT,
    "three": ((0, END), (1, 1, END), (1, 2, 3, END)),
    "with a dead end": ((0, END), (1, 2, END), (1, 3, 3, 3, 3, END)),
    "too long ones": ((0, 0, END), (0, 1, END), (2, END), (0, 2, 3, 3, END), (1, 1, 1, 1, END)),
}


@pytest.mark.parametrize("explores", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_answers_have_the_distribution_of_the_model_given_the_grammar(grammar: str, explores: bool) -> None:
    model, count, draw = Model(GRAMMARS[grammar], number=len(grammar)), 800, random.Random(1)
    wanted = model.wanted()
    found: Counter[Prefix | None] = Counter()
    for seed in range(count):
        sampler = ExactSampler(seed, GrammarExact(500, math.inf), lambda: 1.0, SharedMasses(), explores=explores)
        found[answer_of(model, sampler, draw)] += 1
    assert set(found) <= set(wanted)
    distance = sum(abs(found[answer] / count - p) for answer, p in wanted.items()) / 2
    noise = [_distance_of_a_sample(wanted, count, draw) for _ in range(30)]
    assert distance <= max(noise) * 1.5


def _distance_of_a_sample(wanted: dict[Prefix, float], count: int, draw: random.Random) -> float:
    sample = Counter(draw.choices(list(wanted), list(wanted.values()), k=count))
    return sum(abs(sample[answer] / count - p) for answer, p in wanted.items()) / 2


def test_masses_fall_to_the_probability_of_the_grammar() -> None:
    model = Model(GRAMMARS["three"], number=3)
    total = sum(
        math.prod(model.probabilities(answer[:i])[token] for i, token in enumerate(answer)) for answer in model.answers
    )
    draw, sampler = random.Random(2), ExactSampler(1, GrammarExact(10_000, math.inf), lambda: 1.0, SharedMasses())
    last = 0.0
    for _ in range(60):
        assert answer_of(model, sampler, draw) is not None
        assert math.log(total) - 1e-6 <= sampler.masses.log_mass <= last + 1e-9
        last = sampler.masses.log_mass
        sampler.accepted = False
        sampler._begin()
    assert sampler.masses.log_mass == pytest.approx(math.log(total), abs=1e-5)


SHARED = GrammarExact(500, math.inf, shared_tries=6)


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_answers_after_shared_tries_have_the_distribution_and_do_not_depend_on_who_made_them(grammar: str) -> None:
    model, count = Model(GRAMMARS[grammar], number=len(grammar)), 800
    wanted, shared = model.wanted(), SharedMasses()
    found: Counter[Prefix | None] = Counter()
    for seed in range(count):
        made, taken = SharedMasses(), ExactSampler(seed, SHARED, lambda: 1.0, shared, grammar)
        own = ExactSampler(seed, SHARED, lambda: 1.0, made, grammar)
        assert own.may_run(Sequence())
        assert taken.may_run(Sequence())
        answers = [answer_of(model, sampler, None) for sampler in (own, taken)]
        assert answers[0] == answers[1]
        assert (own.tries, own.masses.log_mass) == (taken.tries, taken.masses.log_mass)
        assert own.shared_tries == 6
        assert taken.shared_tries == (6 if seed == 0 else 0)
        found[answers[0]] += 1
    assert set(found) <= set(wanted)
    distance = sum(abs(found[answer] / count - p) for answer, p in wanted.items()) / 2
    draw = random.Random(count)
    assert distance <= 1.5 * max(_distance_of_a_sample(wanted, count, draw) for _ in range(30))


def test_another_question_or_another_number_of_shared_tries_learns_by_itself() -> None:
    model, shared = Model(GRAMMARS["three"], number=5), SharedMasses()
    for bound, question in ((SHARED, "a"), (SHARED, "b"), (GrammarExact(500, math.inf, shared_tries=2), "a")):
        sampler = ExactSampler(1, bound, lambda: 1.0, shared, question)
        assert sampler.may_run(Sequence())
        assert answer_of(model, sampler, None) is not None
        assert sampler.shared_tries == bound.shared_tries
    shared.clear()
    sampler = ExactSampler(1, SHARED, lambda: 1.0, shared, "a")
    assert sampler.may_run(Sequence())
    assert answer_of(model, sampler, None) is not None
    assert sampler.shared_tries == 6


def test_one_sequence_with_a_slot_makes_the_shared_tries_and_others_wait() -> None:
    model, shared = Model(GRAMMARS["three"], number=5), SharedMasses()
    samplers = [ExactSampler(seed, SHARED, lambda: 1.0, shared, "a") for seed in range(3)]
    sequences = [Sequence() for _ in samplers]

    def may_run() -> list[bool]:
        return [sampler.may_run(each) for sampler, each in zip(samplers, sequences, strict=True)]

    assert may_run() == [True, False, False]
    assert ExactSampler(1, SHARED, lambda: 1.0, shared, "b").may_run(Sequence()), "another question"
    sequences[0].slot = -1
    assert [sampler.may_run(each) for sampler, each in zip(samplers[1:], sequences[1:], strict=True)] == [True, False]
    sequences[0].slot = 1  # it is back
    samplers[0].end(sequences[0])
    assert may_run() == [False, True, False]
    samplers[1].end(sequences[1])
    assert may_run() == [True, False, False]
    assert samplers[0].take([0], [(logarithm(model.probabilities(())[0]), -math.inf)], None) is Verdict.GO_ON
    sequences[0].slot = -1  # preempted in a try, which it ends when it is back
    assert samplers[1].may_run(sequences[1])
    assert answer_of(model, samplers[1], None) is not None
    assert may_run() == [True, True, True]
    assert samplers[0].take([END], [(-0.1, -math.inf)], FinishReason.STOP) is Verdict.AGAIN
    assert [(each.learning, each.shared_tries) for each in samplers] == [(False, 1), (False, 6), (False, 0)]
    assert len({each.masses.log_mass for each in (samplers[0], samplers[2])}) == 1


def test_a_learner_whose_matcher_is_lost_gives_way_to_one_that_has_its_own() -> None:
    shared = SharedMasses()
    samplers = [ExactSampler(seed, SHARED, lambda: 1.0, shared, "a") for seed in range(2)]
    first, second = Sequence(), Sequence()
    assert samplers[0].may_run(first)
    first.grammar_state = second.grammar_state = GrammarState.LOST
    assert not samplers[1].may_run(second), "both wait for the next grammar process"
    second.grammar_state = GrammarState.OPEN
    assert samplers[1].may_run(second)
    assert not samplers[0].may_run(first)


def test_tries_from_before_another_grammar_process_teach_nothing() -> None:
    model, shared = Model(GRAMMARS["three"], number=5), SharedMasses()
    fresh = ExactSampler(7, SHARED, lambda: 1.0, SharedMasses(), "a")
    wanted = answer_of(model, fresh, None)
    sampler = ExactSampler(7, SHARED, lambda: 1.0, shared, "a")
    assert sampler.may_run(Sequence())
    lie = (math.log(1e-9), -math.inf)  # of a process with other masks
    assert sampler.take([0], [lie], None) is Verdict.GO_ON
    shared.clear()
    assert sampler.take([END], [lie], FinishReason.STOP) is Verdict.AGAIN
    assert (sampler.shared_tries, len(sampler.masses)) == (0, 1)
    assert answer_of(model, sampler, None) == wanted
    assert sampler.masses.log_mass == fresh.masses.log_mass


def test_the_shared_masses_used_last_stay() -> None:
    shared, masses = SharedMasses(max_prefixes=2 * (PER_QUESTION + 3)), PrefixMasses()
    for token in (1, 2):
        masses.add(0, token, -1.0, -2.0)
    for question in ("a", "b", "a", "c"):
        shared.put(question, masses)
        assert shared.get("a") is not None
    assert shared.get("b") is None
    copy = shared.get("c")
    assert copy is not None
    assert copy.add(0, 3, -1.0, -3.0) == 3
    assert [len(each) for each in (copy, shared.get("c") or copy, masses)] == [4, 3, 3]
    assert copy.add(0, 2, -1.0, -3.0) == 2


def test_the_same_tokens_in_longer_steps_get_the_same_verdict() -> None:
    model = Model(EVERY_SHORT, number=5)
    for seed in range(50):
        ends = []
        for tokens_per_step in (1, 3):
            sampler = ExactSampler(seed, GrammarExact(3, math.inf), lambda: 1.0, SharedMasses())
            answer = answer_of(model, sampler, random.Random(seed), tokens_per_step)
            ends.append((answer, sampler.tries, sampler.tokens, sampler.masses.log_mass))
        assert ends[0] == ends[1]


def test_a_bound_is_looked_at_only_between_tries() -> None:
    now = 10.0
    sampler = ExactSampler(1, GrammarExact(5, 2.0), lambda: now, SharedMasses())
    rare = (math.log(1e-9), -math.inf)
    assert sampler.take([1], [rare], None) is Verdict.GO_ON
    now = 20.0
    assert sampler.take([2], [rare], None) is Verdict.GO_ON
    assert sampler.take([END], [rare], FinishReason.STOP) is Verdict.GIVEN_UP
    few = ExactSampler(1, GrammarExact(1, math.inf), lambda: now, SharedMasses())
    assert few.take([1, END], [rare, rare], FinishReason.STOP) is Verdict.GIVEN_UP
    assert few.tries == 1


def test_a_grammar_without_an_answer_in_time_is_given_up() -> None:
    sampler = ExactSampler(1, GrammarExact(100, math.inf), lambda: 1.0, SharedMasses())
    assert sampler.take([1], [(-1.0, -math.inf)], FinishReason.GRAMMAR_INCOMPLETE) is Verdict.GIVEN_UP
    assert (sampler.masses.log_mass, sampler.tries) == (-math.inf, 1)


def test_a_full_memory_of_prefixes_keeps_the_distribution() -> None:
    model, draw = Model(EVERY_SHORT, number=7), random.Random(4)
    masses = PrefixMasses()
    for token in range(MAX_PREFIXES - 1):
        assert masses.add(0, token, -20.0, -30.0) > 0
    assert masses.add(0, 1 << 20, math.log(0.25), math.log(0.5)) == -1
    masses.update([0])
    assert masses.log_mass == pytest.approx(math.log(0.75), abs=1e-3)
    sampler = ExactSampler(1, GrammarExact(10_000, math.inf), lambda: 1.0, SharedMasses())
    sampler._here = -1  # no prefix has room
    assert answer_of(model, sampler, draw) is not None


def test_tries_and_coins_have_other_numbers_than_sequences() -> None:
    from gpu_engine.front.prompt import sequence_seed

    seeds = {sequence_seed(5, index) for index in range(1000)}
    sampler = ExactSampler(5, GrammarExact(1000, math.inf), lambda: 1.0, SharedMasses())
    tries = []
    for number in range(1, 1001):
        sampler.tries = number
        tries.append(sampler.seed)
    assert tries[0] == 5
    assert len(set(tries) | seeds) == 1999
    coins = [coin(mixed(seed, 1), position) for seed in range(300) for position in range(10)]
    assert sum(coins) / len(coins) == pytest.approx(0.5, abs=0.02)
    assert len(set(coins)) == 3000
