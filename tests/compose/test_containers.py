"""The composed stack for real: hardened as the files say, a guided answer, kills in mid-answer, the backend swapped,
and every overlay that needs no GPU.

`make compose-test` builds the images and runs this. The tests go in order on one stack, which starts from nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import jsonschema
import openai
import pytest
import trustme

from lockstep_client.access import TLS
from protos.engine.v1 import engine_pb2 as pb
from tests.compose.stack import UP_TIMEOUT_S, Stack, check, disturbed_answer, listing
from tests.e2e.asking import ANSWER_TIMEOUT_S
from tests.rpc_client import Client

pytestmark = [pytest.mark.docker, pytest.mark.slow]

ITEMS = 20


@pytest.fixture(scope="module")
def stack(root: Path) -> Iterator[Stack]:
    stack = Stack(root)
    stack.down()
    try:
        stack.up()
        yield stack
    finally:
        print(stack.compose("logs", "--no-color", "--tail", "60", check=False))
        stack.down()


async def test_a_guided_answer_from_the_host(stack: Stack) -> None:
    request, schema = listing(3)
    check(await stack.ask(request), schema)


@pytest.mark.parametrize("service", ["engine", "grammar"])
def test_a_process_can_write_next_to_nothing_and_gain_nothing(stack: Stack, service: str) -> None:
    assert stack.inside(service, "id -u; id -g").split() == ["10001", "10001"]
    status = stack.inside(service, "grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/1/status").split()
    assert dict(zip(status[::2], status[1::2], strict=True)) == {
        "CapEff:": "0" * 16,
        "CapBnd:": "0" * 16,
        "NoNewPrivs:": "1",
    }
    assert stack.inside(service, "touch /opt/lockstep/x /etc/x 2>/dev/null; ls /opt/lockstep/x /etc/x", False) == ""


def test_they_share_one_folder_with_two_private_sockets(stack: Stack) -> None:
    mounts = '{{range .Mounts}}{{.Type}} {{.Source}} {{.Destination}}{{"\\n"}}{{end}}'
    engine, grammar = (set(stack.inspect(name, mounts).splitlines()) for name in ("engine", "grammar"))
    assert {line.split()[-1] for line in engine & grammar} == {"/run/lockstep"}
    assert len(grammar) == 1
    for service in ("engine", "grammar"):
        seen = stack.inside(service, "stat -c '%a %u %F %n' /run/lockstep /run/lockstep/*").splitlines()
        assert seen == [
            "700 10001 directory /run/lockstep",
            "600 10001 socket /run/lockstep/grammar.sock",
            "600 10001 socket /run/lockstep/segment.sock",
        ]


def test_the_grammar_container_has_no_network_and_no_torch(stack: Stack) -> None:
    assert stack.inside("grammar", "ls /sys/class/net").split() == ["lo"]
    find = "import importlib.util as u; print([m for m in ('torch', 'llguidance', 'xgrammar') if u.find_spec(m)])"
    assert stack.inside("grammar", f'python -c "{find}"') == "['llguidance']"


def kill_the_container(stack: Stack) -> None:
    """By hand, so Docker leaves it dead; somebody starts it again."""
    stack.compose("kill", "grammar")
    stack.up()


def crash_the_process(stack: Stack) -> None:
    """Docker starts it again by its restart policy."""
    stack.inside("grammar", "kill -9 -1", check=False)


@pytest.mark.parametrize("kill", [kill_the_container, crash_the_process])
async def test_the_sidecar_is_killed_in_mid_answer(stack: Stack, kill: Callable[[Stack], None]) -> None:
    request, schema = listing(ITEMS)
    undisturbed = await stack.ask(request)
    check(undisturbed, schema)
    disturbed = await disturbed_answer(stack.address, request, lambda: asyncio.to_thread(kill, stack))
    print(f"{kill.__name__}: {disturbed.last.telemetry}")
    check(disturbed, schema)
    assert disturbed.whole == undisturbed.whole
    async with Client(stack.address) as client:
        assert (await client.stats()).grammar_ready


async def test_a_crashed_engine_comes_back_to_the_same_sidecar(stack: Stack) -> None:
    grammar = stack.container("grammar"), stack.inspect("grammar", "{{.State.StartedAt}}")
    restarts = stack.restarts("engine")
    stack.inside("engine", "kill -9 -1", check=False)
    async with asyncio.timeout(UP_TIMEOUT_S):
        while not await asyncio.to_thread(stack.recovered, "engine", restarts):  # noqa: ASYNC110 - nothing tells us
            await asyncio.sleep(1)
    request, schema = listing(3)
    check(await stack.ask(request), schema)
    assert grammar == (stack.container("grammar"), stack.inspect("grammar", "{{.State.StartedAt}}"))


async def test_the_variable_swaps_the_backend_under_the_running_engine(stack: Stack) -> None:
    engine = stack.container("engine"), stack.inspect("engine", "{{.State.StartedAt}}")
    request, schema = listing(3)
    for name, backend in (("xgrammar", pb.BACKEND_XGRAMMAR), ("llguidance", pb.BACKEND_LLGUIDANCE)):
        dataclasses.replace(stack, variables={"GRAMMAR_BACKEND": name}).up()
        check(await stack.ask(request), schema)
        assert await stack.backends() == [backend]
    assert engine == (stack.container("engine"), stack.inspect("engine", "{{.State.StartedAt}}"))


@pytest.mark.parametrize(("overlay", "service"), [("compose.http.yaml", "gateway"), ("compose.smg.yaml", "smg")])
def test_openai_clients_get_a_guided_answer_through_a_gateway_in_front(
    stack: Stack, overlay: str, service: str
) -> None:
    in_front = dataclasses.replace(stack, files=("compose.yaml", overlay))
    in_front.up()
    assert in_front.inside(service, "id -u; touch /opt/x /etc/x 2>/dev/null; ls /opt/x /etc/x", False) == "10001"
    _, schema = listing(3)
    base_url = f"http://{in_front.compose('port', service, '8000')}/v1"
    with openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=ANSWER_TIMEOUT_S) as client:
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": "List cities and years as JSON."}],
            response_format={"type": "json_schema", "json_schema": {"name": "cities", "schema": schema}},
            max_tokens=400,
            temperature=0,
        )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content or ""), schema)


def transferred(stack: Stack, service: str, direction: str) -> float:
    """Return how many pages a container's engine has sent or received, as its metrics say."""
    fetch = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9464/metrics').read().decode())"
    lines = stack.inside(service, f'python -c "{fetch}"').splitlines()
    name = f"lockstep_transfer_{direction}_pages_total"
    (line,) = [line for line in lines if line.startswith(f'{name}{{process="engine"}} ')]
    return float(line.split()[1])


