"""What the name of a model may be: checked without torch, so that a wrong path is refused at once.

Not responsible for: fetching or reading a model (hub.py, loader.py).
"""

from __future__ import annotations

import re
from pathlib import Path

from gpu_engine.api.engine_settings import EMBEDDED_MODEL

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""owner/name"""


def check_name(name: str, setting: str) -> None:
    """Raise FileNotFoundError, with one line, for a name that is no path that exists and cannot be an id of the hub."""
    if name and name != EMBEDDED_MODEL and not Path(name).exists() and not _ID.fullmatch(name):
        raise FileNotFoundError(
            f"{setting}: {name} is neither a directory, a GGUF file, a hub id (owner/name) nor 'embedded'"
        )
