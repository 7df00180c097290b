"""Artifacts on disk: the same bytes, or nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grammar_service.compile.disk_cache import FORMAT, SCAN_INTERVAL, SUFFIX, DiskCache, artifact_key
from grammar_service.grammar.value import Kind, Whitespace, parse

A, B = "a" * 64, "b" * 64


def cache(folder: Path, max_bytes: int = 1 << 20) -> DiskCache:
    return DiskCache(folder / "cache", max_bytes)


def only_file(folder: Path) -> Path:
    (path,) = (folder / "cache").iterdir()
    return path


def test_a_stored_artifact_is_found_by_the_next_process(tmp_path: Path) -> None:
    cache(tmp_path).put(A, b"artifact\0\n")
    again = cache(tmp_path)
    assert again.get(A) == b"artifact\0\n"
    assert again.get(B) is None
    assert (again.hits, again.damaged) == (1, 0)
    assert os.stat(tmp_path / "cache").st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content + b"x",
        lambda content: b"",
        lambda content: content.replace(FORMAT.encode(), b"lockstep-artifact-0"),
        lambda content: content[:-3] + b"???",
        lambda content: b"\x80\x04pickle",
    ],
)
def test_a_damaged_or_foreign_file_is_removed(tmp_path: Path, damage: object) -> None:
    made = cache(tmp_path)
    made.put(A, b"the artifact")
    path = only_file(tmp_path)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert made.get(A) is None
    assert made.damaged == 1
    assert not path.exists()
    made.put(A, b"the artifact")
    assert made.get(A) == b"the artifact"


def test_a_file_under_another_name_is_foreign(tmp_path: Path) -> None:
    made = cache(tmp_path)
    made.put(A, b"the artifact")
    only_file(tmp_path).rename(tmp_path / "cache" / (B + SUFFIX))
    assert made.get(B) is None


def test_the_least_recently_used_artifacts_are_removed(tmp_path: Path) -> None:
    made = cache(tmp_path, max_bytes=10_000)
    keys = [f"{i:064d}" for i in range(4)]
    for i, key in enumerate(keys[:3]):
        made.put(key, bytes(3000))
        os.utime(tmp_path / "cache" / (key + SUFFIX), ns=(i, i))
    assert made.get(keys[0]) is not None
    made.put(keys[3], bytes(3000))
    assert [made.get(key) is not None for key in keys] == [True, False, True, True]
    made.put(A, bytes(20_000))
    assert made.get(A) is None


def test_the_bound_holds_between_two_scans_and_with_older_files(tmp_path: Path) -> None:
    before = cache(tmp_path, max_bytes=1 << 20)
    for i in range(8):
        before.put(f"a{i:063d}", bytes(1000))
    made = cache(tmp_path, max_bytes=10_000)
    for i in range(2 * SCAN_INTERVAL + 3):
        made.put(f"b{i:063d}", bytes(1000))
        assert sum(path.stat().st_size for path in (tmp_path / "cache").iterdir()) <= 10_000
    assert made.get(f"b{2 * SCAN_INTERVAL + 2:063d}") is not None


def test_foreign_files_in_the_directory_stay(tmp_path: Path) -> None:
    made = cache(tmp_path, max_bytes=1000)
    other = tmp_path / "cache" / "notes.txt"
    other.write_bytes(bytes(5000))
    made.put(A, bytes(500))
    made.put(B, bytes(500))
    assert other.exists()
    assert [made.get(A), made.get(B)].count(None) == 1


def test_a_directory_that_every_user_may_write_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(PermissionError, match="cache_dir"):
        cache(tmp_path)


def test_a_read_only_directory_disables_only_the_cache(tmp_path: Path) -> None:
    made = cache(tmp_path)
    (tmp_path / "cache").rmdir()
    made.put(A, b"x")
    assert made.get(A) is None


def test_a_key_depends_on_everything_that_an_artifact_depends_on() -> None:
    a = parse(Kind.REGEX, "a", Whitespace.ANY)
    b = parse(Kind.REGEX, "b", Whitespace.ANY)
    keys = {
        artifact_key(a, "llguidance", "v1", allow_unenforced=False),
        artifact_key(b, "llguidance", "v1", allow_unenforced=False),
        artifact_key(a, "llguidance", "v2", allow_unenforced=False),
        artifact_key(a, "llguidance", "v1", allow_unenforced=True),
        artifact_key(parse(Kind.CHOICE, '["a"]', Whitespace.ANY), "llguidance", "v1", allow_unenforced=False),
    }
    assert len(keys) == 5
    assert FORMAT


def test_clearing_removes_every_artifact_and_leaves_other_files(tmp_path: Path) -> None:
    made = cache(tmp_path)
    made.put(A, b"one")
    made.put(B, b"two")
    size = sum(path.stat().st_size for path in (tmp_path / "cache").iterdir())
    (tmp_path / "cache/notes.txt").write_text("not ours")
    (tmp_path / f"cache/.written{SUFFIX}").write_text("an artifact that another process is writing")
    assert made.clear() == (2, size)
    assert (made.get(A), made.get(B)) == (None, None)
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {"notes.txt", f".written{SUFFIX}"}
    assert made.clear() == (0, 0)
    made.put(A, b"again")
    assert made.get(A) == b"again"
