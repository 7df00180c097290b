"""The models in huggingface_hub's cache: what there is, and removing it.

A repository with GGUF files has a name for each kind in it, since a server reads one file of them.

Invariant: the content of a file is removed only if no other file of the repository has it.
Not responsible for: fetching a model, and finding it at a start (see hub.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_engine.model.names import kind_of


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
    """Return the models in a cache, by name. None: huggingface_hub's own."""
    return [
        CachedModel(name, sum(_blobs(files).values()), max(file.blob_last_accessed for file in files))
        for repository in _repositories(cache)
        for name, files in sorted(_models(repository).items())
    ]


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
    if not kind or len(models) == 1:
        revisions = [revision.commit_hash for revision in repository.revisions]
        strategy = _scan(cache).delete_revisions(*revisions)
        strategy.execute()
        if repository.repo_path.exists():
            raise OSError(f"{repository.repo_path} could not be removed")
        return int(strategy.expected_freed_size)
    kept = _blobs(file for revision in repository.revisions for file in revision.files if file not in models[name])
    freed = {blob: size for blob, size in _blobs(models[name]).items() if blob not in kept}
    for file in models[name]:
        file.file_path.unlink(missing_ok=True)
    for blob in freed:
        blob.unlink(missing_ok=True)
    return sum(freed.values())


def _scan(cache: Path | None) -> Any:
    from huggingface_hub import scan_cache_dir

    return scan_cache_dir(cache)


def _repositories(cache: Path | None) -> list[Any]:
    """Return huggingface_hub's descriptions of the models' repositories."""
    from huggingface_hub import CacheNotFound

    try:
        scan = _scan(cache)
    except CacheNotFound:  # nothing was fetched yet
        return []
    found = (repository for repository in scan.repos if repository.repo_type == "model" and repository.nb_files)
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
    if not models or any(file.file_path.suffix == ".safetensors" for file in others):
        models[repository.repo_id] = others
    return models


def _blobs(files: Iterable[Any]) -> dict[Path, int]:
    """Return the contents of files with their sizes: two revisions may share one."""
    return {file.blob_path: file.size_on_disk for file in files}
