"""The seams between the rooms of the engine, as protocols, and the values that cross them.

The engine runs on its own thread, the servicer and the grammar client on the event loop. Every protocol says on
which of them its methods may be called. Tests implement these protocols with small fakes.

Not responsible for: any behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from gpu_engine.api.adapters import Adapter, AdapterKind, AdapterUse
    from gpu_engine.api.config import EngineConfig
    from gpu_engine.api.errors import LockstepError
    from gpu_engine.api.output_tensors import OutputSpec
    from gpu_engine.api.page_transfer import PageAccess
    from gpu_engine.api.processors import Processors
    from gpu_engine.api.request import GrammarSpec, Request, Salt, Telemetry
    from gpu_engine.api.sampling_defaults import Defaults
    from gpu_engine.api.stats import EngineStats, IterationRing, SequenceStats


class Tokenizer(Protocol):
    """A Hugging Face fast tokenizer, as far as the front uses it."""

    @property
    def backend_tokenizer(self) -> Any:
        """The Rust tokenizer: `encode_batch_fast`, `decode`, `to_str`."""

    @property
    def chat_template(self) -> Any:
        """Jinja source, a mapping of names to sources, or None."""

    @property
    def bos_token_id(self) -> int | None:
        """Token that begins a sequence, if the model has one."""

    @property
    def pad_token_id(self) -> int | None:
        """Token that fills a batch, if the model has one."""

    def save_pretrained(self, save_directory: str) -> Any:
        """Write the tokenizer's files into a folder."""

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, **options: Any
    ) -> Any:
        """Render a conversation to text with `tokenize=False`. `options` are tools and variables of the template."""


class Vocabulary(Protocol):
    """The tokens of a model: all that the grammar process takes from it."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of columns of the logits, padding included."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence."""


class Model(Vocabulary, Protocol):
    """A loaded model, as far as the front uses it."""

    @property
    def model_type(self) -> str:
        """The type in the model's configuration, such as "llama"."""

    @property
    def dtype_name(self) -> str:
        """ "bfloat16" or "float32"."""

    @property
    def weights(self) -> str:
        """What the products multiply: the dtype, or the forms of quantised weights with their number."""

    @property
    def path(self) -> Path | None:
        """The directory or file that it was loaded from; None: it was made in memory."""

    @property
    def numerics(self) -> str:
        """What decides the bits of its logits: servers with equal weights and equal `numerics` sample equal tokens."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters, with shared ones counted once."""

    @property
    def name(self) -> str:
        """Path or name that the model was loaded from."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, in tokens."""

    @property
    def sampling_defaults(self) -> Defaults:
        """Values of the sampling parameters that a request leaves out, where the model has its own."""

    @property
    def outputs(self) -> Mapping[str, OutputSpec]:
        """The tensors that requests may ask for, by name."""


class PageEvents(Protocol):
    """The observer of the prefix index. Called on the engine's thread; must not block or raise.

    A page is reported with its tokens and its parent: the page before it or, for the first page, the salt.
    """

    def reset(self, pages: Sequence[tuple[int, tuple[int | Salt, tuple[int, ...]]]]) -> None:
        """These pages are indexed, a page after its parent, and no others are."""

    def stored(self, page: int, parent: int | Salt, tokens: tuple[int, ...]) -> None:
        """`page` is now indexed as well."""

    def removed(self, page: int) -> None:
        """`page` is not indexed any more; no page after it is."""


class AdapterAccess(Protocol):
    """The adapters of an engine. Every method is thread-safe."""

    @property
    def max_bytes(self) -> int:
        """Room for adapters; 0: the server takes none."""

    def find(self, kind: AdapterKind, name: str) -> Adapter:
        """Return the adapter of that name for a new request. Raises InvalidRequest, with the names that exist."""

    def acquire(self, adapters: Sequence[Adapter]) -> None:
        """Count one more user of each. Raises InvalidRequest, and counts none, where one was unloaded meanwhile."""

    def release(self, adapters: Sequence[Adapter]) -> None:
        """Count one user less of each."""

    def load(self, name: str, path: str) -> Adapter:
        """Load an adapter, or replace the unused one of that name. Reads files. Raises InvalidRequest, UnknownAdapter,
        AdapterRefused or LimitExceeded."""

    def unload(self, name: str) -> Future[None]:
        """Take an adapter's name away; the result comes when its last user has ended. Raises UnknownAdapter."""

    def listed(self) -> list[AdapterUse]:
        """Return the adapters, by name."""


