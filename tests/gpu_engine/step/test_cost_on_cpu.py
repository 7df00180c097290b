"""A step on a CPU calls torch rarely: each call costs a microsecond or two next to a forward of a few milliseconds."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_engine.core.cpu_executor import cpu_executor
from gpu_engine.core.running import RunningSequence
from kernels.kv_pages import KVHeads, KVPages
from kernels.library import native
from tests.gpu_engine.harness import ask, config, tokens

MAX_CALLS = 52
"""Measured with torch 2.13: 45, and 97 when the launches themselves were torch."""


class Counter(TorchDispatchMode):  # type: ignore[misc,unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


class StubModel:
    """Returns the same logits for every row, with two calls."""

    vocab_size, max_model_len, eos_token_ids = 256, 128, (0,)
    device, dtype, name = torch.device("cpu"), torch.float32, "stub"

    skips_padding = takes_prompts = can_defer_head = False
    adapters = ranks = net = fused = recurrent = None

    def allocate_pages(self, num_pages: int, page_size: int, **_: Any) -> list[KVPages]:
        return KVPages.allocate_layers([KVHeads(1, 8)], num_pages, page_size, self.dtype, self.device)

    def logits(self, ids_BP: torch.Tensor, context: Any) -> torch.Tensor:
        return torch.zeros(ids_BP.numel(), self.vocab_size)


def test_a_step_without_drafts_calls_torch_rarely() -> None:
    executor = cpu_executor(config(drafter="none"), StubModel(), None, 64, 0)  # type: ignore[arg-type]
    executor.warm_up()
    request = ask(tokens(20, 1), max_tokens=60, ignore_eos=True).request
    sequence: RunningSequence = RunningSequence(len(request.prompt_ids), False, request=request)
    sequence.slot, sequence.pages = 0, [1, 2, 3, 4, 5]
    executor.slot_writer.assign(sequence)

    def step() -> int:
        handle = executor.runner.launch((sequence,))
        executor.runner.collect(handle)
        return len(handle.outcomes[0].token_ids)

    for _ in range(3):
        assert step() == 1
    with Counter() as counter:
        assert step() == 1
    assert counter.calls <= MAX_CALLS


def test_a_thread_that_runs_steps_has_the_model_s_number_of_threads() -> None:
    """Torch's number is that of the thread that set it, until another thread's first parallel operation."""
    executor = cpu_executor(config(drafter="none"), StubModel(), None, 64, 0)  # type: ignore[arg-type]
    before, seen = torch.get_num_threads(), []
    native()  # makes OpenMP's functions visible

    def run() -> None:
        executor.enter()
        seen.append(ctypes.CDLL(None).omp_get_max_threads())

    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 3]
