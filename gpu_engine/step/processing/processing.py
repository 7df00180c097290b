"""The logits processors of one step program: calls of all kinds, and the capture of one kind.

Invariant: on a stream that runs at once nothing is captured, and the host calls every kind. Not responsible for:
loading (see processors/loading.py), the choice between the two (see device/graphs.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from gpu_engine.api.processors import Processors
from gpu_engine.step.buffers import SlotBuffers
from gpu_engine.step.launches import StepLaunches
from gpu_engine.step.processing.captured import CapturedProcessing, CapturedSlots
from gpu_engine.step.processing.host import HostProcessing
from gpu_engine.step.stream import Stream


@dataclass(frozen=True, slots=True, eq=False)
class Processing:
    """The logits processors of a server that has some."""

    host: HostProcessing
    captured: CapturedProcessing | None
    """None: the stream runs at once, or no processor can be captured."""

    @classmethod
    def of(cls, processors: Processors, stream: Stream, launches: StepLaunches, slot: SlotBuffers) -> Self | None:
        """Return it for a program over these; None: the server has no processors."""
        if not processors.loaded:
            return None
        num_slots, num_rows = slot.drafts_SR.shape
        host = HostProcessing(stream, launches, num_rows)
        if stream.runs_at_once or not processors.captured:
            return cls(host, None)
        slots = CapturedSlots.allocate(processors, num_slots, stream.device)
        return cls(host, CapturedProcessing(processors, slots))

    @property
    def slots(self) -> CapturedSlots | None:
        """What the slots' sequences ask of the captured processors; None: nothing is captured."""
        return None if self.captured is None else self.captured.slots