@dataclass(frozen=True, slots=True)
class DraftModelInfo:
    """A draft model that was loaded."""

    name: str
    """Its directory or file."""
    num_parameters: int


class DraftModelAccess(Protocol):
    """The draft model of an engine. Every method is thread-safe."""

    @property
    def name(self) -> str:
        """The model that drafts now; empty: none does."""

    def exchange(self, path: str) -> DraftModelInfo:
        """Load another draft model from a directory or GGUF file, and draft with it from the next iteration on. Blocks.

        Raises InvalidRequest, UnknownModel, ExchangeRefused or ShuttingDown; the model before then drafts on.
        """


class EngineCore(Protocol):
    """The engine, as far as the servicer uses it. Every method is thread-safe and returns at once."""

    @property
    def config(self) -> EngineConfig:
        """The configuration of the engine."""

    @property
    def adapters(self) -> AdapterAccess:
        """The adapters that requests may name."""

    @property
    def draft_models(self) -> DraftModelAccess:
        """The draft model, which clients may exchange."""

    @property
    def pages(self) -> PageAccess:
        """The KV pages, of an engine whose role is "prefill" or "decode"."""

    def submit(self, request: Request, *, awaits_pages: bool = False) -> Telemetry:
        """Queue one sequence; return its telemetry, which the engine's thread writes.

        `awaits_pages`: it comes into the waiting queue when `PageAccess.close` names it. Raises LimitExceeded when the
        queue is full, and ShuttingDown while the engine closes.
        """

    def abort(self, request_id: str) -> bool:
        """End every sequence of the request with ABORTED; False if none is waiting or running."""

    def drop(self, request: Request) -> None:
        """Free the slot and pages of the sequence, with no more events. No error if it has ended."""

    def stats(self) -> EngineStats:
        """Return the counters and gauges, at most one step old."""

    @property
    def iterations(self) -> IterationRing:
        """The last iterations of the engine's loop."""

    def sequence_stats(self) -> list[SequenceStats]:
        """Return what each sequence that waits or runs is doing."""

    def watch_pages(self, events: PageEvents | None) -> None:
        """Report the prefix index to `events` from now on: its pages, then every change. None: report to none."""


class GrammarEvents(Protocol):
    """Events of the grammar client for the engine. Thread-safe; a stale (slot, slot_gen) is ignored."""

    def grammar_opened(
        self,
        slot: int,
        slot_gen: int,
        *,
        compile_ms: float,
        cache_hit: bool,
        backend: int,
        warnings: tuple[str, ...],
        verified: bool,
    ) -> None:
        """The slot's matcher has accepted its committed tokens. `verified`: it checks the answer."""

    def grammar_backtracked(self, slot: int, slot_gen: int, num_tokens: int, dead_texts: tuple[bytes, ...]) -> None:
        """The slot's answer keeps its first `num_tokens` tokens, and avoids the texts from now on; -1: there is no way
        back."""

    def grammar_failed(self, slot: int, slot_gen: int, error: LockstepError) -> None:
        """End the slot's request with `error`."""

    def grammar_lost(self, binding: Collection[tuple[int, int]]) -> None:
        """The grammar process ended: guided slots pause and keep their KV pages. `binding`: the slots, with their
        slot_gen, that it was binding at that moment."""

    def grammar_silent(self) -> None:
        """No heartbeat arrives: guided slots pause, with their KV pages and matchers. Next: grammar_alive or
        grammar_lost."""

    def grammar_alive(self) -> None:
        """Heartbeats arrive again: guided slots continue from their committed tokens."""

    def grammar_restored(self) -> None:
        """A grammar process is attached again: the engine opens every guided slot with its committed tokens."""


