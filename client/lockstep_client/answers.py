"""Typed results: deltas, whole answers, and what a server says about itself.

The invariant: an `Answer` is the sum of its sequence's deltas, whether it was streamed or not. Every field of the
server's messages has one here, under the same name; a test compares them.

Not responsible for: joining deltas (see joining.py).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message as Wire

from lockstep_client.errors import NotParsed
from lockstep_client.messages import Message, ToolCall
from lockstep_client.wire import engine_pb2 as pb

T = TypeVar("T")
M = TypeVar("M")


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    """End of sequence, a stop token or a stop string."""
    LENGTH = "length"
    """Free text reached `max_tokens` or the context."""
    ABORTED = "aborted"
    """`abort`, or the server is closing."""
    GRAMMAR_INCOMPLETE = "grammar_incomplete"
    """The limit was reached before the answer was complete."""
    GRAMMAR_ERROR = "grammar_error"
    """No token was legal."""
    GRAMMAR_CLOSED = "grammar_closed"
    """A complete answer, which the server led to its end near `max_tokens`."""
    GRAMMAR_INVALID = "grammar_invalid"
    """With `unenforced="verify"`: the answer could not become valid any more."""
    REPETITION = "repetition"
    """The answer repeated itself: it was led to its end by its grammar, or cut."""
    GRAMMAR_INEXACT = "grammar_inexact"
    """With `grammar_exact`: no answer was accepted within the bound."""


COMPLETE = frozenset({FinishReason.STOP, FinishReason.GRAMMAR_CLOSED, FinishReason.REPETITION})
"""Reasons with which a guided answer is complete, unless a stop of the request came first."""


class PartKind(enum.StrEnum):
    """What a part of an answer is."""

    REASONING = "reasoning"
    CONTENT = "content"
    TOOL_CALL = "tool_call"
    """A tool call begins: `tool_call_id` and `tool_name` are set, `text` is empty."""
    TOOL_ARGUMENTS = "tool_arguments"


class TokenOrigin(enum.StrEnum):
    """How a step came to a token."""

    SAMPLED = "sampled"
    """The model's own token."""
    DRAFT = "draft"
    """An accepted draft of the drafter."""
    FORCED = "forced"
    """An accepted draft of the grammar, because no other text is legal there."""


@dataclass(frozen=True, slots=True)
class Part:
    """A delta of one part of an answer, of requests with tools or reasoning."""

    kind: PartKind
    text: str
    tool_call_index: int
    """Which call of the answer, from 0."""
    tool_call_id: str
    tool_name: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """An alternative: a token and its natural log-probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of the token at one position, and the most likely tokens, most likely first."""

    logprob: float
    top: tuple[TokenLogprob, ...]
    token_id: int | None = None
    """The token; None in answers whose token ids were left out. `token_texts` of a client has the texts of ids."""


@dataclass(frozen=True, slots=True)
class FieldLogprob:
    """The log-probability of one leaf of a JSON answer, summed over its tokens."""

    pointer: str
    """The leaf, as a JSON Pointer (RFC 6901)."""
    logprob: float
    tokens: int


class ValueEventKind(enum.StrEnum):
    """What an event says of a value."""

    STARTED = "started"
    FINISHED = "finished"
    ITEM = "item"
    """The value has ended, and is an item of the array that `items_of` names."""


