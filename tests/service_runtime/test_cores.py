"""Cores under control groups, from files in a folder of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from service_runtime.cores import usable_cores
from tests.service_runtime.systems import system


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("", {}, 8),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "250000 100000\n"}, 3),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "10000 100000\n"}, 1),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "9900000 100000\n"}, 8),
        # The tightest of a group and those above it holds.
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "200000 100000"}, 2),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/cpu.max": "100000 100000", "sys/fs/cgroup/a/cpu.max": "200000 100000"}, 1),
        # In a container the path is the host's and the mount starts at our own group.
        ("0::/docker/1234\n", {"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        ("0::/../elsewhere\n", {"sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        (
            "4:memory:/x\n3:cpu,cpuacct:/x\n0::/\n",
            {
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        (
            "3:cpuacct,cpu:/host/path\n",
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "25000\n"},
            2,
        ),
        (
            "3:cpu:/\n",
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
            8,
        ),
        ("3:cpuset:/x\n", {"sys/fs/cgroup/cpuset/x/cpu.cfs_quota_us": "100000\n"}, 8),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "nonsense"}, 8),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "0 0"}, 8),
        ("nonsense\n", {}, 8),
    ],
)
def test_quota(tmp_path: Path, groups: str, files: dict[str, str], cores: int) -> None:
    assert usable_cores(system(tmp_path, groups, files), affinity=8) == cores


def test_nothing_to_read_leaves_the_cpu_set(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, affinity=3) == 3
    assert usable_cores() >= 1
