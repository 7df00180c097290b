"""The time of a step, from below: bytes and operations over what the device can do, and what is added to them.

A kind of work takes as long as the slower of its bytes and its operations (the roofline of Williams, Waterman and
Patterson, 2009); kinds follow one another, so their times are added. Invariant: the time never falls when rows, context
or prompts grow. The grammar process works next to the forward, so it only costs what it takes longer.

Sources: Leviathan, Kalman and Matias 2023 (tokens a step), Hockney 1994 and Thakur, Rabenseifner and Gropp 2005
(collectives), Williams et al. 2009 (roofline).
Not responsible for: which sequences are in a step (see replica.py), and figures to compare with (see comparison.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from tools.scale.device import Device
from tools.scale.memory import Format
from tools.scale.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """What one iteration of an engine has to do."""

    lanes: int
    """Sequences that decode."""
    draft_rows: int = 0
    """Drafts that are verified, over all lanes; the forward has a row for each lane and each draft."""
    prefill_tokens: int = 0
    context_tokens: int = 0
    """Tokens in the KV cache of the sequences that decode, together."""
    prompt_context: int = 0
    """Tokens before the middle of the chunk that is prefilled: what its average token attends to."""
    guided_lanes: int = 0

    @property
    def decode_rows(self) -> int:
        """Rows of the decoding sequences."""
        return self.lanes + self.draft_rows


class StepCost(Protocol):
    """The time of an iteration: a formula, or a fit to a real engine."""

    def seconds(self, load: StepLoad) -> float:
        """Return the expected seconds, without noise."""


def expected_tokens(acceptance: float, drafts: float) -> float:
    """Return the tokens of a step that verifies `drafts` drafts, each right with a chance of `acceptance`.

    (1 - a^(g + 1)) / (1 - a) (Leviathan et al. 2023, equation 1), the bonus token included. `drafts` may be a mean.
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance: {acceptance} is not in [0, 1]")
    if acceptance == 1:
        return drafts + 1
    return float((1 - acceptance ** (drafts + 1)) / (1 - acceptance))


@dataclass(frozen=True, slots=True)
class StepParts:
    """Seconds of one step by what takes them."""

    products: float
    attention: float
    head: float
    rest: float
    """Norms, gates, rotation and sampling."""
    launches: float
    collectives: float
    host: float
    grammar: float
    """What the grammar process takes longer than the forward, and the exposed posts."""

    @property
    def forward(self) -> float:
        """Seconds of the model's forward, after which mask rows are filled."""
        return self.products + self.attention + self.head + self.rest + self.launches + self.collectives

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.forward + self.host + self.grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The step time of a model on one or several devices; a `StepCost`."""

    shape: ModelShape
    device: Device
    form: Format
    tensor_parallel: int = 1
    kv_bytes: int = 2
    mask_s: float = 0.0
    """Seconds of the grammar process for a guided sequence and step (`us a slot` of `bench_sidecar`, in seconds)."""
    posts: int = 1
    """Posts of a guided step; each has an exposed wait."""
    nodes: int = 0
    """Launches of a captured step; 0: nine a layer and seventeen more."""

    def _product_s(self, weight_bytes: float, operations: float) -> float:
        times = weight_bytes / self.device.bandwidth, operations / self.device.peak
        return (max(times) if self.device.overlaps else sum(times)) / self.tensor_parallel

    def _attention_s(self, load: StepLoad) -> float:
        shape, ranks = self.shape, self.tensor_parallel
        copies = max(1.0, ranks / shape.num_kv_heads)
        numbers = shape.kv_numbers * copies / ranks * self.kv_bytes
        operations = 4 * shape.num_heads * shape.head_dim * shape.num_layers / ranks
        rows_a_lane = load.decode_rows / load.lanes if load.lanes else 0.0
        decode = max(
            load.context_tokens * numbers / self.device.bandwidth,
            load.context_tokens * rows_a_lane * operations / self.device.attention_peak,
        )
        prompt = load.prefill_tokens * (load.prompt_context + 1) * operations / self.device.attention_peak
        return decode + prompt

    def parts(self, load: StepLoad) -> StepParts:
        """Return the seconds of one step by what takes them."""
        shape, form, device = self.shape, self.form, self.device
        rows = load.decode_rows + load.prefill_tokens
        read = shape.num_layers * (shape.attention_weights + shape.expert_weights * shape.read_experts(rows))
        products = self._product_s(read * form.product, 2.0 * shape.row_weights * rows) if rows else 0.0
        head_rows = load.decode_rows
        head = 2.0 * shape.embedding_weights * head_rows
        collectives = 0.0
        if self.tensor_parallel > 1 and rows:
            hidden_bytes = rows * shape.hidden * self.kv_bytes
            collectives = 2 * shape.num_layers * device.link.all_reduce_s(hidden_bytes, self.tensor_parallel)
            # Sampling gathers each shard's best, its maximum and its column, not rows of logits.
            collectives += device.link.all_gather_s(12.0 * head_rows * self.tensor_parallel, self.tensor_parallel)
        forward = StepParts(
            products=products,
            attention=self._attention_s(load),
            head=self._product_s(shape.embedding_weights * form.head, head) if head_rows else 0.0,
            rest=rows * device.rows_s * shape.num_layers * (4 * shape.hidden + 3 * shape.intermediate),
            launches=(self.nodes or 9 * shape.num_layers + 17) * device.node_s,
            collectives=collectives,
            host=device.step_s + device.lane_s * load.lanes,
            grammar=0.0,
        )
        if not load.guided_lanes:
            return forward
        late = max(0.0, load.guided_lanes * self.mask_s - forward.forward) + self.posts * device.await_s
        return replace(forward, grammar=late)

    def seconds(self, load: StepLoad) -> float:
        """See `StepCost`."""
        return self.parts(load).total

    def floor_s(self) -> float:
        """Return the seconds in which the weights of one row are read: what no step without a batch can beat."""
        return self.parts(StepLoad(lanes=1)).products + self.parts(StepLoad(lanes=1)).head

    def tokens_per_s(self, load: StepLoad, acceptance: float = 0.0) -> float:
        """Return the tokens of all lanes a second, with drafts accepted independently."""
        drafts = load.draft_rows / load.lanes if load.lanes else 0.0
        return load.lanes * expected_tokens(acceptance, drafts) / self.seconds(load)
