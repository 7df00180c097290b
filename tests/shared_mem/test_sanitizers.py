"""The flags under gcc's sanitizers and its analyzer: two threads over one mapping, two ends, two processes.

No report is suppressed. Leaks are not looked for in Python: the interpreter ends without freeing what it has.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import shared_mem
from tools.step_plane.mutants import build_flags, copy_sources, run_tests

NATIVE = Path(shared_mem.__file__).parent / "native"
RACE = Path(__file__).with_name("race.c")
ADDRESS = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# TSan does not know fences. Those of flags.c order atomics alone, and rows are ordered by acquire and release.
THREAD = ("-g", "-fsanitize=thread", "-Wno-tsan")
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def runtime(name: str) -> str:
    found = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return str(Path(found).resolve(strict=True))


def build_race(program: Path, sanitizer: tuple[str, ...]) -> None:
    sources = [str(RACE), str(NATIVE / "flags.c")]
    warnings = ["-Wall", "-Wextra", "-Werror"]
    command = [
        "gcc",
        "-O1",
        "-std=gnu11",
        *warnings,
        *sanitizer,
        "-pthread",
        f"-I{NATIVE}",
        *sources,
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True)


def race(program: Path, rounds: int) -> None:
    run = subprocess.run([program, str(rounds)], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def test_two_threads_over_one_mapping_lose_no_row(tmp_path: Path) -> None:
    build_race(tmp_path / "race", ())
    race(tmp_path / "race", 5_000)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", [THREAD, ADDRESS], ids=["thread", "address-undefined"])
def test_two_threads_have_no_report(tmp_path: Path, sanitizer: tuple[str, ...]) -> None:
    build_race(tmp_path / "race", sanitizer)
    race(tmp_path / "race", 100_000)


@pytest.mark.slow
def test_thread_sanitizer_reports_rows_that_no_flag_orders(tmp_path: Path) -> None:
    """The report that the test above would show: with a relaxed sequence nothing orders a row and its reader."""
    old = "at64(answer, 0), a->seq, memory_order_release);"
    copy_sources(tmp_path, [("native/flags.c", old, old.replace("release", "relaxed"))])
    command = ["gcc", "-O1", "-std=gnu11", *THREAD, "-pthread", f"-I{NATIVE}", str(RACE)]
    subprocess.run([*command, str(tmp_path / "shared_mem/native/flags.c"), "-o", str(tmp_path / "race")], check=True)
    reports = ""
    for rows in (2_000, 20_000, 200_000):  # on busy cores the threads of a short run may hardly meet
        run = subprocess.run([tmp_path / "race", str(rows)], capture_output=True, text=True, check=False)
        reports += run.stderr
        if "data race" in reports:
            break
    assert "data race" in reports
    assert run.returncode


@pytest.mark.slow
def test_ends_and_processes_have_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_sources(tmp_path, ())
    build_flags(tmp_path / "shared_mem", *ADDRESS)
    for name, value in OPTIONS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LD_PRELOAD", " ".join(map(runtime, ("libasan.so", "libubsan.so"))))
    assert run_tests(tmp_path, 500.0).failure == ""


@pytest.mark.slow
@pytest.mark.parametrize("source", ["flags.c", "chains.c"])
def test_the_analyzer_is_clean(source: str) -> None:
    command = ["gcc", "-O2", "-std=gnu11", "-fanalyzer", "-Wall", "-Wextra", "-Werror", "-c", "-o", "/dev/null"]
    subprocess.run([*command, str(NATIVE / source)], check=True)
