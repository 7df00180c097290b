"""Receipts of a whole server whose engine is a fake: what they say, and when there is none."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.receipts import TokenChain, keyed, prompt_digest, request_digest
from gpu_engine.api.request import FinishReason, Request, TokenEvent
from gpu_engine.api.signed_statements import checked_claims, read_key
from gpu_engine.front.port.listening import ServerError
from gpu_engine.server import Parts, open_server
from protos.engine.v1 import engine_pb2 as pb
from tests.fakes import EOS, FakeEngine, FakeModel, Script, answers_with
from tests.gpu_engine.fake_servers import ENGINE, config, serving
from tests.receipt_keys import new_key
from tests.rpc_client import Client

NONCE = b"0123456789abcdef"
SECRET = "a prompt with a secret"


def request(text: str = SECRET, **fields: Any) -> pb.GenerateRequest:
    asked = pb.GenerateRequest(text=text, **fields)
    asked.response.receipt_nonce = NONCE
    return asked


@asynccontextmanager
async def signing(tmp_path: Path, script: Script) -> AsyncIterator[Client]:
    """Run a server with a key; yield a client of it."""
    key = str(new_key(tmp_path / "key.pem"))
    opened = serving(script, listen=f"unix:{tmp_path}/s", receipt_key=key)
    async with opened as server, Client(server.address) as client:
        yield client


async def last_of(client: Client, asked: pb.GenerateRequest, index: int = 0) -> pb.GenerateResponse:
    return [each async for each in client.generate(asked) if each.index == index][-1]


async def refusal_of(client: Client, asked: pb.GenerateRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await last_of(client, asked)
    return caught.value.code(), str(caught.value.details())


def chain_of(text: str, *ids: int) -> TokenChain:
    chain = TokenChain(NONCE)
    chain.push([*text.encode(), *ids])
    return chain


async def test_a_receipt_names_what_ran_and_nothing_can_be_read_from_it(tmp_path: Path) -> None:
    async with signing(tmp_path, answers_with("hello")) as client:
        sampling = pb.SamplingParams(seed=(1 << 64) - 1, max_tokens=9, stop=["hidden"], bad_token_ids=[7])
        asked = request(sampling=sampling)
        last = await last_of(client, asked)
        public = read_key((await client.info()).receipt_key)
    claims = checked_claims(last.receipt, public)
    assert claims["request"] == request_digest(NONCE, asked)
    assert claims["prompt"] == {"tokens": len(SECRET), "digest": prompt_digest(NONCE, SECRET.encode())}
    assert claims["nonce"] == keyed(NONCE, "nonce", "")
    chain = chain_of("hello", EOS)
    assert claims["answer"] == {"finish": "STOP", "tokens": 6, "links": chain.links, "end": chain.end}
    sampled = claims["sampling"]
    assert (sampled["seed"], sampled["max_tokens"], sampled["temperature"]) == (str((1 << 64) - 1), 9, 1.0)
    assert sampled["stop"] == keyed(NONCE, "stop", ["hidden"])
    assert sampled["bad_token_ids"] == keyed(NONCE, "bad_token_ids", [7])
    assert (claims["model"]["type"], claims["engine"]["numerics"]) == ("fake", "fake")
    text = json.dumps(claims)
    assert not any(word in text for word in ("secret", "hello", "hidden", NONCE.decode(), NONCE.hex()))


async def test_each_of_n_sequences_has_a_receipt_with_its_own_seed_in_its_last_response(tmp_path: Path) -> None:
    async with signing(tmp_path, answers_with("hello")) as client:
        public = read_key((await client.info()).receipt_key)
        for options in ({}, {"whole": True}, {"cumulative": True}, {"omit_text": True, "omit_token_ids": True}):
            asked = request(sampling=pb.SamplingParams(n=2), response=pb.ResponseOptions(**options))
            responses = [each async for each in client.generate(asked)]
            ends = {each.index: each for each in responses if each.finish_reason}
            assert [each for each in responses if each.receipt] == [*ends.values()]
            for index, end in ends.items():
                claims = checked_claims(end.receipt, public)
                assert claims["sampling"]["seed"] == str(end.telemetry.seed)
                assert (claims["sequence"], claims["answer"]["links"]) == (index, chain_of("hello", EOS).links)


async def test_tokens_after_a_stop_string_do_not_count(tmp_path: Path) -> None:
    script = answers_with("hello there", tokens_per_step=8)
    async with signing(tmp_path, script) as client:
        last = await last_of(client, request(sampling=pb.SamplingParams(stop=["lo"])))
        public = read_key((await client.info()).receipt_key)
    assert checked_claims(last.receipt, public)["answer"]["links"] == chain_of("hello").links


async def test_an_aborted_answer_and_one_without_nonce_have_none(tmp_path: Path) -> None:
    def script(request: Request) -> Iterable[TokenEvent]:
        yield TokenEvent(0, (104,))
        yield TokenEvent(0, finish=FinishReason.ABORTED)

    async with signing(tmp_path, script) as client:
        for asked in (request(), pb.GenerateRequest(text="x")):
            last = await last_of(client, asked)
            assert (last.finish_reason, last.receipt) == (pb.FINISH_REASON_ABORTED, "")


async def test_wrong_nonces_and_what_no_receipt_can_name_are_refused_by_name(tmp_path: Path) -> None:
    async with signing(tmp_path, answers_with("x")) as client:
        for nonce, size in ((b"", 0), (b"a" * 15, 15), (b"a" * 65, 65)):
            asked = pb.GenerateRequest(text="x", response=pb.ResponseOptions(receipt_nonce=nonce))
            problem = f"response.receipt_nonce: has {size} bytes, must have 16 to 64"
            assert await refusal_of(client, asked) == (grpc.StatusCode.INVALID_ARGUMENT, problem)
        beams = request(beam_search=pb.BeamSearch(beam_width=2))
        assert (await refusal_of(client, beams))[1].startswith("response.receipt_nonce: ")
        processor = request(logits_processors=[pb.LogitsProcessor(name="p")])
        assert (await refusal_of(client, processor))[1].startswith("response.receipt_nonce: ")
    async with serving(answers_with("x"), listen=f"unix:{tmp_path}/t") as server, Client(server.address) as client:
        problem = "response.receipt_nonce: this server signs no receipts (its setting receipt_key)"
        assert await refusal_of(client, request()) == (grpc.StatusCode.INVALID_ARGUMENT, problem)
        assert (await client.info()).receipt_key == ""


def with_files(path: Path) -> Parts:
    """Return the parts of a server whose model has files."""
    return Parts(
        lambda config, progress: FakeModel(path=path),
        lambda config, *_, **hooks: FakeEngine(config, answers_with("hello")),
    )


async def test_only_requests_for_receipts_wait_until_the_models_files_are_read(tmp_path: Path) -> None:
    """The model is a pipe, which nothing has written to."""
    pipe, key = tmp_path / "model.gguf", str(new_key(tmp_path / "key.pem"))
    os.mkfifo(pipe)
    opened = open_server(ENGINE, config(tmp_path, receipt_key=key), parts=with_files(pipe))
    async with opened as server, Client(server.address) as client:
        waiting = asyncio.create_task(last_of(client, request()))
        assert not (await last_of(client, pb.GenerateRequest(text="x"))).receipt
        await asyncio.sleep(0)
        assert not waiting.done()
        await asyncio.to_thread(lambda: pipe.open("wb").close())
        assert (await waiting).receipt


async def test_a_server_whose_model_changed_on_disk_signs_nothing_and_serves_the_rest(tmp_path: Path) -> None:
    file, key = tmp_path / "model.gguf", str(new_key(tmp_path / "key.pem"))
    file.write_text("weights")
    loaded = with_files(file)

    class Late(FakeEngine):
        def start(self) -> None:
            file.write_text("other weights")

    def build(config: EngineConfig, *_: object, **hooks: object) -> FakeEngine:
        return Late(config, answers_with("hello"))

    parts = Parts(loaded.load_model, build)
    opened = open_server(ENGINE, config(tmp_path, receipt_key=key), parts=parts)
    async with opened as server, Client(server.address) as client:
        code, problem = await refusal_of(client, request())
        assert code is grpc.StatusCode.UNIMPLEMENTED
        assert "model.gguf has changed since the model was loaded" in problem
        assert (await last_of(client, pb.GenerateRequest(text="x"))).finish_reason == pb.FINISH_REASON_STOP


@pytest.mark.parametrize(("content", "problem"), [(None, "cannot read"), (b"x", "holds no private key in PEM")])
async def test_a_wrong_key_ends_the_start_with_its_setting(tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "key.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ServerError, match=rf"^receipt_key: .*{problem}|^receipt_key: {problem}"):
        async with open_server(ENGINE, config(tmp_path, receipt_key=str(path)), parts=with_files(path)):
            pytest.fail("it must not start")


WITHOUT_EXTRA = """
import sys

sys.modules["cryptography"] = None
from pathlib import Path
from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.extensions.receipts import extension
from gpu_engine.front.port.listening import ServerError

try:
    extension.open(EngineConfig(), ServerConfig(receipt_key=sys.argv[1]), [])
except ServerError as error:
    print(error)
"""


def test_a_missing_extra_is_named_at_the_start(root: Path, tmp_path: Path) -> None:
    key = str(new_key(tmp_path / "key.pem"))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRA, key], cwd=root, capture_output=True, text=True, check=True
    )
    wanted = "receipt_key: needs the package cryptography: pip install 'lockstep-engine[receipts]'\n"
    assert done.stdout == wanted, done.stderr
