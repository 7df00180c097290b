"""Models whose layers differ over a recorded device have the tokens of a CPU, whatever is accepted and happens.

Some have recurrent layers, and some attention with heads of two sizes.

Not responsible for: the kernels (see tests/kernels/test_recurrent.py), hybrids on a CPU (see
tests/gpu_engine/test_hybrids.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_engine.api.adapters import AdapterKind, AdapterLimits
from gpu_engine.api.request import FinishReason
from gpu_engine.core.engine import Engine
from gpu_engine.drafters.build import DrafterParts
from gpu_engine.model.loader import LoadedModel, load_model
from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.launches import place_of
from gpu_engine.step.prompt_rows import Chunks, Hidden
from kernels.accept import StepTensors
from tests.gpu_engine import hybrids, tiny
from tests.gpu_engine.adapters.files import save_lora
from tests.gpu_engine.beams import search, search_all
from tests.gpu_engine.device.adapter_stacks import over_stacks
from tests.gpu_engine.device.device_engine import (
    RecordedDevice,
    answer_over_a_loss,
    device_engine,
    guided_device_engine,
)
from tests.gpu_engine.device.device_requests import GUIDED, INTERPRETED, SMALL, on_cpu, on_device
from tests.gpu_engine.harness import (
    Answer,
    answer_all,
    answer_each,
    ask,
    config,
    executor_of,
    tokens,
    unguided_engine,
    with_drafts,
)
from tests.gpu_engine.processor_cases import HERE, SETTING, processed

pytestmark = INTERPRETED


def small(family: str, folder: Path) -> Path:
    """Write a model of one recurrent layer and one with attention, for the interpreter, or one of `tiny` as it is."""
    shape = hybrids.configuration(family)
    if family not in hybrids.CONFIGS:
        return tiny.save(shape, folder)
    shape.num_hidden_layers, shape.num_attention_heads, shape.num_key_value_heads = 2, 2, 1
    if family == "lfm2":
        shape.layer_types = ["conv", "full_attention"]
    elif family == "qwen3_5":
        shape.layer_types, shape.head_dim = ["linear_attention", "full_attention"], 32
        shape.linear_num_key_heads, shape.linear_num_value_heads = 1, 2
    elif family == "bamba":
        shape.mamba_n_heads, shape.mamba_d_head, shape.mamba_n_groups = 2, 64, 1
    return tiny.save(shape, folder)


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    """Return a function from a family's name to a tiny model on a CPU."""

    @cache
    def load(family: str) -> LoadedModel:
        folder = small(family, tmp_path_factory.mktemp("hybrid"))
        return load_model(config(model=str(folder), fuse_parts=False))

    return load


