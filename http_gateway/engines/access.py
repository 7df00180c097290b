"""The gateway's credentials for its engines: TLS and a token.

Invariant: files that are missing or wrong are an error at the start that names the setting.

Not responsible for: clients (see http/keys.py and http/tls.py).
"""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from http_gateway.config import GatewayConfig
from http_gateway.engines.engine import Metadata
from service_runtime.from_files import read_bytes
from service_runtime.tokens import first_token


def credentials(config: GatewayConfig) -> grpc.ChannelCredentials | None:
    """Return the credentials of the channels; None: clear text. Raises ValueError with the setting."""
    if not (config.engine_tls or config.engine_tls_ca or config.engine_tls_cert):
        return None
    settings = ("engine_tls_ca", "engine_tls_key", "engine_tls_cert")
    ca, key, cert = (
        read_bytes(name, Path(getattr(config, name))) if getattr(config, name) else None for name in settings
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # gRPC takes any bytes, and then reaches nobody
    try:
        if ca is not None:
            context.load_verify_locations(config.engine_tls_ca)
        if cert is not None:
            context.load_cert_chain(config.engine_tls_cert, config.engine_tls_key, password="")
    except ssl.SSLError as error:
        raise ValueError(f"engine_tls_ca, engine_tls_cert, engine_tls_key: {error.reason or error}") from error
    return grpc.ssl_channel_credentials(ca, key, cert)


def token(config: GatewayConfig) -> Metadata:
    """Return the metadata of the gateway's own calls. Raises ValueError with the setting."""
    if not config.engine_token_file:
        return ()
    return (("authorization", f"Bearer {first_token(Path(config.engine_token_file), 'engine_token_file')}"),)
