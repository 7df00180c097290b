"""Logits processors: a server's own code between the model's forward and sampling.

A processor maps the logits of a row to other logits. It is a pure function of the tokens before the row, the
logits, and the arguments of the request. Row j of a sequence follows the drafts 0 to j - 1, and its tokens end
with them, so a processor sees a row exactly as if its prefix were committed. Invariant: a processor keeps nothing
between calls. Drafts are rejected, batches regroup and preempted sequences begin again, and no call says so; what
depends on the answer so far is computed from the tokens. So drafts change no token.

A class has one of three methods, which makes it one of three kinds: `process` (`LogitsProcessor`, one sequence),
`process_batch` (`BatchedLogitsProcessor`, all sequences of a step) or `process_rows` with `capturable = True`
(`CapturableLogitsProcessor`, torch operations that a CUDA graph records). Its constructor takes a `ProcessorSetup`.

All three get float32 logits on the device of the model, a copy that they may change and return. They return logits of
the same shape, dtype and device. -inf forbids a token; +inf and NaN are errors. Whatever a processor raises or returns
wrongly ends the request at that row with INTERNAL, and no other request.

Not responsible for: loading (see processors/loading.py), calling (see step/processing/).

Shapes: R rows of one sequence, N rows of a step, V columns of the logits, L tokens, A arguments.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from gpu_engine.api.errors import InvalidRequest, ProcessorFailed

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

MAX_PER_REQUEST = 8
"""The most processors of a request."""


MAX_LOADED = 64
"""The most processors of a server."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True)
class ProcessorEntry:
    """`name=module:Class`, or `name=module:Class{...}` with a JSON object."""

    name: str
    module: str
    class_name: str
    options: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the entry. Raises ValueError that quotes it."""
        name, _, rest = text.partition("=")
        path, brace, options = rest.partition("{")
        module, _, class_name = path.strip().partition(":")
        if not _NAME.fullmatch(name) or not _PATH.fullmatch(module) or not class_name.isidentifier():
            raise ValueError(f"{text!r} is not NAME=MODULE:CLASS, optionally followed by a JSON object")
        try:
            parsed = json.loads(brace + options) if brace else {}
        except ValueError as error:
            raise ValueError(f"{name}: the options are not a JSON object: {error}") from None
        return cls(name, module, class_name, parsed)


@dataclass(frozen=True, slots=True)
class ProcessorSetup:
    """What the constructor of a processor gets, once, at the start of the server."""

    vocab_size: int
    """V, padding included."""
    eos_token_ids: tuple[int, ...]
    tokenizer: Any
    """The model's fast tokenizer (transformers); for the constructor and `prepare`."""
    device: torch.device
    """The device of the logits."""
    options: Mapping[str, Any]
    """The JSON object after the class in the setting; empty: there was none."""


@dataclass(frozen=True, slots=True)
class ProcessorRequest:
    """A request that names the processor."""

    request_id: str
    client_id: str
    """Empty: the client gave none."""
    arguments: Mapping[str, Any]
    """The request's own; empty: it gave none."""


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The rows of one sequence in one step."""

    request_id: str
    client_id: str
    index: int
    """The sequence's number among the `n` of its request."""
    arguments: Any
    """What `prepare` returned for the request."""
    prompt_length: int
    tokens: torch.Tensor
    """int32 [n + R - 1] on the device of the logits: the n tokens of prompt and answer, then the drafts. Not to be
    changed."""
    num_rows: int
    """R, at least 1."""

    def prefix(self, row: int) -> torch.Tensor:
        """Return the tokens before the row, int32 [n + row]: a view."""
        return self.tokens[: len(self.tokens) - self.num_rows + 1 + row]


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """The rows of a step as static tensors on the device of the logits. Not to be changed."""

    tokens_NL: torch.Tensor
    """int32, the tokens before each row. The entries from `length_N` on are tokens without a meaning."""
    length_N: torch.Tensor
    """int64, tokens before each row, at least 1 and at most L."""
    prompt_length_N: torch.Tensor
    """int64, the prompt's part of them."""
    arguments_NA: torch.Tensor
    """float64, the numbers that `prepare` returned for the request of each row; zeros where `on_N` is False."""
    on_N: torch.Tensor
    """bool: the row's request named the processor. What is returned for other rows is not used, whatever it is."""


class _Prepares(Protocol):
    def prepare(self, request: ProcessorRequest) -> Any:
        """Return what the calls for this request get as `arguments`.

        Raises ValueError for wrong arguments: the request is refused with INVALID_ARGUMENT and the message. Called once
        a request, on the event loop or another thread, before it waits for a slot; takes microseconds.
        """


