"""The model of the tests on a recorded device.

Triton's interpreter runs each program of a launch in Python, so the model has one layer, two heads and one KV head: a
step needs a quarter of the programs that the CPU tests' model needs. Layers and head groups are covered by the tests of
the attention kernel.
"""

from __future__ import annotations

import importlib.util
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from gpu_engine.model.loader import LoadedModel, load_model
from tests.fakes import EOS
from tests.gpu_engine import eagle, tiny
from tests.gpu_engine.device.device_requests import GUIDED, UNGUIDED, on_cpu
from tests.gpu_engine.device.happens_before import Run, of_launch, watched_run
from tests.gpu_engine.harness import config
from tests.kernels.checked_interpreter import checked_interpreter

SEED = os.environ.get("LOCKSTEP_TEST_ORDERS")
"""Set: all tests of the folder are watched, in orders that this seed draws, and the figures are printed at the end."""
FIGURES: Counter[str] = Counter()

ORDERED = {
    *("test_happens_before.py", "test_device_decoupled.py", "test_device_adapters.py", "test_device_beams.py"),
    *("test_device_transfer.py", "test_device_hybrids.py"),
}
"""Files whose tests look for accesses without an order, which takes them a third longer. Their slow tests run in an
order that events permit, drawn with a seed."""


@pytest.fixture(autouse=True)
def checked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check each access of the interpreter to memory (see tests/kernels/checked_interpreter.py), and in `ORDERED` that
    those of streams and of the host have an order (see happens_before.py)."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    ordered = request.path.name in ORDERED or SEED is not None
    draws = SEED is not None or (ordered and request.node.get_closest_marker("slow") is not None)
    seed = zlib.crc32(f"{request.node.nodeid} {SEED or 0}".encode()) if draws else None
    with checked_interpreter() as found, watched_run(seed) if ordered else nullcontext(Run()) as run:
        found.then = of_launch if ordered else None
        yield
    if SEED is not None:
        FIGURES["launches"] += found.launches
        FIGURES["accesses"] += found.num_accesses
        FIGURES["nodes"] += sum(order.nodes for order in run.orders)
        FIGURES["pairs"] += sum(order.compared for order in run.orders)
        FIGURES["orders drawn"] += len(run.turns)
        FIGURES["turns drawn"] += sum(turns.drawn for turns in run.turns)
    assert found.faults == []
    assert run.races == []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, count in FIGURES.items():
        terminalreporter.write_line(f"{name}: {count:,}")


def small_llama(folder: Path, seed: int = 0, *, rounds: bool = True) -> Path:
    family = tiny.FAMILIES["llama"]()
    family.num_hidden_layers, family.num_attention_heads, family.num_key_value_heads = 1, 2, 1
    family.head_dim = family.hidden_size // family.num_attention_heads
    return tiny.save(family, folder, rounds=rounds, seed=seed)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A tiny Llama in float32 on a CPU, unfused: fused layers are native code on a CPU, which no capture records.

    Its name is its folder.
    """
    return load_model(config(model=str(small_llama(tmp_path_factory.mktemp("rounds"))), fuse_parts=False))


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a draft model that sometimes agrees with the target."""
    return str(small_llama(tmp_path_factory.mktemp("other"), seed=1))


@pytest.fixture(scope="session")
def head(llama: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of an EAGLE3 head of random weights, over a part of the vocabulary."""
    folder = tmp_path_factory.mktemp("random") / "eagle3"
    eagle.save_random(Path(llama.name), folder)
    return str(folder)


@pytest.fixture(scope="session")
def unguided_tokens(llama: LoadedModel) -> list[list[int]]:
    return on_cpu(llama, [make() for make in UNGUIDED])


@pytest.fixture(scope="session")
def guided_tokens(llama: LoadedModel) -> list[list[int]]:
    emitted = on_cpu(llama, [make() for make in GUIDED])
    assert [len(ids) for ids in emitted] == [9, 6, 8]
    assert emitted[0][-1] == emitted[2][-1] == EOS
    return emitted
