"""Processes that end with their parent."""

from __future__ import annotations

import psutil


def gone(pid: int, timeout_s: float = 20.0) -> bool:
    try:
        psutil.Process(pid).wait(timeout_s)
    except psutil.NoSuchProcess:
        pass
    except psutil.TimeoutExpired:
        return False
    return True
