"""What a compile worker made of a grammar: the library's bytes, and what is known of the shortest answers.

Invariant: `pack` and `unpack` are inverse; no pickle. As bytes: the plan as one line of JSON, then the library's. Not
here: what the bytes mean (the backends), what the plan means (closing.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Artifact:
    """On its way from a worker, or from the disk, to the loader. Nothing in it was checked."""

    data: bytes
    plan: Any
    """For `CompletionPlan.from_wire`."""
    compile_ms: float = 0.0
    """Time of the compilation itself, without waiting, proof and transport; 0: it came from the disk."""

    def pack(self) -> bytes:
        """Return it as bytes, without the time."""
        return json.dumps(self.plan).encode() + b"\n" + self.data

    @staticmethod
    def unpack(packed: bytes) -> Artifact:
        """Return what was packed. Raises ValueError for anything else."""
        at = packed.index(b"\n")
        return Artifact(packed[at + 1 :], json.loads(packed[:at]))
