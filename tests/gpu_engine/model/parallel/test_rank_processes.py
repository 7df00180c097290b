"""Ranks are processes: they give the tokens of one, a lost one ends the engine, and none outlives rank 0.

Not responsible for: servers (see test_killed_ranks.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest

from gpu_engine.api.errors import InternalError, RankLost
from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import LoadedModel, ModelNotSupported, load_model
from gpu_engine.model.parallel.ranks import Ranks
from tests.gpu_engine.harness import Answer, answer_all, ask, config, running, tokens, unguided_engine, with_drafts

LIMIT_S = 5.0
"""The longest time from the loss of a rank to the end of the engine."""


def alive(process_id: int) -> bool:
    """Return whether a process runs; one that has ended and is not reaped does not."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def ends(process_id: int, within_s: float = LIMIT_S) -> bool:
    deadline_s = time.monotonic() + within_s
    while alive(process_id) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return not alive(process_id)


@contextmanager
def divided(model: str, size: int = 2, **fields: object) -> Iterator[tuple[LoadedModel, Ranks]]:
    loaded = load_model(config(model=model, tensor_parallel_size=size, **fields))
    assert isinstance(loaded.ranks, Ranks)
    try:
        yield loaded, loaded.ranks
    finally:
        loaded.ranks.close()


def lose(engine: Engine, process_id: int, number: int) -> tuple[str, float]:
    """Send the signal; return the engine's failure and the seconds until it."""
    failed: list[Exception] = []
    ended = threading.Event()

    def report(error: Exception) -> None:
        failed.append(error)
        ended.set()

    engine.watch(report)
    begun_s = time.monotonic()
    os.kill(process_id, number)
    assert ended.wait(30)
    return str(failed[0]), time.monotonic() - begun_s


@pytest.mark.slow
def test_two_processes_with_a_cache_of_8_bits_have_the_tokens_of_one(llama: LoadedModel) -> None:
    found, scores = [], []
    for model_of in (nullcontext((llama, None)), divided(llama.name, kv_cache_dtype="int8")):
        with model_of as (model, _), running(Engine(with_drafts(7, kv_cache_dtype="int8"), model)) as engine:
            cases = [ask(tokens(20, 2, repeat=8), logprobs=0), ask(tokens(9, 5), temperature=0.7, logprobs=0)]
            found.append(answer_all(engine, cases))
            scores.append([entry.logprob for case in cases for entry in case.logprobs])
    assert found[0] == found[1]
    # Ranks round sums differently, which moves a key or a value by a whole step now and then (1e-3 here); a rank that
    # had a cache of floats would be 1e-2 off.
    np.testing.assert_allclose(scores[1], scores[0], atol=4e-3)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("busy", [True, False], ids=["in steps", "idle"])
def test_two_processes_have_the_tokens_of_one_and_end_with_one_that_dies_or_hangs(
    llama: LoadedModel, number: signal.Signals, busy: bool
) -> None:
    def cases() -> list[Answer]:
        return [ask(tokens(20, 2, repeat=8), max_tokens=20), ask(tokens(9, 5), max_tokens=20, temperature=0.7)]

    with unguided_engine(llama, with_drafts(0)) as engine:
        expected = answer_all(engine, cases())
    with divided(llama.name) as (model, ranks):
        engine = Engine(with_drafts(7), model)
        engine.start()
        try:
            assert answer_all(engine, cases()) == expected
            running = ask(tokens(9, 5), max_tokens=240, ignore_eos=True, seed=1)
            if busy:
                running.submit(engine)
            reason, seconds = lose(engine, ranks.process_ids[0], number)
            lost = "was ended by SIGKILL" if number == signal.SIGKILL else "has sent no heartbeat for 2.5 s"
            assert reason == f"rank 1 of 2 (process {ranks.process_ids[0]}) {lost}"
            assert seconds < LIMIT_S
            if busy:
                running.wait()
                assert number != signal.SIGKILL or isinstance(running.error, InternalError)
            with pytest.raises(InternalError, match="lost"):
                engine.submit(ask([1]).request)
        finally:
            engine.close()
    assert not any(map(alive, ranks.process_ids))


@pytest.mark.slow
def test_of_three_ranks_one_that_hangs_ends_the_others(saved: Callable[[str], Path], tmp_path: Path) -> None:
    from transformers import LlamaConfig

    from tests.gpu_engine import tiny

    shape = {**tiny._SHAPE, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    folder = tiny.save(LlamaConfig(**shape), tmp_path / "three")
    with divided(str(folder), 3) as (_, ranks):
        first, second = ranks.process_ids
        lost = threading.Event()
        ranks.watch(lost.set)
        os.kill(second, signal.SIGSTOP)
        assert lost.wait(LIMIT_S)
        with pytest.raises(RankLost, match=r"^rank 2 of 3 .* has sent no heartbeat"):
            ranks.check()
        assert ends(first)
        assert ends(second)


@pytest.mark.slow
def test_a_rank_that_cannot_load_its_part_is_named(llama: LoadedModel) -> None:
    ranks = Ranks.start(config(model="/nowhere", tensor_parallel_size=2))
    try:
        with pytest.raises(RankLost, match=r"^rank 1 of 2 \(process \d+\) cannot load its part: .*/nowhere"):
            ranks.connect(llama.device)
    finally:
        ranks.close()


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_a_model_whose_layers_differ_starts_no_ranks(saved: Callable[[str], Path], family: str) -> None:
    problem = r"^tensor_parallel_size: cannot be combined with a model whose layers differ in their heads, or share"
    with pytest.raises(ModelNotSupported, match=problem):
        load_model(config(model=str(saved(family)), tensor_parallel_size=2))


@pytest.mark.slow
def test_a_model_that_cannot_be_divided_ends_its_ranks(saved: Callable[[str], Path]) -> None:
    with pytest.raises(ModelNotSupported, match=r"^tensor_parallel_size"):
        load_model(config(model=str(saved("gpt2")), tensor_parallel_size=2))
    left = subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "parallel.worker"], capture_output=True, check=False)
    assert not left.stdout
