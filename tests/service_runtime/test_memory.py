"""The memory under control groups, from files in a folder of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from service_runtime.memory import available_memory
from tests.service_runtime.systems import system

MACHINE = {"proc/meminfo": "MemTotal: 64000 kB\nMemAvailable:  1000 kB\n"}
GROUP = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("groups", "files", "available"),
    [
        ("", {}, None),
        ("0::/\n", MACHINE, 1_024_000),
        ("0::/\n", MACHINE | {f"{GROUP}/memory.max": "max\n", f"{GROUP}/memory.current": "5\n"}, 1_024_000),
        ("0::/\n", MACHINE | {f"{GROUP}/memory.max": "9000\n", f"{GROUP}/memory.current": "5000\n"}, 4000),
        # Files that were read, and that the kernel can drop, take nothing away.
        (
            "0::/a\n",
            MACHINE
            | {f"{GROUP}/a/memory.max": "9000", f"{GROUP}/a/memory.current": "5000"}
            | {f"{GROUP}/a/memory.stat": "anon 10\ninactive_file 2000\nactive_file 1000\n"},
            7000,
        ),
        ("0::/\n", {f"{GROUP}/memory.max": "9000\n", f"{GROUP}/memory.current": "9500\n"}, 0),
        (
            "4:memory:/x\n",
            {f"{GROUP}/memory/x/memory.limit_in_bytes": "800", f"{GROUP}/memory/x/memory.usage_in_bytes": "300"},
            500,
        ),
        # Version 1 counts the groups below in the use, and in the fields with `total_`.
        (
            "4:memory:/x\n",
            {f"{GROUP}/memory/x/memory.limit_in_bytes": "800", f"{GROUP}/memory/x/memory.usage_in_bytes": "300"}
            | {f"{GROUP}/memory/x/memory.stat": "inactive_file 10\ntotal_inactive_file 60\ntotal_active_file 40\n"},
            600,
        ),
    ],
)
def test_the_tightest_of_the_machine_and_its_groups_holds(
    tmp_path: Path, groups: str, files: dict[str, str], available: int | None
) -> None:
    assert available_memory(system(tmp_path, groups, files)) == available


def test_this_machine_has_memory() -> None:
    assert (available_memory() or 0) > 0
