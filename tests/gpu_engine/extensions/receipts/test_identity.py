"""The digests of a model: of whole files, read once, and never of a file that has changed."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from gpu_engine.extensions.receipts.identity import FilesChanged, ModelFiles, tokenizer_digest
from tests.fakes import ByteTokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "b.safetensors", "a.safetensors", "notes.txt"):
        (folder / name).write_bytes(name.encode() * 400_000)
    return folder


def test_a_folders_digest_is_of_its_configuration_and_weights(folder: Path) -> None:
    parts = [(folder / name).read_bytes() for name in ("config.json", "a.safetensors", "b.safetensors")]
    joined = "\n".join(hashlib.sha256(part).hexdigest() for part in parts)
    digest = ModelFiles.of(folder).digest(None)
    assert digest == hashlib.sha256(joined.encode()).hexdigest()
    (folder / "notes.txt").write_text("other")
    assert ModelFiles.of(folder).digest(None) == digest
    (folder / "b.safetensors").write_text("other")
    assert ModelFiles.of(folder).digest(None) != digest


def test_a_gguf_files_digest_is_of_all_its_parts(tmp_path: Path) -> None:
    paths = [tmp_path / f"m-{number:05}-of-00002.gguf" for number in (1, 2)]
    for path in paths:
        path.write_text(path.name)
    digest = ModelFiles.of(paths[0]).digest(None)
    paths[1].write_text("other")
    assert ModelFiles.of(paths[0]).digest(None) != digest
    paths[1].unlink()
    with pytest.raises(FileNotFoundError):
        ModelFiles.of(paths[0])
    assert ModelFiles.of(None).digest(None) == ""


def test_a_second_start_reads_only_files_that_changed(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "kept.json"
    digest = ModelFiles.of(folder).digest(kept)
    known = json.loads(kept.read_text())
    assert len(known) == 3
    # What is kept is believed: a wrong value shows that the file was not read.
    wrong = {key: "0" * 64 if "a.safetensors" in key else value for key, value in known.items()}
    kept.write_text(json.dumps(wrong))
    assert ModelFiles.of(folder).digest(kept) != digest
    path = folder / "a.safetensors"
    os.utime(path, ns=(0, 0))
    assert ModelFiles.of(folder).digest(kept) == digest
    for broken in ("", "[]", "{"):
        kept.write_text(broken)
        assert ModelFiles.of(folder).digest(kept) == digest
    kept.unlink()
    kept.mkdir()  # cannot be written
    assert ModelFiles.of(folder).digest(kept) == digest


@pytest.mark.parametrize("with_kept", [False, True])
def test_a_file_that_changed_since_the_load_has_no_digest(folder: Path, tmp_path: Path, with_kept: bool) -> None:
    kept = tmp_path / "kept.json" if with_kept else None
    files = ModelFiles.of(folder)
    files.digest(kept)
    other = folder / "other"
    other.write_bytes((folder / "b.safetensors").read_bytes())
    other.rename(folder / "b.safetensors")
    with pytest.raises(FilesChanged, match=r"b\.safetensors has changed since the model was loaded"):
        files.digest(kept)


def test_a_tokenizers_digest_has_its_chat_template() -> None:
    one, same, other = (ByteTokenizer(chat_template=template) for template in ("a", "a", "b"))
    assert tokenizer_digest(one) == tokenizer_digest(same) != tokenizer_digest(other)
