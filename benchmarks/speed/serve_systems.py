"""The systems of `serve`: their names, what each needs, and how each is started with the same threads and prompts.

Invariant: a system that is not installed, or does not start, becomes one reason; the others run.
Not responsible for: measuring them (see serve.py).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.failure import CannotRun
from benchmarks.harness.server import ServerOptions
from benchmarks.harness.systems import Lockstep, System, SystemFailed
from benchmarks.peers import foreign
from benchmarks.peers.llama_server import LlamaServer
from benchmarks.peers.vllm_server import VllmServer

Maker = Callable[[], System]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the systems are started with. A path that is None means that its systems are skipped."""

    engine: ServerOptions
    """This engine's options; its device, threads and use of a prefix cache are those of the other systems as well."""
    dtype: str
    """Of the systems that do not run a GGUF file."""
    directory: Path
    """The model as a Hugging Face directory."""
    gguf: Path | None
    """The same model as a GGUF file."""
    batch: int
    """The highest concurrency."""
    lookup: int
    vllm_ngram: int
    openvino_lookup: int
    llama_ngram: int
    openvino_python: Path | None
    llama_server: Path | None
    vllm_python: Path | None


def gguf_file(model: str, given: Path | None) -> Path | None:
    """Return the GGUF file of `model` for the peers that read one: `given`, `model` itself, or the embedded one.

    None: the model is a directory, or the embedded model is not installed.

    Raises:
        ValueError: `given` is not a file.

    """
    if given is not None and not given.is_file():
        raise ValueError(f"--gguf: {given} is not a file")
    if given is not None:
        return given
    if model == "embedded":
        from gpu_engine.model.embedded import EmbeddedModelMissing, weights_file

        try:
            return weights_file()
        except EmbeddedModelMissing:
            return None
    return Path(model) if model.endswith(".gguf") else None


def found_llama_server(given: Path | None) -> Path | None:
    """Return the binary of llama.cpp's server: `given`, else the one on the PATH, else None."""
    if given is not None:
        return given
    on_path = shutil.which("llama-server")
    return Path(on_path) if on_path else None


def makers(settings: Settings) -> dict[str, Maker]:
    """Return every system's name and how it is started; nothing starts here."""
    return {
        "lockstep": lambda: Lockstep(settings.engine),
        "lockstep-k0": lambda: Lockstep(dataclasses.replace(settings.engine, num_draft_tokens=0, drafter="none")),
        **_transformers(settings),
        "openvino": lambda: _openvino(settings, 0),
        "openvino-lookup": lambda: _openvino(settings, settings.openvino_lookup),
        "llamacpp": lambda: _llamacpp(settings, 0),
        "llamacpp-ngram": lambda: _llamacpp(settings, settings.llama_ngram),
        "vllm": lambda: _vllm(settings, 0),
        "vllm-ngram": lambda: _vllm(settings, settings.vllm_ngram),
        "vllm-server": lambda: _vllm_server(settings),
    }


SYSTEMS = (
    "lockstep",
    "lockstep-k0",
    "transformers",
    "transformers-lookup",
    "transformers-lookup-free",
    "openvino",
    "openvino-lookup",
    "llamacpp",
    "llamacpp-ngram",
    "vllm",
    "vllm-ngram",
    "vllm-server",
)
"""The names of `makers`, in the order of the table."""


def _transformers(settings: Settings) -> dict[str, Maker]:
    weights = None

    def make(lookup: int, grammar: bool) -> System:
        nonlocal weights
        _refuse_prefix_cache(settings)
        if importlib.util.find_spec("xgrammar") is None:
            raise SystemFailed("xgrammar is not installed")
        from benchmarks.peers.transformers import Transformers, Weights

        engine = settings.engine
        weights = weights or Weights(settings.directory, settings.dtype, engine.num_threads, engine.device)
        return Transformers(weights, lookup=lookup, grammar=grammar)

    return {
        "transformers": lambda: make(0, True),
        "transformers-lookup": lambda: make(settings.lookup, True),
        "transformers-lookup-free": lambda: make(settings.lookup, False),
    }


def _refuse_prefix_cache(settings: Settings) -> None:
    if settings.engine.prefix_cache:
        raise SystemFailed("--prefix-cache: this system cannot forget the prompts of an earlier pass, or has no cache")


def _gguf(settings: Settings) -> Path:
    if settings.gguf is None:
        raise SystemFailed("no --gguf, and the model is not one")
    return settings.gguf


def _openvino(settings: Settings, lookup: int) -> System:
    _refuse_prefix_cache(settings)
    if settings.openvino_python is None:
        raise SystemFailed("no --openvino-python")
    return foreign.openvino(
        settings.openvino_python,
        _gguf(settings),
        num_threads=settings.engine.num_threads,
        batch=settings.batch,
        lookup=lookup,
    )


def _llamacpp(settings: Settings, ngram: int) -> System:
    _refuse_prefix_cache(settings)
    if settings.llama_server is None:
        raise SystemFailed("no --llama-server, and none on the PATH")
    return LlamaServer(
        settings.llama_server,
        _gguf(settings),
        num_threads=settings.engine.num_threads,
        batch=settings.batch,
        ngram=ngram,
    )


def _vllm(settings: Settings, ngram: int) -> System:
    if settings.vllm_python is None:
        raise SystemFailed("no --vllm-python")
    return foreign.vllm(
        settings.vllm_python,
        settings.directory,
        dtype=settings.dtype,
        num_threads=settings.engine.num_threads,
        batch=settings.batch,
        ngram=ngram,
        prefix_cache=settings.engine.prefix_cache,
    )


def _vllm_server(settings: Settings) -> System:
    _refuse_prefix_cache(settings)
    if settings.vllm_python is None:
        raise SystemFailed("no --vllm-python")
    return VllmServer(
        settings.vllm_python,
        settings.directory,
        dtype=settings.dtype,
        num_threads=settings.engine.num_threads,
        batch=settings.batch,
    )


def start_systems(
    names: Sequence[str], known: Mapping[str, Maker], running: ExitStack
) -> tuple[list[System], dict[str, str]]:
    """Start the systems named; return the started ones, and for each of the others the reason.

    `running` closes what was started, also when this function does not return.
    """
    started: list[System] = []
    absent: dict[str, str] = {}
    for name in names:
        print(f"starting {name} ...", file=sys.stderr)
        try:
            system = known[name]()
        except (CannotRun, ImportError, OSError) as failure:
            absent[name] = str(failure)
            print(f"{name}: {failure}", file=sys.stderr)
            continue
        running.callback(system.close)
        started.append(system)
    return started, absent


def peer_names(systems: Sequence[System], guided: bool) -> list[str]:
    """Return the systems that this engine is compared with. On a guided workload, one that ignores schemas is none."""
    return [system.name for system in systems if not isinstance(system, Lockstep) and (system.guided or not guided)]
