"""Kernels that Triton alone has. A CPU-only install without the dev extra has no Triton."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
