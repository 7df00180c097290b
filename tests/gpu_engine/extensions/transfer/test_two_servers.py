"""Two servers with tiny models in one process: one prefills, one decodes; what happens when they do not fit or part."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.transfer_config import TransferConfig
from gpu_engine.core.engine import Engine
from gpu_engine.extensions.transfer.kv_transfer_servicer import SERVICE
from gpu_engine.front.port.listening import ServerError
from gpu_engine.model.loader import LoadedModel, load_model
from gpu_engine.server import SERVICE as ENGINE_SERVICE
from gpu_engine.server import Parts, Server, open_server
from protos.engine.v1 import engine_pb2 as pb
from tests.gpu_engine.harness import config
from tests.rpc_client import Client
from tests.waiting import eventually

PARTS = Parts(load_model, Engine)
TEXT = "A prompt of a hundred and some tokens, which is long enough for a fetch: " + "one two three " * 6
PAGES = (len(TEXT) - 1) // 16


def configs(
    llama: LoadedModel, tmp_path: Path, role: str, engine: dict[str, Any], **fields: Any
) -> tuple[EngineConfig, ServerConfig]:
    """Return the settings of a server; `fields` are those of ServerConfig, and of TransferConfig."""
    own: dict[str, Any] = {"prefill_timeout_s": 60.0}  # however busy the machine is
    if role == "decode":
        own |= {"prefill_from": (f"unix:{tmp_path}/prefill",), "prefill_tokens": 32}
    own |= {name: fields.pop(name) for name in [*fields] if name.startswith("prefill_")}
    base: dict[str, Any] = {"listen": f"unix:{tmp_path}/{role}", "grammar": "none", "drain_timeout_s": 0.0}
    return config(model=llama.name, role=role, num_draft_tokens=7, **own, **engine), ServerConfig(**base | fields)


@asynccontextmanager
async def serving(
    llama: LoadedModel, tmp_path: Path, role: str, engine: dict[str, Any] | None = None, **fields: Any
) -> AsyncIterator[Server]:
    settings, server_settings = configs(llama, tmp_path, role, engine or {}, **fields)
    async with open_server(settings, server_settings, parts=PARTS) as server:
        yield server


@dataclass
class Pair:
    prefill: Server
    decode: Server
    client: Client


@asynccontextmanager
async def pair(llama: LoadedModel, tmp_path: Path, **fields: Any) -> AsyncIterator[Pair]:
    async with (
        serving(llama, tmp_path, "prefill") as prefill,
        serving(llama, tmp_path, "decode", **fields) as decode,
        Client(decode.address) as client,
    ):
        yield Pair(prefill, decode, client)


def ask(text: str = TEXT, max_tokens: int = 12, **fields: Any) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=0.7, seed=5, ignore_eos=True)
    return pb.GenerateRequest(text=text, sampling=sampling, **fields)


async def answer(client: Client, request: pb.GenerateRequest) -> tuple[list[int], int]:
    """Return the tokens, and how many of the prompt were cached."""
    ids, cached = [], 0
    async for response in client.generate(request, timeout_s=120):
        ids += response.token_ids
        cached = max(cached, response.usage.cached_tokens)
    return ids, cached


def metric(server: Server, name: str, **labels: str) -> float:
    value = server.calls.watch.registry.get_sample_value(f"lockstep_transfer_{name}", labels)
    return value or 0.0


@pytest.fixture(scope="module")
def expected(llama: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """The answer of one server to `ask()`."""

    async def alone() -> list[int]:
        folder = tmp_path_factory.mktemp("alone")
        async with serving(llama, folder, "both") as server, Client(server.address) as client:
            return (await answer(client, ask()))[0]

    return asyncio.run(alone())


async def health_of(address: str, service: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


def idle(*servers: Server) -> bool:
    return all((stats := server.stats()).running == stats.waiting == stats.pages_used == 0 for server in servers)


async def test_a_prompt_is_prefilled_there_and_decoded_here(
    llama: LoadedModel, tmp_path: Path, expected: list[int]
) -> None:
    async with pair(llama, tmp_path) as two:
        assert await answer(two.client, ask()) == (expected, PAGES * 16)
        assert await answer(two.client, ask()) == (expected, PAGES * 16)  # of the prefix cache: nothing is fetched
        assert metric(two.decode, "received_pages_total") == PAGES
        await eventually(lambda: metric(two.prefill, "sent_pages_total") == PAGES)
        bytes_of_a_page = two.decode.engine.pages.form.page_bytes
        assert metric(two.decode, "received_bytes_total") == PAGES * bytes_of_a_page
        assert metric(two.decode, "seconds_count") == 1
        assert (await answer(two.client, ask("short")))[1] == 0
        assert metric(two.decode, "seconds_count") == 1
        sampling = pb.SamplingParams(max_tokens=4, n=3, ignore_eos=True)
        many = pb.GenerateRequest(text="The others. " + TEXT, sampling=sampling)
        async for _ in two.client.generate(many, timeout_s=120):
            pass
        assert metric(two.decode, "seconds_count") == 2, "the sequences of a request share one fetch"
        await eventually(lambda: idle(two.prefill, two.decode))


async def test_pages_of_layers_with_heads_of_two_sizes_are_fetched(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    model = load_model(config(model=str(saved("gemma4 small"))))
    async with serving(model, tmp_path, "both") as server, Client(server.address) as client:
        expected, _ = await answer(client, ask())
    async with pair(model, tmp_path) as two:
        assert await answer(two.client, ask()) == (expected, PAGES * 16)
        assert metric(two.decode, "received_pages_total") == PAGES


@pytest.mark.slow
async def test_requests_that_need_the_forward_of_their_prompt_are_prefilled_here(
    llama: LoadedModel, tmp_path: Path
) -> None:
    async with pair(llama, tmp_path) as two:
        for options in (pb.ResponseOptions(prompt_logprobs=1), pb.ResponseOptions(context_logits=True)):
            assert await answer(two.client, ask(max_tokens=2, response=options)) != []
        assert metric(two.decode, "seconds_count") == 0
        beams = ask("Beams. " + TEXT, 3, beam_search=pb.BeamSearch(beam_width=2))
        beams.sampling.ClearField("temperature")
        beams.sampling.ClearField("seed")
        async for _ in two.client.generate(beams, timeout_s=120):
            pass
        assert metric(two.decode, "received_pages_total") == (len("Beams. " + TEXT) - 1) // 16


async def test_the_prefill_engine_refuses_generate_and_says_its_role(llama: LoadedModel, tmp_path: Path) -> None:
    async with serving(llama, tmp_path, "prefill") as server, Client(server.address) as client:
        with pytest.raises(grpc.aio.AioRpcError, match="role=prefill") as refused:
            await answer(client, ask())
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert (await client.info()).role == "prefill"
        found = [await health_of(server.address, service) for service in ("", SERVICE, ENGINE_SERVICE)]
        health = health_pb2.HealthCheckResponse
        assert found == [health.SERVING, health.SERVING, health.NOT_SERVING]


@pytest.mark.slow
async def test_another_model_is_refused_with_one_line_and_the_answer_comes(
    llama: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture, expected: list[int]
) -> None:

    def other(settings: EngineConfig, progress: Any) -> LoadedModel:
        model = load_model(settings, progress)
        next(iter(model.net.parameters())).data.flatten()[0] += 1.0
        return model

    settings, on = configs(llama, tmp_path, "prefill", {})
    async with (
        open_server(settings, on, parts=replace(PARTS, load_model=other)),
        serving(llama, tmp_path, "decode") as decode,
        Client(decode.address) as client,
    ):
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert (await answer(client, ask()))[0] == expected
        lines = [record.getMessage() for record in caplog.records if "prefilled here" in record.getMessage()]
        assert len(lines) == 1
        assert "format: fingerprint is " in lines[0]
        assert metric(decode, "fallbacks_total", reason="differs") == 2  # the second time without asking


class Gate:
    """A unix socket before another one; what the engine after it sends waits while the gate is shut."""

    def __init__(self, path: Path, target: Path) -> None:
        self.path, self._target = path, target
        self.open = asyncio.Event()
        self.open.set()
        self.held = 0
        """Bytes that wait."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with await asyncio.start_unix_server(self._connection, self.path):
            yield

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        its_reader, its_writer = await asyncio.open_unix_connection(self._target)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._copy(reader, its_writer, gated=False))
                tasks.create_task(self._copy(its_reader, writer, gated=True))
        except* ConnectionError:
            pass  # an end that closes
        finally:
            writer.close()
            its_writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, gated: bool) -> None:
        while data := await reader.read(1 << 16):
            if gated and not self.open.is_set():
                self.held += len(data)
                await self.open.wait()
            writer.write(data)
            await writer.drain()
        writer.close()


