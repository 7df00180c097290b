"""The result of a compile worker: the library's serialised grammar, and the completion plan.

Invariant: `pack` and `unpack` are inverse. No pickle: the packed form is the plan as one line of JSON, then the
library's bytes.

Not responsible for: the meaning of the bytes (see backends/), of the plan (see completion/plan.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Artifact:
    """On its way from a worker or the disk to the loader. Its contents are not checked."""

    data: bytes
    plan: Any
    """Argument of `CompletionPlan.from_wire`."""
    compile_ms: float = 0.0
    """Time of only the compilation, without queue, proof and transport; 0: the artifact came from the disk."""

    def pack(self) -> bytes:
        """Return the artifact as bytes, without the time."""
        return json.dumps(self.plan).encode() + b"\n" + self.data

    @staticmethod
    def unpack(packed: bytes) -> Artifact:
        """Return the artifact that `pack` was called on. Raises ValueError for any other bytes."""
        at = packed.index(b"\n")
        return Artifact(packed[at + 1 :], json.loads(packed[:at]))
