"""Addresses, TLS and tokens, against servers that ask for them."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
import trustme

from lockstep_client import NO_RETRIES, TLS, AsyncClient, Client, Unavailable
from tests.client.scripted import Scripted, serving


def test_tls_with_a_certificate_of_the_client(server: Scripted, tmp_path: Path) -> None:
    ca = trustme.CA()
    theirs, own = ca.issue_cert("server.test"), ca.issue_cert("client.test")
    pair = theirs.private_key_pem.bytes(), theirs.cert_chain_pems[0].bytes()
    credentials = grpc.ssl_server_credentials([pair], ca.cert_pem.bytes(), require_client_auth=True)
    ca.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    cert, key = own.cert_chain_pems[0].bytes(), own.private_key_pem.bytes()
    tls = TLS(ca=tmp_path / "ca.crt", cert=cert, key=key, server_name="server.test")
    with serving(server, "127.0.0.1:0", credentials) as address:
        with Client(address, tls=tls, token="secret") as client:
            assert client.generate("x").text == "yes"
        assert server.metadata[0]["authorization"] == "Bearer secret"
        anonymous = Client(address, tls=TLS(ca=ca.cert_pem.bytes(), server_name="server.test"), retries=NO_RETRIES)
        with anonymous, pytest.raises(Unavailable):
            anonymous.generate("x", timeout_s=5)


async def test_a_token_is_asked_for_before_each_call(address: str, server: Scripted) -> None:
    tokens = iter(["one", "two"])
    async with AsyncClient(address, token=lambda: next(tokens), metadata=[("traceparent", "t")]) as client:
        await client.stats()
        await client.generate("x")
    assert [each["authorization"] for each in server.metadata] == ["Bearer one", "Bearer two"]
    assert server.metadata[0]["traceparent"] == "t"


def test_a_token_does_not_cross_a_network_in_clear_text() -> None:
    with pytest.raises(ValueError, match="token: it would cross the network to gpu1:50051 in clear text"):
        Client("gpu1:50051", token="secret")
    with Client("localhost:50051", token="secret"), Client("gpu1:50051", token="secret", tls=True):
        pass


def test_wrong_certificates_are_refused_at_once() -> None:
    for tls, message in (
        (TLS(cert=b"-----BEGIN"), "tls.cert, tls.key: each needs the other"),
        (TLS(ca="/nowhere/ca.crt"), "tls.ca: cannot read /nowhere/ca.crt: No such file"),
        (TLS(ca=b"garbage"), "tls.ca: holds no certificates in PEM"),
        (TLS(cert=b"garbage", key=b"garbage"), "tls.cert: is not in PEM"),
    ):
        with pytest.raises(ValueError, match=message):
            Client(tls=tls)


def test_the_address_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_SERVER", "gpu1:1")
    with Client() as named, Client("unix:/s") as given:
        assert (named.address, given.address) == ("gpu1:1", "unix:/s")
    monkeypatch.delenv("LOCKSTEP_SERVER")
    with Client() as default:
        assert default.address == "127.0.0.1:50051"
    with pytest.raises(ValueError, match="without a scheme"):
        Client("http://localhost:50051")
