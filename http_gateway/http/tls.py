"""HTTPS: the certificate of the gateway, and the authorities whose clients it admits.

Invariant: a certificate and a key that do not belong together are an error at the start. Renewed files are used from
the next handshake on: OpenSSL's context takes them while it is in use.

Not responsible for: the engines' certificates (engines/access.py).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from http_gateway.config import GatewayConfig
from service_runtime.from_files import FromFiles

log = logging.getLogger(__name__)

CHECK_EVERY_S = 5.0


class Certificates:
    """The TLS context of the server, which follows its files."""

    def __init__(self, config: GatewayConfig) -> None:
        """Read the files. Raises ValueError that names the setting."""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.set_alpn_protocols(["http/1.1"])
        self._config = config
        paths = [Path(path) for path in (config.tls_cert, config.tls_key, config.tls_client_ca) if path]
        if config.tls_client_ca:
            self.context.verify_mode = ssl.CERT_REQUIRED
        self._files = FromFiles(paths, self._load)

    async def follow(self) -> None:
        """Read renewed files, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            self._files.get()

    def _load(self) -> None:
        config = self._config
        try:
            # A context of its own first: a wrong pair must not replace the one in use.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_cert, config.tls_key, password=_none)
            self.context.load_cert_chain(config.tls_cert, config.tls_key, password=_none)
            if config.tls_client_ca:
                self.context.load_verify_locations(config.tls_client_ca)
        except ssl.SSLError as error:
            names = "tls_cert, tls_key" + (", tls_client_ca" if config.tls_client_ca else "")
            raise ValueError(f"{names}: {error.reason or error}") from error
        except OSError as error:
            raise ValueError(f"tls_cert, tls_key: cannot read {error.filename}: {error.strerror}") from error


def _none() -> str:
    raise ssl.SSLError("the key is encrypted")