@dataclass(frozen=True, slots=True)
class ValueEvent:
    """An event of a value of a JSON answer, as the server sends it. No later one takes it back."""

    kind: ValueEventKind
    pointer: str
    """The value's place, as a JSON Pointer (RFC 6901)."""
    type: str
    """"object", "array", "string", "number", "boolean" or "null"."""
    value_json: str | None
    """The value's JSON text; None for a value that began, and for a container whose parts had events."""
    logprob: float | None
    """The sum over the value's tokens; None unless log-probabilities were asked for and the value has ended."""
    tokens: int
    """The number of those tokens."""


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """Some rows of a tensor that the request asked for. Row i belongs to position `start + i` of prompt and answer."""

    name: str
    """`context_logits`, `generation_logits`, or a name of `additional_outputs`."""
    dtype: str
    """ "float32", "bfloat16" or "float16"."""
    shape: tuple[int, ...]
    """Rows first."""
    data: bytes
    """Little endian, row by row."""
    start: int
    """Position of the first row: 0 is the first token of the prompt. The row of a token of the answer is that of the
    token before it."""

    def tolist(self) -> list[Any]:
        """Return the numbers as nested lists."""
        if self.dtype == "bfloat16":  # the upper half of a float32
            wide = bytearray(2 * len(self.data))
            wide[2::4], wide[3::4] = self.data[::2], self.data[1::2]
            values = list(struct.unpack(f"<{len(self.data) // 2}f", wide))
        else:
            code, size = ("e", 2) if self.dtype == "float16" else ("f", 4)
            values = list(struct.unpack(f"<{len(self.data) // size}{code}", self.data))
        for size in reversed(self.shape[1:]):
            values = [values[at : at + size] for at in range(0, len(values), size)]
        return values

    def numpy(self) -> Any:
        """Return the numbers as an array of numpy, which must be installed; bfloat16 becomes float32."""
        import numpy as np

        if self.dtype == "bfloat16":
            wide = np.frombuffer(self.data, np.dtype("<u2")).astype(np.uint32) << 16
            return wide.view(np.float32).reshape(self.shape)
        return np.frombuffer(self.data, np.dtype("<f2" if self.dtype == "float16" else "<f4")).reshape(self.shape)

    def __repr__(self) -> str:
        return f"<OutputTensor {self.name} {self.dtype} {self.shape} from {self.start}>"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one sequence."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Of prompt_tokens: tokens that the prefix cache had."""
    reasoning_tokens: int
    """Of completion_tokens: tokens of the reasoning, its markers included."""


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Where the time of one sequence went; engine.proto documents each field."""

    queue_ms: float
    compile_ms: float
    compile_cache_hit: bool
    ttft_ms: float
    total_ms: float
    mask_wait_ms: float
    steps: int
    draft_tokens: int
    accepted_draft_tokens: int
    acceptance_length: float
    deferred_rows: int
    seed: int
    backend: str
    warnings: tuple[str, ...]
    backtracks: int = 0
    exact_tries: int = 0
    exact_tokens: int = 0
    exact_log_mass: float = 0.0


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and tokens of one sequence. `text` may lag behind `token_ids`."""

    request_id: str
    index: int
    """Which of the n sequences, from 0."""
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    """None until the last delta of the sequence."""
    matched_token_id: int | None
    matched_stop_str: str | None
    usage: Usage | None
    """In the last delta of the sequence, as are telemetry and field_logprobs."""
    telemetry: Telemetry | None
    parts: tuple[Part, ...]
    """`text` by part, without the markers; empty for requests without tools and reasoning."""
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    field_logprobs: tuple[FieldLogprob, ...]
    outputs: tuple[OutputTensor, ...]
    """Rows of the tensors that the request asked for."""
    beam_score: float | None
    """In the last delta of a sequence of a beam search."""
    token_origins: tuple[TokenOrigin, ...]
    """One entry per token, when asked for."""
    held_tokens: int
    """Tokens of a verified answer that were chosen and are held back."""
    value_events: tuple[ValueEvent, ...]
    """With `value_events` or `items_of`, in the order of the answer."""
    receipt: str
    """With `receipt_nonce`, in the last delta of the sequence; else empty."""


