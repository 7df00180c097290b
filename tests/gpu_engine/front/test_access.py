"""Access to the public port: TLS, client certificates, bearer tokens, files that change, unprotected addresses."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gpu_engine.api.config import ServerConfig
from gpu_engine.cli import commands as cli
from gpu_engine.cli.access_flags import access_of, add_access_flags
from gpu_engine.front.port.early import check_port
from gpu_engine.front.port.listening import ServerError, exposure, is_local
from gpu_engine.server import Server
from protos.engine.v1 import engine_pb2 as pb
from service_runtime.from_files import CHECK_EVERY_S, FromFiles
from service_runtime.tokens import known, parse_tokens
from tests.fakes import answers_with
from tests.gpu_engine.fake_servers import serving as serving_fake
from tests.rpc_client import Client

TOKEN, OTHER_TOKEN = "0123456789abcdef-one", "0123456789abcdef-two"
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
serving = partial(serving_fake, answers_with("yes"))


@dataclass(frozen=True, slots=True)
class Files:
    """Certificates and tokens in a folder."""

    folder: Path
    authority: trustme.CA

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    def issue(self, name: str, authority: trustme.CA | None = None) -> tuple[Path, Path]:
        """Write NAME.crt and NAME.key for localhost; return their paths."""
        issued = (authority or self.authority).issue_cert("localhost", "127.0.0.1", common_name=name)
        cert, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        key.write_bytes(issued.private_key_pem.bytes())
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        return cert, key

    def tls(self, **fields: Any) -> dict[str, Any]:
        """Return settings for TLS with a new certificate."""
        cert, key = self.issue("server")
        return {"listen": "localhost:0", "tls_cert": str(cert), "tls_key": str(key)} | fields

    def tokens(self, *tokens: str) -> str:
        path = self.folder / "tokens"
        path.write_text("# for tests\n\n" + "".join(f"{token}\n" for token in tokens))
        return str(path)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    return Files(tmp_path, authority)


def flags(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_access_flags(parser)
    return parser.parse_args(arguments)


async def ask(server: Server, *arguments: str) -> str:
    """Return the answer of a client with these flags."""
    async with Client(server.address, access_of(flags("--server", server.address, *arguments))) as client:
        return "".join([r.text async for r in client.generate(pb.GenerateRequest(text="x"), timeout_s=20)])


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask again and again; files are looked at once a second."""
    async with asyncio.timeout(20):
        while not await condition():  # noqa: ASYNC110 - what is waited for has no event in this process
            await asyncio.sleep(0.05)


async def refused(server: Server, *arguments: str) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(server, *arguments)
    return caught.value.code(), str(caught.value.details())


# --- TLS


async def test_only_tls_of_a_trusted_authority_gets_in_and_a_renewed_certificate_is_taken_over(files: Files) -> None:
    renewed = trustme.CA()
    renewed.cert_pem.write_to_path(files.folder / "renewed.crt")
    trust_renewed = ("--tls-ca", str(files.folder / "renewed.crt"))
    async with serving(**files.tls()) as server:
        assert await ask(server, "--tls-ca", str(files.ca)) == "yes"
        assert (await refused(server))[0] is grpc.StatusCode.UNAVAILABLE
        assert (await refused(server, *trust_renewed))[0] is grpc.StatusCode.UNAVAILABLE
        files.issue("server", renewed)

        async def taken_over() -> bool:
            try:
                return await ask(server, *trust_renewed) == "yes"
            except grpc.aio.AioRpcError:
                return False

        await eventually(taken_over)


async def test_with_a_client_authority_only_its_clients_get_in(files: Files) -> None:
    good = files.issue("client")
    bad = files.issue("stranger", trustme.CA())
    async with serving(**files.tls(tls_client_ca=str(files.ca))) as server:
        trust = ("--tls-ca", str(files.ca))
        assert await ask(server, *trust, "--tls-cert", str(good[0]), "--tls-key", str(good[1])) == "yes"
        for arguments in (trust, (*trust, "--tls-cert", str(bad[0]), "--tls-key", str(bad[1]))):
            assert (await refused(server, *arguments))[0] is grpc.StatusCode.UNAVAILABLE


