"""Where a model is: a path, or a name that huggingface_hub resolves, from its cache first: `Qwen/Qwen3-0.6B`, or
`unsloth/Qwen3-4B-GGUF:Q4_K_M` for a GGUF file of a repository.

A model whose files are all in the cache starts without a request to the hub, so a server restarts without a network.
Invariant: only safetensors, GGUF, JSON and text are fetched; a checkpoint with weights only in pickles is refused by
name, and so is one that needs code of its own: reading either could run anything. A download that does not fit on the
disk is refused before it begins, and one that was interrupted goes on where it ended.
Not responsible for: loading (see loader.py), the embedded model (see embedded.py).
"""

from __future__ import annotations

import errno
import glob
import io
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.engine_settings import EMBEDDED_MODEL
from gpu_engine.model.embedded import weights_file
from gpu_engine.model.files.early import check_files, without_weights
from gpu_engine.model.names import GGUF, ModelNotSupported, check_name, files_of_kind, kind_of, one_line, part_names

Progress = Callable[[str, float], None]
"""Called with (the present stage, the finished share in [0, 1])."""

_FETCHED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_LEFT = ["*/*", "consolidated*.safetensors"]
"""Folders hold other formats; `consolidated` are the same weights under other names."""
_TOKEN = "give your token in HF_TOKEN or hf_token_file"
_ROOM = (
    "remove others (`lockstep list`, `lockstep rm NAME`), or name another directory in HF_HUB_CACHE; what was fetched "
    "is kept"
)
_REPORTED = 0.02
"""Progress is reported at steps of this share: a log has a line for each."""


def _free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of a folder that may not exist yet."""
    there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    return shutil.disk_usage(there).free


@dataclass(frozen=True, slots=True)
class Hub:
    """The place that model ids are resolved at. None: as huggingface_hub's environment variables say (HF_ENDPOINT,
    HF_HUB_CACHE, HF_HUB_OFFLINE, HF_TOKEN)."""

    endpoint: str | None = None
    cache: Path | None = None
    offline: bool | None = None
    token: str | None = None
    free_bytes: Callable[[Path], int] = _free_bytes
    """Free bytes on the disk of a folder."""

    @property
    def shown_cache(self) -> str:
        """The cache's directory."""
        from huggingface_hub import constants

        return str(self.cache or constants.HF_HUB_CACHE)

    @property
    def shown_endpoint(self) -> str:
        """The hub's address."""
        from huggingface_hub import constants

        return self.endpoint or constants.ENDPOINT

    @property
    def is_offline(self) -> bool:
        """True: no request is sent."""
        from huggingface_hub import constants

        return bool(constants.HF_HUB_OFFLINE) if self.offline is None else self.offline


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model that a setting names."""

    name: str
    """A path, or an id of the hub."""
    revision: str = ""
    """Branch, tag or commit; empty: main, or a path."""
    setting: str = "model"
    """Messages begin with it."""
    with_tokenizer: bool = True
    """False: a drafting head, which has none."""

    @property
    def repository(self) -> str:
        """The hub's id, without the kind of a file."""
        return self.name.partition(":")[0]

    @property
    def kind(self) -> str:
        """The kind of a GGUF file; empty: a checkpoint of safetensors."""
        return self.name.partition(":")[2]

    def __str__(self) -> str:
        return f"{self.name} at {self.revision}" if self.revision else self.name


def read_token(path: str) -> str | None:
    """Return the token in a file, or None for an empty path; raise ModelNotSupported that names the setting."""
    if not path:
        return None
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelNotSupported(f"hf_token_file: {path} cannot be read: {error}") from error
    if not token or re.search(r"\s", token):
        raise ModelNotSupported(f"hf_token_file: {path} must hold one token")
    return token


def locate(wanted: Wanted, hub: Hub, progress: Progress | None = None) -> Path:
    """Return the directory or file of a model: the path that is named, or the snapshot of the hub's id.

    Raises FileNotFoundError for a name that is neither, and ModelNotSupported for a model that cannot be had, each with
    one line that begins with the setting.
    """
    path = Path(wanted.name)
    if path.exists():
        if wanted.revision:
            raise ModelNotSupported(f"revision: {wanted.revision!r} is for a model of the hub; {path} is a path")
        return _first_part(wanted, path) if path.suffix == GGUF else path
    check_name(wanted.name, wanted.setting)
    return (_gguf_file if wanted.kind else _snapshot)(wanted, hub, progress or _show_nothing)


