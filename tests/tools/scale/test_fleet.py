"""The simulation: closed forms of queues, conservation, determinism, failures, and policies."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_engine.api.config import EngineConfig
from tools.scale.fleet import Failure, Fleet, Result
from tools.scale.plan import Goals, Size, lose_engine, plan, run_size
from tools.scale.replica import Drafts, EngineSpec, Grammars
from tools.scale.routers import ROUTERS
from tools.scale.step_time import StepLoad
from tools.scale.traces import Arrival, Lengths, Load

TICK_S = 0.01


class Constant:
    """Every iteration takes as long; a prompt token adds `prompt_s`."""

    def __init__(self, step_s: float = TICK_S, prompt_s: float = 0.0) -> None:
        self.step_s, self.prompt_s = step_s, prompt_s

    def seconds(self, load: StepLoad) -> float:
        return self.step_s + self.prompt_s * load.prefill_tokens


def spec(slots: int = 4, **changes: object) -> EngineSpec:
    config = EngineConfig(
        device="cpu", max_batch_size=slots, max_queue_size=100_000, drafter="none", prefix_cache=False
    )
    return replace(EngineSpec(cost=Constant(), config=config, mixes=True, start_s=3.0), **changes)  # type: ignore[arg-type]


def queue_trace(rate: float, mean_tokens: float, count: int, seed: int) -> list[Arrival]:
    """Poisson arrivals of requests without a prompt whose answers have a geometric number of tokens: exponential
    times."""
    rng, now, trace = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        tokens = max(1, math.ceil(rng.expovariate(1 / mean_tokens)))
        trace.append(Arrival(at_s=now, prompt_tokens=1, answer_tokens=tokens))
    return trace


def erlang_c(servers: int, offered: float) -> float:
    """Return the chance that a request waits in M/M/c (Erlang 1917)."""
    terms = [offered**k / math.factorial(k) for k in range(servers)]
    last = offered**servers / math.factorial(servers) * servers / (servers - offered)
    return last / (sum(terms) + last)


MEAN_TOKENS = 10.0
SERVICE_S = TICK_S / -math.expm1(-1 / MEAN_TOKENS)
"""Mean time of an answer of whole ticks."""
SPREAD = 1 - (TICK_S / SERVICE_S)
"""Variance of that time over its mean squared: that of a geometric distribution, a little below an exponential one's
1."""


def mean_wait(servers: int, engines: int, router: str, utilisation: float) -> float:
    """Return the mean time in the waiting queue over some runs, without the first tenth of each."""
    rate, waits = utilisation * servers * engines / SERVICE_S, []
    for seed in range(2, 5):
        trace = queue_trace(rate, MEAN_TOKENS, 3000, seed)
        result = Fleet(spec(servers), engines, router, seed=seed).run(trace)
        waits += [r.first_s - r.arrival.at_s for r in result.requests if r.number > 300]
    return fmean(waits) - TICK_S  # the step that brings the first token


@pytest.mark.parametrize(
    ("servers", "utilisation"),
    [pytest.param(1, 0.5, marks=pytest.mark.slow), pytest.param(1, 0.7, marks=pytest.mark.slow), (4, 0.7)],
)
def test_one_engine_waits_as_a_queue_of_as_many_servers(servers: int, utilisation: float) -> None:
    """An engine whose step takes as long for any batch is M/M/c with c slots: W = C(c, a) / (c mu - lambda) (Erlang
    1917),
    times (1 + spread) / 2 for the geometric times (exact for one server, by Pollaczek and Khinchine; Lee and Longton
    1959).
    A request that finds a free slot next to a running step waits for half of the step on average."""
    rate = utilisation * servers / SERVICE_S
    queue_s = erlang_c(servers, utilisation * servers) / (servers / SERVICE_S - rate) * (1 + SPREAD) / 2
    measured = mean_wait(servers, 1, "round-robin", utilisation)
    assert queue_s * 0.85 < measured < queue_s * 1.15 + TICK_S / 2


@pytest.mark.slow
def test_round_robin_over_two_engines_waits_as_erlang_arrivals() -> None:
    """Every second request of Poisson arrivals at each engine: E2/M/1, W = sigma / (mu (1 - sigma)), where sigma is
    (2 lambda / (mu - mu sigma + 2 lambda))^2 (Kleinrock 1975). Least loaded waits less."""
    utilisation, mu = 0.7, 1 / SERVICE_S
    rate, sigma = utilisation * mu, 0.5
    for _ in range(200):
        sigma = (2 * rate / (mu - mu * sigma + 2 * rate)) ** 2
    queue_s = sigma / (mu * (1 - sigma))
    measured = mean_wait(1, 2, "round-robin", utilisation)
    assert queue_s * 0.8 < measured < queue_s * 1.1 + TICK_S / 2
    assert mean_wait(1, 2, "least-loaded", utilisation) < 0.9 * measured


def as_numbers(result: Result) -> list[object]:
    return [
        result.duration_s,
        list(result.gaps),
        [(r.outcome, r.first_s, r.last_s, r.emitted, r.attempts) for r in result.requests],
    ]


@settings(max_examples=15, deadline=None)
@given(
    engines=st.integers(1, 4),
    router=st.sampled_from(sorted(ROUTERS)),
    rate=st.floats(1, 30),
    slots=st.integers(1, 6),
    kills=st.lists(st.tuples(st.floats(0, 4), st.integers(0, 3), st.sampled_from(["engine", "grammar"])), max_size=4),
    queue=st.integers(1, 30),
    seed=st.integers(0, 1000),
    retries=st.booleans(),
)
def test_every_request_ends_once(
    engines: int,
    router: str,
    rate: float,
    slots: int,
    kills: list[tuple[float, int, str]],
    queue: int,
    seed: int,
    retries: bool,
) -> None:
    lengths = Lengths(prompt_mean=60, answer_mean=12)
    load = Load(rate=rate, lengths=lengths, guided_share=0.5, groups=5, group_tokens=40, grammars=4, burstiness=2)
    config = EngineConfig(
        device="cpu", max_batch_size=slots, max_queue_size=queue, max_model_len=1024, kv_cache_tokens=1024
    )
    one = spec(drafts=Drafts.constant(2.5, 0.5), config=config, start_s=1.0, grammars=Grammars(compile_s=0.2))
    failures = [Failure(at_s, number % engines, what) for at_s, number, what in kills]
    trace = load.trace(4.0, seed)
    fleet = Fleet(one, engines, router, failures, seed, 0.3, retries)
    result = fleet.run(trace)
    outcomes = result.outcomes
    assert len(trace) == outcomes["ended"] + outcomes["lost"] + outcomes["refused"]
    for request in result.requests:
        assert request.outcome != "ended" or request.emitted == request.arrival.answer_tokens
        assert request.outcome != "refused" or not request.emitted
        assert not request.emitted or request.arrival.at_s < request.first_s <= request.last_s <= result.duration_s
    for replica in fleet.replicas:
        assert replica.load == 0
        replica.check()
    again = Fleet(one, engines, router, failures, seed, 0.3, retries).run(load.trace(4.0, seed))
    assert as_numbers(again) == as_numbers(result), "equal seeds give equal runs"


def test_another_seed_gives_another_run() -> None:
    load = Load(rate=5)
    assert load.trace(5, 0) == load.trace(5, 0) != load.trace(5, 1)
    one = spec(noise=(0.8, 1.0, 1.4))
    first, second = (Fleet(one, 1, seed=seed).run(load.trace(5, 0)) for seed in (0, 1))
    assert as_numbers(first) != as_numbers(second)


def test_a_dead_engine_loses_answers_that_had_begun_alone() -> None:
    trace = [Arrival(at_s=0.0, prompt_tokens=1, answer_tokens=200) for _ in range(8)]
    trace += [Arrival(at_s=1.5, prompt_tokens=1, answer_tokens=10) for _ in range(4)]
    fleet = Fleet(spec(2), 2, "round-robin", [Failure(1.0, 0)], detect_s=1.0)
    result = fleet.run(trace)
    outcomes = [request.outcome for request in result.requests]
    assert outcomes.count("lost") == 2, "two slots of the dead engine had begun"
    assert outcomes.count("ended") == 10
    retried = [r for r in result.requests if r.attempts == 2]
    assert len(retried) == 4, "two waited there, and two came before the router knew"
    assert all(r.first_s > 2.0 for r in retried)
    assert fleet.replicas[0].deaths == 1
    lost = Fleet(spec(2), 2, "round-robin", [Failure(1.0, 0)], retries=False).run(trace)
    assert lost.outcomes["lost"] == 6


def test_a_killed_grammar_process_holds_up_guided_answers_alone() -> None:
    trace = [Arrival(at_s=0.0, prompt_tokens=1, answer_tokens=100, grammar=g) for g in (0, 1)]
    one = spec(grammars=Grammars(compile_s=0.0, bind_s=0.0, restart_s=0.5))
    free, guided = Fleet(one, 1, failures=[Failure(0.3, 0, "grammar")]).run(trace).requests
    assert free.last_s == pytest.approx(100 * TICK_S, abs=2 * TICK_S)
    assert guided.last_s == pytest.approx(free.last_s + 0.5, abs=3 * TICK_S)


def test_equal_grammars_share_a_compilation_and_workers_bound_the_others() -> None:
    def last_first_token(grammars: list[int]) -> float:
        one = spec(64, grammars=Grammars(compile_s=0.5, compile_workers=2, bind_s=0.0))
        trace = [Arrival(at_s=0.0, prompt_tokens=1, answer_tokens=1, grammar=g) for g in grammars]
        return max(request.first_s for request in Fleet(one, 1).run(trace).requests)

    assert last_first_token([1] * 40) < 4
    assert last_first_token(list(range(1, 41))) > 40 * 0.5 / 2 * 0.6


def test_prefix_affinity_finds_pages_that_other_policies_prefill_again() -> None:
    load = Load(rate=8, groups=12, group_tokens=512, lengths=Lengths(prompt_mean=600, answer_mean=10, spread=0.1))
    config = EngineConfig(device="cpu", max_batch_size=16, max_model_len=1024, kv_cache_tokens=4096, drafter="none")
    one = spec(cost=Constant(prompt_s=2e-4), config=config)
    cached = {name: Fleet(one, 4, name).run(load.trace(30, 0)).cached_tokens for name in ROUTERS}
    blind = max(cached[name] for name in ("round-robin", "least-loaded", "power-of-two"))
    assert cached["prefix-affinity"] > 1.1 * blind
    assert cached["gateway"] > 1.1 * blind


@pytest.mark.slow
def test_two_choices_are_nearly_as_good_as_all() -> None:
    load = Load(rate=30, lengths=Lengths(prompt_mean=20, answer_mean=60, spread=1.0))
    trace = load.trace(15, 0)
    waits = {name: Fleet(spec(3), 8, name).run(trace).ttft(99) for name in ROUTERS}
    assert waits["least-loaded"] <= waits["power-of-two"] < waits["round-robin"]


def test_a_plan_is_the_smallest_number_behind_which_all_hold() -> None:
    def size(count: int, ttft_s: float) -> Size:
        return Size(count, ttft_s, 0, 0.01, 0, 100, 0.5, 1.0)

    goals = Goals(ttft_s=0.5)
    assert plan([size(1, 2), size(2, 0.4), size(3, 0.6), size(4, 0.3), size(5, 0.2)], goals) == 4
    assert plan([size(1, 2), size(2, 1)], goals) is None


@pytest.mark.slow
def test_more_engines_hold_a_load_and_a_lost_one_costs() -> None:
    load = Load(rate=12, lengths=Lengths(prompt_mean=40, answer_mean=60))
    goals, traces = Goals(ttft_s=0.3), [load.trace(20, seed) for seed in (0, 1)]
    sizes = [run_size(spec(), count, traces, goals, "least-loaded", warm_s=2) for count in (1, 2, 3, 4)]
    assert [s.ttft_s for s in sizes] == sorted((s.ttft_s for s in sizes), reverse=True)
    enough = plan(sizes, goals)
    assert enough is not None
    assert enough > 1
    loss = lose_engine(spec(), enough, traces[0], goals, "least-loaded", at_s=8)
    assert loss.lost > 0
    assert loss.refused == 0
    assert loss.during_ttft_s > loss.undisturbed_ttft_s
