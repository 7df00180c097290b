"""The Serve application on real Ray: two replicas on this machine, one killed under load, in four times five rounds.

Skipped without the extra `ray`. Ray's memory is bounded, and it listens on loopback alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.server import free_port
from tests.gpu_engine import tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: pip install '.[ray]'"),
]

ROUNDS = 5
LOAD = 12
BOUND_S = 570
"""Of a replica and its engine that start in each round: 13 s of a quiet machine, and six times as long on a busy one.
No test may take ten minutes."""

SCRIPT = """
import asyncio, json, os, random, signal, sys, time
import ray
from ray import serve
from ray.exceptions import RayActorError
import httpx
import psutil
from deploy.ray.serve_app import Interrupted, app

model, (port, rounds, requests, seed) = sys.argv[1], map(int, sys.argv[2:])
ray.init(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, _node_ip_address="127.0.0.1",
    log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}})
serve.start(http_options={"host": "127.0.0.1", "port": port})
settings = {"model": model, "dtype": "float32", "num_threads": 1, "max_model_len": 512, "max_batch_size": 4,
    "device": "cpu", "grammar": "none", "min_replicas": 2, "max_replicas": 2, "engine_cpus": 0.5}
front = serve.run(app(settings), route_prefix="/")
engines = serve.get_deployment_handle("Engine", "default")
url = f"http://127.0.0.1:{port}/generate"
options = {"max_tokens": 200, "ignore_eos": True, "temperature": 0.0}

async def ask(client, number, streamed):
    # Its outcome: the text, or "begun" for an answer that was cut after its first part.
    body = {"prompt": f"request {number % 3}", "options": options, "stream": streamed}
    if not streamed:
        answer = await client.post(url, json=body)
        return answer.json()["answers"][0]["text"] if answer.status_code == 200 else f"LOST {answer.text}"
    async with client.stream("POST", url, json=body) as answer:
        lines = [json.loads(line) async for line in answer.aiter_lines()]
    if "error" in lines[-1]:
        return f"begun {lines[-1]['error']}" if len(lines) > 1 else f"LOST {lines[-1]}"
    return "".join(line["text"] for line in lines)

async def replicas():
    # The processes of both replicas, once they serve.
    pids = set()
    while len(pids) < 2:
        try:
            pids.add(await engines.process_id.remote())
        except RayActorError:  # of the one that was killed
            await asyncio.sleep(0.1)
        pids = {pid for pid in pids if psutil.pid_exists(pid)}
    return sorted(pids)

async def killed(client, chance):
    # The outcomes of requests during which a replica is killed, and whether its engine is left.
    pids = await replicas()
    load = [asyncio.create_task(ask(client, number, number % 2 == 0)) for number in range(requests)]
    await asyncio.sleep(chance.uniform(0.0, 0.8))
    replica = chance.choice(pids)
    (victim,) = [c.pid for c in psutil.Process(replica).children() if "gpu_engine" in c.cmdline()]
    os.kill(replica, signal.SIGKILL)
    found = await asyncio.gather(*load)
    began = time.monotonic()
    while os.path.exists(f"/proc/{victim}") and time.monotonic() < began + 30:
        await asyncio.sleep(0.1)
    return {"found": found, "engine_left": os.path.exists(f"/proc/{victim}")}

async def main():
    async with httpx.AsyncClient(timeout=120) as client:
        await replicas()
        plain = [await ask(client, number, False) for number in range(3)]
        parts = [delta.text async for delta in front.options(stream=True).generate.remote("request 0", **options)]
        bad = await client.post(url, json={"prompt": "x", "options": {"temperature": -1.0}})
        unknown = await client.post(url, json={"prompt": "x", "option": {}})
        chance, found = random.Random(seed), []
        for number in range(rounds):
            began = time.monotonic()
            found.append(await killed(client, chance))
            print(f"round {number}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        after = [await ask(client, number, True) for number in range(3)]
        return {"plain": plain, "handle": "".join(parts), "parts": len(parts), "rounds": found, "after": after,
            "bad": [bad.status_code, bad.json()["error"]], "unknown": [unknown.status_code, unknown.json()["error"]]}

print("RESULT " + json.dumps(asyncio.run(main())), flush=True)
serve.shutdown()
ray.shutdown()
"""


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_a_killed_replica_loses_no_request_that_had_not_begun(root: Path, tmp_path: Path, seed: int) -> None:
    """Five rounds each."""
    model = tiny.save(tiny.FAMILIES["llama"](), tmp_path / "tiny", rounds=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(root), str(root / "client"))),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        # A busy machine takes longer than 15 s to import what Ray's agents need.
        "RAY_agent_register_timeout_ms": "300000",
        "RAY_worker_niceness": "0",
    }
    command = [sys.executable, "-c", SCRIPT, str(model), *map(str, (free_port(), ROUNDS, LOAD, seed))]
    with subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            out, _ = process.communicate(timeout=BOUND_S)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
    (line,) = [line for line in out.splitlines() if line.startswith("RESULT ")]
    result = json.loads(line.removeprefix("RESULT "))
    assert len(set(result["plain"])) > 1
    assert result["handle"] == result["plain"][0]
    assert result["parts"] > 1
    assert (result["bad"][0], "temperature" in result["bad"][1]) == (400, True)
    assert result["unknown"] == [400, "option: no such field"]
    expected, cut = [result["plain"][number % 3] for number in range(LOAD)], 0
    for each in result["rounds"]:
        wrong = [(found, want) for found, want in zip(each["found"], expected, strict=True) if found != want]
        # An answer that had begun to stream on the killed replica ends with an error; every other one is whole.
        assert all(found.startswith("begun Interrupted: ") for found, _ in wrong), wrong
        assert len(wrong) <= 5, "more than the slots of one replica"
        assert not each["engine_left"], "the engine ends with its replica"
        cut += len(wrong)
    assert len(result["rounds"]) == ROUNDS
    assert cut, "no round killed a replica amid a stream"
    assert result["after"] == result["plain"]
