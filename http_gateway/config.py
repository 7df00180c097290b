"""The configuration of a gateway: one frozen dataclass, validated once, never changed.

Filled from flags, environment and TOML under the same names (see `read`).

Not responsible for: how settings are found (service_runtime/settings.py), or anything that a request can choose.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service_runtime.logs import FORMATS, LEVELS
from service_runtime.settings import Sources, add_flags

ENVIRONMENT_PREFIX = "LOCKSTEP_GATEWAY_"

_DESCRIPTION = """\
The gateway of Lockstep: OpenAI's HTTP API in front of one or several engines. `lockstep serve --http 127.0.0.1:8000`
starts one beside the engine by itself. Start one by hand for several engines, or on another machine.

Examples:
  lockstep gateway                                                 in front of an engine on 127.0.0.1:50051
  lockstep gateway --engine gpu1:50051,gpu2:50051 --listen 0.0.0.0:8000 --api-key-file keys
  curl http://127.0.0.1:8000/v1/models
"""

_EPILOG = f"""\
A flag beats the environment variable {ENVIRONMENT_PREFIX}<NAME>, which beats the key of the TOML file named with
--config, which beats the default. Exit status: 0 after SIGTERM or SIGINT; 1 the address is taken; 2 wrong usage.
"""


def _require(condition: bool, name: str, problem: str) -> None:
    if not condition:
        raise ValueError(f"{name}: {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
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
    tls_cert: str = ""
    """PEM file with the gateway's certificate chain for HTTPS. A renewed file is read again."""
    tls_key: str = ""
    """PEM file with the private key of tls_cert, unencrypted."""
    tls_client_ca: str = ""
    """PEM file with certificate authorities; every client then needs a certificate that one of them has signed."""
    max_body_bytes: int = 8 << 20
    """Longest body of a request, in bytes; a longer one is answered with 413."""
    allowed_origins: str = ""
    """Origins whose pages may use the API from a browser (CORS), with a comma between two; "*" means all."""
    page: bool = True
    """Serve a small page for trying the model at `/`."""
    drain_timeout_s: float = 5.0
    """Time that running answers have to end after SIGTERM, in seconds."""
    log_format: str = "text"
    """"text", or "json" (one object per line)."""
    log_level: str = "info"
    """"debug", "info", "warning" or "error"."""

    def __post_init__(self) -> None:
        host, _, port = self.listen.rpartition(":")
        _require(
            port.isdecimal() and int(port) < 1 << 16 and bool(host),
            "listen",
            f"{self.listen!r} is neither host:port nor fd:N",
        )
        _require(bool(self.engines), "engine", "at least one address is required")
        for address in self.engines:
            host, _, port = address.rpartition(":")
            _require(
                (address.startswith("unix:") and address != "unix:") or (bool(host) and port.isdecimal()),
                "engine",
                f"{address!r} is neither host:port nor unix:/path",
            )
        _require(len(set(self.engines)) == len(self.engines), "engine", "an address is given twice")
        for prefix in ("tls", "engine_tls"):
            cert, key = getattr(self, f"{prefix}_cert"), getattr(self, f"{prefix}_key")
            _require(bool(cert) or not key, f"{prefix}_cert", f"is required with {prefix}_key")
            _require(bool(key) or not cert, f"{prefix}_key", f"is required with {prefix}_cert")
        _require(bool(self.tls_cert) or not self.tls_client_ca, "tls_client_ca", "needs tls_cert and tls_key")
        _require(not (self.tenant_file and self.api_key_file), "api_key_file", "its keys belong into tenant_file")
        _require(
            not self.forward_keys or bool(self.api_key_file or self.tenant_file),
            "forward_keys",
            "needs api_key_file: the keys of clients",
        )
        _require(self.max_body_bytes >= 1024, "max_body_bytes", "must be at least 1024")
        _require(self.drain_timeout_s >= 0, "drain_timeout_s", "must not be negative")
        _require(self.log_format in FORMATS, "log_format", f"{self.log_format!r} is not one of {', '.join(FORMATS)}")
        _require(self.log_level in LEVELS, "log_level", f"{self.log_level!r} is not one of {', '.join(LEVELS)}")

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