def _show_nothing(stage: str, done: float) -> None:
    """See `Progress`."""


def _first_part(wanted: Wanted, path: Path) -> Path:
    """Return the first part of the GGUF file that has `path` as one. Raises ModelNotSupported for parts that are
    missing."""
    names = part_names(path.name)
    if missing := [name for name in names if not path.with_name(name).is_file()]:
        raise ModelNotSupported(
            f"{wanted.setting}: {path} is one of {len(names)} parts, and its folder has no {', '.join(missing[:3])}"
            f"{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}"
        )
    return path.with_name(names[0])


def _gguf_file(wanted: Wanted, hub: Hub, progress: Progress) -> Path:
    """Return the GGUF file of a kind, its first part if it has several, if the cache has it whole, else fetch it."""
    folder = cached_snapshot(wanted, hub)
    cached = [str(path.relative_to(folder)) for path in folder.rglob(f"*{GGUF}") if path.is_file()] if folder else []
    try:
        files = files_of_kind(cached, wanted.kind)
    except ValueError:  # some of its parts, or several files; the hub's list says more
        files = []
    if folder is not None and files:
        return folder / files[0]
    missing = f"{wanted} is no path, and is not in the cache {hub.shown_cache}"
    if hub.is_offline:
        has = f" (which has {', '.join(_kinds(cached))})" if _kinds(cached) else ""
        raise ModelNotSupported(
            f"{wanted.setting}: {missing}{has}, and HF_HUB_OFFLINE forbids to ask the hub; {_todo(wanted)}"
        )
    listed = _listing(wanted, hub, missing)
    files = _of_kind(wanted, [*listed.sizes])
    if not files:
        kinds = _kinds(listed.sizes) or [name for name in listed.sizes if name.endswith(GGUF)]
        has = f"it has {', '.join(kinds)}" if kinds else "it has no GGUF file"
        raise ModelNotSupported(f"{wanted.setting}: {wanted.repository} has no GGUF file {wanted.kind}; {has}")
    return _fetch(wanted, hub, progress, listed, files, missing) / files[0]


