"""A request within all limits, before it is tokenised, and the limits themselves: values that the front makes.

The invariant: nothing here is changed once it is made. The access log and the traces read these values when a call
ends.

Not responsible for: the checks (front/validation.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from gpu_engine.api.adapters import Adapter
from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.conversation import Chat, Reasoning
from gpu_engine.api.outputs import OutputSpec, WantedOutput
from gpu_engine.api.processors import Processors, ProcessorUse
from gpu_engine.api.request import Backtracking, BeamParams, GrammarSpec, TenantShare
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
    """Of a request without its own; 0: none."""
    repetition: RepetitionLimit = field(default_factory=partial(RepetitionLimit, 0, 1, 8))
    """Of a request without its own."""
    backtracking: Backtracking = field(default_factory=partial(Backtracking, 8, 32))
    """Of a request without its own numbers; each may be 0."""
    allow_never_preempt: bool = False
    max_output_bytes: int = 0
    """Of the tensors that a request asks for."""
    output_memory_bytes: int = 0
    """Of the tensors of all running requests."""
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
    ) -> Limits:
        """Return the limits: the smaller of the configured and the model's. `processors`: None for none."""
        return cls(
            vocab_size=vocab_size,
            max_model_len=min(max_model_len, engine.max_model_len),
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
            allow_never_preempt=server.allow_never_preempt,
            max_output_bytes=server.max_output_bytes,
            output_memory_bytes=server.output_memory_bytes,
            outputs=outputs or {},
        )


@dataclass(frozen=True, slots=True)
class Tokens:
    """A prompt that the client tokenised."""

    ids: tuple[int, ...]


Prompt = str | Tokens | Chat


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A request that is within every limit that can be checked without the tokenizer."""

    request_id: str
    prompt: Prompt
    n: int
    num_draft_tokens: int
    jump_forward_tokens: int
    """The server's F, or the request's own number for all drafts."""
    draft_index: bool
    """The suffix index may draft for the request and keep its answer, if the server has one."""
    grammar: GrammarSpec | None
    seed: int
    """Of the first sequence; given by the client or drawn."""
    max_tokens: int | None
    """As the client gave it; None: as many as the context has room for."""
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    bad_token_ids: tuple[int, ...]
    bad_words: tuple[str, ...]
    logit_bias: tuple[tuple[int, float], ...]
    """(token, bias), by rising token, none of them 0."""
    ignore_eos: bool
    logprobs: int | None
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    omit_text: bool
    omit_token_ids: bool
    repetition: RepetitionLimit | None = None
    """None: the answer may repeat itself."""
    backtracking: Backtracking | None = None
    """None: no token of the answer is taken back."""
    echo: bool = False
    """The first response of each sequence begins with the prompt."""
    field_logprobs: bool = False
    """The last response has the log-probability of each leaf of the JSON answer."""
    token_origins: bool = False
    """The responses say of each token how its step came to it."""
    prompt_logprobs: int | None = None
    """Alternatives of each token of the prompt; None: no log-probabilities of the prompt."""
    priority: int = 0
    """A higher one leaves the waiting queue first."""
    max_queue_ms: int | None = None
    """The longest wait for a slot; None: no limit."""
    never_preempt: bool = False
    outputs: tuple[WantedOutput, ...] = ()
    """Tensors to return; those of the prompt's tokens come with the first sequence alone."""
    cache_salt: str = ""
    """Part of the key of the prefix cache and of the suffix index."""
    client_id: str = ""
    """Of a group of requests, chosen by the client; empty: none."""
    logits_processors: tuple[ProcessorUse, ...] = ()
    """In the order of the request."""
    reasoning: Reasoning | None = None
    beams: BeamParams | None = None
    """A beam search, of which `n` sequences are returned; None: sampling."""
    lora: Adapter | None = None
    """The LoRA adapter that the request names."""
    prompt_adapter: Adapter | None = None
    """The prompt adapter that the request names."""
    tenant: TenantShare | None = None
    """Whose request it is; None: the server has no tenants."""
