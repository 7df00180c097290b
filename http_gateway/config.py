"""The configuration of a gateway: one frozen dataclass, validated once, never changed.

Filled from flags, environment and TOML under the same names (see `read`).

Not responsible for: how settings are found (service_runtime/settings.py), or anything that a request can choose.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service_runtime.settings import Sources, add_flags
from service_runtime.shared_settings import LogSettings, PortSettings, is_address, is_host_port, require

ENVIRONMENT_PREFIX = "LOCKSTEP_GATEWAY_"

_DESCRIPTION = """\
The gateway of Lockstep: OpenAI's HTTP API in front of one or several engines. `lockstep serve --http 127.0.0.1:8000`
starts one next to the engine by itself. Start one by hand for several engines, or on another machine.

Examples:
  lockstep gateway                                                 in front of an engine on 127.0.0.1:50051
  lockstep gateway --engine gpu1:50051,gpu2:50051 --listen 0.0.0.0:8000 --api-key-file keys
  curl http://127.0.0.1:8000/v1/models
"""

_EPILOG = f"""\
A flag beats the environment variable {ENVIRONMENT_PREFIX}<NAME>, which beats the key of the TOML file named with
--config, which beats the default. Exit status: 0 after SIGTERM or SIGINT; 1 the address is taken; 2 wrong usage.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(LogSettings, PortSettings):
    """The HTTP address of the gateway, its engines, and the keys of its clients."""

    listen: str = "127.0.0.1:8000"
    """Address for HTTP: "host:port", or "fd:N", a socket that the parent process has bound."""
    engine: str = "127.0.0.1:50051"
    """Addresses of the engines, with a comma between two: "host:port" or "unix:/path"."""
    engine_tls: bool = False
    """Use TLS to the engines, with the certificate authorities of this system."""
    engine_tls_ca: str = ""
    """PEM file with certificate authorities for the engines' certificates; implies engine_tls."""
    engine_tls_cert: str = ""
    """PEM file with the gateway's certificate, for engines that ask for one; implies engine_tls."""
    engine_tls_key: str = ""
    """PEM file with the private key of engine_tls_cert."""
    engine_token_file: str = ""
    """File whose first token the gateway sends to the engines."""
    forward_keys: bool = False
    """Send a client's API key on to the engines instead of the token of engine_token_file: for engines that tell
    clients apart by their tokens."""
    api_key_file: str = ""
    """File with API keys, one per line; every call except /health then needs one. A changed file is read again. Empty:
    none is asked for."""
    tenant_file: str = ""
    """TOML file with the tenants of the engines (docs/access.md), in place of api_key_file: the keys are their tokens,
    which are sent on to the engines. /metrics is for operators then."""
    max_body_bytes: int = 8 << 20
    """Longest body of a request, in bytes; a longer one is answered with 413."""
    allowed_origins: str = ""
    """Origins whose pages may use the API from a browser (CORS), with a comma between two; "*" means all."""
    page: bool = True
    """Serve a small page for trying the model at `/`."""

    def __post_init__(self) -> None:
        require(is_host_port(self.listen), "listen", f"{self.listen!r} is neither host:port nor fd:N")
        require(bool(self.engines), "engine", "at least one address is required")
        for address in self.engines:
            require(is_address(address), "engine", f"{address!r} is neither host:port nor unix:/path")
        require(len(set(self.engines)) == len(self.engines), "engine", "an address is given twice")
        cert, key = self.engine_tls_cert, self.engine_tls_key
        require(bool(cert) or not key, "engine_tls_cert", "is required with engine_tls_key")
        require(bool(key) or not cert, "engine_tls_key", "is required with engine_tls_cert")
        self.check_port()
        self.check_logs()
        require(not (self.tenant_file and self.api_key_file), "api_key_file", "its keys belong into tenant_file")
        require(
            not self.forward_keys or bool(self.api_key_file or self.tenant_file),
            "forward_keys",
            "needs api_key_file: the keys of clients",
        )
        require(self.max_body_bytes >= 1024, "max_body_bytes", "must be at least 1024")

    @property
    def engines(self) -> tuple[str, ...]:
        """The addresses of the engines."""
        return tuple(address.strip() for address in self.engine.split(",") if address.strip())

    @property
    def forwards_keys(self) -> bool:
        """`forward_keys`, which tenants imply."""
        return self.forward_keys or bool(self.tenant_file)

    @property
    def origins(self) -> tuple[str, ...]:
        """The origins of `allowed_origins`."""
        return tuple(origin.strip() for origin in self.allowed_origins.split(",") if origin.strip())


def read(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[GatewayConfig, list[str]]:
    """Return the configuration from flags, environment and TOML, and a warning for each setting under an old name.

    Ends the process with status 2 and a message on a wrong setting, and with status 0 on --help.
    """
    parser = argparse.ArgumentParser(
        prog="lockstep gateway",
        allow_abbrev=False,
        usage="%(prog)s [settings]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, [GatewayConfig], ENVIRONMENT_PREFIX)
    flags = parser.parse_args(arguments)
    try:
        sources = Sources(flags, environment, [GatewayConfig], prefix=ENVIRONMENT_PREFIX, table="gateway")
        return sources.fill(GatewayConfig), sources.warnings
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\nTry --help.\n")
