"""One sequence to generate: what was asked, what comes back, and how the two threads talk about it.

A `Request` is validated and tokenised before it exists; nothing after this module checks user input again. `n`
sequences of one RPC are n Requests with one `request_id` and different `index`. Not here: protobuf (servicer) and
scheduling state.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gpu_engine.api.errors import LockstepError


class FinishReason(enum.Enum):
    """Why a sequence ended; the values are those of the proto enum."""

    STOP = 1
    LENGTH = 2
    ABORTED = 3
    GRAMMAR_INCOMPLETE = 4
    GRAMMAR_ERROR = 5
    GRAMMAR_CLOSED = 6


class GrammarKind(enum.Enum):
    """Kinds of grammar; the values are those of `lockstep.grammar.v1.Kind`."""

    JSON_OBJECT = 1
    JSON_SCHEMA = 2
    REGEX = 3
    EBNF = 4
    LARK = 5
    CHOICE = 6
    STRUCTURAL_TAG = 7


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar as the client gave it; equal specs share one compilation."""

    kind: GrammarKind
    source: str
    """The grammar text; for CHOICE a JSON array of strings; empty for JSON_OBJECT."""
    whitespace: int = 0
    """A value of the Whitespace enum (equal in both protos)."""
    backend: int = 0
    """A value of the Backend enum (equal in both protos); 0 is the sidecar's default."""
    allow_unenforced: bool = False
    """Parts that cannot be enforced become warnings."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping, every default already applied. `temperature == 0` is greedy."""

    max_tokens: int
    seed: int
    """64 bits; with the absolute position it keys the sampling noise."""
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """The client's; the model's own end-of-sequence ids are the engine's unless `ignore_eos`."""
    bad_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences of length >= 2 that must not appear; single tokens are in `bad_token_ids`."""
    ignore_eos: bool = False
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Logprobs:
    """At one position, of the model's own distribution: natural logarithms."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Telemetry:
    """Where the time of a sequence went. Times are `time.monotonic()` seconds; the engine thread alone writes it."""

    arrived_s: float = field(default_factory=time.monotonic)
    scheduled_s: float = 0.0
    cached_tokens: int = 0
    """What was there when it was last seated before its first token, and was not prefilled."""
    prefilled_s: float = 0.0
    """The last chunk of the prompt was launched; where all of it was there, the time of its seat."""
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    finished_s: float = 0.0
    compile_ms: float = 0.0
    compile_cache_hit: bool = False
    mask_wait_ms: float = 0.0
    steps: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    deferred_rows: int = 0
    backend: int = 0
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one step did to one sequence. Exactly one event of a sequence has `finish` or `error` set: its last."""

    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    """One entry a token when asked for, else empty."""
    finish: FinishReason | None = None
    matched_token_id: int | None = None
    error: LockstepError | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. Identity is the object; `key` names it to humans and to Abort."""

    request_id: str
    index: int
    prompt_ids: list[int]
    """At least one token; len(prompt_ids) + 1 <= max_model_len."""
    sampling: SamplingParams
    sink: Callable[[TokenEvent], None]
    """Called on the engine thread, once per step with news; must not block or raise."""
    grammar: GrammarSpec | None = None
    num_draft_tokens: int = 0
    """Drafts per step for this sequence; the server's K is the most."""
    jump_forward_tokens: int | None = None
    """The same for what the grammar forces; the server's F is the most. None: as many as `num_draft_tokens`."""
    telemetry: Telemetry = field(default_factory=Telemetry)

    @property
    def max_jump_forward(self) -> int:
        """Drafts per step that the grammar may force; none for a request without speculation."""
        own = self.num_draft_tokens
        return own if self.jump_forward_tokens is None or not own else self.jump_forward_tokens

    @property
    def key(self) -> str:
        """`request_id` and index, for logs."""
        return f"{self.request_id}/{self.index}"

    def __repr__(self) -> str:
        grammar_state = self.grammar.kind.name if self.grammar else "free"
        return f"<Request {self.key} prompt={len(self.prompt_ids)} {grammar_state} draft={self.num_draft_tokens}>"
