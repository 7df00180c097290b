"""The fingerprint of an engine: it depends on what the engine computes, and not on when its pages are read."""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from gpu_engine.api.page_transfer import PageFormat, Piece
from gpu_engine.api.request import Request
from gpu_engine.extensions.transfer.identity import PROBE_TOKENS, identify

FORM = PageFormat("weights", "float32", page_size=16, layout="token-major", num_layers=2, num_kv_heads=1, head_dim=4)


@dataclass
class FakeEngine:
    """Its pages are ready in an order of chance; a piece is ordered by layers, as the real one's."""

    kv: np.ndarray
    """[parts, pages, numbers]."""
    rng: random.Random
    form: PageFormat = FORM
    running: list[Request] = field(default_factory=list)

    @property
    def pages(self) -> FakeEngine:
        return self

    def submit(self, request: Request) -> None:
        self.running.append(request)

    def drop(self, request: Request) -> None:
        self.running.remove(request)

    def read(self, request: Request, first_page: int, most: int) -> Future[Piece]:
        ready = self.rng.randint(first_page + 1, self.kv.shape[1])
        pages = self.kv[:, first_page : min(ready, first_page + most)]
        done: Future[Piece] = Future()
        done.set_result(Piece(pages.shape[1], np.ascontiguousarray(pages).tobytes()))
        return done


MODEL = SimpleNamespace(
    vocab_size=300, tokenizer=SimpleNamespace(backend_tokenizer=SimpleNamespace(get_vocab_size=lambda: 256))
)


async def fingerprint(kv: np.ndarray, seed: int) -> str:
    engine = FakeEngine(kv, random.Random(seed))
    form = await identify(engine, MODEL)  # type: ignore[arg-type]
    assert not engine.running
    return form.fingerprint


async def test_a_fingerprint_does_not_depend_on_how_many_pages_are_ready_at_each_read() -> None:
    kv = np.random.default_rng(1).normal(size=(4, PROBE_TOKENS // FORM.page_size, 64)).astype(np.float32)
    assert len({await fingerprint(kv, seed) for seed in range(20)}) == 1
    other = kv.copy()
    other[3, -1, -1] = np.nextafter(other[3, -1, -1], np.float32(9))
    assert await fingerprint(other, 0) != await fingerprint(kv, 0)
