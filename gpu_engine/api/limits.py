"""The limits of requests to one server: values that the front makes once.

Not responsible for: the checks (front/validation.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.output_tensors import OutputSpec
from gpu_engine.api.processors import Processors
from gpu_engine.api.request import Backtracking
from gpu_engine.api.sampling_defaults import Defaults
from service_runtime.repetition import RepetitionLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a request on this server; made once from the configuration and the model."""

    vocab_size: int
    max_model_len: int
    num_draft_tokens: int
    jump_forward_tokens: int
    max_n: int
    max_prompt_bytes: int
    max_beam_width: int = 0
    """0: no beam search."""
    stream_pace_s: float = 0.0
    grammar_handles_bytes: int = 64 << 20
    draft_index: bool = False
    """The server has a suffix index."""
    draft_index_shared: bool = False
    logits_processors: Processors = field(default_factory=Processors)
    checks_tokens: bool = False
    """Every call has a bearer token that the server knows."""
    max_queue_ms: int = 0
    """The longest wait of a request that sets none; 0: no limit."""
    repetition: RepetitionLimit = field(default_factory=partial(RepetitionLimit, 0, 1, 8))
    """The limit of repetition for a request that sets none."""
    backtracking: Backtracking = field(default_factory=partial(Backtracking, 8, 32))
    """How an answer goes back for a request that sets no numbers; each may be 0."""
    allow_never_preempt: bool = False
    signs_receipts: bool = False
    exact_answers: bool = True
    """Answers may be exact: the engine runs on a CPU."""
    max_output_bytes: int = 0
    """The most bytes of the tensors that one request asks for."""
    output_memory_bytes: int = 0
    """The most bytes of the tensors of all running requests."""
    sampling_defaults: Defaults = field(default_factory=dict)
    """Values of the sampling parameters that a request leaves out, where the model has its own."""
    outputs: Mapping[str, OutputSpec] = field(default_factory=dict)
    """The tensors of the model, by name."""

    @classmethod
    def of(
        cls,
        engine: EngineConfig,
        server: ServerConfig,
        *,
        vocab_size: int,
        max_model_len: int,
        outputs: Mapping[str, OutputSpec] | None = None,
        processors: Processors | None = None,
        sampling_defaults: Defaults | None = None,
    ) -> Limits:
        """Return the limits: the smaller of the configured and the model's. `processors`: None for none."""
        return cls(
            vocab_size=vocab_size,
            max_model_len=min(max_model_len, engine.max_model_len or max_model_len),
            num_draft_tokens=engine.num_drafts,
            jump_forward_tokens=engine.num_jump_forward,
            max_n=server.max_n,
            max_prompt_bytes=server.max_prompt_bytes,
            max_beam_width=beams if (beams := min(engine.max_beam_width, engine.max_batch_size)) > 1 else 0,
            stream_pace_s=server.stream_pace_ms / 1e3,
            grammar_handles_bytes=server.grammar_handles_bytes,
            draft_index=engine.max_draft_index_bytes > 0,
            draft_index_shared=engine.draft_index_shared,
            logits_processors=processors or Processors(),
            checks_tokens=bool(server.auth_token_file),
            max_queue_ms=server.max_queue_ms,
            exact_answers=not engine.device.startswith("cuda"),
            allow_never_preempt=server.allow_never_preempt,
            signs_receipts=bool(server.receipt_key),
            max_output_bytes=server.max_output_bytes,
            output_memory_bytes=server.output_memory_bytes,
            outputs=outputs or {},
            sampling_defaults=sampling_defaults or {},
        )