async def test_with_an_engine_for_prompts_an_answer_is_the_same(stack: Stack) -> None:
    """The prompt is long enough for a transfer, and every whole page of it crosses between the containers."""
    request, schema = listing(3)
    request.sampling.max_tokens = 400
    rivers = ("Rhine", "Danube", "Elbe", "Oder", "Loire", "Tagus", "Ebro", "Po", "Tiber", "Thames")
    request.messages.messages[0].content += "".join(
        f" One of them is on the {river}, an old one." for river in rivers * 3
    )
    stack.up()
    alone = await stack.ask(request)
    two = dataclasses.replace(stack, files=("compose.yaml", "compose.disaggregated.yaml"))
    two.up()
    answer = await two.ask(request)
    check(answer, schema)
    assert answer.token_ids == alone.token_ids
    pages = (answer.last.usage.prompt_tokens - 1) // 16
    assert pages * 16 > 128, "the default of prefill_tokens"
    assert answer.last.usage.cached_tokens == pages * 16
    assert transferred(two, "prefill", "sent") == transferred(two, "engine", "received") == pages


def secrets_in(folder: Path) -> trustme.CA:
    """Write what compose.tls.yaml mounts, readable by the container's user; return who signed it."""
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    (folder / "tls.crt").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    (folder / "tls.key").write_bytes(issued.private_key_pem.bytes())
    (folder / "tokens").write_text("0123456789abcdef\n")
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)
    return authority


async def test_tls_and_tokens_from_a_folder_of_secrets(stack: Stack, tmp_path: Path) -> None:
    authority = secrets_in(tmp_path)
    behind_tls = dataclasses.replace(
        stack, files=("compose.yaml", "compose.tls.yaml"), variables={"LOCKSTEP_SECRETS": str(tmp_path)}
    )
    behind_tls.up()
    tls = TLS(ca=authority.cert_pem.bytes())
    request, schema = listing(3)
    check(await behind_tls.ask(request, tls, "0123456789abcdef"), schema)
    with pytest.raises(grpc.aio.AioRpcError, match="authorization: is missing"):
        await behind_tls.ask(request, tls)
    with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
        await behind_tls.ask(request)
