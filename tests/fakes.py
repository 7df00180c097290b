"""Small fakes behind the seams of `gpu_engine.api.ports`: they follow the protocols, without a model or a process.

The invariant: a fake holds no assertion.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from gpu_engine.api.adapters import Adapter, AdapterKind, AdapterUse
from gpu_engine.api.config import EngineConfig
from gpu_engine.api.errors import InternalError, InvalidRequest, LockstepError, UnknownAdapter
from gpu_engine.api.output_tensors import OutputSpec
from gpu_engine.api.ports import ClearedGrammars, Compiled, DraftModelInfo, GrammarLibrary, GrammarStats, PageEvents
from gpu_engine.api.processors import Processors
from gpu_engine.api.request import FinishReason, GrammarSpec, Request, Telemetry, TokenEvent
from gpu_engine.api.stats import EngineStats, IterationRing, SequenceStats, Stage

EOS = 256
"""End of sequence of `ByteTokenizer`; 257 is its other special token."""


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer without merges: token b is byte b, 256 and 257 are special."""
    # The byte-level alphabet of GPT-2: printable bytes stand for themselves, the others for characters from U+0100 on.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    vocab = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|start|>"])
    return tokenizer


class ByteTokenizer:
    """A `ports.Tokenizer` over `byte_tokenizer`; its template refuses the content "refuse"."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.backend_tokenizer = byte_tokenizer()
        self.chat_template = chat_template or (
            "{% for m in messages %}{% if m.content == 'refuse' %}{{ raise_exception('no') }}{% endif %}"
            "{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
        )

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, **options: Any
    ) -> str:
        def raise_exception(message: str) -> None:
            raise jinja2.exceptions.TemplateError(message)

        return jinja2.Template(self.chat_template).render(
            messages=conversation,
            add_generation_prompt=add_generation_prompt,
            raise_exception=raise_exception,
            **options,
        )

    bos_token_id = 257
    pad_token_id = None

    def save_pretrained(self, save_directory: str) -> None:
        self.backend_tokenizer.save(f"{save_directory}/tokenizer.json")
        Path(save_directory, "chat_template.jinja").write_text(self.chat_template)

    def encode(self, text: str) -> list[int]:
        return list(self.backend_tokenizer.encode(text).ids)


@dataclass(frozen=True)
class FakeModel:
    """A `ports.Model` without a model."""

    tokenizer: Any = field(default_factory=ByteTokenizer)
    vocab_size: int = 320
    eos_token_ids: tuple[int, ...] = (EOS,)
    model_type: str = "fake"
    dtype_name: str = "float32"
    weights: str = "float32"
    numerics: str = "fake"
    path: Path | None = None
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    num_parameters: int = 7
    name: str = "fake-model"
    max_model_len: int = 256
    outputs: dict[str, OutputSpec] = field(default_factory=lambda: {"logits": OutputSpec("float32", (320,))})


Script = Callable[[Request], Iterable[TokenEvent]]


def answers_with(text: str, tokens_per_step: int = 1) -> Script:
    """Return a script that answers every request with `text` and end of sequence."""

    def script(request: Request) -> Iterable[TokenEvent]:
        ids = [*text.encode(), EOS]
        for start in range(0, len(ids), tokens_per_step):
            part = tuple(ids[start : start + tokens_per_step])
            last = start + tokens_per_step >= len(ids)
            yield TokenEvent(
                request.index,
                part,
                finish=FinishReason.STOP if last else None,
                matched_token_id=EOS if last else None,
            )

    return script


class FakeAdapters:
    """`ports.AdapterAccess` without weights. `load` takes any path; an adapter whose path ends with "prompt" is one."""

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.max_bytes = max_bytes
        self.loaded: dict[str, AdapterUse] = {}
        self.generations = 0

    def find(self, kind: AdapterKind, name: str) -> Adapter:
        use = self.loaded.get(name)
        if use is None or use.adapter.kind is not kind:
            field = "lora" if kind is AdapterKind.LORA else "prompt_adapter"
            raise InvalidRequest(field, f"there is no {name!r}; there are: {', '.join(self.loaded)}")
        return use.adapter

    def acquire(self, adapters: Sequence[Adapter]) -> None:
        pass

    def release(self, adapters: Sequence[Adapter]) -> None:
        pass

    def load(self, name: str, path: str) -> Adapter:
        self.generations += 1
        kind = AdapterKind.PROMPT if path.endswith("prompt") else AdapterKind.LORA
        adapter = Adapter(name, kind, path, 4, 64, self.generations, self.generations, at_start=False, first_token=1000)
        self.loaded[name] = AdapterUse(adapter, 0)
        return adapter

    def unload(self, name: str) -> Future[None]:
        if name not in self.loaded:
            raise UnknownAdapter(f"name: there is no adapter {name!r}; there are: {', '.join(self.loaded)}")
        del self.loaded[name]
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def listed(self) -> list[AdapterUse]:
        return [self.loaded[name] for name in sorted(self.loaded)]


class FakeDraftModels:
    """`ports.DraftModelAccess` without a model. `exchange` takes any path but one that ends with "other"."""

    def __init__(self) -> None:
        self.name = ""

    def exchange(self, path: str) -> DraftModelInfo:
        if path.endswith("other"):
            raise InvalidRequest("path", "its tokenizer is another one")
        self.name = path
        return DraftModelInfo(path, 1000)


class FakeEngine:
    """A `ports.ServedEngine` whose thread plays a script for every request. Without a script the test calls `emit`."""

    def __init__(self, config: EngineConfig | None = None, script: Script | None = None) -> None:
        self.config = config or EngineConfig(max_model_len=256)
        self.script = script
        self.measure: Callable[[Request, Telemetry], None] | None = None
        """Fills the telemetry of each request in."""
        self.adapters = FakeAdapters()
        self.draft_models = FakeDraftModels()
        self.submitted: list[Request] = []
        self.telemetry: dict[Request, Telemetry] = {}
        self.dropped: list[Request] = []
        self.opened: list[tuple[int, int]] = []
        self.backtracked: list[tuple[int, int, int, tuple[bytes, ...]]] = []
        self.failed: list[tuple[int, int, LockstepError]] = []
        self.outages: list[str] = []
        self.binding: set[tuple[int, int]] = set()
        self.grammar_progress = 0
        self.processors = Processors()
        self.watchers: list[Callable[[Exception], None]] = []
        self.refuse_with: LockstepError | None = None
        self.refuse_from = 0
        """`refuse_with` is raised once so many requests are in."""
        self.closed = False
        self.page_events: PageEvents | None = None
        self.generated_tokens = 0
        self.iterations = IterationRing(8)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fake engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while work := self._work.get():
            work()

    def start(self) -> None:
        """Nothing to warm up."""

    def submit(self, request: Request, *, awaits_pages: bool = False) -> Telemetry:
        if self.refuse_with and len(self.submitted) >= self.refuse_from:
            raise self.refuse_with
        self.submitted.append(request)
        telemetry = self.telemetry[request] = Telemetry()
        if self.measure:
            self.measure(request, telemetry)
        if self.script:
            for event in self.script(request):
                self.emit(request, event)
        return telemetry

    def emit(self, request: Request, event: TokenEvent) -> None:
        """Send `event` from the engine thread, unless the request was dropped."""

        def send() -> None:
            if request not in self.dropped:
                request.sink(event)

        self._work.put(send)

    def settle(self) -> None:
        """Block the caller until the engine thread has sent every event that was emitted before.

        A script that calls it holds the event loop, since `submit` runs there: all its events wait in the mailbox then.
        """
        sent = threading.Event()
        self._work.put(sent.set)
        assert sent.wait(60), "the fake engine's thread stands still"

    def abort(self, request_id: str) -> bool:
        found = [request for request in self.submitted if request.request_id == request_id]
        for request in found:
            self.emit(request, TokenEvent(request.index, finish=FinishReason.ABORTED))
        return bool(found)

    def drop(self, request: Request) -> None:
        self.dropped.append(request)

    def stats(self) -> EngineStats:
        running = len(self.submitted) - len(self.dropped)
        return EngineStats(num_slots=4, num_pages=64, running=running, generated_tokens=self.generated_tokens)

    def sequence_stats(self) -> list[SequenceStats]:
        return [
            SequenceStats(r.request_id, r.index, r.scheduling.client_id, Stage.DECODE, len(r.prompt_ids), 0, 0, None, 0)
            for r in self.submitted
            if r not in self.dropped
        ]

    def watch_pages(self, events: PageEvents | None) -> None:
        self.page_events = events

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
        self.opened.append((slot, slot_gen))

    def grammar_backtracked(self, slot: int, slot_gen: int, num_tokens: int, dead_texts: tuple[bytes, ...]) -> None:
        self.backtracked.append((slot, slot_gen, num_tokens, dead_texts))

    def grammar_failed(self, slot: int, slot_gen: int, error: LockstepError) -> None:
        self.failed.append((slot, slot_gen, error))

    def grammar_lost(self, binding: Collection[tuple[int, int]]) -> None:
        self.outages.append("lost")
        self.binding = set(binding)

    def forgive_grammar_end(self) -> None:
        self.outages.append("forgiven")

    def grammar_silent(self) -> None:
        self.outages.append("silent")

    def grammar_alive(self) -> None:
        self.outages.append("alive")

    def grammar_restored(self) -> None:
        self.outages.append("restored")

    def watch(self, failed: Callable[[Exception], None]) -> None:
        self.watchers.append(failed)

    def fail(self, error: Exception) -> None:
        """Fail for good, on the engine's thread: every sequence ends with INTERNAL."""

        def end() -> None:
            for request in self.submitted:
                request.sink(TokenEvent(request.index, error=InternalError(str(error))))
            for watcher in self.watchers:
                watcher(error)

        self._work.put(end)

    def close(self, timeout_s: float) -> None:
        if not self.closed:
            self.closed = True
            self._work.put(None)
            self._thread.join(timeout_s)


