"""What is after the services under test: an engine that answers at once, a model, a grammar client.

Invariant: they follow the seams of gpu_engine/api/ports.py, hold nothing of a request that has ended, and run no
thread. Each sequence gets the same text, with the numbers that its request asks for.

Not responsible for: what a request says (the services).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from gpu_engine.api.adapters import Adapter, AdapterKind, AdapterUse
from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.errors import (
    AdapterRefused,
    ExchangeRefused,
    InvalidRequest,
    LockstepError,
    UnknownAdapter,
    WrongRole,
)
from gpu_engine.api.limits import Limits
from gpu_engine.api.output_tensors import LOGITS, OutputSpec
from gpu_engine.api.page_transfer import PageAccess
from gpu_engine.api.ports import ClearedGrammars, Compiled, DraftModelInfo, GrammarLibrary, GrammarStats, PageEvents
from gpu_engine.api.request import FinishReason, GrammarSpec, Logprobs, Request, Telemetry, TokenEvent, TokenOrigin
from gpu_engine.api.stats import EngineStats, Iteration, IterationRing, SequenceStats
from gpu_engine.front.calls import Calls
from tools.simulation.model import EOS, VOCAB, byte_tokenizer

MAX_MODEL_LEN = 256
ANSWER = tuple(b'{"a": 1}\n<tool_call>\xc3')
"""Ends within a character."""
TEMPLATES = {path.stem: path.read_text() for path in sorted(Path(__file__).with_name("templates").iterdir())}
"""Chat templates by name, short ones in the manner of the formats that are named so."""


@cache
def tokenizer(template: str = "hermes") -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes with one of TEMPLATES."""
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), eos_token="<|end|>", bos_token="<|start|>", chat_template=TEMPLATES[template]
    )


@dataclass(frozen=True)
class FuzzModel:
    """A `ports.Model` without a model."""

    tokenizer: Any = field(default_factory=tokenizer)
    vocab_size: int = VOCAB
    eos_token_ids: tuple[int, ...] = (EOS,)
    model_type: str = "fuzzed"
    dtype_name: str = "float32"
    weights: str = "float32"
    numerics: str = "none"
    path: Path | None = None
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    num_parameters: int = 1
    name: str = "fuzzed"
    max_model_len: int = MAX_MODEL_LEN
    outputs: dict[str, OutputSpec] = field(default_factory=lambda: {LOGITS: OutputSpec("float32", (VOCAB,))})


class NoAdapters:
    """A `ports.AdapterAccess` that has none, and takes none."""

    max_bytes = 1 << 20

    def find(self, kind: AdapterKind, name: str) -> Adapter:
        """Refuse the name."""
        raise InvalidRequest("lora" if kind is AdapterKind.LORA else "prompt_adapter", f"there is no {name[:64]!r}")

    def acquire(self, adapters: Sequence[Adapter]) -> None:
        """Count no user."""

    def release(self, adapters: Sequence[Adapter]) -> None:
        """Count no user."""

    def load(self, name: str, path: str) -> Adapter:
        """Refuse the path."""
        raise AdapterRefused("adapter_dirs: this server takes no adapters")

    def unload(self, name: str) -> Future[None]:
        """Refuse the name."""
        raise UnknownAdapter(f"name: there is no adapter {name[:64]!r}")

    def listed(self) -> list[AdapterUse]:
        """Return none."""
        return []


class NoDraftModel:
    """A `ports.DraftModelAccess` of an engine without a draft model."""

    name = ""

    def exchange(self, path: str) -> DraftModelInfo:
        """Refuse the path."""
        raise ExchangeRefused("drafter: this server has no draft model")


class InstantEngine:
    """A `ports.EngineCore`: a sequence has its whole answer when `submit` returns."""

    def __init__(self, config: EngineConfig) -> None:
        self.config, self.adapters, self.draft_models = config, NoAdapters(), NoDraftModel()
        self.iterations = IterationRing(8)
        self.iterations.add(Iteration(0, 1.0, 0.1, 0, 1, 1, 8, 1, 3, 2, 0, 0, 4))

    @property
    def pages(self) -> PageAccess:
        """Refuse: the engine has no pages for others."""
        raise WrongRole("role: this engine has no KV pages for others")

    def submit(self, request: Request, *, awaits_pages: bool = False) -> Telemetry:
        """Answer the sequence."""
        for event in _answer(request):
            request.sink(event)
        return Telemetry()

    def abort(self, request_id: str) -> bool:
        """Return that no such request runs: all have ended."""
        return False

    def drop(self, request: Request) -> None:
        """Nothing is held."""

    def stats(self) -> EngineStats:
        """Return some figures."""
        return EngineStats(num_slots=4, num_pages=64)

    def sequence_stats(self) -> list[SequenceStats]:
        """Return none: none runs."""
        return []

    def watch_pages(self, events: PageEvents | None) -> None:
        """Tell of an empty index."""
        if events is not None:
            events.reset([])


def _answer(request: Request) -> Iterator[TokenEvent]:
    count = min(len(ANSWER), request.sampling.max_tokens)
    top = tuple((token, -1.0 - token) for token in range(request.outputs.num_logprobs or 0))
    scored = request.outputs.num_logprobs is not None
    for i in range(count):
        last = i == count - 1
        yield TokenEvent(
            request.index,
            (ANSWER[i],),
            (Logprobs(-0.5, top),) if scored else (),
            finish=FinishReason.LENGTH if last else None,
            origins=(TokenOrigin.SAMPLED,) if request.outputs.token_origins else (),
        )


class InstantGrammar:
    """A `ports.GrammarAccess` that takes every grammar."""

    backends = (2, 1)

    def library_of(self, backend: int) -> GrammarLibrary:
        """Return some version."""
        return GrammarLibrary("1", "")

    def prepare(self, request_id: str, spec: GrammarSpec, failed: Callable[[LockstepError], None]) -> None:
        """Take the grammar."""

    def forget(self, request_id: str) -> None:
        """Nothing is held."""

    def compiled_s(self, request_id: str) -> float:
        """Return that it is not compiled yet."""
        return 0.0

    async def compile(self, spec: GrammarSpec) -> Compiled:
        """Return some figures."""
        return Compiled("inner", 2, cache_hit=False, compile_ms=1.0, warnings=())

    async def stats(self) -> GrammarStats:
        """Return some figures."""
        return GrammarStats(starts=1, ready=True)

    async def clear_cache(self, *, disk: bool) -> ClearedGrammars:
        """Return that nothing was there."""
        return ClearedGrammars(0, 0, 0, 0)


def limits(engine: EngineConfig, model: FuzzModel) -> Limits:
    """Return limits so small that short inputs reach them."""
    server = ServerConfig(max_n=3, max_prompt_bytes=2000, stream_pace_ms=0.0, grammar_handles_bytes=1 << 20)
    return Limits.of(
        engine, server, vocab_size=model.vocab_size, max_model_len=model.max_model_len, outputs=model.outputs
    )


def instant_calls() -> Calls:
    """Return the calls to an engine that answers at once. Must run on the event loop."""
    model = FuzzModel()
    config = EngineConfig(
        served_model_name="lockstep,fuzzed",
        max_model_len=MAX_MODEL_LEN,
        max_beam_width=0,
        draft_index_shared=True,
        device="cpu",
    )
    engine = InstantEngine(config)
    calls = Calls(engine, model, limits(config, model), InstantGrammar())
    calls.warm()
    return calls