def grammar_process() -> psutil.Process:
    (child,) = [each for each in psutil.Process().children() if "grammar_service" in each.cmdline()]
    return child


@pytest.mark.slow
async def test_the_grammar_is_compiled_while_the_prompt_is_prefilled_elsewhere(
    llama: LoadedModel, tmp_path: Path
) -> None:
    """Either may end first: the pages are held back until the grammar is compiled, and the other way round."""
    gate = Gate(tmp_path / "gate", tmp_path / "prefill")

    def guided(name: str) -> pb.GenerateRequest:
        request = ask(f"{name}. {TEXT}", 30, grammar=pb.Grammar(regex=f"[a-f]{{9}}{name}"))
        request.sampling.ignore_eos = False
        return request

    async with serving(llama, tmp_path, "both", grammar="spawn") as one, Client(one.address) as client:
        expected = [(await answer(client, guided(name)))[0] for name in ("first", "second")]
    fields = {"grammar": "spawn", "grammar_silence_s": 60.0, "prefill_from": (f"unix:{gate.path}",)}
    async with (
        serving(llama, tmp_path, "prefill"),
        gate.serving(),
        serving(llama, tmp_path, "decode", **fields) as decode,
        Client(decode.address) as client,
    ):
        await answer(client, ask())  # the connection is there

        before, grammars = metric(decode, "received_pages_total"), (await client.stats()).cached_grammars
        gate.open.clear()
        asked = asyncio.create_task(answer(client, guided("first")))
        await eventually(lambda: gate.held > 0)
        while (await client.stats()).cached_grammars == grammars:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.005)
        assert metric(decode, "received_pages_total") == before, "compiled before a page came"
        assert not asked.done()
        gate.open.set()
        pages = (len("first. " + TEXT) - 1) // 16
        assert await asked == (expected[0], pages * 16)
        assert metric(decode, "received_pages_total") == before + pages

        before, grammars = metric(decode, "received_pages_total"), (await client.stats()).cached_grammars
        stopped = grammar_process()
        stopped.suspend()
        try:
            asked = asyncio.create_task(answer(client, guided("second")))
            await eventually(lambda: metric(decode, "received_pages_total") == before + pages)
            assert not asked.done(), "no grammar is compiled"
        finally:
            stopped.resume()
        assert await asked == (expected[1], pages * 16)
        assert (await client.stats()).cached_grammars == grammars + 1


