"""One request: its parts, its sequences, their events, and their times.

Checking a message yields the parts of `Params`, which pass through the server by reference. Each value is copied from
the message once, into the part where every reader finds it:

    ValidatedRequest    the parts, a prompt that is not tokenised yet, and n       (front/validation.py)
    Request             the same parts, and the tokens of one of the n sequences   (front/prompt.py)

Invariant: nothing here but `Telemetry` changes once it is made, and no module after the checks checks user input again.
The `n` sequences of one RPC are n Requests with the same `request_id` and different `index`.

Not responsible for: protobuf (front/servicer.py), or the state of a running sequence (core/running.py).
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from typing import TYPE_CHECKING, Any

from gpu_engine.api.adapters import Adapter
from gpu_engine.api.conversation import Prompt, Reasoning
from gpu_engine.api.errors import LockstepError
from gpu_engine.api.output_tensors import OutputRows, WantedOutput
from service_runtime.repetition import RepetitionLimit

if TYPE_CHECKING:
    import numpy as np

    from gpu_engine.api.processors import ProcessorUse


class FinishReason(enum.Enum):
    """Why a sequence ended; the values equal the proto enum's."""

    STOP = 1
    LENGTH = 2
    ABORTED = 3
    GRAMMAR_INCOMPLETE = 4
    GRAMMAR_ERROR = 5
    GRAMMAR_CLOSED = 6
    GRAMMAR_INVALID = 7
    REPETITION = 8
    GRAMMAR_INEXACT = 9


class TokenOrigin(enum.Enum):
    """How a step came to a token; the values equal the proto enum's."""

    SAMPLED = 1
    DRAFT = 2
    FORCED = 3


class GrammarKind(enum.Enum):
    """Kinds of grammar, with the values of `lockstep.grammar.v1.Kind`."""

    NONE = 0
    """No grammar, but options for one that the engine writes."""
    JSON_OBJECT = 1
    JSON_SCHEMA = 2
    REGEX = 3
    EBNF = 4
    LARK = 5
    CHOICE = 6
    STRUCTURAL_TAG = 7
    COMPOSED = 8
    """A grammar of tools, reasoning and a client's grammar; the engine writes it, never a client."""


@dataclass(frozen=True, slots=True)
class GrammarOwner:
    """The tenant for whom a grammar is compiled. Owners with the same `space` are equal, and share compilations."""

    space: str
    """The tenant's name, or "" for grammars that tenants share."""
    tenant: str = field(compare=False)
    """The name of the tenant whose compilations count."""
    max_compilations: int = field(compare=False)
    """The most compilations at once; 0: no limit."""
    max_waiting: int = field(compare=False)
    """Further ones, which wait."""
    max_bytes: int = field(compare=False)
    """Memory of the compiled grammars of `space`; 0: no separate limit."""
    weight: float = field(compare=False, default=1.0)
    """The tenant's share of the compile workers, relative to the weights of others, while several wait for one."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar as the client sent it; equal specs share one compilation."""

    kind: GrammarKind
    source: str
    """The grammar text; for CHOICE a JSON array of strings; empty for JSON_OBJECT."""
    whitespace: int = 0
    """A value of the Whitespace enum (equal in both protos)."""
    backend: int = 0
    """A value of the Backend enum (equal in both protos); 0 is the grammar process's default."""
    allow_unenforced: bool = False
    """Parts of the grammar that cannot be enforced become warnings instead of an error."""
    verify: bool = False
    """Such parts are checked on the answer, which ends with GRAMMAR_INVALID where it cannot become valid."""
    owner: GrammarOwner | None = None
    """None: the server has no tenants."""
    bounds: tuple[tuple[str, int], ...] = ()
    """(field of the message, value) of each bound of JSON values that the request sets, in the order of the message."""
    closed_objects: bool | None = None
    """Objects with `properties` that say nothing about other properties have no others; None: the default."""
    client: str = field(compare=False, repr=False, default="")
    """The client whose turn its compilation takes on a server without tenants; "" for an unknown one."""

    @property
    def turn_of(self) -> tuple[str, float]:
        """Whose turn among the compilations it takes, and with what weight."""
        return (self.client, 1.0) if self.owner is None else (self.owner.tenant, self.owner.weight)