class FakeGrammar:
    """A `ports.GrammarAccess` that refuses grammars by their source; one that is `full` takes none."""

    def __init__(self, refusals: Mapping[str, LockstepError] | None = None) -> None:
        self.refusals = dict(refusals or {})
        self.full: LockstepError | None = None
        self.backends = (2, 1)
        self.prepared: list[tuple[str, GrammarSpec]] = []
        self.forgotten: list[str] = []
        self.compiled: list[GrammarSpec] = []

    def library_of(self, backend: int) -> GrammarLibrary:
        return GrammarLibrary(f"{backend}.0", "whitespace=spaced")

    def prepare(self, request_id: str, spec: GrammarSpec, failed: Callable[[LockstepError], None]) -> None:
        if self.full:
            raise self.full
        self.prepared.append((request_id, spec))
        if error := self.refusals.get(spec.source):
            failed(error)

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)

    def compiled_s(self, request_id: str) -> float:
        return time.monotonic() if any(request_id == prepared for prepared, _ in self.prepared) else 0.0

    async def compile(self, spec: GrammarSpec) -> Compiled:
        if error := self.refusals.get(spec.source):
            raise error
        self.compiled.append(spec)
        return Compiled(
            "inner", 2, len(self.compiled) > 1, 3.0, ("w",), memory_bytes=99, min_tokens=4, known_answer_tokens=6
        )

    async def clear_cache(self, *, disk: bool) -> ClearedGrammars:
        return ClearedGrammars(dropped=3, kept=1, files=2 if disk else 0, freed_bytes=99)

    async def stats(self) -> GrammarStats:
        return GrammarStats(starts=1, ready=True, matchers=2, cached_grammars=3)
