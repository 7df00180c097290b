"""Names, room and users of adapters, over a memory that only records."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_engine.api.adapters import AdapterKind, AdapterLimits
from gpu_engine.api.config import EngineConfig
from gpu_engine.api.errors import AdapterRefused, InvalidRequest, LimitExceeded, UnknownAdapter
from gpu_engine.model.adapters.peft_files import AdapterNotSupported, LoraFiles, PromptFiles
from gpu_engine.model.adapters.registry import AdapterRegistry
from gpu_engine.model.loaded_model import ModelNotSupported
from tests.gpu_engine.adapters.files import save_prompt

BYTES = 4 * 2 * 8
"""Of an adapter of `folder`."""


class Memory:
    """Records which numbers are in use."""

    def __init__(self) -> None:
        self.prompts: set[int] = set()
        self.refusal = ""

    def check(self, files: LoraFiles | PromptFiles) -> None:
        if self.refusal:
            raise AdapterNotSupported(self.refusal)

    def memory_bytes(self, files: LoraFiles | PromptFiles) -> int:
        return files.memory_bytes

    def put(self, number: int, files: LoraFiles) -> None:
        raise NotImplementedError

    def remove(self, number: int) -> None:
        raise NotImplementedError

    def put_prompt(self, number: int, files: PromptFiles) -> int:
        assert number not in self.prompts
        self.prompts.add(number)
        return 1000 + number

    def remove_prompt(self, number: int) -> None:
        self.prompts.remove(number)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(save_prompt(tmp_path / "adapters" / "one", tokens=2, hidden=8))


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def registry(memory: Memory, tmp_path: Path, folder: str) -> AdapterRegistry:
    """Return a registry with room for three adapters."""
    return AdapterRegistry(memory, AdapterLimits(3 * BYTES), [tmp_path / "adapters"])


def names(registry: AdapterRegistry) -> list[str]:
    return [use.adapter.name for use in registry.listed()]


def test_the_least_recently_used_one_makes_room(registry: AdapterRegistry, memory: Memory, folder: str) -> None:
    for name in ("a", "b", "c"):
        registry.load(name, folder)
    registry.find(AdapterKind.PROMPT, "a")
    registry.load("d", folder)
    assert names(registry) == ["a", "c", "d"]
    assert len(memory.prompts) == 3
    used = [registry.find(AdapterKind.PROMPT, name) for name in ("a", "c", "d")]
    registry.acquire(used)
    with pytest.raises(
        LimitExceeded, match=f"max_adapter_bytes: 'e' needs {BYTES} bytes, .* have {3 * BYTES} of {3 * BYTES}"
    ):
        registry.load("e", folder)
    registry.release(used)
    registry.load("e", folder)
    assert names(registry) == ["c", "d", "e"]


def test_one_of_the_settings_is_never_evicted(memory: Memory, tmp_path: Path, folder: str) -> None:
    settings = EngineConfig(
        adapters=(f"start={folder}",),
        adapter_dirs=(str(tmp_path / "adapters"),),
        max_adapter_bytes=2 * BYTES,
        device="cpu",
    )
    registry = AdapterRegistry.open(settings, memory)
    registry.load("a", folder)
    registry.load("b", folder)
    assert names(registry) == ["b", "start"]
    registry.close()
    assert memory.prompts == set()


def test_a_replaced_one_keeps_its_name_until_the_new_one_fits(
    registry: AdapterRegistry, memory: Memory, folder: str
) -> None:
    first = registry.load("a", folder)
    memory.refusal = "the tensor x has another shape"
    with pytest.raises(InvalidRequest, match="path: the tensor x has another shape"):
        registry.load("a", folder)
    assert registry.find(AdapterKind.PROMPT, "a") is first
    memory.refusal = ""
    second = registry.load("a", folder)
    assert registry.find(AdapterKind.PROMPT, "a") is second
    assert second.generation > first.generation
    assert len(memory.prompts) == 1
    registry.acquire([second])
    with pytest.raises(AdapterRefused, match="name: 'a' is in use by 1 sequences"):
        registry.load("a", folder)


def test_an_unloaded_one_is_released_by_its_last_user(registry: AdapterRegistry, memory: Memory, folder: str) -> None:
    adapter = registry.load("a", folder)
    for _ in range(2):
        registry.acquire([adapter])
    gone = registry.unload("a")
    with pytest.raises(UnknownAdapter, match="name: there is no adapter 'a'; there are: none"):
        registry.unload("a")
    with pytest.raises(InvalidRequest, match="prompt_adapter: the prompt adapter 'a' was unloaded meanwhile"):
        registry.acquire([adapter])
    registry.load("a", folder)  # the name is free at once
    registry.release([adapter])
    assert not gone.done()
    assert len(memory.prompts) == 2
    registry.release([adapter])
    assert gone.done()
    assert len(memory.prompts) == 1


def test_unknown_names_and_directories_say_what_there_is(
    registry: AdapterRegistry, memory: Memory, tmp_path: Path, folder: str
) -> None:
    for name in ("b", "a"):
        registry.load(name, folder)
    with pytest.raises(InvalidRequest, match="prompt_adapter: there is no prompt adapter 'x'; there are: a, b"):
        registry.find(AdapterKind.PROMPT, "x")
    with pytest.raises(InvalidRequest, match="lora: there is no LoRA adapter 'a'; there are: none"):
        registry.find(AdapterKind.LORA, "a")
    for path in (str(tmp_path), str(tmp_path / "adapters" / ".." / "other"), "/"):
        with pytest.raises(InvalidRequest, match=r"path: .* is not below adapter_dirs"):
            registry.load("x", path)
    (tmp_path / "adapters" / "link").symlink_to(tmp_path)
    with pytest.raises(InvalidRequest, match=r"path: .* is not below adapter_dirs"):
        registry.load("x", str(tmp_path / "adapters" / "link"))
    with pytest.raises(UnknownAdapter, match=r"path: .* has no adapter_config.json"):
        registry.load("x", str(tmp_path / "adapters"))
    with pytest.raises(InvalidRequest, match="name: 'a/b' is not 1 to 64 letters"):
        registry.load("a/b", folder)
    with pytest.raises(AdapterRefused, match="path: this server loads no adapters"):
        AdapterRegistry(memory, AdapterLimits(1)).load("x", folder)
    with pytest.raises(ModelNotSupported, match=r"adapter_dirs: .*nowhere is no directory"):
        AdapterRegistry.open(EngineConfig(adapter_dirs=(str(tmp_path / "nowhere"),), device="cpu"), memory)


def test_loads_uses_and_unloads_of_many_threads_leave_nothing(
    registry: AdapterRegistry, memory: Memory, folder: str
) -> None:
    def work(name: str) -> None:
        for _ in range(20):
            try:
                adapter = registry.load(name, folder)
                registry.acquire([adapter])
            except (AdapterRefused, InvalidRequest, LimitExceeded):
                continue
            registry.release([adapter])

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b", "c", "a", "d")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [use.in_use for use in registry.listed()] == [0] * len(names(registry))
    for name in names(registry):
        registry.unload(name).result(timeout=1)
    assert memory.prompts == set()


@pytest.fixture
def limited(memory: Memory, tmp_path: Path) -> Callable[..., AdapterRegistry]:
    return lambda **limits: AdapterRegistry(memory, AdapterLimits(1 << 20, **limits), [tmp_path / "adapters"])


def test_without_a_free_number_the_least_recently_used_one_of_the_kind_goes(
    limited: Callable[..., AdapterRegistry], memory: Memory, folder: str
) -> None:
    registry = limited(max_adapters=2)
    for name in ("a", "b", "c"):
        registry.load(name, folder)
    assert names(registry) == ["b", "c"]
    assert memory.prompts == {1, 2}
    replaced = registry.load("b", folder)
    assert names(registry) == ["b", "c"]
    registry.acquire([registry.find(AdapterKind.PROMPT, "c"), replaced])
    with pytest.raises(LimitExceeded, match="max_adapters: 2 prompt adapters are loaded, and none of them can be"):
        registry.load("d", folder)
    only = limited(max_adapters=1)
    memory.prompts.clear()
    first = only.load("a", folder)
    assert only.load("a", folder).generation > first.generation, "it replaces the only one"
    assert (names(only), memory.prompts) == (["a"], {1})


def test_an_adapter_larger_than_the_settings_allow_is_refused(
    limited: Callable[..., AdapterRegistry], memory: Memory, folder: str
) -> None:
    with pytest.raises(InvalidRequest, match="path: num_virtual_tokens: is 2, and max_virtual_tokens is 1"):
        limited(max_virtual_tokens=1).load("a", folder)
    assert not memory.prompts
