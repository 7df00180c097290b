"""The adapters that requests may name: loading, memory, users, and unloading when the last user has ended.

An adapter that the settings name stays. One that LoadAdapter has loaded is evicted, the least recently used first, when
another one needs its room and no sequence uses it. Invariant: the weights of an adapter are released only when no
sequence uses it, and `in_use` is the number of sequences between `acquire` and `release`. Every method may be called
from any thread. Not responsible for: the weights (see pool.py), the files (see peft_files.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gpu_engine.api.adapters import Adapter, AdapterKind, AdapterLimits, AdapterUse, check_name, named_adapters
from gpu_engine.api.config import EngineConfig
from gpu_engine.api.errors import AdapterRefused, InvalidRequest, LimitExceeded, UnknownAdapter
from gpu_engine.model.adapters.peft_files import AdapterNotSupported, LoraFiles, PromptFiles, read_adapter
from gpu_engine.model.loaded_model import ModelNotSupported

log = logging.getLogger(__name__)

_FIELDS = {AdapterKind.LORA: "lora", AdapterKind.PROMPT: "prompt_adapter"}
_NOUNS = {AdapterKind.LORA: "LoRA adapter", AdapterKind.PROMPT: "prompt adapter"}


class AdapterMemory(Protocol):
    """Where the weights go; `pool.AdapterPool` is one."""

    def check(self, files: LoraFiles | PromptFiles) -> None:
        """Raise AdapterNotSupported where an adapter does not fit the model."""

    def memory_bytes(self, files: LoraFiles | PromptFiles) -> int:
        """Return what the adapter takes of the memory for all."""

    def put(self, number: int, files: LoraFiles) -> None:
        """Make LoRA adapter `number` of these matrices, which were checked."""

    def remove(self, number: int) -> None:
        """Release the memory of LoRA adapter `number`."""

    def put_prompt(self, number: int, files: PromptFiles) -> int:
        """Make prompt adapter `number` of these embeddings, which were checked; return the id of its first virtual
        token."""

    def remove_prompt(self, number: int) -> None:
        """Release the memory of prompt adapter `number`."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A loaded adapter, until its weights are released."""

    adapter: Adapter
    in_use: int = 0
    used: int = 0
    """Number of the last `find` or `acquire`."""
    released: Future[None] = field(default_factory=Future)
    named: bool = True
    """False: unloaded, while sequences still use it."""


