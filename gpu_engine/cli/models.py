"""`lockstep pull`, `list` and `rm`: models of the hub in the cache of this machine.

The invariant: no server and no library of models is loaded. stdout has only the path, the table or what was freed.

Not responsible for: the cache's layout, which is huggingface_hub's (gpu_engine/model/hub_cache.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path

from gpu_engine.api.engine_settings import EMBEDDED_MODEL
from gpu_engine.cli.asking import FAILED, OK, usage
from gpu_engine.cli.terminal import loading_progress
from gpu_engine.model.hub import Hub, Wanted, locate, read_token, size_text
from gpu_engine.model.hub_cache import NotCached, cached_models, remove
from gpu_engine.model.names import ModelNotSupported, is_hub_name


def run_pull(flags: argparse.Namespace) -> int:
    """Fetch a model, and print where it is."""
    if not is_hub_name(flags.name) or Path(flags.name).exists():
        return _not_of_the_hub(flags.name)
    if not _installed():
        return FAILED
    try:
        hub = Hub(token=read_token(flags.hf_token_file))
        with loading_progress() as progress:
            path = locate(Wanted(flags.name, flags.revision, "NAME"), hub, progress)
    except ModelNotSupported as error:
        return _failed(error)
    print(path)
    return OK


def run_list(_: argparse.Namespace) -> int:
    """Print the models in the cache."""
    if not _installed():
        return FAILED
    models = cached_models()
    if not models:
        print(f"no model is in {Hub().shown_cache}; `lockstep pull NAME` fetches one", file=sys.stderr)
        return OK
    width = max(len(model.name) for model in models)
    print(f"{'NAME':<{width}}  {'SIZE':>9}  LAST READ")
    for model in models:
        day = time.strftime("%Y-%m-%d", time.localtime(model.used_s))
        print(f"{model.name:<{width}}  {size_text(model.num_bytes):>9}  {day}")
    return OK


def run_rm(flags: argparse.Namespace) -> int:
    """Remove models from the cache."""
    if not _installed():
        return FAILED
    cached = {model.name for model in cached_models()}
    for name in flags.names:
        if not is_hub_name(name) and name not in cached:
            return _not_of_the_hub(name)
    for name in flags.names:
        try:
            freed = remove(name)
        except (NotCached, OSError) as error:
            return _failed(error)
        print(f"removed {name}: {size_text(freed)}")
    return OK


def _installed() -> bool:
    there = importlib.util.find_spec("huggingface_hub") is not None
    if not there:
        print("error: models of the hub need huggingface_hub, which the extra `engine` brings", file=sys.stderr)
    return there


def _not_of_the_hub(name: str) -> int:
    if name == EMBEDDED_MODEL:
        return usage(
            ValueError(f"NAME: {name} comes with a Python package, and is not in the cache of the hub's models")
        )
    if Path(name).exists():
        return usage(ValueError(f"NAME: {name} is a path; a model of the hub is named owner/name"))
    return usage(ValueError(f"NAME: {name} is no name of the hub: owner/name, or owner/name:KIND for a GGUF file"))


def _failed(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    return FAILED