@dataclass(frozen=True, slots=True)
class GrammarExact:
    """How an answer is sampled from the model's distribution given the grammar: the bound of its tries."""

    tries: int
    """The most tries, at least 1."""
    max_s: float
    """No try begins later than this many seconds after the first token."""
    fails: bool = False
    """At the bound the request fails; else the sequence ends with GRAMMAR_INEXACT."""
    shared_tries: int = 0
    """Tries before the others, with the same seeds in every request: what they teach is kept for later requests."""
    any_spelling: bool = False
    """The masks allow every spelling of a text in tokens."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when an answer stops, with every default applied. `temperature == 0` is greedy."""

    max_tokens: int
    seed: int
    """64 bits without a sign; with the absolute position it keys the sampling noise."""
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: every token."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """The client's stop tokens; the engine adds the model's end-of-sequence ids unless `ignore_eos`."""
    bad_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences of length >= 2 that must not be generated; single tokens are in `bad_token_ids`."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, bias), by rising token: added to the logits before penalties and temperature."""
    ignore_eos: bool = False
    repetition: RepetitionLimit | None = None
    """None: the answer may repeat itself."""
    grammar_exact: GrammarExact | None = None
    """The answer has the model's distribution given the grammar; None: the grammar masks each token."""

    @property
    def filters(self) -> tuple[str, ...]:
        """Names of the parameters that keep tokens from being drawn because others are more likely."""
        neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        return tuple(name for name, value in neutral.items() if getattr(self, name) != value)


@dataclass(frozen=True, slots=True)
class Speculation:
    """How many drafts a sequence may have."""

    num_draft_tokens: int = 0
    """Drafts per step, at most the server's K."""
    jump_forward_tokens: int | None = None
    """Jump-forward tokens per step, at most the server's F. None: as many as `num_draft_tokens`."""
    draft_index: bool = True
    """The suffix index may draft for the request and keep its answer, if the server has one."""

    @property
    def max_jump_forward(self) -> int:
        """The most jump-forward tokens per step; 0 for a request without speculation."""
        own = self.num_draft_tokens
        return own if self.jump_forward_tokens is None or not own else self.jump_forward_tokens


@dataclass(frozen=True, slots=True)
class TenantShare:
    """What the scheduler knows of the tenant of a sequence."""

    name: str
    weight: float
    """The tenant's part of the engine, relative to other tenants, while several have sequences that wait."""
    max_running: int
    """The most slots; 0: no limit for the tenant."""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """When a sequence runs, for whom, and with whom it shares cached pages."""

    priority: int = 0
    """A higher one leaves the waiting queue first."""
    max_queue_ms: int | None = None
    """The longest wait for a slot, after which the sequence ends with QueueTimeout; None: no limit."""
    never_preempt: bool = False
    """The sequence waits until the pages of its whole answer are free, and holds them to its end."""
    cache_salt: str = ""
    """Requests share pages of the prefix cache, and answers of the suffix index, only where their salts are equal."""
    client_id: str = ""
    """Name of a group of requests, chosen by the client; empty: none."""
    tenant: TenantShare | None = None
    """The tenant of the request; None: the server has no tenants."""

    @property
    def max_queue_s(self) -> float:
        """`max_queue_ms` in seconds; infinite without a limit."""
        return math.inf if self.max_queue_ms is None else self.max_queue_ms / 1e3


@dataclass(frozen=True, slots=True)
class WantedReceipt:
    """A receipt that a request asks for."""

    nonce: bytes = field(repr=False)
    """The key of its digests, which only the client knows."""
    request_digest: str
    """Of the message, see `api/receipts.py`."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the engine computes for a request in addition to its tokens."""

    logprobs: int | None = None
    """Alternatives of each token whose log-probabilities are returned; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    """Alternatives of each token of the prompt; None: no log-probabilities of the prompt."""
    masked_logprobs: bool = False
    """The log-probabilities of the answer are among the tokens that the grammar allows at each place."""
    field_logprobs: bool = False
    """The last response has the log-probability of each leaf of the JSON answer."""
    token_origins: bool = False
    """The events say how the step chose each token."""
    value_events: bool = False
    """The responses say when each value of the JSON answer begins and ends."""
    items_of: str | None = None
    """JSON Pointer of the array whose items the responses have, each when it has ended; None: no items."""
    receipt: WantedReceipt | None = None
    """The last response of each sequence has a receipt; None: it has none."""
    tensors: tuple[WantedOutput, ...] = ()
    """Tensors of the model."""

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives of each token that a step computes; None: no log-probabilities."""
        return 0 if self.logprobs is None and self.field_logprobs else self.logprobs


