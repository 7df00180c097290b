"""The Python client against the real server: every kind of grammar, its own installation, its own server."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import psutil
import pytest
from packaging.requirements import Requirement

from lockstep_client import (
    AsyncClient,
    Client,
    FinishReason,
    Grammar,
    InvalidRequest,
    Keywords,
    Message,
    NotParsed,
    Reasoning,
)
from lockstep_client.schemas import schema_of
from tests.docs.pages import ROOT, Snippet, snippets
from tests.e2e.conftest import RunningServer
from tests.waiting import eventually

pytestmark = pytest.mark.model

DEFAULT_ADDRESS = "127.0.0.1:50051"
README = [snippet for snippet in snippets("python") if snippet.page == ROOT / "client/README.md"]


@dataclass
class City:
    name: Annotated[str, {"maxLength": 30}]
    inhabitants: Annotated[int, {"minimum": 0, "maximum": 99_999_999}]


@pytest.fixture
def client(server: RunningServer) -> Any:
    with Client(server.address, timeout_s=120) as connected:
        yield connected


def test_a_schema_comes_back_as_an_object(client: Client) -> None:
    answer = client.chat("Describe Paris as JSON.", schema=City, max_tokens=100, temperature=0)
    assert isinstance(answer.parsed, City)
    jsonschema.Draft202012Validator(json.loads(schema_of(City).text)).validate(json.loads(answer.text))


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar.json_object(), r"\s*\{.*\}\s*"),
        (Grammar.regex("[0-9]{4}-[0-9]{2}"), r"\d{4}-\d{2}"),
        (Grammar.choice("yes", "no"), "yes|no"),
        (Grammar.ebnf('root ::= "a" [0-9]'), r"a\d"),
        (Grammar.lark("start: /b[0-9]/"), r"b\d"),
        (Grammar.schema(list[int]).with_options(whitespace="compact"), r"\[[-0-9,]*\]"),
    ],
    ids=repr,
)
def test_a_grammar_of_every_kind_holds(client: Client, grammar: Grammar, pattern: str) -> None:
    answer = client.generate("Answer: ", grammar=grammar, max_tokens=40, seed=3)
    assert answer.finish_reason in (FinishReason.STOP, FinishReason.GRAMMAR_CLOSED)
    assert re.fullmatch(pattern, answer.text, re.DOTALL)


async def test_the_other_calls_are_answered(client: Client) -> None:
    await eventually(lambda: client.stats().grammar_ready)
    info = client.model_info()
    assert (info.model, info.model_type, info.max_model_len, info.max_batch_size) == ("embedded", "llama", 512, 8)
    assert info.num_parameters == 134_515_008
    assert set(info.backends) == {"llguidance", "xgrammar"}
    assert client.stats().num_slots == 8
    tokens = client.tokenize("Hello world", with_texts=True, add_special_tokens=False)
    assert client.detokenize(tokens.token_ids) == "".join(tokens.texts) == "Hello world"
    assert len(client.tokenize(messages="Hello").token_ids) > len(tokens.token_ids)
    compiled = client.compile(schema=City)
    assert compiled.min_tokens > 1
    assert client.chat("Rome", grammar=compiled, max_tokens=100, temperature=0).parsed.inhabitants >= 0
    with pytest.raises(InvalidRequest) as refused:
        client.generate("x", top_p=2.0)
    assert refused.value.field == "sampling.top_p"


async def test_an_answer_is_aborted_by_its_id(server: RunningServer) -> None:
    endless = {"request_id": "long-one", "ignore_eos": True, "max_tokens": 400}
    async with AsyncClient(server.address) as client, client.stream_generate("One, ", **endless) as stream:
        async for _ in stream:
            assert await client.abort("long-one")
            break
        assert (await stream.answer()).finish_reason is FinishReason.ABORTED


def weather(city: Annotated[str, Keywords(maxLength=20)], days: Annotated[int, Keywords(minimum=1, maximum=9)]) -> str:
    """Tell the weather of a city for the next days."""
    return f"{days} days of sun in {city}"


@pytest.mark.parametrize("choice", ["required", "weather"])
def test_a_function_is_called_with_what_its_types_say(client: Client, choice: str) -> None:
    question = "How will the weather be in Oslo in the next 3 days?"
    answer = client.chat(
        question, tools=[weather], tool_choice=choice, parallel_tool_calls=False, max_tokens=80, temperature=0
    )
    (call,) = answer.tool_calls
    assert call.name == "weather"
    assert "days of sun" in weather(**call.json())
    assert answer.message.tool_calls == (call,)
    with pytest.raises(NotParsed):
        _ = answer.parsed


def test_reasoning_tools_and_a_schema_in_one_conversation(client: Client) -> None:
    phase = Reasoning(enabled=True, max_tokens=12, begin="<think>", end="</think>")
    turns = [Message(role="user", content="Say A."), {"role": "assistant", "content": "A"}]
    options = {"schema": City, "tools": [weather], "reasoning": phase, "logprobs": 1, "echo": True}
    answer = client.chat(
        [*turns, {"role": "user", "content": "Describe Oslo."}], max_tokens=120, temperature=0, **options
    )
    assert "<think>" not in answer.content
    assert len(answer.logprobs) == len(answer.token_ids)
    assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens
    if answer.tool_calls:
        weather(**answer.tool_calls[0].json())
    else:
        assert isinstance(answer.parsed, City)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment with the client installed into it; return its interpreter."""
    folder = tmp_path_factory.mktemp("client")
    source, python = folder / "source", folder / "venv/bin/python"
    # pip builds in the source's folder, so it gets a copy.
    subprocess.run(["cp", "-r", str(ROOT / "client"), str(source)], check=True)
    venv.create(folder / "venv", with_pip=True)
    command = [str(python), "-m", "pip", "install", "--quiet", str(source)]
    subprocess.run(command, check=True, timeout=300)
    return python


