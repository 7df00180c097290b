"""The command of a worker that pretends to compile."""

from __future__ import annotations

import sys
from pathlib import Path

PRETEND = (sys.executable, str(Path(__file__).with_name("pretend_worker.py")))