@dataclass(frozen=True, slots=True)
class ResponseParams:
    """How the tokens of a request become the text that its client gets."""

    omit_text: bool = False
    echo: bool = False
    """The first response of each sequence begins with the prompt."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


class EarlyStopping(enum.Enum):
    """When a beam search ends, once it has as many ended answers as beams; the values equal the proto enum's."""

    HEURISTIC = 1
    """When the best beam, at its present length, is no better than the worst ended answer."""
    AT_ONCE = 2
    NEVER = 3
    """When no beam can become better than the worst ended answer, at any length."""


@dataclass(frozen=True, slots=True)
class BeamParams:
    """The parameters of a beam search."""

    width: int
    """Beams, at least 2."""
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    num_returned: int = 1
    """Sequences that are returned, at most `width`; the events of sequence i have index i."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities at one position, natural logarithms of the model's own distribution, or of the same among the
    tokens that the grammar allows there."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens but the first, natural logarithms of the model's own distribution.

    N tokens, M alternatives of each, the most likely first.
    """

    logprob_N: np.ndarray[Any, np.dtype[np.float32]]
    top_ids_NM: np.ndarray[Any, np.dtype[np.int32]]
    top_logprobs_NM: np.ndarray[Any, np.dtype[np.float32]]


@dataclass(slots=True)
class Telemetry:
    """Times and counts of one sequence, or of one beam search. Times are `time.monotonic()` seconds, 0.0 before they
    come. The engine's thread writes it; other threads may read it."""

    scheduled_s: float = 0.0
    cached_tokens: int = 0
    """Prompt tokens that were not prefilled, because their KV pages were cached when the sequence last got a slot
    before its first token."""
    prefilled_s: float = 0.0
    """When the last chunk of the prompt was launched, or when the sequence got its slot if the whole prompt was
    cached."""
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
    backtracks: int = 0
    exact_tries: int = 0
    exact_tokens: int = 0
    """Tokens of all tries."""
    exact_log_mass: float = 0.0
    """Logarithm of the best known upper bound of the probability that the model's answer is in the grammar."""


@dataclass(slots=True)
class TokenEvent:
    """The result of one step for one sequence. Its last event, and no other, has `finish` or `error`.

    Nothing changes an event once it is made; a frozen class would take three times as long to make.
    """

    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    """One entry per token if the request asked for them, else empty."""
    finish: FinishReason | None = None
    matched_token_id: int | None = None
    error: LockstepError | None = None
    prompt_logprobs: PromptLogprobs | None = None
    """The log-probabilities of the prompt; in the first event with a token, if the request asked for them."""
    outputs: tuple[OutputRows, ...] = ()
    """Rows of the requested tensors, among them the rows of `token_ids`. An event may have only rows."""
    beam_score: float | None = None
    """In the last event of a sequence of a beam search, unless the search has found fewer sequences."""
    origins: tuple[TokenOrigin, ...] = ()
    """One entry per token if the request asked for them, else empty."""
    num_held: int = 0
    """Tokens that were chosen and are held back, because the answer may still go back over them."""


MAX_BACKTRACKS, MAX_HOLD_TOKENS = 64, 1024


@dataclass(frozen=True, slots=True)
class Backtracking:
    """How a verified answer may go back when no token is legal."""

    max_backtracks: int
    hold_tokens: int
    """The last tokens of the answer that are held back, and over which it may go back. At least 1."""


@dataclass(frozen=True, slots=True)
class SuffixScope:
    """The answers from which the suffix index may draft for one request; its own answer joins them."""

    key: bytes
    """A digest; two requests share answers if and only if their keys are equal."""
    seeds: tuple[tuple[int, ...], ...] = ()
    """Texts, as tokens, with which a new scope begins."""