def _of_kind(wanted: Wanted, files: Sequence[str]) -> list[str]:
    """Return the parts of the file of the wanted kind, [] if there is none. Raises ModelNotSupported for several files,
    and for parts that are missing."""
    try:
        return files_of_kind(files, wanted.kind)
    except ValueError as error:
        raise ModelNotSupported(f"{wanted.setting}: {wanted.repository}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Listing:
    """The files that the hub has of a revision."""

    commit: str
    sizes: dict[str, int]
    """By name, in bytes; 0: the hub does not say."""
    blobs: dict[str, str]
    """The name of each file's content in the cache, whatever revisions have it; "": the hub does not say."""


def _listing(wanted: Wanted, hub: Hub, missing: str) -> _Listing:
    """Ask the hub for the files of a model. Nothing is written, so a refusal leaves nothing in the cache."""
    from huggingface_hub import HfApi, errors

    _quieten()
    api = HfApi(endpoint=hub.endpoint, token=hub.token)
    try:
        # One request. A listing of the tree would be tried again for half a minute where the hub cannot be reached.
        info = api.model_info(wanted.repository, revision=wanted.revision or None, files_metadata=True)
    except (errors.HTTPError, errors.HFValidationError, OSError, RuntimeError) as error:  # type: ignore[attr-defined]
        raise ModelNotSupported(_why_not_fetched(error, wanted, hub, missing)) from error
    files = info.siblings or ()
    return _Listing(
        str(info.sha),
        {file.rfilename: file.size or 0 for file in files},
        {file.rfilename: (file.lfs.sha256 if file.lfs else file.blob_id) or "" for file in files},
    )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _kinds(files: Iterable[str]) -> list[str]:
    return sorted({kind_of(file) for file in files} - {""})


def cached_snapshot(wanted: Wanted, hub: Hub) -> Path | None:
    """Return the folder of a revision in the cache, whole or in part; None: there is none."""
    repository, revision = _folder(wanted, hub), wanted.revision or "main"
    if Path(revision).is_absolute() or ".." in Path(revision).parts:
        raise ModelNotSupported(f"revision: {revision} is no name of a branch, a tag or a commit")
    ref = repository / "refs" / revision
    folder = repository / "snapshots" / (ref.read_text() if ref.is_file() else revision)
    return folder if folder.is_dir() else None


def _quieten() -> None:
    for name in ("httpx", "httpx2"):  # they log every address, and some are signed
        logging.getLogger(name).setLevel(logging.WARNING)


def _snapshot(wanted: Wanted, hub: Hub, progress: Progress) -> Path:
    """Return the snapshot in the cache if it is whole, else fetch it."""
    from huggingface_hub import errors, snapshot_download

    files: dict[str, Any] = {
        "repo_id": wanted.name,
        "revision": wanted.revision or None,
        "cache_dir": hub.cache,
        "endpoint": hub.endpoint,
        "allow_patterns": _FETCHED,
        "ignore_patterns": _LEFT,
    }
    try:
        folder = Path(snapshot_download(**files, local_files_only=True))
        if _is_whole(folder, wanted.with_tokenizer):
            return folder
        missing = f"{wanted} is no path, and only a part of it is in the cache {hub.shown_cache}"
    except errors.LocalEntryNotFoundError as error:
        none = type(error) is errors.LocalEntryNotFoundError  # else a snapshot without some of its files
        missing = (
            f"{wanted} is no path, and {'is not' if none else 'only a part of it is'} in the cache {hub.shown_cache}"
        )
    except errors.HFValidationError as error:
        raise ModelNotSupported(f"{wanted.setting}: {_one_line(error)}") from error
    if hub.is_offline:
        raise ModelNotSupported(
            f"{wanted.setting}: {missing}, and HF_HUB_OFFLINE forbids to ask the hub; {_todo(wanted)}"
        )
    listed = _listing(wanted, hub, missing)
    fetched = [name for name in listed.sizes if _matches(name, _FETCHED) and not _matches(name, _LEFT)]
    if "config.json" not in fetched or not any(name.endswith(".safetensors") for name in fetched):
        raise ModelNotSupported(f"{wanted.setting}: {wanted} {_not_whole(wanted, listed)}")
    folder = _fetch(wanted, hub, progress, listed, fetched, missing)
    if not _has_weights(folder):
        raise ModelNotSupported(f"{wanted.setting}: {wanted} lacks safetensors files that its index names")
    return folder


def _fetch(wanted: Wanted, hub: Hub, progress: Progress, listed: _Listing, names: Sequence[str], missing: str) -> Path:
    """Fetch files of a repository; return the snapshot's folder."""
    from huggingface_hub import errors, snapshot_download

    folder = _folder(wanted, hub)

    def is_there(name: str) -> bool:
        blob = listed.blobs[name]
        return (folder / "snapshots" / listed.commit / name).exists() or bool(
            blob and (folder / "blobs" / blob).exists()
        )

    _refuse_full_disk(wanted, hub, sum(listed.sizes[name] for name in names if not is_there(name)))
    progress(f"fetching {wanted} from {hub.shown_endpoint}", 0.0)
    try:
        fetched = snapshot_download(
            wanted.repository,
            revision=wanted.revision or None,
            cache_dir=hub.cache,
            endpoint=hub.endpoint,
            allow_patterns=[glob.escape(name) for name in names],
            token=hub.token,
            tqdm_class=_bar(str(wanted), progress),
        )
    except (errors.HTTPError, OSError, RuntimeError) as error:  # type: ignore[attr-defined]
        raise ModelNotSupported(_why_not_fetched(error, wanted, hub, missing)) from error
    return Path(fetched)


def _refuse_full_disk(wanted: Wanted, hub: Hub, num_bytes: int) -> None:
    """Raise ModelNotSupported if files of so many bytes do not fit next to what was fetched of them before."""
    begun = sum(path.stat().st_blocks * 512 for path in (_folder(wanted, hub) / "blobs").glob("*.incomplete"))
    needed, free = max(0, num_bytes - begun), hub.free_bytes(Path(hub.shown_cache))
    if free < needed:
        raise ModelNotSupported(
            f"{wanted.setting}: {wanted} needs {size_text(needed)} in {hub.shown_cache}, whose disk has "
            f"{size_text(free)}; {_ROOM}"
        )


def _folder(wanted: Wanted, hub: Hub) -> Path:
    """Return the folder of a repository in the cache."""
    from huggingface_hub import errors
    from huggingface_hub.file_download import repo_folder_name

    try:
        return Path(hub.shown_cache, repo_folder_name(repo_id=wanted.repository, repo_type="model"))
    except errors.HFValidationError as error:
        raise ModelNotSupported(f"{wanted.setting}: {_one_line(error)}") from error


def size_text(num_bytes: int) -> str:
    """Return a number of bytes for people."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def _todo(wanted: Wanted) -> str:
    return f"fetch it where the hub can be reached (`lockstep pull {wanted.name}`) and copy the cache, or give a path"


def _why_not_fetched(error: Exception, wanted: Wanted, hub: Hub, missing: str) -> str:
    """Return the message for an error of huggingface_hub."""
    from huggingface_hub import errors

    endpoint = hub.shown_endpoint
    if isinstance(error, errors.GatedRepoError):
        page = f"{endpoint}/{wanted.repository}"
        return f"{wanted.setting}: {wanted.repository} is gated: accept its terms at {page}, and {_TOKEN}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{wanted.setting}: {wanted.repository} is no path, and {endpoint} has no such model, or a private one: "
            f"check the name, or {_TOKEN}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"revision: {wanted.repository} has no branch, tag or commit {wanted.revision!r}"
    no_answer = isinstance(error, errors.HTTPError) and not isinstance(error, errors.HfHubHTTPError)  # type: ignore[attr-defined]
    if no_answer or isinstance(error, errors.LocalEntryNotFoundError):
        why = _one_line(error.__cause__ or error)
        return f"{wanted.setting}: {missing}, and {endpoint} cannot be reached ({why}); {_todo(wanted)}"
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return f"{wanted.setting}: {wanted} does not fit into {hub.shown_cache}: the disk is full; {_ROOM}"
    return f"{wanted.setting}: {wanted} cannot be fetched to {hub.shown_cache}: {_one_line(error)}"


def _has_weights(folder: Path) -> bool:
    """Return whether the weights that a snapshot names are there."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file() or not index.is_file():
        return any(folder.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        return False
    return bool(names) and all((folder / str(name)).is_file() for name in names)


def _is_whole(folder: Path, with_tokenizer: bool) -> bool:
    """Return whether a snapshot has all that a start reads: other programs fetch a file at a time."""
    tokenizer = not with_tokenizer or any(
        (folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")
    )
    return (folder / "config.json").is_file() and tokenizer and _has_weights(folder)


def _not_whole(wanted: Wanted, listed: _Listing) -> str:
    """Return what a repository lacks for a checkpoint of safetensors."""
    if (kinds := _kinds(listed.sizes)) and not any(name.endswith(".safetensors") for name in listed.sizes):
        return f"has GGUF files and no safetensors; name a kind, such as {wanted.name}:{kinds[0]}: {', '.join(kinds)}"
    if "config.json" not in listed.sizes:
        return "has no config.json: no model in Hugging Face's format"
    return without_weights(listed.sizes)


def path_of(
    config: EngineConfig, progress: Progress | None = None, *, setting: str = "model", with_tokenizer: bool = True
) -> Path:
    """Return the directory or the GGUF file of `config.model`, fetched if it is the name of one of the hub.

    Raises ModelNotSupported, FileNotFoundError or EmbeddedModelMissing with a reason.
    """
    if config.model == EMBEDDED_MODEL:
        return weights_file()
    wanted = Wanted(config.model, config.revision, setting, with_tokenizer)
    return locate(wanted, Hub(token=read_token(config.hf_token_file)), progress)


def find_model(config: EngineConfig, progress: Progress | None = None) -> Path:
    """Return where the model lies. Raise ModelNotSupported, FileNotFoundError or EmbeddedModelMissing for a model or a
    draft model that is not there, or is damaged; fetch those of the hub. Loads no torch, so that a mistake is told at
    once."""
    wanted = {"model": config}
    if config.drafter in ("model", "decoupled"):
        wanted["draft_model"] = replace(config, model=config.draft_model, revision="")
    found = {}
    for setting, each in wanted.items():
        found[setting] = path_of(each, progress, setting=setting)
        if each.model != EMBEDDED_MODEL:  # a package of its own
            check_files(found[setting], setting)
    return found["model"]


def _one_line(error: BaseException) -> str:
    text = one_line(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _bar(repo: str, progress: Progress) -> type[Any]:
    """Return a progress bar class that reports the bytes of a download to `progress`, and draws nothing."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    last = -1.0

    class Bar(tqdm):  # type: ignore[misc]
        """One of the several bars of a download; those of bytes report."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"disable": False, "file": io.StringIO(), "leave": False})

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            nonlocal last
            if self.unit != "B" or not self.total:
                return
            # The total grows while files are asked for, so the share may fall.
            share = min(1.0, self.n / self.total)
            if abs(share - last) >= _REPORTED or (share == 1.0 != last):
                last = share
                progress(f"fetching {repo}: {int(self.n) >> 20} of {int(self.total) >> 20} MiB", share)

    return Bar
