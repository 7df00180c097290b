"""An entry of the setting `logits_processors`, parsed. Needs no torch, so that a wrong one is known at once.

Invariant: an entry is a value; nothing is imported for it. Not responsible for: loading (see processors/loading.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

MAX_LOADED = 64
"""The most processors of a server."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True)
class ProcessorEntry:
    """`name=module:Class`, or `name=module:Class{...}` with a JSON object."""

    name: str
    module: str
    class_name: str
    options: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the entry. Raises ValueError that quotes it."""
        name, _, rest = text.partition("=")
        path, brace, options = rest.partition("{")
        module, _, class_name = path.strip().partition(":")
        if not _NAME.fullmatch(name) or not _PATH.fullmatch(module) or not class_name.isidentifier():
            raise ValueError(f"{text!r} is not NAME=MODULE:CLASS, optionally followed by a JSON object")
        try:
            parsed = json.loads(brace + options) if brace else {}
        except ValueError as error:
            raise ValueError(f"{name}: the options are not a JSON object: {error}") from None
        return cls(name, module, class_name, parsed)
