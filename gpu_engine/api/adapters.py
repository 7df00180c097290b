"""Adapters as values: small trained weights in addition to the model's, which a request names.

Invariant: two adapters never have the same `generation`, so whatever is cached by it belongs to one set of weights.
Not responsible for: reading and holding the weights (model/adapters/), checking a request (front/validation.py).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_RANK = 256
"""Largest rank of a LoRA adapter."""
MAX_ADAPTERS = 255
"""Most adapters of each kind at once."""
MAX_VIRTUAL_TOKENS = 1024
"""Most virtual tokens of a prompt adapter."""

DEVICE_ADAPTERS, DEVICE_RANK, DEVICE_VIRTUAL_TOKENS = 8, 16, 128
"""The defaults on a GPU, where memory for all adapters is allocated at the start."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class AdapterKind(enum.Enum):
    """What an adapter is; the values equal the proto enum's."""

    LORA = 1
    PROMPT = 2


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One loaded adapter."""

    name: str
    kind: AdapterKind
    path: str
    """Its directory."""
    size: int
    """The largest rank of a LoRA adapter, or the virtual tokens of a prompt adapter."""
    memory_bytes: int
    number: int
    """From 1 on: its place among the loaded adapters of its kind. Another adapter may have it later."""
    generation: int
    """Counts the adapters that this process has loaded; this one included."""
    at_start: bool
    """The settings name it: it is never evicted."""
    first_token: int = 0
    """A prompt adapter's first virtual token; its id comes after the vocabulary."""

    @property
    def virtual_ids(self) -> range:
        """The ids of a prompt adapter's virtual tokens."""
        return range(self.first_token, self.first_token + self.size)


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What the adapters of a server may be. The fields are called after the settings."""

    max_adapter_bytes: int
    """Memory of all adapters."""
    max_adapters: int = MAX_ADAPTERS
    """The most adapters of each kind at once."""
    max_lora_rank: int = MAX_RANK
    max_virtual_tokens: int = MAX_VIRTUAL_TOKENS
    """The most virtual tokens of one prompt adapter."""


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """A loaded adapter, and the sequences that use it now."""

    adapter: Adapter
    in_use: int


def named_adapters(parts: Iterable[str]) -> dict[str, str]:
    """Return name -> directory of the setting `adapters`. Raises ValueError."""
    found: dict[str, str] = {}
    for part in parts:
        name, sign, folder = part.partition("=")
        if not sign or not folder:
            raise ValueError(f"{part!r} is not NAME=DIRECTORY")
        check_name(name)
        if name in found:
            raise ValueError(f"{name!r} is named twice")
        found[name] = folder
    return found


def check_name(name: str) -> None:
    """Raise ValueError unless `name` is 1 to 64 letters, digits, `_`, `-` and `.`."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not 1 to 64 letters, digits, '_', '-' and '.'")