async def test_the_answer_comes_without_the_prefill_engine(
    llama: LoadedModel, tmp_path: Path, expected: list[int]
) -> None:
    async with serving(llama, tmp_path, "decode") as decode, Client(decode.address) as client:
        assert await answer(client, ask()) == (expected, 0)
        assert metric(decode, "fallbacks_total", reason="gone") == 1
        await eventually(lambda: idle(decode))


def secrets_in(folder: Path) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Return the settings of a server that prefills and of one that decodes, and another authority for the latter."""
    authority, other = trustme.CA(), trustme.CA()
    server, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("decode")
    texts = {
        "ca": authority.cert_pem.bytes(),
        "other": other.cert_pem.bytes(),
        "cert": b"".join(blob.bytes() for blob in server.cert_chain_pems),
        "key": server.private_key_pem.bytes(),
        "client-cert": b"".join(blob.bytes() for blob in client.cert_chain_pems),
        "client-key": client.private_key_pem.bytes(),
        "tokens": b"t" * 32,
    }
    at = {name: str(folder / name) for name in texts}
    for name, text in texts.items():
        Path(at[name]).write_bytes(text)
    prefill = {"tls_cert": at["cert"], "tls_key": at["key"], "tls_client_ca": at["ca"], "auth_token_file": at["tokens"]}
    own = {"prefill_tls_cert": at["client-cert"], "prefill_tls_key": at["client-key"]}
    return (
        prefill,
        {**own, "prefill_tls_ca": at["ca"], "prefill_token_file": at["tokens"]},
        {"prefill_tls_ca": at["other"]},
    )


@pytest.mark.slow
async def test_pages_need_tls_on_both_sides_and_a_token(
    llama: LoadedModel, tmp_path: Path, expected: list[int]
) -> None:
    prefill_settings, every, another_ca = secrets_in(tmp_path)

    def without(*names: str) -> dict[str, str]:
        return {name: path for name, path in every.items() if name not in names}

    cases: list[tuple[dict[str, str], str | None]] = [
        (every, None),
        ({}, "gone"),
        (without("prefill_tls_cert", "prefill_tls_key"), "gone"),
        (every | another_ca, "gone"),
        (without("prefill_token_file"), "refused"),
    ]
    async with serving(llama, tmp_path, "prefill", listen="127.0.0.1:0", **prefill_settings) as prefill:
        for fields, reason in cases:
            async with (
                serving(llama, tmp_path, "decode", prefill_from=(prefill.address,), **fields) as decode,
                Client(decode.address) as client,
            ):
                assert await answer(client, ask()) == (expected, 0 if reason else PAGES * 16), fields
                assert metric(decode, "received_pages_total") == (0 if reason else PAGES), fields
                if reason:
                    assert metric(decode, "fallbacks_total", reason=reason) == 1, fields


async def test_a_client_that_leaves_ends_the_fetch_on_both_sides(llama: LoadedModel, tmp_path: Path) -> None:
    async with pair(llama, tmp_path) as two:
        for _ in range(4):
            task = asyncio.create_task(answer(two.client, ask("leave " + TEXT, 100)))
            await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await eventually(lambda: idle(two.prefill, two.decode))
        assert (await answer(two.client, ask()))[0]


async def test_settings_that_contradict_the_role_end_the_start() -> None:
    start = EngineConfig(transfer=TransferConfig(role="decode")), ServerConfig(grammar="none")
    with pytest.raises(ServerError, match="prefill_from: role=decode needs"):
        async with open_server(*start, parts=PARTS):
            pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "drafter", "numbers"), [("llguidance", "ngram", (3, 7)), ("xgrammar", "decoupled", (7,))]
)
async def test_guided_answers_are_those_of_one_engine_with_drafts_and_a_killed_grammar_process(
    llama: LoadedModel, tmp_path: Path, backend: str, drafter: str, numbers: tuple[int, ...]
) -> None:
    """Eight prompts at once, guided and free, in a cache that makes some lose their slots."""
    engine = {"kv_cache_tokens": 512, "drafter": drafter, "draft_model": llama.name if drafter == "decoupled" else ""}
    texts = [f"{at} {TEXT}" for at in range(8)]
    grammars = [pb.Grammar(regex="[a-f]{12,24}"), pb.Grammar(json_object=True), None, None] * 2

    async def answers(client: Client, drafts: int) -> list[list[int]]:
        requests = [ask(text, 24) for text in texts]
        for request, grammar in zip(requests, grammars, strict=True):
            request.speculation.num_draft_tokens = drafts
            request.cache_salt = f"drafts {drafts}"
            if grammar is not None:
                request.sampling.ignore_eos = False
                request.grammar.CopyFrom(grammar)
        return [ids for ids, _ in await asyncio.gather(*(answer(client, request) for request in requests))]

    spawned = {"grammar": "spawn", "grammar_backend": backend}
    async with serving(llama, tmp_path, "both", engine, **spawned) as one, Client(one.address) as client:
        expected = await answers(client, 0)
    async with (
        serving(llama, tmp_path, "prefill"),
        serving(llama, tmp_path, "decode", engine, **spawned) as decode,
        Client(decode.address) as client,
    ):
        assert (await client.info()).backends[0] == pb.Backend.Value(f"BACKEND_{backend.upper()}")
        for drafts in numbers:
            fetched = metric(decode, "seconds_count")
            task = asyncio.create_task(answers(client, drafts))
            if drafts == 7:
                await eventually(lambda: decode.stats().running)
                grammar_process().kill()
            assert await task == expected, drafts
            assert metric(decode, "seconds_count") > fetched
        assert metric(decode, "received_pages_total") > 0
        await eventually(lambda: idle(decode))
