"""A client of the public API, for the command line and the demo; also an example of how to write one.

The invariants: leaving `generate` early cancels the call, and the server frees what it holds for it. A bearer token
crosses a network over TLS alone.

Not responsible for: retries and load balancing.
"""

from __future__ import annotations

import argparse
import os
import ssl
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import grpc

from gpu_engine.front.port.auth import HEADER
from gpu_engine.front.port.listening import is_local
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc
from service_runtime.from_files import read_bytes

DEFAULT_SERVER = "127.0.0.1:50051"


@dataclass(frozen=True, slots=True)
class Access:
    """The credentials of a channel to one server."""

    tls: grpc.ChannelCredentials | None = None
    token: str | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call."""
        return ((HEADER, f"Bearer {self.token}"),) if self.token else ()

    def __repr__(self) -> str:
        return f"<Access {'TLS' if self.tls else 'clear text'}, {'a token' if self.token else 'no token'}>"


NO_CREDENTIALS = Access()
"""Clear text and no token: enough for a server with neither TLS nor tokens."""


class Client:
    """A client of the server at "host:port" or "unix:/path". An async context manager; made on the event loop."""

    def __init__(self, address: str, access: Access = NO_CREDENTIALS) -> None:
        self.address = address
        self._metadata = access.metadata
        options = [("grpc.max_receive_message_length", -1)]
        self._channel = (
            grpc.aio.secure_channel(address, access.tls, options=options)
            if access.tls
            else grpc.aio.insecure_channel(address, options=options)
        )
        self._stub: engine_pb2_grpc.EngineAsyncStub = engine_pb2_grpc.EngineStub(self._channel)

    async def generate(
        self, request: pb.GenerateRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Stream the answer. Raises grpc.aio.AioRpcError with the server's status and message."""
        call = self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for response in call:
                yield response
        finally:
            call.cancel()

    async def abort(self, request_id: str) -> bool:
        """End a request; False if it is not running."""
        request = pb.AbortRequest(request_id=request_id)
        return (await self._stub.Abort(request, metadata=self._metadata)).aborted

    async def compile(self, grammar: pb.Grammar, *, timeout_s: float | None = None) -> pb.CompileResponse:
        """Compile a grammar ahead of time. A request may then name it by the `grammar_id` of the response."""
        return await self._stub.Compile(pb.CompileRequest(grammar=grammar), timeout=timeout_s, metadata=self._metadata)

    async def info(self, *, timeout_s: float = 5.0) -> pb.GetModelInfoResponse:
        """Return the model and the limits of the server."""
        return await self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=timeout_s, metadata=self._metadata)

    async def stats(self, *, timeout_s: float = 5.0) -> pb.GetStatsResponse:
        """Return the counters and gauges of the server."""
        return await self._stub.GetStats(pb.GetStatsRequest(), timeout=timeout_s, metadata=self._metadata)

    async def tokenize(self, request: pb.TokenizeRequest, *, timeout_s: float = 30.0) -> pb.TokenizeResponse:
        """Return the token ids of a text or a conversation."""
        return await self._stub.Tokenize(request, timeout=timeout_s, metadata=self._metadata)

    async def detokenize(self, request: pb.DetokenizeRequest, *, timeout_s: float = 30.0) -> str:
        """Return the text of token ids."""
        return (await self._stub.Detokenize(request, timeout=timeout_s, metadata=self._metadata)).text

    async def token_texts(self, token_ids: Sequence[int], *, timeout_s: float = 30.0) -> list[str]:
        """Return the text of each token; bytes that are no UTF-8 become U+FFFD."""
        request = pb.DetokenizeRequest(token_ids=token_ids, with_texts=True)
        return list((await self._stub.Detokenize(request, timeout=timeout_s, metadata=self._metadata)).texts)

    async def load_adapter(self, name: str, path: str, *, timeout_s: float = 60.0) -> pb.Adapter:
        """Load an adapter from a directory of the server."""
        request = pb.LoadAdapterRequest(name=name, path=path)
        return (await self._stub.LoadAdapter(request, timeout=timeout_s, metadata=self._metadata)).adapter

    async def exchange_drafter(self, path: str, *, timeout_s: float = 300.0) -> pb.ExchangeDrafterResponse:
        """Load another draft model from a directory or file of the server, and draft with it."""
        request = pb.ExchangeDrafterRequest(path=path)
        return await self._stub.ExchangeDrafter(request, timeout=timeout_s, metadata=self._metadata)

    async def unload_adapter(self, name: str, *, timeout_s: float | None = None) -> None:
        """Take an adapter's name away, and wait until the last sequence that uses it has ended."""
        request = pb.UnloadAdapterRequest(name=name)
        await self._stub.UnloadAdapter(request, timeout=timeout_s, metadata=self._metadata)

    async def adapters(self, *, timeout_s: float = 5.0) -> pb.ListAdaptersResponse:
        """Return the adapters of the server."""
        return await self._stub.ListAdapters(pb.ListAdaptersRequest(), timeout=timeout_s, metadata=self._metadata)

    async def aclose(self) -> None:
        """Close the channel and cancel the calls that run."""
        await self._channel.close(None)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<Client {self.address}>"


