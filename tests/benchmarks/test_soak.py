"""The soak finds what was left behind, and sends requests of every kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import pytest

from benchmarks.faults import soak
from benchmarks.faults.footprint import Process, Sample
from benchmarks.faults.soak import MORE_THREADS, Seen, slower, verdict
from benchmarks.faults.traffic import KINDS, LEAST_GUIDED, Traffic
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc

RUNNING = (
    Process("engine", 1, 900.0, 40, 30),
    Process("grammar", 2, 200.0, 20, 5),
    Process("gateway", 3, 100.0, 12, 4),
)
REST = Sample(10.0, RUNNING, pb.GetStatsResponse(grammar_ready=True))


def flat() -> Seen:
    samples = [replace(REST, seconds=float(second)) for second in range(61)]
    return Seen(canaries=[(second, 100.0) for second in range(9)], samples=samples)


def changed(role: str, **values: Any) -> Sample:
    """Return the sample at rest with one process that differs."""
    return replace(REST, processes=tuple(replace(p, **values) if p.role == role else p for p in RUNNING))


def test_a_server_that_stays_as_it_was_is_flat() -> None:
    assert verdict(REST, changed("engine", memory_mib=920.0, threads=29), flat(), 48.0) == []


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (changed("grammar", descriptors=21), "grammar: 20 descriptors became 21"),
        (changed("gateway", threads=5 + MORE_THREADS), f"gateway: 4 threads became {5 + MORE_THREADS}"),
        (replace(REST, processes=RUNNING[:1]), "grammar: there is no process"),
        (replace(REST, stats=pb.GetStatsResponse(pages_used=3)), "at rest, 3 pages_used are left"),
        (replace(REST, stats=pb.GetStatsResponse(matchers=1)), "at rest, 1 matchers are left"),
    ],
)
def test_what_is_left_behind_is_named(last: Sample, expected: str) -> None:
    assert any(line.startswith(expected) for line in verdict(REST, last, flat(), 48.0))


@pytest.mark.parametrize(
    ("role", "grows_at", "expected"),
    [
        ("engine", 30, "engine: 900 MiB became 1000, more than 48 above"),
        ("gateway", 50, "gateway: 100 MiB became 200, more than 48 above"),
        ("grammar", 50, "grammar: 200 MiB became 300, more than 48 above"),
        ("grammar", 30, None),
        ("grammar", 44, None),
        ("engine", 55, None),
    ],
)
def test_memory_that_stays_is_named_and_a_peak_is_not(role: str, grows_at: int, expected: str | None) -> None:
    """A grammar process that starts under faults may have more than the one before; a late peak is no growth."""
    seen = flat()
    (usual,) = (process for process in RUNNING if process.role == role)
    more = changed(role, memory_mib=usual.memory_mib + 100)
    seen.samples = [replace(more, seconds=each.seconds) if each.seconds >= grows_at else each for each in seen.samples]
    assert verdict(REST, REST, seen, 48.0) == ([expected] if expected else [])


def test_other_tokens_slower_canaries_and_unexpected_statuses_are_named() -> None:
    seen = flat()
    seen.canaries, seen.wrong_canaries = [(second, 100.0 * (1 + second)) for second in range(9)], 2
    seen.count("schema", "OK")
    seen.count("schema", "INTERNAL")
    seen.count("left", "CANCELLED")
    assert slower(seen.canaries) == pytest.approx(4.0)
    assert verdict(REST, REST, seen, 48.0) == [
        "schema: 1 INTERNAL",
        "canary: 2 of 9 answers have other tokens",
        "canary: 4.00 times as slow in the last third as in the first",
    ]
    assert len(verdict(REST, REST, seen, 48.0, most_slower=4.5)) == 2


async def test_a_seed_gives_the_same_requests() -> None:
    channel = grpc.aio.insecure_channel("127.0.0.1:1")
    stub = engine_pb2_grpc.EngineStub(channel)
    first, second, other = (Traffic(stub, "127.0.0.1:1", "embedded", seed) for seed in (1, 1, 2))
    kinds = [kind for kind in KINDS if kind not in ("compile", "http", "http left")]
    requests = [[each.request(kind) for kind in kinds] for each in (first, second, other)]
    assert requests[0] == requests[1]
    assert requests[0] != requests[2]
    assert {request.HasField("grammar") for request in requests[0]} == {True, False}
    made = [first.request(kind) for kind in kinds if kind != "invalid" for _ in range(50)]
    assert min(each.sampling.max_tokens for each in made) < 8
    limits = [each.sampling.max_tokens for each in made if each.HasField("grammar")]
    assert LEAST_GUIDED <= min(limits) < LEAST_GUIDED + 4
    await channel.close(None)


@pytest.mark.slow
def test_a_short_soak_of_the_embedded_model_is_flat(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--minutes 0.4 --clients 4 --fault-every 4 --warm-rounds 1 --sample-every 1"
    # Caches are not full so soon, and other tests share the cores: memory and latency say nothing here.
    status = soak.main([*arguments.split(), "--growth-mib", "400", "--max-slower", "inf"])
    printed = capsys.readouterr().out
    assert "verdict: flat" in printed
    assert status == 0
    assert [kind for kind in KINDS if f"| {kind} " not in printed] == []