class LogitsProcessor(_Prepares, Protocol):
    """Called for one sequence. On a GPU its step runs outside captured graphs."""

    def process(self, rows: SequenceRows, logits_RV: torch.Tensor) -> torch.Tensor:
        """Return the logits of the rows. Row j may depend on `rows.prefix(j)`, `logits_RV[j]`, the ids and the
        arguments, and on nothing else. Called on the engine's thread, which it blocks."""


class BatchedLogitsProcessor(_Prepares, Protocol):
    """Called once for all sequences of a step that named it. On a GPU its step runs outside captured graphs."""

    def process_batch(self, sequences: Sequence[SequenceRows], logits_NV: torch.Tensor) -> torch.Tensor:
        """Return the logits of all rows, which are the rows of the sequences, one sequence after the other. The rule of
        `LogitsProcessor.process` holds for each row; so the company of a sequence does not matter."""


class CapturableLogitsProcessor(_Prepares, Protocol):
    """Torch operations only on tensors, which are captured with the step on a GPU."""

    capturable: Literal[True]
    num_arguments: int
    """A: how many numbers `prepare` returns for each request."""

    def prepare(self, request: ProcessorRequest) -> Sequence[float]:
        """Return the arguments as numbers, which are stored in float64 and hold integers up to 2^53."""

    def process_rows(self, rows: CapturedRows, logits_NV: torch.Tensor) -> torch.Tensor:
        """Return the logits of all rows.

        Shapes are static: no value is read on the host, and no shape depends on one. N and L differ between calls. On
        a GPU it runs only at the start, and replays repeat its operations.
        """


AnyProcessor = LogitsProcessor | BatchedLogitsProcessor | CapturableLogitsProcessor


class ProcessorError(ValueError):
    """A processor cannot be loaded; the message names the setting and the processor."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedProcessor:
    """A processor of the server. It has one of the three kinds; the other two are None."""

    name: str
    number: int
    """Its place among the server's processors."""
    processor: AnyProcessor
    single: LogitsProcessor | None = None
    batched: BatchedLogitsProcessor | None = None
    captured: CapturableLogitsProcessor | None = None
    column: int = 0
    """The place of a captured processor among the captured ones."""
    first_argument: int = 0
    """The first column of a captured processor in the tensor with the arguments of all captured ones."""


@dataclass(frozen=True, slots=True, eq=False)
class ProcessorUse:
    """One processor of one request."""

    loaded: LoadedProcessor
    arguments: Any
    """What `prepare` returned."""


@dataclass(frozen=True, slots=True, eq=False)
class Processors:
    """The processors of a server, in the order of its setting."""

    loaded: tuple[LoadedProcessor, ...] = ()
    by_name: dict[str, LoadedProcessor] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {each.name: each for each in self.loaded})

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order of the setting."""
        return tuple(self.by_name)

    @property
    def captured(self) -> tuple[LoadedProcessor, ...]:
        """The processors that are only torch operations."""
        return tuple(each for each in self.loaded if each.captured is not None)

    @property
    def num_arguments(self) -> int:
        """Numbers of all captured processors together."""
        return sum(each.captured.num_arguments for each in self.loaded if each.captured is not None)

    def use(self, place: str, name: str, arguments: str, *, request_id: str, client_id: str) -> ProcessorUse:
        """Return the processor `name` with a request's arguments. `arguments` is the text of a JSON object, or empty.

        Raises InvalidRequest, which names a field below `place`, if no processor has this name or its arguments are
        wrong.
        """
        loaded = self.by_name.get(name)
        if loaded is None:
            known = f"this server has {', '.join(self.names)}" if self.names else "this server has none"
            raise InvalidRequest(f"{place}.name", f"{name!r} is no logits processor; {known}")
        try:
            parsed = json.loads(arguments) if arguments else {}
        except ValueError as error:
            raise InvalidRequest(f"{place}.arguments", f"is not JSON: {error}") from None
        if not isinstance(parsed, dict):
            raise InvalidRequest(f"{place}.arguments", "is not a JSON object")
        try:
            return ProcessorUse(loaded, loaded.processor.prepare(ProcessorRequest(request_id, client_id, parsed)))
        except ValueError as error:
            raise InvalidRequest(f"{place}.arguments", f"{name}: {error}") from error
        except Exception as error:  # whatever the processor does
            log.exception("logits processor %s failed to prepare a request", name)
            raise ProcessorFailed(f"{place}: {name} raised {type(error).__name__}; see the server's log") from error


def captured_together(uses: Sequence[ProcessorUse]) -> bool:
    """Return whether a captured step can run these: all are captured, each once, in the order of the server's
    setting, in which a captured step runs them."""
    numbers = [use.loaded.number for use in uses]
    return all(use.loaded.captured is not None for use in uses) and numbers == sorted(set(numbers))