class KnownTexts:
    """Drafts what follows in a text that begins with the same token; every fourth position has a wrong token."""

    layers: tuple[int, ...] = ()

    def __init__(self, texts: Sequence[list[int]], parts: DrafterParts) -> None:
        self._stream, self._most = parts.stream, parts.config.num_drafts
        self._text_VL = torch.zeros(tiny.VOCAB, parts.slot.history_SL.shape[1], dtype=torch.int32)
        for text in texts:
            self._text_VL[text[0], : len(text)] = torch.tensor(text, dtype=torch.int32)
        self._text_VL[:, 3::4] += 1

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Do nothing."""

    def propose(self, batch: StepBatch, step: StepTensors, page_table_BN: torch.Tensor, hidden: Hidden) -> None:
        """Enqueue one launch, which reads no value on the host."""
        self._stream.kernel(self._propose, batch)

    def _propose(self, batch: StepBatch) -> None:
        slot, place_B, going_B = batch.slot, place_of(batch), batch.lane.drafting_B[: batch.num_lanes]
        length_B, R = slot.length_S[place_B], slot.drafts_SR.shape[1]
        at_BR = (length_B[:, None] + torch.arange(R)).clamp(max=self._text_VL.shape[1] - 1)
        draft_BR = self._text_VL[slot.history_SL[place_B, 0].long()[:, None], at_BR.long()]
        most_B = torch.minimum(slot.draft_limit_S[place_B], slot.params.max_length_S[place_B] - length_B - 1)
        count_B = most_B.clamp(min=0, max=self._most)
        slot.drafts_SR[place_B] = torch.where(going_B[:, None], draft_BR, slot.drafts_SR[place_B])
        slot.num_drafts_S[place_B] = torch.where(going_B, count_B, slot.num_drafts_S[place_B])


def drafting(texts: Sequence[list[int]], **fields: Any) -> RecordedDevice:
    return RecordedDevice(drafter_builders={"ngram": partial(KnownTexts, texts)}, **fields)


FREE = [
    partial(ask, [*range(196, 203)] * 2, max_tokens=9, ignore_eos=True),
    partial(ask, tokens(24, 3, repeat=9), max_tokens=7, ignore_eos=True),
    partial(ask, tokens(12, 7), max_tokens=6, temperature=0.8, seed=4, ignore_eos=True),
]
LONG = [partial(ask, tokens(n, n), max_tokens=14, ignore_eos=True) for n in (38, 36)]
"""Requests that do not fit the pages of `SHORT_OF_PAGES` together."""
SHORT_OF_PAGES = {"kv_cache_tokens": 64, "prefix_cache": False}


def texts_of(makes: Sequence[Callable[[], Answer]], expected: list[list[int]]) -> list[list[int]]:
    return [[*make().request.prompt_ids, *ids] for make, ids in zip(makes, expected, strict=True)]


def every(fast: dict[str, int], others: list[tuple[str, int]]) -> list[Any]:
    slow = [pytest.param(*row, marks=pytest.mark.slow) for row in others]
    return [*fast.items(), *slow]


@pytest.mark.parametrize(
    ("family", "num_drafts"),
    every({"lfm2": 3}, [("lfm2", 0), ("qwen3_5", 7), ("bamba", 3), ("jamba dense", 7), ("gemma4 small", 3)]),
)
def test_tokens_equal_those_of_a_cpu(hybrid: Callable[[str], LoadedModel], family: str, num_drafts: int) -> None:
    """At once, where a further request is cancelled, and then again from the prefix cache."""
    model = hybrid(family)
    expected = on_cpu(model, [make() for make in FREE])
    with device_engine(model, on_device(num_drafts), drafting(texts_of(FREE, expected))) as (engine, stream):
        cancelled = ask(tokens(9, 2), max_tokens=40, ignore_eos=True)
        cancelled.on_event = lambda each: cancel(engine, each)
        assert answer_all(engine, [cancelled, *(make() for make in FREE)])[1:] == expected
        assert cancelled.finish is FinishReason.ABORTED
        again = FREE[1]()
        assert answer_each(engine, [again]) == expected[1:2]
        assert again.telemetry.cached_tokens >= 16
        stats = engine.stats()
        assert stream.failure is None
    assert (stats.accepted_draft_tokens > 8) == (num_drafts > 0)
    assert (stats.draft_tokens > stats.accepted_draft_tokens + 4) == (num_drafts > 0)


def cancel(engine: Engine, answer: Answer) -> None:
    if len(answer.tokens) >= 3 and not answer.over:
        engine.abort(answer.request.request_id)


@pytest.mark.slow
def test_a_preempted_sequence_goes_on_with_its_tokens(hybrid: Callable[[str], LoadedModel]) -> None:
    model = hybrid("lfm2")
    expected = on_cpu(model, [make() for make in LONG])
    device = drafting(texts_of(LONG, expected))
    with device_engine(model, on_device(3, **SHORT_OF_PAGES), device) as (engine, _):
        assert answer_all(engine, [make() for make in LONG]) == expected
        assert engine.stats().preemptions > 0
        assert engine.stats().accepted_draft_tokens > 8


@pytest.mark.parametrize(
    ("family", "sync", "lost"),
    [
        ("qwen3_5", "device_flag", False),
        pytest.param("lfm2", "host_callback", True, marks=pytest.mark.slow),
        pytest.param("bamba", "device_flag", True, marks=pytest.mark.slow),
        pytest.param("jamba dense", "host_callback", False, marks=pytest.mark.slow),
        pytest.param("gemma4 small", "device_flag", True, marks=pytest.mark.slow),
    ],
)
def test_guided_tokens_equal_those_of_a_cpu(
    hybrid: Callable[[str], LoadedModel], family: str, sync: str, lost: bool
) -> None:
    """The grammar process proposes right and wrong tokens; it may be lost in a step, and start again."""
    model = hybrid(family)
    expected = on_cpu(model, [make() for make in GUIDED])
    fields = {"row_timeout_ms": 300.0, "draft_timeout_ms": 300.0} if lost else {}
    device = drafting(texts_of(GUIDED, expected))
    with guided_device_engine(model, on_device(3, sync=sync, **fields), device) as (engine, grammar, stream):
        answers = [make() for make in GUIDED]
        if lost:
            assert answer_over_a_loss(engine, grammar, answers) == expected
        else:
            grammar.sidecar.proposes = lambda _, emitted: proposal(expected, emitted)
            assert answer_all(engine, answers) == expected
        stats = engine.stats()
        assert stream.failure is None
    assert (stats.deferred_rows > 0) == lost
    assert stats.accepted_draft_tokens > 3
    assert stats.draft_tokens > stats.accepted_draft_tokens + 1


def proposal(expected: list[list[int]], emitted: list[int]) -> list[int]:
    """Return two right tokens after an odd number of tokens, else wrong ones."""
    rest = next((ids[len(emitted) :] for ids in expected if ids[: len(emitted)] == emitted), [])
    return rest[:2] if len(emitted) % 2 else [len(emitted), 65, 66]


@pytest.mark.slow
def test_a_start_that_warms_up_writes_no_state(hybrid: Callable[[str], LoadedModel]) -> None:
    model, settings = hybrid("bamba"), on_device(1, max_batch_size=1)
    expected = on_cpu(model, [FREE[0]()])
    with device_engine(model, settings, drafting(texts_of(FREE[:1], expected), warms_up=True)) as (engine, _):
        states = executor_of(engine).states
        assert states is not None
        assert not any(bool(part.any()) for part in states.pools.of(0, pending=True))
        assert answer_all(engine, [FREE[0]()]) == expected
        assert any(bool(part.any()) for part in states.pools.of(0, pending=True))


@pytest.mark.slow
def test_beams_are_those_of_a_cpu(hybrid: Callable[[str], LoadedModel]) -> None:
    model, sizes = hybrid("lfm2"), {**SMALL, "max_batch_size": 4}
    with unguided_engine(model, with_drafts(0, **sizes)) as engine:
        (expected,) = search_all(engine, [search(tokens(17, 2), 3, max_tokens=5)])
    with device_engine(model, on_device(1, **sizes)) as (engine, _):
        (found,) = search_all(engine, [search(tokens(17, 2), 3, max_tokens=5)])
    assert found.tokens == expected.tokens
    assert found.scores == pytest.approx(expected.scores, rel=1e-4)


@pytest.mark.slow
def test_processors_and_log_probabilities_are_those_of_a_cpu(hybrid: Callable[[str], LoadedModel]) -> None:
    """One processor is captured, and another one leaves the graph."""
    model = hybrid("qwen3_5")
    fields = {"logits_processors": (f"captured={HERE}:CapturedWaves", SETTING[0])}
    uses = ("captured", '{"strength": 9.0}'), ("waves", '{"strength": 0.5}')

    def made(engine: Engine) -> list[Answer]:
        answers = [processed(engine.processors, make(logprobs=1), use) for make, use in zip(FREE, uses, strict=False)]
        for answer in answers:
            answer.change(prompt_logprobs=1)
        return answers

    def scores(answer: Answer) -> list[float]:
        (prompt,) = [event.prompt_logprobs for event in answer.events if event.prompt_logprobs is not None]
        return [*prompt.logprob_N.tolist(), *(entry.logprob for entry in answer.logprobs)]

    with unguided_engine(model, with_drafts(0, **SMALL, **fields)) as engine:
        expected = made(engine)
        texts = texts_of(FREE[:2], answer_each(engine, expected))
    with device_engine(model, on_device(3, **fields), drafting(texts)) as (engine, _):
        answers = made(engine)
        assert answer_all(engine, answers) == [each.tokens for each in expected]
        assert engine.stats().accepted_draft_tokens > 0
    for ours, theirs in zip(answers, expected, strict=True):
        assert scores(ours) == pytest.approx(scores(theirs), abs=1e-4)


@pytest.mark.slow
def test_adapters_give_the_tokens_of_a_cpu(hybrid: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    """Also on the products of the recurrent layers."""
    folder, size = Path(hybrid("bamba").name), {"max_adapter_bytes": 1 << 20}
    lora = save_lora(folder, tmp_path / "a", seed=1, gain=4.0, targets=("in_proj", "q_proj", "down_proj"))
    named = {"adapters": (f"a={lora}",), **size}

    def made(engine: Engine) -> list[Answer]:
        answers = [FREE[0](), FREE[0](), FREE[1]()]
        for answer in answers[1:]:
            answer.change(lora=engine.adapters.find(AdapterKind.LORA, "a"))
        return answers

    on_a_cpu = load_model(config(model=str(folder), fuse_parts=False, **size))
    with unguided_engine(on_a_cpu, with_drafts(0, **SMALL, **named)) as engine:
        expected = answer_each(engine, made(engine))
    assert expected[0] != expected[1]
    plain = load_model(config(model=str(folder), fuse_parts=False))
    stacked = over_stacks(plain, AdapterLimits(1 << 20, max_adapters=1, max_lora_rank=8, max_virtual_tokens=4))
    with device_engine(stacked, on_device(3, **named, max_adapters=1, max_lora_rank=8, max_virtual_tokens=4)) as (
        engine,
        _,
    ):
        assert answer_all(engine, made(engine)) == expected
