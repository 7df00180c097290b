"""`PageTransport` over gRPC: the pages are the messages of one streaming call to the prefill engine's public port.

Invariant: a piece is taken from the connection when the caller asks for it, so HTTP/2's window bounds what is under
way. It uses the TLS and the tokens of that port.

Not responsible for: the choice of an engine (see remote_prefill.py), the other end (see kv_transfer_servicer.py).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path

import grpc

from gpu_engine.api.page_transfer import Fallback, PageFormat, Piece, TransferFailed, WantedPages
from gpu_engine.api.transfer_config import TransferConfig
from protos.transfer.v1 import transfer_pb2 as pb
from protos.transfer.v1 import transfer_pb2_grpc
from service_runtime.from_files import FromFiles, read_bytes
from service_runtime.tokens import first_token

_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
]

_REASONS = {
    grpc.StatusCode.FAILED_PRECONDITION: Fallback.DIFFERS,
    grpc.StatusCode.UNAVAILABLE: Fallback.GONE,
    grpc.StatusCode.CANCELLED: Fallback.GONE,
    grpc.StatusCode.INTERNAL: Fallback.GONE,
    grpc.StatusCode.DEADLINE_EXCEEDED: Fallback.SLOW,
}
"""Every other status is a refusal."""


class GrpcTransport:
    """A connection to the engine at `address`. Made on the event loop."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float,
        tls: grpc.ChannelCredentials | None = None,
        token: FromFiles[str] | None = None,
    ) -> None:
        """Args: `timeout_s` is the longest wait for the next pages; no `tls`: clear text; `token`: sent with calls."""
        self.address, self._timeout_s, self._token = address, timeout_s, token
        self._channel = (
            grpc.aio.secure_channel(address, tls, options=_OPTIONS)
            if tls
            else grpc.aio.insecure_channel(address, options=_OPTIONS)
        )
        self._stub: transfer_pb2_grpc.KvTransferAsyncStub = transfer_pb2_grpc.KvTransferStub(self._channel)

    async def fetch(self, wanted: WantedPages, first_page: int, form: PageFormat) -> AsyncGenerator[Piece]:
        """Yield the pages from `first_page` on. Raises TransferFailed."""
        message = pb.FetchRequest(
            token_ids=wanted.token_ids,
            first_page=first_page,
            cache_salt=wanted.cache_salt,
            format=_message(form),
            request_id=wanted.request_id,
        )
        metadata = (("authorization", f"Bearer {self._token.get()}"),) if self._token else ()
        call = self._stub.Fetch(message, metadata=metadata)
        at, end = first_page, len(wanted.token_ids) // form.page_size
        try:
            while at < end:
                try:
                    async with asyncio.timeout(self._timeout_s):
                        response = await call.read()
                except TimeoutError:
                    raise TransferFailed(Fallback.SLOW, f"no page came within {self._timeout_s:g} s") from None
                except grpc.aio.AioRpcError as error:
                    reason = _REASONS.get(error.code(), Fallback.REFUSED)
                    raise TransferFailed(reason, f"{error.code().name}: {error.details()}") from None
                if not isinstance(response, pb.FetchResponse):
                    raise TransferFailed(Fallback.GONE, f"the stream ended after {at} of {end} pages")
                count = response.num_pages
                if not 1 <= count <= min(end - at, form.piece_pages) or len(response.data) != count * form.page_bytes:
                    problem = f"{len(response.data)} bytes came for {count} pages of {form.page_bytes} bytes"
                    raise TransferFailed(Fallback.DIFFERS, problem)
                at += count
                yield Piece(count, response.data)
        finally:
            call.cancel()

    async def close(self) -> None:
        """Cancel what runs, and close the connection."""
        await self._channel.close(None)

    def __repr__(self) -> str:
        return f"<GrpcTransport {self.address}>"


def open_transports(config: TransferConfig) -> list[GrpcTransport]:
    """Return a transport for each engine of `prefill_from`. Raises ValueError with the setting at fault."""
    tls, path = _credentials(config), config.prefill_token_file

    def read() -> str:
        return first_token(Path(path), "prefill_token_file")

    token = FromFiles([Path(path)], read) if path else None
    options = {"timeout_s": config.prefill_timeout_s}
    return [GrpcTransport(address, tls=tls, token=token, **options) for address in config.prefill_from]


def _credentials(config: TransferConfig) -> grpc.ChannelCredentials | None:
    if not config.prefill_tls_ca:
        return None
    names = ("prefill_tls_ca", "prefill_tls_key", "prefill_tls_cert")
    ca, key, cert = (read_bytes(name, Path(getattr(config, name))) if getattr(config, name) else None for name in names)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # gRPC takes any bytes, and fails at every handshake
    try:
        context.load_verify_locations(config.prefill_tls_ca)
        if cert is not None:
            context.load_cert_chain(config.prefill_tls_cert, config.prefill_tls_key, password="")
    except ssl.SSLError as error:
        raise ValueError(f"{', '.join(names)}: {error.reason or error}") from error
    return grpc.ssl_channel_credentials(ca, key, cert)


def _message(form: PageFormat) -> pb.PageFormat:
    return pb.PageFormat(
        fingerprint=form.fingerprint,
        dtype=form.dtype,
        page_size=form.page_size,
        layout=form.layout,
        num_layers=form.num_layers,
        num_kv_heads=form.num_kv_heads,
        head_dim=form.head_dim,
        layers=[pb.LayerHeads(num_kv_heads=heads, head_dim=width) for heads, width in form.layers],
    )