def run_in(python: Path, source: str, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), "-c", source],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_choices_are_scored_as_whole_answers(client: Client) -> None:
    shares = client.choice_probs("The capital of France is", [" London", " Paris", " Paris."])
    assert sum(shares.values()) == pytest.approx(1)
    assert shares[" Paris"] + shares[" Paris."] > shares[" London"]
    of_chat = client.choice_probs(messages="Is Paris in France?", choices=["yes", "no"])
    assert set(of_chat) == {"yes", "no"}
    assert sum(of_chat.values()) == pytest.approx(1)


@pytest.mark.slow
def test_an_installation_brings_grpcio_and_protobuf_alone(installed: Path) -> None:
    command = [str(installed), "-m", "pip", "list", "--format=json"]
    listed = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    names = {each["name"].lower().replace("_", "-") for each in listed} - {"pip", "setuptools"}
    of_grpcio = {Requirement(line).name for line in importlib.metadata.requires("grpcio") or () if "extra" not in line}
    assert names - of_grpcio == {"lockstep-client", "grpcio", "protobuf"}


@pytest.mark.slow
@pytest.mark.parametrize("snippet", [s for s in README if s.marks <= {"model"}], ids=str)
def test_the_readme_runs_in_an_installation(
    installed: Path, snippet: Snippet, server: RunningServer, tmp_path: Path
) -> None:
    assert run_in(installed, snippet.text.replace(DEFAULT_ADDRESS, server.address), tmp_path).strip()


@pytest.mark.slow
def test_an_installation_without_an_engine_says_how_to_get_one(installed: Path, tmp_path: Path) -> None:
    source = """
import os
os.environ["PATH"] = ""
from lockstep_client import Client, EngineNotInstalled
try:
    Client.embedded()
except EngineNotInstalled as error:
    print(error)
"""
    assert "pipx install 'lockstep-engine[engine,llguidance]'" in run_in(installed, source, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "versions",
    [("grpcio==1.60.2", "protobuf==4.25.8"), ("protobuf==5.29.5",), ("protobuf==6.33.5",)],
    ids=lambda versions: "-".join(versions),
)
def test_it_works_with_older_versions(versions: tuple[str, ...], server: RunningServer, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
    installed = subprocess.run([*command, "--target", str(tmp_path), *versions], timeout=180, check=False)
    if installed.returncode != 0:
        pytest.skip(f"no wheels of {' and '.join(versions)} for this Python")
    source = f"""
import asyncio, sys
sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / "client")!r}]
import google.protobuf, grpc
from lockstep_client import AsyncClient, Client, Grammar
with Client({server.address!r}) as client:
    answer = client.generate("x", grammar=Grammar.choice("a", "b"), temperature=0)
async def twin():
    async with AsyncClient({server.address!r}) as client, client.stream_generate("x", max_tokens=3) as stream:
        return [delta.text async for delta in stream]
print("grpcio==" + grpc.__version__, "protobuf==" + google.protobuf.__version__)
print(answer.text in "ab", asyncio.run(twin()))
"""
    shown = run_in(Path(sys.executable), source, tmp_path).split()
    assert set(versions) <= set(shown)
    assert "True" in shown


def test_the_engine_may_be_in_the_same_process() -> None:
    """Each has messages of its own, and bytes are the same for both."""
    from lockstep_client.wire import engine_pb2 as own
    from protos.engine.v1 import engine_pb2 as engines

    assert own.GenerateRequest.DESCRIPTOR.file.pool is not engines.GenerateRequest.DESCRIPTOR.file.pool
    message = engines.GenerateRequest(text="x", sampling=engines.SamplingParams(logit_bias={1: 2.0}))
    assert own.GenerateRequest.FromString(message.SerializeToString()).sampling.logit_bias == {1: 2.0}


EMBEDDED = f"""
import os, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "client")!r}]
from lockstep_client import Client
client = Client.embedded(num_threads=1, max_batch_size=2)
print(client.generate("One, two, ", max_tokens=4, temperature=0).text.strip() != "", flush=True)
print(client._server.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_an_embedded_engine_answers_and_ends_with_a_killed_process() -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/client"}
    with subprocess.Popen(
        [sys.executable, "-c", EMBEDDED], stdout=subprocess.PIPE, text=True, env=environment
    ) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "True\n"
        engine = psutil.Process(int(starter.stdout.readline()))
        processes = [engine, *engine.children(recursive=True)]
    assert starter.returncode == -signal.SIGKILL
    _, alive = psutil.wait_procs(processes, timeout=120)
    assert alive == []
