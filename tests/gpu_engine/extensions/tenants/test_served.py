"""Whole servers with tenants: pages of the prefix cache and of another engine (a tiny model), HTTP, certificates."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from gpu_engine.api.admission import EngineAdmission
from gpu_engine.api.config import ServerConfig
from gpu_engine.api.errors import LimitExceeded
from gpu_engine.core.engine import Engine
from gpu_engine.extensions.tenants.accounts import Tenants
from gpu_engine.extensions.tenants.audit import AuditLog
from gpu_engine.extensions.tenants.metrics import TenantCollector
from gpu_engine.front.port.listening import ServerError
from gpu_engine.model.loader import LoadedModel, load_model
from gpu_engine.server import Parts, Server, open_server
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc
from service_runtime.tenants import tenant_file
from tests.fakes import answers_with
from tests.gpu_engine.extensions.tenants.tenant_serving import ACME, AS_ACME, AS_BETA, AS_BOSS, BOSS, FILE, Metadata
from tests.gpu_engine.fake_servers import ENGINE, parts
from tests.gpu_engine.fake_servers import config as server_config
from tests.gpu_engine.harness import config
from tests.gpu_engine.http_calls import ASK, get, until_healthy

PARTS = Parts(load_model, Engine)
NOBODY: Metadata = (("authorization", "Bearer of-nobody-at-all"),)
TEXT = "A prompt of a hundred and some tokens, which is long enough for a fetch: " + "one two three " * 6
PAGES = (len(TEXT) - 1) // 16


@asynccontextmanager
async def serving(llama: LoadedModel, tmp_path: Path, role: str = "both", **fields: Any) -> AsyncIterator[Server]:
    own = {name: fields.pop(name) for name in [*fields] if name.startswith("prefill_")}
    engine = config(model=llama.name, role=role, num_draft_tokens=7, **{"prefill_timeout_s": 60.0, **own})
    (tmp_path / "tenants.toml").write_text(FILE)
    base: dict[str, Any] = {"listen": f"unix:{tmp_path}/{role}", "grammar": "none", "drain_timeout_s": 0.0}
    base["tenant_file"] = str(tmp_path / "tenants.toml")
    async with open_server(engine, ServerConfig(**base | fields), parts=PARTS) as server:
        yield server


async def answer(server: Server, metadata: Metadata, **fields: Any) -> tuple[list[int], int]:
    """Return the tokens of an answer, and how many of its prompt were cached."""
    sampling = pb.SamplingParams(max_tokens=8, temperature=0.7, seed=5, ignore_eos=True)
    ids, cached = [], 0
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        request = pb.GenerateRequest(text=TEXT, sampling=sampling, **fields)
        async for response in stub.Generate(request, metadata=metadata, timeout=120):
            ids += response.token_ids
            cached = response.usage.cached_tokens or cached
    return ids, cached


async def test_no_page_of_one_tenant_is_found_by_another(llama: LoadedModel, tmp_path: Path) -> None:
    async with serving(llama, tmp_path) as server:
        async with grpc.aio.insecure_channel(server.address) as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING, "load balancers have no token"
        tokens, cached = await answer(server, AS_ACME)
        assert cached == 0
        assert await answer(server, AS_ACME) == (tokens, 16 * PAGES)
        assert await answer(server, AS_BETA) == (tokens, 0)
        assert await answer(server, AS_BETA, cache_salt="acme") == (tokens, 0)
        assert await answer(server, AS_BOSS, cache_salt="acme\0") == (tokens, 0)
        assert await answer(server, AS_BETA) == (tokens, 16 * PAGES)


async def test_pages_of_another_engine_are_the_tenant_s_own_and_its_door_is_for_engines(
    llama: LoadedModel, tmp_path: Path
) -> None:
    (tmp_path / "engine-token").write_text(BOSS)
    (tmp_path / "tenant-token").write_text(ACME)
    decode = {"prefill_from": (f"unix:{tmp_path}/prefill",), "prefill_tokens": 32}
    async with serving(llama, tmp_path, "prefill") as prefill:
        async with serving(
            llama, tmp_path, "decode", prefill_token_file=f"{tmp_path}/engine-token", **decode
        ) as server:
            tokens, cached = await answer(server, AS_ACME)
            assert cached == 16 * PAGES, "they came from the other engine"
            before = prefill.stats().cached_tokens
            assert await answer(server, AS_BETA) == (tokens, 16 * PAGES)
            assert prefill.stats().cached_tokens == before, "the other engine had none for this tenant"
            computed = prefill.stats().prefill_tokens
        async with serving(
            llama, tmp_path, "decode", prefill_token_file=f"{tmp_path}/tenant-token", **decode
        ) as server:
            assert await answer(server, AS_ACME) == (tokens, 0), "it prefills by itself"
            assert prefill.stats().prefill_tokens == computed


async def test_a_certificate_belongs_to_a_tenant(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    issued = {name: authority.issue_cert(f"{name}.example") for name in ("client", "stranger")}
    own = authority.issue_cert("localhost")
    own.cert_chain_pems[0].write_to_path(tmp_path / "cert")
    own.private_key_pem.write_to_path(tmp_path / "key")
    (tmp_path / "tenants.toml").write_text(FILE + '[tenants.gamma]\ncertificates = ["client.example"]\n')
    names = {"tls_cert": "cert", "tls_key": "key", "tls_client_ca": "ca.crt", "tenant_file": "tenants.toml"}
    files = {setting: str(tmp_path / name) for setting, name in names.items()}
    settings = server_config(tmp_path, listen="localhost:0", **files)
    engines: list[Any] = []
    async with open_server(ENGINE, settings, parts=parts(answers_with("yes"), engines)) as made:

        async def ask(name: str, metadata: Metadata = ()) -> str:
            cert = issued[name]
            credentials = grpc.ssl_channel_credentials(
                authority.cert_pem.bytes(), cert.private_key_pem.bytes(), cert.cert_chain_pems[0].bytes()
            )
            async with grpc.aio.secure_channel(made.address, credentials) as channel:
                stub = engine_pb2_grpc.EngineStub(channel)
                call = stub.Generate(pb.GenerateRequest(text="x"), metadata=metadata, timeout=20)
                return "".join([response.text async for response in call])

        assert await ask("client") == "yes"
        assert await ask("client", AS_ACME) == "yes", "a token decides"
        assert [request.request_id.partition("/")[0] for request in engines[0].submitted] == ["gamma", "acme"]
        for name, metadata in (("stranger", ()), ("client", NOBODY)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(name, metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert len(engines[0].submitted) == 2


async def test_the_audit_log_says_who_and_how_much_and_never_what(tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text(FILE)
    files = {"tenant_file": str(tmp_path / "tenants.toml"), "audit_log": str(tmp_path / "audit")}
    settings = server_config(tmp_path, **files)
    secret = answers_with("a secret answer")
    async with (
        open_server(ENGINE, settings, parts=parts(secret)) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub = engine_pb2_grpc.EngineStub(channel)

        async def ask(metadata: Metadata, **fields: Any) -> grpc.StatusCode:
            call = stub.Generate(pb.GenerateRequest(text="a secret prompt", **fields), metadata=metadata)
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert [response async for response in call]
            return await call.code()

        async def many() -> Any:
            yield pb.GenerateManyRequest(generate=pb.GenerateRequest(text="a secret prompt", request_id="m"))

        await ask(AS_ACME, request_id="x")
        await ask(NOBODY)
        await ask(AS_BETA, grammar=pb.Grammar(regex="a secret grammar"))
        assert [r async for r in stub.GenerateMany(many(), metadata=AS_BETA)]
        await stub.Abort(pb.AbortRequest(request_id="x"), metadata=AS_BETA)
        await stub.GetStats(pb.GetStatsRequest(), metadata=AS_ACME).code()
        await stub.UnloadAdapter(pb.UnloadAdapterRequest(name="none"), metadata=AS_BOSS).code()
        # The line of a call is written after its status: the next call's handler runs after it.
        await stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=AS_ACME)
    text = (tmp_path / "audit").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    found = {f"{line['tenant']} {line['method'].rpartition('/')[2]} {line['status']}" for line in lines}
    assert len(lines) == 8
    assert found == {
        "acme Generate OK",
        " Generate UNAUTHENTICATED",
        "beta Generate FAILED_PRECONDITION",
        "beta GenerateMany OK",
        "beta Abort OK",
        "acme GetStats PERMISSION_DENIED",
        "boss UnloadAdapter NOT_FOUND",
        "acme GetModelInfo OK",
    }
    (first,) = [line for line in lines if line.get("request_id") == "acme/x"]
    assert (first["prompt_tokens"], first["completion_tokens"], first["finish"]) == (15, 16, ["STOP"])
    assert "secret" not in text
    assert "of-tests" not in text
    assert (tmp_path / "audit").stat().st_mode & 0o777 == 0o600


def test_lines_of_the_audit_log_that_cannot_be_written_are_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "folder").mkdir()
    audit = AuditLog(tmp_path / "folder" / "audit")
    audit.called("acme", "/s/M", "OK", 0.5)
    shutil.rmtree(tmp_path / "folder")
    for _ in range(3):
        audit.called("acme", "/s/M", "OK", 0.5)
    assert repr(audit).endswith("lost=3>")
    assert caplog.text.count("a line could not be written") == 1
    (tmp_path / "folder").mkdir()
    with caplog.at_level("INFO"):
        audit.called("acme", "/s/M", "OK", 0.5)
    assert "lines are written again; 3 were lost" in caplog.text
    (tmp_path / "folder" / "audit").rename(tmp_path / "old")
    audit.called("beta", "/s/M", "OK", 0.5)  # in a new file: the other one was moved away
    audit.close()
    files = (tmp_path / "old", tmp_path / "folder" / "audit")
    assert [json.loads(path.read_text())["tenant"] for path in files] == ["acme", "beta"]


async def test_usage_is_counted_by_tenant(tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text(FILE)
    tenants = Tenants(tenant_file(tmp_path / "tenants.toml"), admission=EngineAdmission(1, 8))
    account = tenants.account_of(tenants.table.by_name["acme"])
    account.enter(2, together=False)
    account.charge_prompt(7)
    account.charge_answer(3)
    tenants.ended("acme", "OK")
    tenants.ended("a name that no file has", "OK")
    with pytest.raises(LimitExceeded):
        account.enter(1, together=False)
    registry = CollectorRegistry()
    registry.register(TenantCollector(lambda: tenants.accounts))
    samples = [sample for family in registry.collect() for sample in family.samples]
    found = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
    assert found == {
        ("lockstep_tenant_sequences", "acme"): 2,
        ("lockstep_tenant_tokens_total", "acme", "prompt"): 7,
        ("lockstep_tenant_tokens_total", "acme", "answer"): 3,
        ("lockstep_tenant_requests_total", "acme", "OK"): 1,
        ("lockstep_tenant_refusals_total", "acme", "max_waiting"): 1,
    }


async def test_a_file_that_is_missing_or_wrong_keeps_the_server_from_starting(tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("[tenants.a]")
    for name, message in (("missing", "cannot read"), ("wrong", "needs tokens")):
        with pytest.raises(ServerError, match=f"tenant_file: .*{message}"):
            async with open_server(ENGINE, server_config(tmp_path, tenant_file=str(tmp_path / name))):
                pass


@pytest.mark.slow  # a gateway process starts
async def test_the_gateway_hands_tenants_on_and_their_limits_back(tmp_path: Path) -> None:
    limited = FILE.replace("max_running = 1", "tokens_per_minute = 20")
    (tmp_path / "tenants.toml").write_text(limited)
    settings = server_config(tmp_path, http="127.0.0.1:0", tenant_file=str(tmp_path / "tenants.toml"))
    engines: list[Any] = []
    async with open_server(ENGINE, settings, parts=parts(answers_with("yes"), engines)) as made:
        assert made.http_address is not None
        await until_healthy(made.http_address)
        http, path = made.http_address, "/v1/chat/completions"
        assert (await get(http, path, ASK))[0] == 401
        assert (await get(http, path, ASK, "of-nobody-at-all"))[0] == 401
        status, body = await get(http, path, ASK, ACME)
        assert (status, body["choices"][0]["message"]["content"]) == (200, "yes")
        assert engines[0].submitted[-1].request_id.startswith("acme/")
        assert body["id"] == engines[0].submitted[-1].client_request_id
        status, body = await get(http, path, ASK, ACME)
        assert status == 429
        assert body["error"]["message"].startswith("tokens_per_minute: tenant acme: the limit is 20; try again in ")
        assert (await get(http, path, ASK, BOSS))[0] == 200
        assert (await get(http, "/v1/models", None, ACME))[0] == 200
        assert (await get(http, "/metrics", None, ACME))[0] == 403