def add_access_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--server` and the flags for TLS and tokens."""
    group = parser.add_argument_group("server", "Its address, and the credentials that it asks for.")
    group.add_argument(
        "--server",
        metavar="ADDRESS",
        default=os.environ.get("LOCKSTEP_SERVER", DEFAULT_SERVER),
        help=f"host:port or unix:/path (default: {DEFAULT_SERVER}; env: LOCKSTEP_SERVER)",
    )
    group.add_argument("--tls", action="store_true", help="use TLS, with the certificate authorities of this system")
    group.add_argument("--tls-ca", metavar="FILE", help="use TLS, with the certificate authorities in this PEM file")
    group.add_argument(
        "--tls-cert", metavar="FILE", help="PEM file with a certificate of the client, if the server asks for one"
    )
    group.add_argument("--tls-key", metavar="FILE", help="PEM file with the private key of --tls-cert")
    group.add_argument("--token-file", metavar="FILE", help="file whose first line is a bearer token")


def access_of(flags: argparse.Namespace) -> Access:
    """Return the credentials that the flags name. Raises ValueError that names the flag."""
    if bool(flags.tls_cert) != bool(flags.tls_key):
        raise ValueError("--tls-cert and --tls-key need each other")
    encrypted = flags.tls or flags.tls_ca or flags.tls_cert
    credentials = None
    if encrypted:
        ca, key, cert = (
            read_bytes(flag, Path(path)) if path else None
            for flag, path in (("--tls-ca", flags.tls_ca), ("--tls-key", flags.tls_key), ("--tls-cert", flags.tls_cert))
        )
        _check_pem(flags)
        credentials = grpc.ssl_channel_credentials(ca, key, cert)
    token = None
    if flags.token_file:
        if not encrypted and not is_local(flags.server):
            raise ValueError(
                f"--token-file: a token would cross the network to {flags.server} in clear text; add --tls"
            )
        lines = read_bytes("--token-file", Path(flags.token_file)).decode("ascii", "replace").split()
        if not lines:
            raise ValueError(f"--token-file: {flags.token_file} is empty")
        token = lines[0]
    return Access(credentials, token)


def _check_pem(flags: argparse.Namespace) -> None:
    # gRPC takes any bytes without an error, and then reports that the server cannot be reached.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if flags.tls_ca:
        try:
            context.load_verify_locations(flags.tls_ca)
        except ssl.SSLError as error:
            raise ValueError(f"--tls-ca: {flags.tls_ca} holds no certificates in PEM") from error
    if flags.tls_cert:
        try:
            context.load_cert_chain(flags.tls_cert, flags.tls_key, password="")
        except ssl.SSLError as error:
            raise ValueError(
                f"--tls-cert, --tls-key: {flags.tls_cert} and {flags.tls_key} must be a certificate and its "
                f"unencrypted key in PEM ({error.reason or error})"
            ) from error