Salt = str | tuple[str, int, int]
"""Part of the prefix cache's key: a client's salt, or that and the generations of the adapters, 0 for none."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Params:
    """What a request asks for, in parts."""

    sampling: SamplingParams
    grammar: GrammarSpec | None = None
    backtracking: Backtracking | None = None
    """How a verified answer may go back; None: no token is taken back."""
    speculation: Speculation = Speculation()
    scheduling: Scheduling = Scheduling()
    outputs: Outputs = Outputs()
    response: ResponseParams = ResponseParams()
    logits_processors: tuple[ProcessorUse, ...] = ()
    """They change the logits of each token, in this order."""
    lora: Adapter | None = None
    """The LoRA adapter of every forward over the sequence."""
    prompt_adapter: Adapter | None = None
    """The prompt adapter whose virtual tokens the prompt begins with."""
    beams: BeamParams | None = None
    """A beam search in place of sampling: the engine runs it for the request with index 0, and sends the events of
    every sequence that is returned to its sink. None: sampling."""

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The adapters that the sequence uses."""
        return tuple(adapter for adapter in (self.lora, self.prompt_adapter) if adapter is not None)

    @property
    def salt(self) -> Salt:
        """What pages of the prefix cache are shared by: the client's salt, and the adapters' weights."""
        salt = self.scheduling.cache_salt
        if self.lora is None and self.prompt_adapter is None:
            return salt
        lora, prompt = (0 if adapter is None else adapter.generation for adapter in (self.lora, self.prompt_adapter))
        return salt, lora, prompt


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ValidatedRequest:
    """A request that is within every limit that can be checked without the tokenizer.

    `max_tokens` and `bad_words` are what the client gave: the tokenizer decides what `params.sampling` has of them
    (see `front/prompt.py`).
    """

    request_id: str
    prompt: Prompt
    n: int
    """Sequences to return."""
    params: Params
    """`sampling.seed` is the first sequence's, given by the client or drawn."""
    max_tokens: int | None = None
    """None: as many as the context has room for."""
    bad_words: tuple[str, ...] = ()
    reasoning: Reasoning | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Request(Params):
    """One sequence. Two requests are equal only if they are the same object; `key` names it in logs."""

    request_id: str
    """On a server with tenants it begins with the tenant's name."""
    index: int = 0
    prompt_ids: list[int]
    """At least one token; len(prompt_ids) + 1 <= max_model_len. Never changed."""
    sink: Callable[[TokenEvent], None]
    """Called on the engine's thread with each event; must not block or raise."""
    arrived_s: float = field(default_factory=time.monotonic)
    """`time.monotonic()` when the request arrived."""
    suffix_scope: SuffixScope | None = None
    """None: the suffix index neither drafts for this sequence nor keeps its answer."""
    echo_text: str | None = None
    """The prompt's text, with which the first response of the sequence begins; None: not asked for."""
    prefill_only: bool = False
    """The sequence is prefilled and never decodes: another engine reads its pages (see api/page_transfer.py)."""

    @classmethod
    def of(cls, params: Params, **fields: Any) -> Request:
        """Return the request of one sequence: the parts of `params`, and its own `fields`."""
        return cls(**{part.name: getattr(params, part.name) for part in dataclass_fields(Params)}, **fields)

    @property
    def client_request_id(self) -> str:
        """`request_id` as the client has given or received it."""
        tenant = self.scheduling.tenant
        return self.request_id if tenant is None else self.request_id[len(tenant.name) + 1 :]

    @property
    def num_virtual_tokens(self) -> int:
        """The first tokens of `prompt_ids`, which no client has written."""
        return 0 if self.prompt_adapter is None else self.prompt_adapter.size

    @property
    def text_prompt_ids(self) -> list[int]:
        """`prompt_ids` without the virtual tokens."""
        return self.prompt_ids[self.num_virtual_tokens :] if self.prompt_adapter is not None else self.prompt_ids

    @property
    def key(self) -> str:
        """`request_id` and index, for logs."""
        return f"{self.request_id}/{self.index}"

    def __repr__(self) -> str:
        kind = self.grammar.kind.name if self.grammar else "unconstrained"
        drafts = self.speculation.num_draft_tokens
        return f"<Request {self.key} prompt={len(self.prompt_ids)} {kind} draft={drafts}>"
