"""The number of cores that this process may use: its CPU set, and the CPU quota of every control group above it.

The invariant: the number is at least 1 and at most the size of the CPU set.

Not responsible for: the use of the cores, or where control groups are (control_groups.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from service_runtime.control_groups import folders, read


def usable_cores(root: Path = Path("/"), affinity: int | None = None) -> int:
    """Return the number of usable cores; a quota is rounded up.

    Args:
        root: the directory that holds `proc` and `sys`.
        affinity: size of the CPU set; None asks the kernel.
    """
    cores = len(os.sched_getaffinity(0)) if affinity is None else affinity
    return max(1, min([cores, *_quotas(root)]))


def _quotas(root: Path) -> Iterator[int]:
    for version, folder in folders(root, "cpu"):
        if version == 2:
            quota, _, period = read(folder / "cpu.max").partition(" ")
        else:
            quota, period = read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us")
        yield from _rounded_up(quota, period)


def _rounded_up(quota: str, period: str) -> Iterator[int]:
    # "max" and -1 mean no limit.
    if quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0:
        yield -(-int(quota) // int(period))
