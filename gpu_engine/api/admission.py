"""How many sequences an engine takes at once: the one rule that the engine, its doors and the tenants' shares ask.

Invariant: pure; a sequence counts from its submission to its end.

Not responsible for: what each tenant may have of it (extensions/tenants/accounts.py), compilations (sidecar/).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.errors import LimitExceeded


@dataclass(frozen=True, slots=True)
class EngineAdmission:
    """The limit of one engine."""

    max_running: int
    """Slots."""
    max_waiting: int
    """Sequences that wait for a slot."""

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        """Return the limit that the settings state."""
        return cls(config.max_batch_size, config.max_queue_size)

    @property
    def max_sequences(self) -> int:
        """The most sequences that run or wait."""
        return self.max_running + self.max_waiting

    def admit(self, live: int) -> None:
        """Raise LimitExceeded unless one more sequence fits next to `live` ones, which run or wait."""
        if live >= self.max_sequences:
            raise LimitExceeded(f"{live} sequences run or wait; max_queue_size = {self.max_waiting}")

    def admit_to_call(self, unfinished: int) -> None:
        """Raise LimitExceeded unless one call may have one more request next to `unfinished` ones, which run, wait, or
        have responses that the client has not read."""
        if unfinished >= self.max_sequences:
            raise LimitExceeded(
                f"{self.max_sequences} requests of this call run, wait, or have responses that were not read; "
                f"max_queue_size = {self.max_waiting}"
            )
