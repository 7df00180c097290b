"""The chart's pod for real, as containers: probes, a guided answer, kills in mid-answer, and the drain on SIGTERM.

`make compose-test` builds the images and runs this. The tests go in order on one pod, which starts from nothing.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tests.compose.pod import NAME, Pod, docker
from tests.compose.stack import check, disturbed_answer, listing
from tests.e2e.asking import Answer, answer
from tests.rpc_client import Client

pytestmark = [
    pytest.mark.docker,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("helm_python") is None, reason="needs helm-python-sdk"),
]

SERVING = health_pb2.HealthCheckResponse.SERVING
ITEMS = 20


@pytest.fixture(scope="module")
def pod(root: Path) -> Iterator[Pod]:
    pod = Pod.render(root)
    pod.remove()
    try:
        pod.start()
        yield pod
    finally:
        for name in ("engine", "grammar"):
            print(docker("logs", "--tail", "40", f"{NAME}-{name}", check=False))
        pod.remove()


async def ask(pod: Pod, items: int = 3) -> Answer:
    request, schema = listing(items)
    async with Client(pod.address(50051)) as client:
        found = await answer(client, request)
    check(found, schema)
    return found


@pytest.mark.parametrize("name", ["engine", "grammar"])
def test_every_probe_passes(pod: Pod, name: str) -> None:
    assert [pod.probe(name, which) for which in ("startup", "readiness", "liveness")] == [SERVING] * 3


async def test_a_guided_answer(pod: Pod) -> None:
    await ask(pod)


def test_http_is_served_with_the_gauges_that_routers_read(pod: Pod) -> None:
    address = pod.address(8000)
    with urllib.request.urlopen(f"http://{address}/v1/models", timeout=20) as models:
        assert json.load(models)["data"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as metrics:
        assert "vllm:num_requests_waiting{" in metrics.read().decode()


@pytest.mark.parametrize("name", ["engine", "grammar"])
def test_a_process_is_the_first_one_and_can_gain_nothing(pod: Pod, name: str) -> None:
    assert pod.inside(name, "id -u; id -g").split() == ["10001", "10001"]
    status = pod.inside(name, "grep -E '^(Name|CapEff|CapBnd|NoNewPrivs)' /proc/1/status").split()
    assert dict(zip(status[::2], status[1::2], strict=True)) == {
        "Name:": "python",
        "CapEff:": "0" * 16,
        "CapBnd:": "0" * 16,
        "NoNewPrivs:": "1",
    }
    assert pod.inside(name, "touch /opt/lockstep/x /etc/x 2>/dev/null; ls /opt/lockstep/x /etc/x", check=False) == ""


def test_the_sockets_are_private_in_a_volume_that_everybody_may_write(pod: Pod) -> None:
    for name in ("engine", "grammar"):
        seen = pod.inside(name, "stat -c '%a %u %F %n' /run/lockstep/private /run/lockstep/private/*").splitlines()
        assert [line.replace("2700", "700") for line in seen] == [
            "700 10001 directory /run/lockstep/private",
            "600 10001 socket /run/lockstep/private/grammar.sock",
            "600 10001 socket /run/lockstep/private/segment.sock",
        ]


async def test_the_grammar_container_is_killed_in_mid_answer_and_started_again(pod: Pod) -> None:
    request, schema = listing(ITEMS)
    undisturbed = await ask(pod, ITEMS)

    async def kill() -> None:
        await asyncio.to_thread(docker, "kill", f"{NAME}-grammar")
        await asyncio.to_thread(docker, "start", f"{NAME}-grammar")

    found = await disturbed_answer(pod.address(50051), request, kill)
    check(found, schema)
    assert found.token_ids == undisturbed.token_ids
    assert pod.probe("grammar", "readiness", wait_s=60) == SERVING


async def test_the_engine_container_is_killed_and_finds_the_same_grammar_process(pod: Pod) -> None:
    grammar = pod.inspect("grammar", "{{.State.StartedAt}}")
    docker("kill", f"{NAME}-engine")
    docker("start", f"{NAME}-engine")
    pod.probe("engine", "startup", wait_s=300)
    await ask(pod)
    assert pod.inspect("grammar", "{{.State.StartedAt}}") == grammar


async def test_sigterm_drains_the_engine_and_then_the_grammar_process_ends(pod: Pod) -> None:
    request, schema = listing(ITEMS)
    undisturbed = await ask(pod, ITEMS)
    refused: list[grpc.StatusCode] = []

    async def end() -> None:
        ending = asyncio.create_task(asyncio.to_thread(pod.end, "engine"))
        while await asyncio.to_thread(pod.probe, "engine", "readiness") == SERVING:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
        async with Client(pod.address(50051)) as client:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answer(client, listing(3)[0])
            refused.append(caught.value.code())
        assert await ending == 0

    found = await disturbed_answer(pod.address(50051), request, end, after=30)
    check(found, schema)
    assert found.token_ids == undisturbed.token_ids
    assert refused == [grpc.StatusCode.UNAVAILABLE]
    # The kubelet ends a native sidecar when the other containers have ended.
    assert pod.inspect("grammar", "{{.State.Running}}") == "true"
    assert pod.end("grammar") == 0


def test_sigterm_ends_an_engine_that_still_loads(pod: Pod) -> None:
    docker("start", f"{NAME}-grammar")  # with both ended, Docker has emptied the volume
    pod.probe("grammar", "startup", wait_s=60)
    docker("rm", "--force", "--volumes", f"{NAME}-engine")
    pod.create("engine")
    time.sleep(3.0)
    began_s = time.monotonic()
    docker("stop", "--time", "60", f"{NAME}-engine")
    assert int(pod.inspect("engine", "{{.State.ExitCode}}")) in (143, 0), docker("logs", f"{NAME}-engine")
    assert time.monotonic() - began_s < 20, "a process without a handler would have waited for SIGKILL"