@dataclass(slots=True, kw_only=True, repr=False)
class Answer(Generic[T]):
    """One finished sequence. With `n` above 1 it is sequence 0, and `others` has the rest.

    `text` is everything that the model wrote. With tools or reasoning, `content` is the part for the user.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    telemetry: Telemetry
    matched_token_id: int | None = None
    matched_stop_str: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    field_logprobs: tuple[FieldLogprob, ...] = ()
    outputs: Mapping[str, OutputTensor] = field(default_factory=dict)
    """By name, all rows of each tensor that the request asked for."""
    beam_score: float | None = None
    token_origins: tuple[TokenOrigin, ...] = ()
    receipt: str = ""
    """The signed receipt, if the request had a `receipt_nonce`."""
    others: tuple[Answer[T], ...] = ()
    _parse: Any = None
    _value: list[T] = field(default_factory=list)

    @property
    def parsed(self) -> T:
        """The answer as a value of the schema, or of JSON. Raises NotParsed, which says why there is none.

        An answer that the server led to its end at `max_tokens` has none: values that the model had no room for are
        left out or made up. `parse(closed=True)` returns it all the same.
        """
        return self.parse()

    def parse(self, *, closed: bool = False) -> T:
        """Return what `parsed` has; `closed`: also of an answer that ended with GRAMMAR_CLOSED. Raises NotParsed."""
        if self.finish_reason is FinishReason.GRAMMAR_CLOSED and not closed and self._parse is not None:
            raise NotParsed(
                "the answer reached max_tokens or the end of the context, and the server closed it: values may be "
                "missing or made up; give it more room, or take them with parse(closed=True)"
            )
        if not self._value:
            self._value.append(self._parsed())
        return self._value[0]

    def _parsed(self) -> T:
        if self._parse is None:
            raise NotParsed("the request had no schema and no JSON grammar; read `text`")
        if self.finish_reason not in COMPLETE:
            raise NotParsed(f"the answer is not complete: it ended with {self.finish_reason.name}")
        if self.tool_calls and not self.content.strip():
            raise NotParsed(f"the answer is a call of {self.tool_calls[0].name}; see `tool_calls`")
        try:
            value: T = self._parse(self.content)
        except ValueError as error:
            stop = self.matched_stop_str
            cut = f"; the stop string {stop!r} came first" if stop else ""
            raise NotParsed(f"the answer is no value of the schema{cut}: {error}") from error
        return value

    @property
    def message(self) -> Message:
        """The answer as a turn of the conversation, to be sent back with the next one."""
        return Message(role="assistant", content=self.content, tool_calls=self.tool_calls, reasoning=self.reasoning)

    def __repr__(self) -> str:
        return f"<Answer {self.finish_reason.value} {self.text[:60]!r}>"


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tokenised prompt."""

    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    """The text of each token, when asked for."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model and the limits of a server; engine.proto documents each field."""

    model: str
    model_type: str
    dtype: str
    vocab_size: int
    max_model_len: int
    max_batch_size: int
    max_queue_size: int
    num_draft_tokens: int
    drafter: str
    eos_token_ids: tuple[int, ...]
    backends: tuple[str, ...]
    num_parameters: int
    version: str
    device: str
    served_names: tuple[str, ...]
    tool_format: str
    reasoning_begin: str
    reasoning_end: str
    logits_processors: tuple[str, ...]
    max_beam_width: int
    output_names: tuple[str, ...]
    max_adapter_bytes: int
    page_size: int
    role: str
    draft_model: str
    weights: str = ""
    """What the products multiply: the dtype, or the forms of quantised weights with their number."""
    receipt_key: str = ""
    """The public key that checks the server's receipts, as the text of a JSON Web Key; empty: it signs none."""


@dataclass(frozen=True, slots=True)
class ClearedGrammars:
    """What `clear_grammar_cache` dropped."""

    dropped: int
    """Grammars in memory."""
    kept: int
    """Grammars that running requests use."""
    freed_bytes: int
    """Of memory and of disk, an estimate."""
    files: int


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters since the start of a server, and current gauges; engine.proto documents each field."""

    waiting: int
    running: int
    num_slots: int
    pages_used: int
    num_pages: int
    steps: int
    generated_tokens: int
    prefill_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int
    finished: Mapping[str, int]
    failed: Mapping[str, int]
    mask_wait_ms: float
    deferred_rows: int
    grammar_starts: int
    grammar_ready: bool
    matchers: int
    cached_grammars: int
    cached_tokens: int
    pages_cached: int
    weight_bytes: int
    kv_cache_bytes: int
    buffer_bytes: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of a server."""

    name: str
    kind: str
    """"lora" or "prompt"."""
    path: str
    """Its directory there."""
    size: int
    """Of a LoRA adapter the largest rank, of a prompt adapter the virtual tokens."""
    memory_bytes: int
    in_use: int
    """Sequences that use it."""


def adapter_of(message: pb.Adapter) -> Adapter:
    """Return an adapter of a message."""
    kind = pb.Adapter.Kind.Name(message.kind).removeprefix("KIND_").lower()
    return Adapter(message.name, kind, message.path, message.size, message.memory_bytes, message.in_use)


def from_message(kind: type[M], message: Wire, **more: Any) -> M:
    """Return a dataclass with the values of a message's fields of the same names, and with those of `more`."""
    names = [each.name for each in fields(kind) if each.name not in more]  # type: ignore[arg-type]
    return kind(**{name: _plain(message, name) for name in names}, **more)


