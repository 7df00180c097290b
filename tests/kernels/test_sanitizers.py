"""The engine's C code under gcc's sanitizers and its analyzer.

The vector kernels are not under the analyzer: gcc does not get through them in a quarter of an hour. Under UBSan each
vector unit has its own library, without optimisation: its checks are a branch each in code that is inlined
everywhere, of which gcc's optimiser does not come to an end.

No report is suppressed. Leaks are not looked for: the interpreter and torch end without freeing what they have.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kernels.library import native
from tests.kernels.library_copy import NATIVE, SCALAR, build, package_copy, set_level

SOURCES = sorted(path.name for path in NATIVE.glob("*.c"))
TEAM_RACE = Path(__file__).with_name("team_race.c")
ADDRESS = ("-g1", "-fsanitize=address", "-fno-omit-frame-pointer")
UNDEFINED = ("-fsanitize=undefined", "-fno-sanitize-recover=all")
TESTS = (
    *("test_accept.py", "test_blocks.py", "test_experts.py", "test_fused.py", "test_fused_attention.py"),
    *("test_latent.py", "test_layer_forms.py", "test_low_rank.py", "test_mixture.py"),
    *("test_paged_attention.py", "test_recurrent.py", "test_suffix.py", "test_team.py"),
    "test_unpack.py",
)
OF_EVERY_UNIT = tuple(
    f"tests/kernels/test_blocks.py::test_{name}"
    for name in (
        "every_variant_that_this_cpu_runs_gives_the_same_bits",
        "products_over_codes_have_the_bits_of_those_over_their_8_bits",
    )
)
"""They call the kernels of units that a library of one unit has not."""
LEVELS = {"baseline": 1, "x86_64_v3": 3, "x86_64_v4": 4, "x86_64_vnni": 5, "x86_64_avxvnni": 6}
"""Vector unit -> the level at which dispatch.c calls its kernels."""
pytestmark = [pytest.mark.slow, pytest.mark.sanitizers]


def build_team_race(folder: Path, team: Path) -> Path:
    program = folder / "team_race"
    options = ["-O1", "-g", "-std=gnu11", "-fsanitize=thread", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{NATIVE}"]
    subprocess.run(["gcc", *options, str(TEAM_RACE), str(team), "-o", str(program)], check=True)
    return program


def test_calls_of_several_threads_have_no_data_race(tmp_path: Path) -> None:
    program = build_team_race(tmp_path, NATIVE / "team.c")
    done = subprocess.run([program, "20000"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_thread_sanitizer_reports_loops_that_nothing_orders(tmp_path: Path) -> None:
    """The report that the test above would show: the end of a loop is published, and taken, without an order."""
    text = (NATIVE / "team.c").read_text()
    changed = text.replace("memory_order_release", "memory_order_relaxed")
    changed = changed.replace("memory_order_acq_rel", "memory_order_relaxed")
    changed = changed.replace("memory_order_acquire", "memory_order_relaxed")
    assert changed != text
    (tmp_path / "team.c").write_text(changed)
    program = build_team_race(tmp_path, tmp_path / "team.c")
    done = subprocess.run([program, "20000"], capture_output=True, text=True, check=False)
    assert "data race" in done.stderr
    assert done.returncode


def test_launches_drafts_and_the_team_have_no_report(root: Path, tmp_path: Path) -> None:
    """A library of these alone: no test here calls a kernel of another source."""
    tests = (
        "tests/kernels/test_suffix.py",
        "tests/kernels/test_unpack.py",
        "tests/gpu_engine/step/test_native_launches.py",
    )
    run_over_copy(root, tmp_path, SCALAR, ("-O1", *ADDRESS, *UNDEFINED), tests)


@pytest.mark.parametrize(("variant", "level"), LEVELS.items())
def test_kernels_of_a_vector_unit_have_no_undefined_behaviour(
    root: Path, tmp_path: Path, variant: str, level: int
) -> None:
    flag = "avx_vnni" if variant == "x86_64_avxvnni" else ""
    if int(native().lockstep_cpu_level()) < min(level, 5) or flag not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this processor does not run {variant}")
    tests = [f"tests/kernels/{name}" for name in TESTS]
    # Products over blocks, which no CPU at the first level calls, are linked all the same.
    with_variant = [f"{variant}.c", *(["x86_64_v3.c"] if level == 1 else []), "dispatch.c", *SCALAR]
    tests += [f"--deselect={name}" for name in OF_EVERY_UNIT]
    run_over_copy(root, tmp_path, with_variant, ("-O1", "-g1", *UNDEFINED), tests, level=level)


@pytest.fixture(scope="module")
def with_addresses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a copy of the package with AddressSanitizer, whose build takes as long as its tests."""
    folder = tmp_path_factory.mktemp("addresses")
    build(package_copy(folder), SOURCES, ("-O1", *ADDRESS))
    return folder


@pytest.mark.parametrize("half", [0, 1])
def test_kernels_have_no_bad_access(root: Path, with_addresses: Path, half: int) -> None:
    run_with_copy(root, with_addresses, [f"tests/kernels/{name}" for name in TESTS[half::2]])


def run_over_copy(
    root: Path, folder: Path, sources: Sequence[str], options: Sequence[str], tests: Sequence[str], level: int = 0
) -> None:
    """Run tests over a copy of the package whose library is built of `sources` with these options.

    `level`: that of lockstep_cpu_level, whose kernels the library calls, and has alone; 0: the processor's.
    """
    package = package_copy(folder)
    if level:
        set_level(package / "native" / "dispatch.c", level)
    build(package, sources, options)
    run_with_copy(root, folder, tests)


def run_with_copy(root: Path, folder: Path, tests: Sequence[str]) -> None:
    """Run tests over the copy of the package in `folder`, whose library is built."""
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "LD_PRELOAD": " ".join(runtime(name) for name in ("libasan.so", "libubsan.so")),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        "-k",
        "not triton",
    ]
    # The copy of the package comes before the repository's.
    command += ["-o", f"pythonpath={folder} . client", *tests]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def runtime(name: str) -> str:
    found = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return str(Path(found.stdout.strip()).resolve(strict=True))


@pytest.mark.parametrize("source", [*SCALAR, "dispatch.c"])
def test_the_analyzer_is_clean(source: str) -> None:
    command = [
        "gcc",
        "-O1",
        "-std=gnu11",
        "-fopenmp",
        "-fanalyzer",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-c",
        "-o",
        "/dev/null",
        str(NATIVE / source),
    ]
    subprocess.run(command, check=True)
