"""Counts and times of the requests of this service, as Triton counts them for each model.

Invariant: a request counts once, when it ends: as a success with the times of its sequences, or as a failure. A request
that its client cancelled counts as neither.

Not responsible for: the engine's own counters and metrics (see gpu_engine/ops).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from gpu_engine.doors.kserve.infer_responses import VERSION
from gpu_engine.front.text_output import SequenceOutput
from protos.kserve.v2 import inference_pb2 as pb


class Statistics:
    """Statistics of one model. Used on the event loop."""

    def __init__(self) -> None:
        self._times = pb.InferStatistics()
        self._last_ms = 0
        self._sequences = 0
        self._steps = 0

    def arrived(self) -> None:
        """Note that a request has arrived."""
        self._last_ms = time.time_ns() // 1_000_000

    def _sequence(self, output: SequenceOutput) -> None:
        telemetry = output.telemetry
        self._sequences += 1
        self._steps += telemetry.steps
        stages = (output.request.arrived_s, telemetry.scheduled_s, telemetry.prefilled_s, output.finished_s)
        times = (self._times.queue, self._times.compute_input, self._times.compute_infer)
        for duration, begin_s, end_s in zip(times, stages, stages[1:], strict=False):
            if begin_s and end_s:  # a sequence may end before it gets a slot
                _add(duration, end_s - begin_s)
        _add(self._times.cache_hit if telemetry.cached_tokens else self._times.cache_miss, 0.0)

    def succeeded(self, seconds: float, sequences: Sequence[SequenceOutput]) -> None:
        """Count a request, and the times of its sequences, which have all ended."""
        _add(self._times.success, seconds)
        for output in sequences:
            self._sequence(output)

    def failed(self, seconds: float) -> None:
        """Count a request that was refused or that failed."""
        _add(self._times.fail, seconds)

    def message(self, name: str) -> pb.ModelStatistics:
        """Return the statistics, under the model's name that the client used."""
        return pb.ModelStatistics(
            name=name,
            version=VERSION,
            last_inference=self._last_ms,
            inference_count=self._sequences,
            execution_count=self._steps,
            inference_stats=self._times,
        )

    def __repr__(self) -> str:
        return f"<Statistics {self._times.success.count} answered, {self._times.fail.count} failed>"


def _add(duration: pb.StatisticDuration, seconds: float) -> None:
    duration.count += 1
    duration.ns += max(0, round(seconds * 1e9))
