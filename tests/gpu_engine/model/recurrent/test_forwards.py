"""Hybrids as one loop and as one native call: their numbers, and the bits of a row however its sequence is cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from gpu_engine.model.adapters.peft_files import LoraFiles, read_adapter
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.fused_forward import FusedForward, WholeForward
from gpu_engine.model.loader import LoadedModel, load_model
from gpu_engine.model.probe import probe
from gpu_engine.model.quantised.native import NativeForward
from gpu_engine.model.recording import distance, typical_distance
from gpu_engine.model.recurrent.delta_nets import DeltaNet
from gpu_engine.model.states import SequenceStates
from kernels.blocks import can_multiply_blocks
from tests.gpu_engine import hybrids
from tests.gpu_engine.adapters.files import save_lora
from tests.gpu_engine.harness import config
from tests.gpu_engine.model.model_logits import assert_same_bits_on_every_unit, logits, some_ids

needs_blocks = pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")

NATIVE = (
    "lfm2",
    "lfm2 moe",
    "granite dense",
    "granite",
    "bamba",
    "falcon_h1",
    "falcon_h1 plain",
    "falcon_h1 with norms",
    "qwen3_5",
    "qwen3_5 moe",
    "nemotron_h",
    "nemotron_h dense",
    "nemotron_h moe",
)
"""Families whose forward is one loop, and natively one call."""
LOOPS = (*NATIVE, "jamba dense", "qwen3_next")
NATIVE_ADAPTERS = ("lfm2", "granite dense", "bamba")
"""Those whose native forward takes adapters."""
QKV, RECURRENT, BLOCK = ("q_proj", "k_proj", "v_proj"), ("in_proj", "out_proj"), ("gate_proj", "up_proj", "down_proj")
DELTA_NET = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
ADAPTED: dict[str, tuple[str, ...]] = {
    "lfm2": (*QKV, *RECURRENT, "w1", "w2", "w3"),
    "lfm2 moe": (*QKV, *RECURRENT, "w1", "w2", "w3"),
    "qwen3_5": (*QKV, "o_proj", *DELTA_NET, *BLOCK),
    "qwen3_5 moe": (*QKV, "o_proj", *DELTA_NET, *BLOCK),
    "qwen3_next": (*QKV, "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"),
    "granite dense": (*QKV, "o_proj", *RECURRENT, "input_linear", "output_linear"),
    "granite": (*QKV, "o_proj", *RECURRENT, "input_linear", "output_linear"),
    "bamba": (*QKV, "o_proj", *RECURRENT, *BLOCK),
    "falcon_h1": (*QKV, "o_proj", *RECURRENT, *BLOCK),
    "falcon_h1 plain": (*QKV, "o_proj", *RECURRENT, *BLOCK),
    "falcon_h1 with norms": (*QKV, "o_proj", *RECURRENT, *BLOCK),
    "jamba dense": (*QKV, "o_proj", *RECURRENT, *BLOCK),
    "nemotron_h": (*QKV, "o_proj", *RECURRENT, "up_proj", "down_proj"),
    "nemotron_h dense": (*QKV, "o_proj", *RECURRENT, "up_proj", "down_proj"),
    "nemotron_h moe": (*QKV, "o_proj", *RECURRENT, "up_proj", "down_proj"),
}
"""The products of their layers, without experts."""
TOKENS, DRAFTS, LANES = 80, 6, 3


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LoadedModel]:
    """Return a function from a family and settings to its tiny model."""

    @cache
    def folder(family: str) -> Path:
        return hybrids.save(family, tmp_path_factory.mktemp("hybrid"))

    def load(family: str, **settings: object) -> LoadedModel:
        return load_model(config(model=str(folder(family)), **settings))

    return load


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Sequences:
    """Sequences of one model, which go on together by verifications of drafts."""

    def __init__(self, model: LoadedModel, ids_BN: torch.Tensor) -> None:
        self.model, self.ids_BN, (B, N) = model, ids_BN, ids_BN.shape
        pages = -(-N // 16) + 1
        self.pages, self.table = model.allocate_pages(B * pages, 16), torch.randperm(B * pages).view(B, pages).int()
        self.states = SequenceStates(model.recurrent, num_slots=B, max_rows=DRAFTS + 1)
        self.done = [0] * B
        self.found_BNV = torch.zeros(B, N, model.vocab_size)
        self.adapters_B: torch.Tensor | None = None

    def prefill(self, lanes: list[int], counts: list[int]) -> None:
        """Take the next tokens of some sequences as chunks of prompts; a chunk of no tokens is padding."""
        self.forward(lanes, counts, counts, fills=True)
        for b, count in zip(lanes, counts, strict=True):
            self.done[b] += count

    def verify(self, lanes: list[int], right: list[int], wrong: list[int], committed: list[int]) -> None:
        """Take the next token of some sequences, with so many right drafts after it and then so many wrong ones."""
        counts = [1 + a + b for a, b in zip(right, wrong, strict=True)]
        got = self.forward(lanes, counts, committed, wrong=wrong)
        for row, (b, drafts) in enumerate(zip(lanes, right, strict=True)):
            own = slice(self.done[b], self.done[b] + 1 + drafts)
            self.found_BNV[b, own] = got[row, : 1 + drafts]
            self.done[b] += 1 + drafts

    @torch.inference_mode()
    def forward(
        self,
        lanes: list[int],
        counts: list[int],
        committed: list[int],
        wrong: list[int] | None = None,
        *,
        fills: bool = False,
    ) -> torch.Tensor:
        """Run the next rows of some sequences, of which the last ones are wrong; return the logits [B, P, V]."""
        P, starts = max(counts), [self.done[b] for b in lanes]
        ids_BP, positions_BP = torch.zeros(len(lanes), P, dtype=torch.int64), torch.full((len(lanes), P), -1)
        for row, (b, start, count) in enumerate(zip(lanes, starts, counts, strict=True)):
            ids_BP[row, :count] = self.ids_BN[b, start : start + count]
            positions_BP[row, :count] = torch.arange(start, start + count)
            if wrong is not None and wrong[row]:
                at = count - wrong[row]
                ids_BP[row, at:count] = (ids_BP[row, at:count] + 7) % 256
        ctx = AttentionContext(self.pages, self.table[lanes].contiguous(), positions_BP.int())
        ctx.recurrent = self.states.forward_of(lanes, starts, counts, committed, P)
        ctx.adapters_B = self.adapters_B
        if fills:
            self.model.prefill(ids_BP, ctx)
            return torch.empty(0)
        return self.model.logits(ids_BP, ctx).view(len(lanes), P, -1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", LOOPS)
def test_a_hybrid_runs_as_one_loop(load: Callable[..., LoadedModel], family: str, dtype: str) -> None:
    own, loop = (load(family, dtype=dtype, fuse_parts=fuse) for fuse in (False, True))
    assert own.fused.forward is None
    assert isinstance(loop.fused.forward, FusedForward), loop.fused.left
    assert loop.fused.delta_nets == sum(type(module) is DeltaNet for module in own.net.modules())
    assert not loop.takes_prompts
    ids_BP = some_ids(3, 40)
    assert distance(logits(loop, ids_BP), logits(own, ids_BP)) < (1e-4 if dtype == "float32" else 5e-2)


@needs_blocks
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["int8", "q4"])
@pytest.mark.parametrize("family", NATIVE)
def test_a_quantised_hybrid_runs_as_one_native_call(
    load: Callable[..., LoadedModel], family: str, dtype: str, quantization: str
) -> None:
    own, native = (load(family, dtype=dtype, quantization=quantization, fuse_parts=fuse) for fuse in (False, True))
    assert own.quantised
    assert own.fused.forward is None
    assert isinstance(native.fused.forward, NativeForward), native.fused.left
    assert not native.takes_prompts
    ids_BP = some_ids(3, 40)
    # transformers' forward rounds to the dtype before each quantisation, which then finds other integers.
    got_NV, want_NV = (logits(model, ids_BP).flatten(0, 1).float() for model in (native, own))
    assert typical_distance(got_NV, want_NV) < (2e-2 if dtype == "float32" else 0.1)
    assert_same_bits_on_every_unit(native)


class Forgets:
    """A forward that takes no row again."""

    skips_padding = takes_prompts = True

    def __init__(self, own: WholeForward) -> None:
        self.own = own

    def logits(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> torch.Tensor:
        return self.own.logits(ids_BP, self._without_redo(ctx))

    def fill(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> None:
        self.own.fill(ids_BP, self._without_redo(ctx))

    def _without_redo(self, ctx: AttentionContext) -> AttentionContext:
        assert ctx.recurrent is not None
        rows = replace(ctx.recurrent.rows, redo_L=torch.zeros_like(ctx.recurrent.rows.redo_L))
        return replace(ctx, recurrent=replace(ctx.recurrent, rows=rows))


@needs_blocks
@pytest.mark.parametrize("family", ["lfm2", "bamba", "qwen3_5"])
def test_a_native_forward_that_takes_no_row_again_is_seen_at_the_start(
    load: Callable[..., LoadedModel], family: str
) -> None:
    model = load(family, dtype="bfloat16", quantization="q4")
    assert isinstance(model.fused.forward, NativeForward)
    own = load(family, dtype="bfloat16", quantization="q4", fuse_parts=False)
    of_probe = torch.arange(16)[None] * 37 % own.vocab_size
    goes_on = probe(own, own=logits(own, of_probe)[0]).goes_on(model)
    assert goes_on(model.fused.forward)
    assert not goes_on(Forgets(model.fused.forward))


SETTINGS = [
    *[pytest.param(family, {"dtype": "float32"}, id=f"{family}-loop") for family in LOOPS],
    *[
        pytest.param(family, {"dtype": "bfloat16", "quantization": "q4"}, id=f"{family}-native", marks=needs_blocks)
        for family in NATIVE
    ],
]


@pytest.mark.parametrize(("family", "settings"), SETTINGS)
def test_a_row_has_the_same_bits_with_any_drafts_and_in_any_company(
    load: Callable[..., LoadedModel], family: str, settings: dict[str, str]
) -> None:
    """A sequence of prompt chunks and verifications, whose drafts are accepted or rejected, against one forward of all
    tokens of a sequence by itself. Some lanes are padding, and some verifications commit no row."""
    model, ids_BN, draw = load(family, **settings), some_ids(LANES, TOKENS), random.Random(3)
    want_BNV = torch.cat([logits_of_all(model, ids_BN[b : b + 1]) for b in range(LANES)])
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        run = Sequences(model, ids_BN)
        run.prefill([1, 2, 0], [17, 0, 9])
        run.prefill([0, 2], [4, 1])
        first = list(run.done)
        while left := [b for b in range(LANES) if run.done[b] < TOKENS]:
            lanes = draw.sample(left, draw.randint(1, len(left)))
            right = [draw.randint(0, min(DRAFTS, TOKENS - run.done[b] - 1)) for b in lanes]
            room = [min(DRAFTS - a, TOKENS - run.done[b] - a - 1) for a, b in zip(right, lanes, strict=True)]
            wrong = [draw.randint(0, most) for most in room]
            run.verify(lanes, right, wrong, [draw.randint(0, 1) for _ in lanes])
        for b, start in enumerate(first):
            assert torch.equal(run.found_BNV[b, start:], want_BNV[b, start:]), (num_threads, b)


@pytest.mark.parametrize(("family", "settings"), SETTINGS)
def test_rows_that_threads_share_by_rows_are_those_of_one_thread(
    load: Callable[..., LoadedModel], family: str, settings: dict[str, str]
) -> None:
    """240 rows, 48 for each of five threads. A fill leaves the states that logits leave."""
    model, ids_BN = load(family, **settings), some_ids(LANES, TOKENS)
    want_BNV = torch.cat([logits_of_all(model, ids_BN[b : b + 1]) for b in range(LANES)])
    for num_threads in (1, 2, 3, 5):
        torch.set_num_threads(num_threads)
        assert torch.equal(logits_of_all(model, ids_BN), want_BNV), num_threads
        run = Sequences(model, ids_BN)
        run.prefill([0, 1, 2], [TOKENS - 1] * LANES)
        run.verify([2, 0, 1], [0] * LANES, [0] * LANES, [1] * LANES)
        assert torch.equal(run.found_BNV[:, -1], want_BNV[:, -1]), num_threads


@pytest.mark.parametrize(("family", "settings"), SETTINGS)
def test_states_of_layers_that_a_forward_wants_are_those_of_transformers_forward(
    load: Callable[..., LoadedModel], family: str, settings: dict[str, str]
) -> None:
    ids_BN, taken = some_ids(1, 9), []
    for fuse in (False, True):
        model = load(family, **{**settings, "dtype": "float32"}, fuse_parts=fuse)
        run = Sequences(model, ids_BN)
        ctx = AttentionContext(run.pages, run.table, torch.arange(9, dtype=torch.int32)[None])
        ctx.recurrent = run.states.forward_of([0], [0], [9], [9])
        ctx.hidden = dict.fromkeys(range(model.net.config.num_hidden_layers + 1))
        with torch.inference_mode():
            model.prefill(ids_BN, ctx)
        taken.append(ctx.hidden)
    for layer, want in taken[0].items():
        assert distance(taken[1][layer], want) < (4e-2 if "quantization" in settings else 1e-3), layer


@pytest.mark.parametrize(("family", "settings"), SETTINGS)
def test_an_adapter_changes_every_product_of_its_own_rows(
    load: Callable[..., LoadedModel], tmp_path: Path, family: str, settings: dict[str, str]
) -> None:
    """Also those of the recurrent layers; against transformers' forward over the same products."""
    ids_BN, found, plain = some_ids(LANES, 24), [], load(family, **{**settings, "dtype": "float32"})
    assert plain.path is not None
    files = read_adapter(save_lora(plain.path, tmp_path, targets=ADAPTED[family], seed=3), 1 << 20)
    assert isinstance(files, LoraFiles)
    for fuse in (False, True):
        fields = {**settings, "dtype": "float32", "max_adapter_bytes": 1 << 20}
        model = load(family, **fields, fuse_parts=fuse)
        native = "quantization" in settings and family in NATIVE_ADAPTERS
        assert type(model.fused.forward) is ((NativeForward if native else FusedForward) if fuse else type(None))
        assert model.adapters is not None
        model.adapters.put(1, files)
        found.append(logits_of_all(model, ids_BN, adapters=[1, 0, 1]))
    own_BNV, fused_BNV = found
    assert distance(fused_BNV, own_BNV) < (4e-2 if "quantization" in settings else 1e-3)
    if type(plain.fused.forward) is type(model.fused.forward):
        assert torch.equal(fused_BNV[1], logits_of_all(plain, ids_BN)[1])
    assert distance(fused_BNV[0], logits_of_all(plain, ids_BN)[0]) > 0.1


def logits_of_all(model: LoadedModel, ids_BN: torch.Tensor, adapters: list[int] | None = None) -> torch.Tensor:
    """Return [B, N, V], in memory of their own, of one forward whose rows are all committed."""
    run, (B, N) = Sequences(model, ids_BN), ids_BN.shape
    run.adapters_B = None if adapters is None else torch.tensor(adapters, dtype=torch.int32)
    return run.forward(list(range(B)), [N] * B, [N] * B).clone()
