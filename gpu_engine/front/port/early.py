"""What can be known about the public port before the model's libraries are imported: files, and addresses in use.

The invariant: nothing is kept. Each address is bound and closed again, each file is read and dropped; `bind` of
listening.py does it for good, seconds later, and reports the same errors.

Not responsible for: the directory of the grammar process (see sidecar/directory.py), the model.
"""

from __future__ import annotations

import socket
from pathlib import Path

from gpu_engine.api.config import ServerConfig
from gpu_engine.front.port.listening import ServerError, refuse_taken_path
from gpu_engine.front.port.tls import server_credentials
from service_runtime.tenants import tenant_file
from service_runtime.tokens import token_file


def check_port(config: ServerConfig) -> None:
    """Raise ServerError, which names the setting, for a file or an address that the server cannot use."""
    try:
        if config.tls_cert:
            server_credentials(config)
        if config.auth_token_file:
            token_file(Path(config.auth_token_file))
        if config.tenant_file:
            tenant_file(Path(config.tenant_file))
    except ValueError as error:
        raise ServerError(str(error)) from error
    for setting in ("listen", "http", "health_listen", "metrics_listen"):
        address = getattr(config, setting)
        if address:
            _check_address(setting, address)


def _check_address(setting: str, address: str) -> None:
    if address.startswith("unix:"):
        folder = Path(address.removeprefix("unix:").removeprefix("//")).parent
        if not folder.is_dir():
            raise ServerError(f"{setting}: {folder} is no directory")
        refuse_taken_path(setting, address)
        return
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ServerError(f"{setting}: {host} has no address: {error.strerror or error}") from error
    family, kind, protocol, _, where = found[0]
    with socket.socket(family, kind, protocol) as probe:
        # As gRPC binds: a port whose last connections are still closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(where)
        except OSError as error:
            raise ServerError(f"{setting}: cannot bind {address!r}: {error.strerror or error}") from error
