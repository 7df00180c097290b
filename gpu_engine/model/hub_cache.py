"""The models in huggingface_hub's cache: what there is, and removing it.

A repository with GGUF files has a name for each kind in it, since a server reads one file of them.

Invariant: the content of a file is removed only if no other file of the repository has it.
Not responsible for: fetching a model, and finding it at a start (see hub.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_engine.model.names import kind_of

_WEIGHTS = (".gguf", ".safetensors")


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache."""

    name: str
    num_bytes: int
    used_s: float
    """When a file of it was last read, in seconds since 1970."""


class NotCached(LookupError):
    """No model of this name is in the cache."""


def cached_models(cache: Path | None = None) -> list[CachedModel]:
    """Return the models in a cache, by name. None: huggingface_hub's own.

    A download that was interrupted is listed as its repository, without a kind.
    """
    found = []
    for repository in _repositories(cache):
        for name, files in sorted(_models(repository).items()):
            found.append(CachedModel(name, sum(_blobs(files).values()), max(file.blob_last_accessed for file in files)))
        begun = [path.stat() for path in _begun(repository)]
        if begun and not repository.nb_files:
            size, used_s = sum(stat.st_size for stat in begun), max(stat.st_mtime for stat in begun)
            found.append(CachedModel(repository.repo_id, size, used_s))
    return found


def remove(name: str, cache: Path | None = None) -> int:
    """Remove a model, without a kind the whole repository; return the bytes that were freed.

    Raises NotCached, and OSError for files that cannot be removed.
    """
    repository_id, colon, kind = name.partition(":")
    repository = next((each for each in _repositories(cache) if each.repo_id == repository_id), None)
    models = _models(repository) if repository is not None else {}
    name = f"{repository_id}{colon}{kind.upper()}"
    if repository is None or (kind and name not in models):
        there = f"; there is {', '.join(sorted(models))}" if models else ""
        raise NotCached(f"{name} is not in the cache{there}")
    # Not `delete_revisions`: it looks for a commit in every repository, and a renamed one shares its commits.
    if not kind:
        size = int(repository.size_on_disk) + sum(path.stat().st_size for path in _begun(repository))
        shutil.rmtree(repository.repo_path)
        return size
    others = [file for revision in repository.revisions for file in revision.files if file not in models[name]]
    kept = _blobs(others)
    freed = {blob: size for blob, size in _blobs(models[name]).items() if blob not in kept}
    for file in models[name]:
        file.file_path.unlink(missing_ok=True)
    for blob in freed:
        blob.unlink(missing_ok=True)
    if not _begun(repository) and not any(file.file_path.suffix in _WEIGHTS for file in others):
        shutil.rmtree(repository.repo_path)  # what is left describes the weights that have gone
        freed |= kept
    return sum(freed.values())


def _begun(repository: Any) -> list[Path]:
    """Return the files of a repository whose download has begun and not ended."""
    return [*Path(repository.repo_path, "blobs").glob("*.incomplete")]


@dataclass(frozen=True, slots=True)
class _Begun:
    """A repository of which nothing has arrived whole, with the members that huggingface_hub's have."""

    repo_id: str
    repo_path: Path
    revisions: tuple[Any, ...] = ()
    nb_files: int = 0
    size_on_disk: int = 0


def _scan(cache: Path | None) -> Any:
    from huggingface_hub import scan_cache_dir

    return scan_cache_dir(cache)


def _repositories(cache: Path | None) -> list[Any]:
    """Return huggingface_hub's descriptions of the models' repositories."""
    from huggingface_hub import CacheNotFound, constants

    try:
        scan = _scan(cache)
    except (CacheNotFound, ValueError):  # nothing was fetched yet, or the cache is no folder
        return []
    found = [repository for repository in scan.repos if repository.repo_type == "model" and repository.nb_files]
    known = {repository.repo_path for repository in found}
    folders = Path(cache or constants.HF_HUB_CACHE).glob("models--*")
    begun = [_Begun(folder.name.removeprefix("models--").replace("--", "/"), folder) for folder in folders]
    found += [each for each in begun if each.repo_path not in known and _begun(each)]
    return sorted(found, key=lambda repository: repository.repo_id)


def _models(repository: Any) -> dict[str, list[Any]]:
    """Return the files of each model of a repository, by name."""
    models: dict[str, list[Any]] = {}
    others = []
    for revision in repository.revisions:
        for file in revision.files:
            if kind := kind_of(file.file_path.name):
                models.setdefault(f"{repository.repo_id}:{kind}", []).append(file)
            else:
                others.append(file)
    if (others and not models) or any(file.file_path.suffix == ".safetensors" for file in others):
        models[repository.repo_id] = others
    return models


def _blobs(files: Iterable[Any]) -> dict[Path, int]:
    """Return the contents of files with their sizes: two revisions may share one."""
    return {file.blob_path: file.size_on_disk for file in files}
