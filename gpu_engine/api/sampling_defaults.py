"""The sampling parameters that a model's generation_config.json sets for requests that leave them out.

Invariant: a default has a value that a request may have. Not responsible for: which file counts (model/loader.py), or
the other checks of a request (front/validation.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

MAX_TEMPERATURE = 100.0
MAX_REPETITION = 10.0

Defaults = Mapping[str, float]
"""Values by name of the field of `SamplingParams`."""

_ABOVE_0 = math.nextafter(0.0, 1.0)
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, MAX_TEMPERATURE),
    "top_p": (_ABOVE_0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (_ABOVE_0, MAX_REPETITION),
}
FILE = "generation_config.json"


def read_defaults(folder: Path) -> dict[str, float]:
    """Return the defaults of a directory's generation_config.json; none without the file.

    Raises ValueError, with one line that names the file, for what is no such file.
    """
    path = folder / FILE
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(whole, dict):
        raise ValueError(f"{path} is no JSON object")
    found = {name: whole[name] for name in _BOUNDS if whole.get(name) is not None}
    for name, value in found.items():
        low, high = _BOUNDS[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (name == "top_k" and value != int(value)):
            raise ValueError(
                f"{path}: {name} is {value!r}, which no request may have; generation_config=none ignores it"
            )
    return found


def described(defaults: Defaults) -> str:
    """Return the defaults as words, for the log."""
    return ", ".join(f"{name} {value:g}" for name, value in defaults.items())
