"""Settings that several processes have: log lines, probes, and the certificate of a port.

Invariant: a setting of two processes stands here once, and both config classes inherit it. Each process still reads its
own flags, variables and file.

Not responsible for: how settings are found (settings.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from service_runtime.logs import FORMATS, LEVELS


def require(condition: bool, name: str, problem: str) -> None:
    """Raise ValueError that names the setting, unless the condition holds."""
    if not condition:
        raise ValueError(f"{name}: {problem}")


def is_host_port(address: str) -> bool:
    """Return whether `address` is "host:port"."""
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdecimal() and int(port) < 1 << 16


def is_address(address: str) -> bool:
    """Return whether `address` is "host:port" or "unix:/path"."""
    return (address.startswith("unix:") and address != "unix:") or is_host_port(address)


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """Log lines of a process."""

    log_format: str = "text"
    """"text", or "json" (one object per line)."""
    log_level: str = ""
    """"debug", "info", "warning" or "error". Empty: info, and warning for `lockstep demo`."""

    def check_logs(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        require(self.log_format in FORMATS, "log_format", f"{self.log_format!r} is not one of {', '.join(FORMATS)}")
        known = self.log_level in ("", *LEVELS)
        require(known, "log_level", f"{self.log_level!r} is not one of {', '.join(LEVELS)}")


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """Addresses for scrapers and probes."""

    metrics_listen: str = ""
    """"host:port" on which to serve Prometheus metrics over HTTP; the engine's include the grammar process's. Empty:
    none. The port has no password: bind it to an address that only the scraper reaches."""
    health_listen: str = ""
    """"host:port" for the health service only, in clear text and without tokens: for probes that cannot use the
    public port or the socket of the grammar process. The engine also takes "unix:/path". Empty: none."""

    def check_metrics(self) -> None:
        """Raise ValueError for an address that is none."""
        known = not self.metrics_listen or is_host_port(self.metrics_listen)
        require(known, "metrics_listen", f"{self.metrics_listen!r} is not host:port")


@dataclass(frozen=True, kw_only=True)
class PortSettings:
    """The certificate of a public port, and its end."""

    tls_cert: str = ""
    """PEM file with the server's certificate chain; the port then takes TLS only. A renewed file is read again."""
    tls_key: str = ""
    """PEM file with the private key of tls_cert, unencrypted."""
    tls_client_ca: str = ""
    """PEM file with certificate authorities; every client then needs a certificate that one of them has signed."""
    drain_timeout_s: float = 5.0
    """Time that running requests have to end after SIGTERM, in seconds."""

    def check_port(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        require(bool(self.tls_cert) or not self.tls_key, "tls_cert", "is required with tls_key")
        require(bool(self.tls_key) or not self.tls_cert, "tls_key", "is required with tls_cert")
        require(bool(self.tls_cert) or not self.tls_client_ca, "tls_client_ca", "needs tls_cert and tls_key")
        require(self.drain_timeout_s >= 0, "drain_timeout_s", "must not be negative")


SHARED = (LogSettings, ProbeSettings, PortSettings)
"""The classes of settings that several processes have."""