class AdapterRegistry:
    """The adapters of one engine.

    Args:
        memory: of the model; None where it takes none.
        limits: room for all adapters, and the size of one.
        dirs: directories below which `load` reads.
    """

    def __init__(self, memory: AdapterMemory | None, limits: AdapterLimits, dirs: Iterable[Path] = ()) -> None:
        self._memory, self.limits = memory, limits
        self.max_bytes = limits.max_adapter_bytes if memory is not None else 0
        self._dirs = tuple(Path(item).resolve() for item in dirs)
        self._lock = threading.Lock()
        """Guards the entries; never held while files are read."""
        self._loading = threading.Lock()
        """One load at a time: the room for it is found first."""
        self._entries: dict[int, _Entry] = {}
        """By generation."""
        self._loads = 0
        self._uses = 0

    @classmethod
    def open(cls, config: EngineConfig, memory: AdapterMemory | None) -> AdapterRegistry:
        """Return the registry of these settings, with their adapters loaded. Raises ModelNotSupported."""
        dirs = [Path(item) for item in config.adapter_dirs]
        for item in dirs:
            if not item.is_dir():
                raise ModelNotSupported(f"adapter_dirs: {item} is no directory")
        registry = cls(memory, config.adapter_limits, dirs)
        for name, folder in named_adapters(config.adapters).items():
            try:
                registry._load(name, Path(folder), at_start=True)
            except (InvalidRequest, LimitExceeded, UnknownAdapter) as error:
                registry.close()
                raise ModelNotSupported(f"adapters: {name}: {error}") from error
        return registry

    def find(self, kind: AdapterKind, name: str) -> Adapter:
        """See `AdapterAccess.find`."""
        with self._lock:
            entry = self._named(name)
            if entry is None or entry.adapter.kind is not kind:
                names = ", ".join(self._names(kind)) or "none"
                raise InvalidRequest(_FIELDS[kind], f"there is no {_NOUNS[kind]} {name!r}; there are: {names}")
            entry.used = self._next_use()
            return entry.adapter

    def acquire(self, adapters: Sequence[Adapter]) -> None:
        """See `AdapterAccess.acquire`."""
        with self._lock:
            for adapter in adapters:
                entry = self._entries.get(adapter.generation)
                if entry is None or not entry.named:
                    problem = f"the {_NOUNS[adapter.kind]} {adapter.name!r} was unloaded meanwhile"
                    raise InvalidRequest(_FIELDS[adapter.kind], problem)
            for adapter in adapters:
                entry = self._entries[adapter.generation]
                entry.in_use += 1
                entry.used = self._next_use()

    def release(self, adapters: Sequence[Adapter]) -> None:
        """See `AdapterAccess.release`."""
        with self._lock:
            for adapter in adapters:
                entry = self._entries[adapter.generation]
                entry.in_use -= 1
                assert entry.in_use >= 0, adapter
                if not entry.named and not entry.in_use:
                    self._release_weights(entry)

    def load(self, name: str, path: str) -> Adapter:
        """See `AdapterAccess.load`."""
        if not self._dirs:
            raise AdapterRefused("path: this server loads no adapters (its setting adapter_dirs is empty)")
        folder = Path(path).resolve()
        if not any(folder.is_relative_to(item) for item in self._dirs):
            raise InvalidRequest("path", f"{path!r} is not below adapter_dirs of the server")
        return self._load(name, folder, at_start=False)

    def unload(self, name: str) -> Future[None]:
        """See `AdapterAccess.unload`."""
        with self._lock:
            entry = self._named(name)
            if entry is None:
                raise UnknownAdapter(
                    f"name: there is no adapter {name!r}; there are: {', '.join(self._names()) or 'none'}"
                )
            self._take_name(entry)
            return entry.released

    def listed(self) -> list[AdapterUse]:
        """See `AdapterAccess.listed`."""
        with self._lock:
            entries = sorted(self._entries.values(), key=lambda entry: (entry.adapter.name, entry.adapter.generation))
            return [AdapterUse(entry.adapter, entry.in_use) for entry in entries if entry.named]

    def close(self) -> None:
        """Release all weights. The engine's thread has ended, so no sequence uses any."""
        with self._lock:
            for entry in list(self._entries.values()):
                entry.named = False
                self._release_weights(entry)

    def _load(self, name: str, folder: Path, *, at_start: bool) -> Adapter:
        try:
            check_name(name)
        except ValueError as error:
            raise InvalidRequest("name", str(error)) from error
        if self._memory is None:
            raise InvalidRequest("path", "this server takes no adapters (max_adapter_bytes is 0)")
        with self._loading:
            try:
                files = read_adapter(folder, self.max_bytes)
                self._check_size(files)
                self._memory.check(files)  # before another one is evicted for it
            except FileNotFoundError as error:
                raise UnknownAdapter(f"path: {error}") from error
            except (AdapterNotSupported, OSError) as error:
                raise InvalidRequest("path", str(error)) from error
            kind = AdapterKind.LORA if isinstance(files, LoraFiles) else AdapterKind.PROMPT
            memory_bytes = self._memory.memory_bytes(files)
            with self._lock:
                number = self._make_room(name, kind, memory_bytes)
            first_token = self._put(number, files)
            with self._lock:
                return self._add(name, kind, folder, files, (number, first_token), at_start=at_start)

    def _put(self, number: int, files: LoraFiles | PromptFiles) -> int:
        assert self._memory is not None
        if isinstance(files, PromptFiles):
            return self._memory.put_prompt(number, files)
        self._memory.put(number, files)
        return 0

    def _add(
        self,
        name: str,
        kind: AdapterKind,
        folder: Path,
        files: LoraFiles | PromptFiles,
        place: tuple[int, int],
        *,
        at_start: bool,
    ) -> Adapter:
        """Give the loaded adapter its name; one that has it and is unused loses it."""
        before = self._named(name)
        if before is not None:
            self._take_name(before)
        self._loads += 1
        assert self._memory is not None
        size, memory_bytes = _size(files), self._memory.memory_bytes(files)
        adapter = Adapter(name, kind, str(folder), size, memory_bytes, place[0], self._loads, at_start, place[1])
        self._entries[self._loads] = _Entry(adapter, used=self._next_use())
        log.info("loaded the %s %s of %d bytes from %s", _NOUNS[kind], name, adapter.memory_bytes, folder)
        return adapter

    def _check_size(self, files: LoraFiles | PromptFiles) -> None:
        """Raise AdapterNotSupported where an adapter is larger than the settings allow."""
        limits = self.limits
        name, noun, most = ("max_lora_rank", "rank", limits.max_lora_rank)
        if isinstance(files, PromptFiles):
            name, noun, most = ("max_virtual_tokens", "num_virtual_tokens", limits.max_virtual_tokens)
        if _size(files) > most:
            raise AdapterNotSupported(f"{noun}: is {_size(files)}, and {name} is {most}")

    def _make_room(self, name: str, kind: AdapterKind, size: int) -> int:
        """Evict what must go for `size` bytes and a number; return the number. Raises AdapterRefused or
        LimitExceeded."""
        before = self._named(name)
        if before is not None and before.in_use:
            raise AdapterRefused(f"name: {name!r} is in use by {before.in_use} sequences")
        evictable = sorted(
            (
                e
                for e in self._entries.values()
                if e.named and not e.in_use and not e.adapter.at_start and e is not before
            ),
            key=lambda entry: entry.used,
        )
        # The one that is replaced has its name until the new one is loaded, if there is another number for that.
        taken = sum(entry.adapter.memory_bytes for entry in self._entries.values() if entry is not before)
        gone: list[_Entry] = []
        while taken + size > self.max_bytes and evictable:
            gone.append(evictable.pop(0))
            taken -= gone[-1].adapter.memory_bytes
        if taken + size > self.max_bytes:
            raise LimitExceeded(
                f"max_adapter_bytes: {name!r} needs {size} bytes, and adapters that cannot be evicted have {taken} of"
                f" {self.max_bytes}"
            )
        used = {
            entry.adapter.number for entry in self._entries.values() if entry.adapter.kind is kind and entry not in gone
        }
        number = next((number for number in range(1, self.limits.max_adapters + 1) if number not in used), None)
        if number is None:
            first = [*([] if before is None else [before]), *evictable]
            entry = next((entry for entry in first if entry.adapter.kind is kind), None)
            if entry is None:
                most = self.limits.max_adapters
                raise LimitExceeded(f"max_adapters: {most} {_NOUNS[kind]}s are loaded, and none of them can be evicted")
            gone.append(entry)
            number = entry.adapter.number
        for entry in gone:
            log.info("evicted the adapter %s", entry.adapter.name)
            self._take_name(entry)
        return number

    def _take_name(self, entry: _Entry) -> None:
        entry.named = False
        if not entry.in_use:
            self._release_weights(entry)

    def _release_weights(self, entry: _Entry) -> None:
        assert self._memory is not None
        adapter = entry.adapter
        del self._entries[adapter.generation]
        (self._memory.remove if adapter.kind is AdapterKind.LORA else self._memory.remove_prompt)(adapter.number)
        entry.released.set_result(None)

    def _named(self, name: str) -> _Entry | None:
        return next((e for e in self._entries.values() if e.named and e.adapter.name == name), None)

    def _names(self, kind: AdapterKind | None = None) -> list[str]:
        entries = (entry.adapter for entry in self._entries.values() if entry.named)
        return sorted(adapter.name for adapter in entries if kind in (None, adapter.kind))

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses

    def __repr__(self) -> str:
        return f"<AdapterRegistry of {len(self._entries)} adapters>"


def _size(files: LoraFiles | PromptFiles) -> int:
    """Return the largest rank, or the number of virtual tokens."""
    return files.rank if isinstance(files, LoraFiles) else len(files.embeddings_TH)
