"""The memory of one rank of an engine, part by part, from the model's shape and the engine's own settings.

Invariant: a part is computed by the formula of the code that allocates it, which its docstring names, and
tests/tools/scale/test_memory.py compares the two on the embedded model. Parts without such a test are marked as
estimates.
Not responsible for: the memory of Python, torch, CUDA's context, and the grammar process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.engine_settings import SLOT_TOKENS
from shared_mem.layout import Layout
from tools.scale.shape import ModelShape

_MAX_LOGPROBS = 20
_TILE = 2048
_TABLE_SPARE = 64
"""Positions of the rotary tables beyond `max_model_len`."""
_SLOT_PARAMS_BYTES = 4 * 11 + 8 * 3
_RULES_BYTES = 4 * 512
"""Rules of a slot on a device (`MAX_RULES` of core/device_executor.py)."""
_BIASES_BYTES = 8 * 1024 + 4


@dataclass(frozen=True, slots=True)
class Format:
    """Bytes of a weight by where it is."""

    name: str
    product: float
    head: float
    embedding: float
    native: bool = False
    """The forward is one native call, which has float32 copies of the norms and of the rotary tables."""
    copies_head: bool = False
    """A tied head is a copy of the embedding, in the layout that products read."""

    @property
    def description(self) -> str:
        """Bytes of a weight, in words."""
        return (
            f"{self.product:g} bytes a weight in layers, {self.head:g} in the head, {self.embedding:g} in the embedding"
        )


_Q4, _Q8 = 20 / 32, 34 / 32
"""Blocks of 32: 4 bits with a scale and an offset of 16 bits, or 8 bits with a scale."""

FORMATS = {
    form.name: form
    for form in (
        Format("float32", 4, 4, 4),
        Format("bfloat16", 2, 2, 2),
        Format("bfloat16-cpu", 2, 2, 2, copies_head=True),
        Format("fp8", 1, 2, 2),
        Format("int8", 1, 2, 2),
        Format("int8-cpu", _Q8, _Q8, 2, native=True, copies_head=True),
        Format("q4-cpu", _Q4, _Q8, 2, native=True, copies_head=True),
    )
}
"""What `quantization` and `dtype` make of the weights. `-cpu`: blocks of a CPU, or oneDNN's packed copy of a tied
head."""


class Part(NamedTuple):
    """One line of a report."""

    name: str
    num_bytes: float
    where: str
    """"device", "host" for memory that a GPU does not hold, or the draft model's own GPU."""
    estimate: bool = False
    """No test compares it with the engine."""


