"""What a device can do: bytes and operations a second, and what each launch, collective and host's work costs.

Invariant: each number is the vendor's own, or says which measurement of docs/log/ it was fitted to; a fitted number
predicts nothing about that measurement.
Not responsible for: what a step needs of it (see step_time.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a message between two ranks costs: `alpha_s` + bytes / `bandwidth` (Hockney 1994)."""

    name: str
    alpha_s: float
    """Latency of one message, seconds."""
    bandwidth: float
    """Bytes a second in one direction."""

    def all_reduce_s(self, num_bytes: float, ranks: int) -> float:
        """Return the seconds of a ring's all-reduce: 2 (p - 1) messages of n / p bytes (Thakur et al. 2005)."""
        if ranks == 1:
            return 0.0
        return 2 * (ranks - 1) * (self.alpha_s + num_bytes / ranks / self.bandwidth)

    def all_gather_s(self, num_bytes: float, ranks: int) -> float:
        """Return the seconds of a ring's all-gather of `num_bytes` in all: p - 1 messages of n / p bytes."""
        if ranks == 1:
            return 0.0
        return (ranks - 1) * (self.alpha_s + num_bytes / ranks / self.bandwidth)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One rank's device. Rates are what programs reach, where that was measured, else the vendor's."""

    name: str
    bandwidth: float
    """Bytes a second that a program reads."""
    peak: float
    """Operations a second of products of many rows, two for each multiplication."""
    attention_peak: float
    """Operations a second of attention over many rows."""
    memory: float
    """Bytes."""
    node_s: float
    """Seconds between two launches of a captured graph that are there whatever the launch does; 0 on a CPU."""
    step_s: float
    """Seconds of a step that no rank's device works: launch, reading outputs, Python."""
    lane_s: float
    """The same, for each sequence of the step."""
    rows_s: float
    """Seconds of everything in a row that is neither a product nor attention, for each number of its residual and
    MLP."""
    await_s: float
    """Seconds exposed by one post and the wait for its rows, when the rows are there in time."""
    on_cpu: bool = False
    overlaps: bool = True
    """Products read weights while they compute. On the measured CPU they do not: bytes and operations are added,
    which fits 8
    and 24 rows where the larger of the two is 40% too small."""
    link: Link
    source: str
    """Where the numbers are from."""


NVLINK4 = Link(name="NVLink 4", alpha_s=3e-6, bandwidth=450e9)
"""900 GB/s in both directions by NVIDIA's data sheet of the H100. The latency is an assumption; no two GPUs were
here."""
SHARED_MEMORY = Link(name="gloo on one host", alpha_s=100e-6, bandwidth=2e9)
"""Both numbers are assumptions."""

DEVICES = {
    device.name: device
    for device in (
        Device(
            name="h200",
            bandwidth=4.15e12,
            peak=989e12,
            attention_peak=400e12,
            memory=141e9,
            node_s=2.87e-6,
            step_s=0.0,
            lane_s=0.0,
            rows_s=0.0,
            await_s=18e-6,
            link=NVLINK4,
            source="bandwidth, node and await: docs/log/, 'the first runs on a device'; peak: data sheet",
        ),
        Device(
            name="h100",
            bandwidth=3.35e12 * 0.865,
            peak=989e12,
            attention_peak=400e12,
            memory=80e9,
            node_s=2.87e-6,
            step_s=0.0,
            lane_s=0.0,
            rows_s=0.0,
            await_s=18e-6,
            link=NVLINK4,
            source="data sheet of the SXM5 board, bandwidth times the share of it that the H200 reached; not measured",
        ),
        Device(
            name="a100",
            bandwidth=2.039e12 * 0.865,
            peak=312e12,
            attention_peak=130e12,
            memory=80e9,
            node_s=2.87e-6,
            step_s=0.0,
            lane_s=0.0,
            rows_s=0.0,
            await_s=18e-6,
            link=Link(name="NVLink 3", alpha_s=3e-6, bandwidth=300e9),
            source="data sheet, SXM4, 80 GB; bandwidth times the share of it that the H200 reached; not measured",
        ),
        Device(
            name="zen5-2",
            bandwidth=53.0e9,
            peak=1.387e12,
            attention_peak=0.2216e12,
            memory=23e9,
            node_s=0.0,
            step_s=1.43e-3,
            lane_s=0.39e-3,
            rows_s=6.9e-11,
            await_s=0.0,
            on_cpu=True,
            overlaps=False,
            link=SHARED_MEMORY,
            source="two cores of an AMD EPYC (Zen 5): peak is 2 x 7.76 dot products a nanosecond x 128 operations x "
            "70%; bandwidth is fitted to a forward of one row, attention and rows to the prefill of 256 tokens, step "
            "and lane to the profiled steps of 1 and 24 rows, all of docs/log/",
        ),
    )
}
