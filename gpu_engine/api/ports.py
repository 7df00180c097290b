"""The seams between the asyncio side and the engine: what each side promises the other, as protocols.

The engine runs on a thread of its own and the servicer on the event loop; every method here says on which it may be
called. Tests put small fakes behind these protocols. Not here: any behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from gpu_engine.api.config import EngineConfig
    from gpu_engine.api.errors import LockstepError
    from gpu_engine.api.request import GrammarSpec, Request
    from gpu_engine.api.stats import EngineStats


class Tokenizer(Protocol):
    """What the front needs of a Hugging Face fast tokenizer."""

    @property
    def backend_tokenizer(self) -> Any:
        """The Rust tokenizer: `encode_batch_fast`, `decode`, `to_str`."""

    @property
    def chat_template(self) -> Any:
        """Jinja source, a mapping of names to sources, or None."""

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any:
        """Render a conversation to text with `tokenize=False`."""


class Model(Protocol):
    """What the front needs of a loaded model."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Columns of the logits, padding included."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence."""

    @property
    def model_type(self) -> str:
        """As in the model's configuration: "llama", ..."""

    @property
    def dtype_name(self) -> str:
        """ "bfloat16" or "float32"."""

    @property
    def num_parameters(self) -> int:
        """Parameters, shared ones once."""

    @property
    def name(self) -> str:
        """Path or name the model was loaded from."""

    @property
    def max_model_len(self) -> int:
        """Prompt plus answer in tokens."""


class EngineCore(Protocol):
    """What the servicer calls. Every method but `start` and `close` is thread-safe and returns at once."""

    @property
    def config(self) -> EngineConfig:
        """What the engine was built from."""

    def submit(self, request: Request) -> None:
        """Queue one sequence; raises LimitExceeded when the queue is full and ShuttingDown when closing."""

    def abort(self, request_id: str) -> bool:
        """End every sequence of the request with ABORTED; False when none is running."""

    def drop(self, request: Request) -> None:
        """Free everything the sequence holds, with no more events. Not an error when it has ended."""

    def stats(self) -> EngineStats:
        """Read the counters."""


class GrammarEvents(Protocol):
    """What the grammar client tells the engine. Thread-safe; a stale (slot, slot_gen) is ignored."""

    def grammar_opened(
        self, slot: int, slot_gen: int, *, compile_ms: float, cache_hit: bool, backend: int, warnings: tuple[str, ...]
    ) -> None:
        """The slot's matcher stands at its committed tokens."""

    def grammar_failed(self, slot: int, slot_gen: int, error: LockstepError) -> None:
        """End the slot's request with `error`."""

    def grammar_lost(self, binding: Collection[tuple[int, int]]) -> None:
        """The sidecar is gone: guided slots pause and keep their KV. `binding`: it had a Bind of these in hand."""

    def grammar_silent(self) -> None:
        """The sidecar shows no life: guided slots pause and keep their KV and matchers; heard or lost comes next."""

    def grammar_alive(self) -> None:
        """The sidecar lives after all: guided slots go on where they stand."""

    def grammar_restored(self) -> None:
        """A sidecar is attached again: the engine opens every guided slot again with its committed tokens."""


class GrammarPort(Protocol):
    """What the engine calls, on its own thread. Returns at once."""

    def open(self, slot: int, slot_gen: int, request: Request, committed: tuple[int, ...]) -> None:
        """Give the slot a matcher moved over `committed`; answered by grammar_opened or grammar_failed."""

    def close(self, slot: int, slot_gen: int) -> None:
        """Drop the slot's matcher."""


class ServedEngine(EngineCore, GrammarEvents, Protocol):
    """What the server builds, starts and closes."""

    def start(self) -> None:
        """Start the thread and warm up; blocks until warm."""

    def forgive_grammar_end(self) -> None:
        """The sidecar that was lost last had been ended from outside: no guided sequence is to blame. Any thread."""

    @property
    def grammar_progress(self) -> int:
        """Counts up whenever a sidecar was of use to a guided sequence. Any thread."""

    def watch(self, failed: Callable[[Exception], None]) -> None:
        """Have `failed` called once, on the engine's thread, when the engine can serve nothing any more."""

    def close(self, timeout_s: float) -> None:
        """End running requests with ABORTED and stop the thread; blocks for at most `timeout_s`."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar that is, or was, in the grammar process's cache."""

    grammar_id: str
    backend: int
    cache_hit: bool
    compile_ms: float
    warnings: tuple[str, ...]
    memory_bytes: int = 0
    """What it holds in the grammar process, an estimate."""
    min_tokens: int = 0
    """No answer has fewer, the end-of-sequence token included; 0: not known."""
    closing_tokens: int = 0
    """An answer has so many, and there may be shorter ones; 0: none was found."""
    attached: int = 0
    """The grammar process that has it, if none was attached since: `GrammarLink.attached` of then."""
    ready_s: float = 0.0
    """`time.monotonic()` when it was known here."""


@dataclass(frozen=True, slots=True)
class GrammarStats:
    """Gauges of the grammar process; zeros while it does not answer."""

    starts: int = 0
    ready: bool = False
    matchers: int = 0
    cached_grammars: int = 0


class GrammarAccess(Protocol):
    """What the servicer needs of the grammar client. On the event loop."""

    @property
    def backends(self) -> tuple[int, ...]:
        """Installed backends, the default first."""

    def prepare(self, request_id: str, spec: GrammarSpec, failed: Callable[[LockstepError], None]) -> None:
        """Start compiling for this request; `failed` gets the error that the client is to see. Raises LimitExceeded."""

    def forget(self, request_id: str) -> None:
        """The request is over."""

    def compiled_s(self, request_id: str) -> float:
        """Return `time.monotonic()` when the request's grammar was compiled; 0.0: it is not. Before `forget`."""

    async def compile(self, spec: GrammarSpec) -> Compiled:
        """Compile for nobody's slot. Raises LockstepError."""

    async def stats(self) -> GrammarStats:
        """Ask the grammar process; never raises."""