def _plain(message: Wire, name: str) -> Any:
    value = getattr(message, name)
    described = message.DESCRIPTOR.fields_by_name[name]
    if described.enum_type is not None:
        return tuple(map(backend_name, value)) if hasattr(value, "extend") else backend_name(value)
    if hasattr(value, "items"):
        return dict(value)
    return tuple(value) if hasattr(value, "extend") else value


def backend_name(backend: int) -> str:
    """Return "xgrammar", "llguidance", or "" for none."""
    return pb.Backend.Name(pb.Backend.ValueType(backend)).removeprefix("BACKEND_").lower() if backend else ""


def delta_of(response: pb.GenerateResponse) -> Delta:
    """Return the delta of a response."""
    stop = response.WhichOneof("matched_stop")
    return Delta(
        request_id=response.request_id,
        index=response.index,
        text=response.text,
        token_ids=tuple(response.token_ids),
        logprobs=_logprobs(response.token_ids, response.logprobs),
        finish_reason=_finish_reason(response.finish_reason),
        matched_token_id=response.matched_token_id if stop == "matched_token_id" else None,
        matched_stop_str=response.matched_stop_str if stop == "matched_stop_str" else None,
        usage=from_message(Usage, response.usage) if response.HasField("usage") else None,
        telemetry=from_message(Telemetry, response.telemetry) if response.HasField("telemetry") else None,
        parts=tuple(_part(part) for part in response.parts),
        prompt_token_ids=tuple(response.prompt_token_ids),
        prompt_logprobs=_logprobs(response.prompt_token_ids, response.prompt_logprobs),
        field_logprobs=tuple(from_message(FieldLogprob, each) for each in response.field_logprobs),
        outputs=tuple(from_message(OutputTensor, each) for each in response.outputs),
        beam_score=response.beam_score if response.HasField("beam_score") else None,
        token_origins=tuple(_origin(each) for each in response.token_origins),
        held_tokens=response.held_tokens,
        value_events=tuple(_value_event(each) for each in response.value_events),
        receipt=response.receipt,
    )


def joined_outputs(parts: Iterable[OutputTensor]) -> dict[str, OutputTensor]:
    """Return the tensors whole, by name. `parts` are in the order in which they came."""
    found: dict[str, list[OutputTensor]] = {}
    for part in parts:
        found.setdefault(part.name, []).append(part)
    return {
        name: OutputTensor(
            name,
            every[0].dtype,
            (sum(part.shape[0] for part in every), *every[0].shape[1:]),
            b"".join(part.data for part in every),
            every[0].start,
        )
        for name, every in found.items()
    }


def _origin(origin: int) -> TokenOrigin:
    name = pb.TokenOrigin.DESCRIPTOR.values_by_number[origin].name
    return TokenOrigin(name.removeprefix("TOKEN_ORIGIN_").lower())


def _value_event(event: pb.ValueEvent) -> ValueEvent:
    return ValueEvent(
        kind=ValueEventKind(pb.ValueEvent.Kind.Name(event.kind).removeprefix("KIND_").lower()),
        pointer=event.pointer,
        type=pb.ValueEvent.Type.Name(event.type).removeprefix("TYPE_").lower(),
        value_json=event.value_json if event.HasField("value_json") else None,
        logprob=event.logprob if event.HasField("logprob") else None,
        tokens=event.tokens,
    )


def _finish_reason(reason: int) -> FinishReason | None:
    if not reason:
        return None
    name = pb.FinishReason.DESCRIPTOR.values_by_number[reason].name
    return FinishReason(name.removeprefix("FINISH_REASON_").lower())


def _logprobs(ids: Sequence[int], values: Any) -> tuple[TokenLogprobs, ...]:
    known: Iterable[int | None] = ids if len(ids) == len(values) else [None] * len(values)
    return tuple(
        TokenLogprobs(each.logprob, tuple(TokenLogprob(top.token_id, top.logprob) for top in each.top), token_id)
        for token_id, each in zip(known, values, strict=True)
    )


def _part(part: pb.AnswerPart) -> Part:
    kind = PartKind(pb.AnswerPart.Kind.Name(part.kind).removeprefix("KIND_").lower())
    return Part(kind, part.text, part.tool_call_index, part.tool_call_id, part.tool_name)