@dataclass(frozen=True, slots=True)
class Serving:
    """An engine whose memory is asked for. `config.device` is "cpu" or "cuda"."""

    shape: ModelShape
    form: Format
    config: EngineConfig
    tensor_parallel: int = 1
    kv_bytes: int = 2
    """Bytes of a number in the KV cache: 2 for bfloat16, 4 for float32."""
    draft: ModelShape | None = None
    """With drafter=model or decoupled: the shape of the draft model, which every rank holds whole. With drafter=eagle3
    or dflash: of the head."""

    def __post_init__(self) -> None:
        heads, ranks = self.shape.num_heads, self.tensor_parallel
        if ranks < 1 or heads % ranks:
            raise ValueError(f"tensor_parallel: {ranks} does not divide the model's {heads} heads")

    @property
    def max_model_len(self) -> int:
        """The longest sequence; where it is not set, a slot's share of the KV cache: a shape has no positions."""
        return self.config.max_model_len or SLOT_TOKENS

    @property
    def rank_kv_heads(self) -> int:
        """KV heads of a rank; with more ranks than KV heads, several ranks hold the same one."""
        return max(1, self.shape.num_kv_heads // self.tensor_parallel)

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of a token on one rank, all layers."""
        return 2 * self.shape.num_layers * self.rank_kv_heads * self.shape.head_dim * self.kv_bytes

    @property
    def page_bytes(self) -> int:
        """One page, all layers."""
        return self.kv_token_bytes * self.config.page_size

    @property
    def lookahead(self) -> int:
        """See `lookahead` of gpu_engine/core/executor.py."""
        return self.config.num_rows * (self.config.max_inflight_steps + 1) + self.config.draft_reach

    @property
    def num_pages(self) -> int:
        """Pages of sequences; see `pool_tokens` of gpu_engine/model/cache_size.py."""
        config = self.config
        tokens = config.kv_cache_tokens or config.max_batch_size * self.max_model_len
        return -(-tokens // config.page_size) + config.max_batch_size * -(-self.lookahead // config.page_size)

    @property
    def scratch_pages(self) -> int:
        """Pages of no sequence; see `scratch_pages` of gpu_engine/step/outputs/tensors.py."""
        return max(64, 2 * self.config.page_size) // self.config.page_size

    @property
    def layout(self) -> Layout:
        """The segment that is shared with the grammar process."""
        return Layout(self.config.max_batch_size, self.config.num_rows, self.shape.vocab)

    @property
    def step_rows(self) -> int:
        """The most rows of a decode step."""
        config = self.config
        wanted = config.max_batch_size * config.num_rows
        return min(wanted, config.max_step_rows) if not config.on_cpu else min(wanted, config.step_rows or wanted)

    def weights(self) -> float:
        """Return the bytes of a rank's weights: products, embedding and head are split, the rest is on every rank.

        `weight_bytes` of gpu_engine/ops/memory.py measures the same.
        """
        shape, form = self.shape, self.form
        head = 0.0 if shape.tied and not form.copies_head else shape.embedding_weights * form.head
        split = shape.product_weights * form.product + shape.embedding_weights * form.embedding + head
        kv_copies = max(0, self.tensor_parallel - shape.num_kv_heads) / self.tensor_parallel
        again = kv_copies * shape.num_layers * 2 * shape.hidden * shape.head_dim * form.product
        return split / self.tensor_parallel + again + shape.small_weights * form.embedding

    def tables(self) -> float:
        """Return the bytes of the rotary tables, and of the copies that a native forward has of them and of the norms.

        See `RotaryTable` of gpu_engine/model/rotary.py. `weight_bytes` counts them as well.
        """
        numbers = 2 * (self.max_model_len + _TABLE_SPARE) * self.shape.head_dim
        norms = self.shape.hidden * (2 * self.shape.num_layers + 1)
        return numbers * self.form.embedding + (4.0 * (numbers + norms) if self.form.native else 0.0)

    def kv_cache(self) -> int:
        """Return the bytes of the pages; `LoadedModel.allocate_pages` allocates them."""
        return (self.num_pages + self.scratch_pages) * self.page_bytes

    def draft_memory(self) -> float:
        """Return the bytes of the drafter: its weights and its own pages, or the index of earlier answers."""
        config = self.config
        if config.drafter == "ngram":
            return float(config.max_draft_index_bytes)
        if self.draft is None:
            return 0.0
        tokens = self.num_pages * config.page_size
        if config.drafter == "decoupled":  # a share for each slot, the spare one included
            tokens = (config.max_batch_size + 1) * -(-self._history // config.page_size) * config.page_size
        own = self.draft.num_weights * self.form.embedding + tokens * self.draft.kv_numbers * self.kv_bytes
        return own + (self.draft_buffers() if config.draft_device else 0)

    def draft_buffers(self) -> int:
        """Return the bytes of the buffers that a draft model on its own device drafts over, and of what crosses.

        See `DraftDeviceReplica` of gpu_engine/drafters/draft_device_replica.py. What crosses lies on both devices.
        """
        S, R, vocab = self.config.max_batch_size, self.config.num_rows, self.shape.vocab
        tiles = -(-vocab // _TILE)
        sampling = (S + 1) * (4 * vocab + _RULES_BYTES + _BIASES_BYTES) + S * (12 * tiles + 4 * tiles * _TILE + 4)
        twins = self.slot_buffers() + self.lane_buffers() + 13 * S + sampling
        there = 4 * self._history + 4 * R + _SLOT_PARAMS_BYTES + _RULES_BYTES + _BIASES_BYTES + 4 * 7 + 2
        return twins + 2 * S * (there + 4 * R + 4)

    def slot_buffers(self) -> int:
        """Return the bytes of `SlotBuffers` of gpu_engine/step/buffers.py."""
        config, R = self.config, self.config.num_rows
        table = -(-self._history // config.page_size)
        per_slot = 4 * self._history + 4 * table + (1 + self._trees) * 4 * R + 4 * 6 + 1
        return (config.max_batch_size + 1) * (per_slot + _SLOT_PARAMS_BYTES)

    def lane_buffers(self) -> int:
        """Return the bytes of `LaneBuffers`; on a CPU acceptance's scratch of the vocabulary is among them."""
        S, R = self.config.max_batch_size, self.config.num_rows
        scratch = 8 * (-(-self.shape.vocab // 64) * 64) if self.config.on_cpu else 0
        result = 4 * (R + 4) + 4 * R + 8 * R + 8 * R * _MAX_LOGPROBS + scratch
        tree = self._trees * 4 * (3 * R + 2 * R * R)
        return S * (13 + 1 + 4 * R + 4 + R + 4 * R + 4 + result + tree)

    @property
    def _history(self) -> int:
        """Tokens of a slot's history; on a device the pages of a slot are a multiple of four."""
        config = self.config
        history, whole = self.max_model_len + self.lookahead + config.num_rows, 4 * config.page_size
        return history if config.on_cpu else -(-history // whole) * whole

    @property
    def _trees(self) -> bool:
        return self.config.verifies_trees and not self.config.on_cpu

    def sampling(self) -> int:
        """Return the bytes of sampling on a device: `SlotRows` and `RowScratch` of kernels/cuda/row_state.py."""
        if self.config.on_cpu:
            return 0
        slots, vocab, rows = self.config.max_batch_size + 1, self.shape.vocab, self.step_rows
        tiles = -(-vocab // _TILE)
        return slots * (4 * vocab + _RULES_BYTES + _BIASES_BYTES) + rows * (12 * tiles + 4 * tiles * _TILE + 4)

    def mask_rows(self) -> int:
        """Return the bytes of the shared segment: records, answers, and two buffers of mask rows a slot."""
        return self.layout.total_bytes

    def activations(self) -> float:
        """Return the bytes of the largest forward: of a prefill's tokens, or of a step with its logits. An estimate.

        A row has its residual, its norm, its queries, keys, values and attention, and three widths of the MLP.
        """
        shape, ranks, item = self.shape, self.tensor_parallel, self.kv_bytes
        width = shape.num_heads * shape.head_dim * 2 + 2 * shape.num_kv_heads * shape.head_dim
        mlp = 3 * shape.intermediate * max(1, shape.experts_per_token + shape.shared_experts)
        row = 2 * shape.hidden + (width + mlp) / ranks
        prefill = self.config.prefill_shapes.budget * row * item
        logits = self.step_rows * shape.vocab * (4 if self.config.on_cpu else item) / ranks
        return max(prefill, self.step_rows * row * item) + logits

    def parts(self) -> list[Part]:
        """Return every part of one rank."""
        host = "device" if self.config.on_cpu else "host"
        return [
            Part("weights", self.weights(), "device"),
            Part("rotary tables", self.tables(), "device"),
            Part("KV cache", self.kv_cache(), "device"),
            Part("drafter", self.draft_memory(), self.config.draft_device or "device", self.draft is not None),
            Part("slot buffers", self.slot_buffers(), "device"),
            Part("lane buffers", self.lane_buffers(), "device"),
            Part("sampling", self.sampling(), "device", estimate=True),
            Part("activations and logits", self.activations(), "device", estimate=True),
            Part("shared segment", float(self.mask_rows()), host),
        ]

    def device_bytes(self) -> float:
        """Return the sum of the parts that the device holds."""
        return sum(part.num_bytes for part in self.parts() if part.where == "device")

    def tokens_within(self, num_bytes: float) -> int:
        """Return how many tokens of KV cache fit next to everything else; 0: not even the rest fits."""
        rest = self.device_bytes() - self.num_pages * self.page_bytes
        return max(0, int((num_bytes - rest) // self.page_bytes)) * self.config.page_size

    def num_graphs(self) -> int:
        """Return how many graphs a GPU captures at most: steps by bucket, rows and guidance, and prefill shapes; with
        drafter=decoupled also drafts by bucket and guidance, and one that reads; with draft_device the way there and
        the way back by bucket.

        See `StepGraphs` of gpu_engine/step/device/graphs.py and gpu_engine/drafters/decoupled_graphs.py. Their memory
        was not measured, and is not counted here: those of one stream share a pool, which is as large as the largest of
        them needs, and the nodes' parameters next to it.
        """
        if self.config.on_cpu or self.config.enforce_eager:
            return 0
        largest = self.config.max_batch_size
        sizes = {1, 2, *range(4, 33, 4), *range(48, 129, 16), *range(160, largest + 1, 32), largest}
        buckets = len([size for size in sizes if size <= largest])
        kinds = 3 if self.config.num_drafts else 1
        drafts = buckets * 2 + 1 if self.config.drafts_decoupled else 0
        drafts += buckets * 2 if self.config.draft_device else 0
        return buckets * kinds * 2 + drafts + min(len(self.config.prefill_shapes.every), 64)