async def test_a_renewal_that_does_not_fit_leaves_the_last_one_in_force(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(**files.tls()) as server:
        (files.folder / "server.key").write_bytes(files.issue("other")[1].read_bytes())

        async def logged() -> bool:
            assert await ask(server, "--tls-ca", str(files.ca)) == "yes"
            return "stay in force" in caplog.text

        await eventually(logged)
    assert "is not the key of" in caplog.text


@pytest.mark.parametrize(
    ("setting", "content", "message"),
    [
        ("tls_cert", None, "tls_cert: cannot read .*: No such file"),
        ("tls_key", None, "tls_key: cannot read .*: No such file"),
        ("tls_cert", b"nonsense", "tls_cert, tls_key: .* in PEM"),
        ("tls_key", "other", r"tls_key: .*other\.key is not the key of .*server\.crt"),
        ("tls_client_ca", b"nonsense", "tls_client_ca: .* holds no certificates in PEM"),
        ("auth_token_file", None, "auth_token_file: cannot read .*: No such file"),
        ("auth_token_file", b"\n# none\n", "auth_token_file: .* holds no token"),
        ("auth_token_file", b"short\n", "auth_token_file: .*, line 1: a token has at least 16"),
    ],
)
async def test_files_that_are_missing_or_wrong_keep_the_server_from_starting(
    files: Files, setting: str, content: bytes | str | None, message: str
) -> None:
    path = files.folder / "broken"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        path = files.issue(content)[1]
    with pytest.raises(ServerError, match=message):
        async with serving(**files.tls(**{setting: str(path)})):
            pass


def test_half_of_tls_is_refused() -> None:
    for fields, message in (
        ({"tls_cert": "a"}, "tls_key: is required with tls_cert"),
        ({"tls_key": "a"}, "tls_cert: is required with tls_key"),
        ({"tls_client_ca": "a"}, "tls_client_ca: needs tls_cert and tls_key"),
    ):
        with pytest.raises(ValueError, match=message):
            ServerConfig(**fields)  # type: ignore[arg-type]


# --- tokens


async def test_a_token_lets_in_and_nothing_else_does_until_it_is_revoked(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    for name, token in {"mine": OTHER_TOKEN, "wrong": "0123456789abcdef-three"}.items():
        (files.folder / name).write_text(f"{token}\n")
    mine, wrong = (("--token-file", str(files.folder / name)) for name in ("mine", "wrong"))
    async with serving(auth_token_file=files.tokens(TOKEN, OTHER_TOKEN)) as server:
        assert await ask(server, *mine) == "yes"
        with caplog.at_level("INFO", logger="gpu_engine.front.port.auth"):
            assert await refused(server, *wrong) == (UNAUTHENTICATED, "authorization: holds an unknown token")
        (line,) = (vars(record) for record in caplog.records if record.name == "gpu_engine.front.port.auth")
        assert line["fields"]["status"] == "UNAUTHENTICATED"
        assert line["fields"]["method"] == "/lockstep.engine.v1.Engine/Generate"
        assert "0123456789abcdef" not in str(line)
        files.tokens(TOKEN)

        async def revoked() -> bool:
            try:
                return not await ask(server, *mine)
            except grpc.aio.AioRpcError as error:
                return error.code() is UNAUTHENTICATED

        await eventually(revoked)
        (files.folder / "mine").write_text(TOKEN)
        assert await ask(server, *mine) == "yes"


async def test_every_call_needs_a_well_formed_token_except_those_of_health(files: Files) -> None:
    async with (
        serving(auth_token_file=files.tokens(TOKEN)) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):

        async def status(method: str, *values: str) -> tuple[grpc.StatusCode, str | None]:
            call = channel.unary_unary(method)(b"", metadata=[("authorization", value) for value in values])
            return await call.code(), await call.details()

        for values, problem in (
            ((), "is missing; send `authorization: Bearer TOKEN`"),
            ((TOKEN,), "is not of the form `Bearer TOKEN`"),
            ((f"Basic {TOKEN}",), "is not of the form `Bearer TOKEN`"),
            (("Bearer ",), "is not of the form `Bearer TOKEN`"),
            ((f"Bearer {TOKEN}", f"Bearer {TOKEN}"), "was sent more than once"),
        ):
            found = await status("/lockstep.engine.v1.Engine/GetStats", *values)
            assert found == (UNAUTHENTICATED, f"authorization: {problem}")
        unknown = "/lockstep.engine.v1.Engine/NoSuchMethod"
        assert (await status(unknown))[0] is UNAUTHENTICATED, "whether a method exists is not revealed"
        assert (await status(unknown, f"Bearer {TOKEN}"))[0] is grpc.StatusCode.UNIMPLEMENTED
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
        assert await reflect(iter(asked)).code() is UNAUTHENTICATED
        call = reflect(iter(asked), metadata=[("authorization", f"bearer {TOKEN}")])
        assert (await anext(aiter(call))).list_services_response.service


def test_tokens_are_stored_as_digests_and_compared_whole() -> None:
    digests = parse_tokens(f"{TOKEN}\n  {OTHER_TOKEN}  \n".encode(), Path("t"))
    assert all(len(digest) == 32 and TOKEN.encode() not in digest for digest in digests)
    sent = (TOKEN, OTHER_TOKEN, TOKEN[:-1], "")
    assert [known(token.encode(), digests) for token in sent] == [True, True, False, False]


# --- files that change


def test_files_are_read_again_when_they_change_and_not_more_often_than_that(tmp_path: Path) -> None:
    path, now_s, reads = tmp_path / "f", [0.0], [0]
    path.write_text("a")

    def read() -> str:
        reads[0] += 1
        text = path.read_text()
        if text == "bad":
            raise ValueError("it is bad")
        return text

    watched = FromFiles([path], read, lambda: now_s[0])
    path.write_text("bb")
    assert watched.get() == "a"  # looked at a moment ago
    now_s[0] += CHECK_EVERY_S
    assert watched.get() == "bb"
    now_s[0] += CHECK_EVERY_S
    assert (watched.get(), reads[0]) == ("bb", 2)
    path.write_text("bad")
    for _ in range(2):
        now_s[0] += CHECK_EVERY_S
        assert (watched.get(), reads[0]) == ("bb", 3)
    assert watched.reloads == 1


# --- addresses


@pytest.mark.parametrize(
    ("address", "local"),
    [
        *((address, True) for address in ("127.0.0.1:1", "127.8.8.8:1", "[::1]:1", "localhost:1", "unix:/s")),
        *((address, False) for address in ("0.0.0.0:1", "[::]:1", "example.org:1", "127.0.0.1.example.org:1")),
    ],
)
def test_a_server_that_is_open_to_the_network_says_so(address: str, local: bool) -> None:
    assert is_local(address) is local
    open_to_all, tls = ServerConfig(listen=address), {"tls_cert": "c", "tls_key": "k"}
    assert (exposure(open_to_all) is None) is local
    assert exposure(replace(open_to_all, auth_token_file="t", **tls)) is None
    if not local:
        assert "auth_token_file" in str(exposure(open_to_all))
        assert "auth_token_file" in str(exposure(replace(open_to_all, **tls)))
        assert "clear text" in str(exposure(replace(open_to_all, auth_token_file="t")))


async def test_an_open_server_warns_and_a_unix_socket_is_only_for_its_owner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with serving(listen="0.0.0.0:0"):
            pass
    assert "any client that reaches 0.0.0.0:0 may use it" in caplog.text
    mask = os.umask(0)
    try:
        async with serving(listen=f"unix:{tmp_path}/s", health_listen=f"unix:{tmp_path}/h"):
            assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "sh"] == [0o600, 0o600]
    finally:
        os.umask(mask)


# --- health


async def test_the_health_address_needs_neither_tls_nor_token(files: Files, tmp_path: Path) -> None:
    probe = f"unix:{tmp_path}/h"
    async with (
        serving(**files.tls(tls_client_ca=str(files.ca), auth_token_file=files.tokens(TOKEN), health_listen=probe)),
        grpc.aio.insecure_channel(probe) as channel,
    ):
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/lockstep.engine.v1.Engine/GetStats")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_health_of_a_server_that_is_not_there_is_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["health", "--server", f"unix:{tmp_path}/none", "--timeout", "20"]) == cli.FAILED
    assert "UNAVAILABLE" in capsys.readouterr().out


# --- the client's flags


def test_a_token_does_not_cross_a_network_in_clear_text(tmp_path: Path) -> None:
    (tmp_path / "t").write_text(TOKEN)
    with pytest.raises(ValueError, match="--token-file: a token would cross the network to gpu1:1 in clear text"):
        access_of(flags("--server", "gpu1:1", "--token-file", str(tmp_path / "t")))
    access = access_of(flags("--server", "gpu1:1", "--tls", "--token-file", str(tmp_path / "t")))
    assert access.metadata() == (("authorization", f"Bearer {TOKEN}"),)
    assert TOKEN not in repr(access)
    access = access_of(flags())
    assert (access.address, access.credentials, access.metadata()) == ("127.0.0.1:50051", None, ())


def test_wrong_flags_are_named() -> None:
    for arguments, message in (
        (("--tls-cert", "c"), "--tls-cert and --tls-key need each other"),
        (("--tls-ca", "/no/such"), "--tls-ca: cannot read /no/such"),
        (("--tls-ca", __file__), "--tls-ca: .* holds no certificates in PEM"),
        (("--tls-cert", __file__, "--tls-key", __file__), "--tls-cert, --tls-key: .* must be a certificate"),
        (("--token-file", "/dev/null"), "--token-file: /dev/null is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            access_of(flags(*arguments))


# --- before anything heavy is imported


def test_addresses_and_files_that_cannot_be_used_are_named_early(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        in_use = f"cannot bind '{address}': Address already in use"
        for fields, message in (
            *(({name: address}, f"{name}: {in_use}") for name in ("listen", "health_listen", "metrics_listen")),
            ({"listen": "unix:/nowhere/s"}, "listen: /nowhere is no directory"),
            ({"listen": "no.such.host.invalid:1"}, "listen: no.such.host.invalid has no address"),
            ({"listen": "192.0.2.1:1"}, "listen: cannot bind '192.0.2.1:1': Cannot assign requested address"),
            ({"auth_token_file": "/nowhere/tokens"}, "auth_token_file: cannot read /nowhere/tokens"),
            ({"tls_cert": "/nowhere/a", "tls_key": "/nowhere/b"}, "tls_cert: cannot read /nowhere/a"),
        ):
            with pytest.raises(ServerError, match=message):
                check_port(ServerConfig(**{"listen": "127.0.0.1:0"} | fields))
    free = ServerConfig(listen=f"unix:{tmp_path}/s", health_listen="[::1]:0", metrics_listen="localhost:0")
    for _ in range(2):
        check_port(free)  # what is free stays free
    assert not (tmp_path / "s").exists()
