"""The grammar process's HTTP listener for Prometheus, on a separate thread.

Invariant: it only reads. It has neither TLS nor a password, so it must listen where only the scraper can connect.

Not responsible for: the metrics (see metrics.py).
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server

from service_runtime.metrics_path import only_at_its_path


class CannotListen(Exception):
    """The address is in use or does not belong to this machine. The message names the setting."""


class MetricsListener:
    """Serves a registry from construction to `close`."""

    def __init__(self, listen: str, registry: CollectorRegistry) -> None:
        """Args: `listen` is "host:port". Raises CannotListen."""
        host, _, port = listen.rpartition(":")
        try:
            self._server, self._thread = start_http_server(int(port), host.strip("[]"), registry)
        except OSError as error:
            raise CannotListen(f"metrics_listen: cannot bind {listen!r}: {error.strerror or error}") from error
        self._server.set_app(only_at_its_path(make_wsgi_app(registry)))
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Close the port. Blocks for up to half a second. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __repr__(self) -> str:
        return f"<MetricsListener {self.address}>"