class GrammarPort(Protocol):
    """The grammar client, as far as the engine uses it. Called on the engine's thread; returns at once."""

    def open(
        self,
        slot: int,
        slot_gen: int,
        request: Request,
        committed: tuple[int, ...],
        dead_texts: tuple[bytes, ...] = (),
    ) -> None:
        """Make a matcher for the slot and have it accept `committed`; answered by grammar_opened or grammar_failed.

        `dead_texts`: the answer begins with none of them.
        """

    def backtrack(
        self,
        slot: int,
        slot_gen: int,
        request: Request,
        committed: tuple[int, ...],
        first: int,
        dead_texts: tuple[bytes, ...],
    ) -> None:
        """Find a way back for a verified answer that has no legal token after `committed`, of which `first` must stay.

        The slot's matcher is of no use any more; `close` releases it. Answered by grammar_backtracked or
        grammar_failed.
        """

    def forked(self, slot: int, slot_gen: int, request: Request, before: tuple[int, int] | None) -> None:
        """Note that the engine had the slot's matcher copied from another slot of the request, or taken back, in place
        of the matcher `before`; `close` drops it."""

    def close(self, slot: int, slot_gen: int) -> None:
        """Drop the slot's matcher."""


class ServedEngine(EngineCore, GrammarEvents, Protocol):
    """The engine, as the server builds, starts and closes it."""

    @property
    def processors(self) -> Processors:
        """The logits processors that requests may name; the same ones for the engine's life. Any thread."""

    def start(self) -> None:
        """Start the engine's thread and warm it up; blocks until that is done."""

    def forgive_grammar_end(self) -> None:
        """The last grammar process was ended from outside: its end is not counted against any request. Any thread."""

    @property
    def grammar_progress(self) -> int:
        """A number that grows whenever a grammar process serves a guided sequence. Any thread."""

    def watch(self, failed: Callable[[Exception], None]) -> None:
        """Call `failed` once, on the engine's thread, when the engine cannot serve any request any more."""

    def close(self, timeout_s: float) -> None:
        """End running requests with ABORTED and stop the thread; blocks for at most `timeout_s`."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """The result of one compilation in the grammar process, whose cache may have evicted the grammar since."""

    grammar_id: str
    backend: int
    cache_hit: bool
    compile_ms: float
    warnings: tuple[str, ...]
    memory_bytes: int = 0
    """Its memory in the grammar process, estimated."""
    min_tokens: int = 0
    """Lower bound of an answer's tokens, the end-of-sequence token included; 0: not known."""
    known_answer_tokens: int = 0
    """Tokens of one complete answer; there may be shorter ones. 0: none was found."""
    verified: bool = False
    """Its answers are checked against the schema."""
    attached: int = 0
    """`GrammarLink.attached` at that time: it is in the current grammar process only if the two are equal."""
    ready_s: float = 0.0
    """`time.monotonic()` when the engine received the result."""


@dataclass(frozen=True, slots=True)
class GrammarStats:
    """Gauges of the grammar process; 0 while it does not answer."""

    starts: int = 0
    ready: bool = False
    matchers: int = 0
    cached_grammars: int = 0


@dataclass(frozen=True, slots=True)
class ClearedGrammars:
    """What a call of `GrammarAccess.clear_cache` dropped."""

    dropped: int
    """Grammars in memory."""
    kept: int
    """Grammars that matchers use."""
    files: int
    freed_bytes: int
    """Bytes of memory, estimated, and of files."""


@dataclass(frozen=True, slots=True)
class GrammarLibrary:
    """What decides the answers of a grammar, next to its text."""

    version: str
    """Of the matcher library; empty: not known."""
    defaults: str
    """The grammar process's settings that hold where a request leaves them open."""


class GrammarAccess(Protocol):
    """The grammar client, as far as the servicer uses it. Called on the event loop."""

    @property
    def backends(self) -> tuple[int, ...]:
        """Values of the Backend enum of the installed libraries, the default first."""

    def library_of(self, backend: int) -> GrammarLibrary:
        """Return what masks the answers of a value of the Backend enum."""

    def prepare(self, request_id: str, spec: GrammarSpec, failed: Callable[[LockstepError], None]) -> None:
        """Start compiling for this request; `failed` is called with the client's error. Raises LimitExceeded."""

    def forget(self, request_id: str) -> None:
        """Release what `prepare` holds for the request, which has ended."""

    def compiled_s(self, request_id: str) -> float:
        """Return the `time.monotonic()` at which the request's grammar was compiled; 0.0: not yet. Call before
        `forget`."""

    async def compile(self, spec: GrammarSpec) -> Compiled:
        """Compile ahead of any request. Raises LockstepError."""

    async def stats(self) -> GrammarStats:
        """Ask the grammar process for its gauges; never raises."""

    async def clear_cache(self, *, disk: bool) -> ClearedGrammars:
        """Have the grammar process drop the compiled grammars that no matcher uses. Raises GrammarUnavailable."""
