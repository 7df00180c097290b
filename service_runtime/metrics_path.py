"""Metrics at /metrics, and 404 at every other path: prometheus_client serves them at any path.

The invariant: a scraper with a wrong path, or a client that takes the port for the API, gets an error.

Not responsible for: the metrics, or their port.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication

PATH = "/metrics"


def only_at_its_path(metrics: WSGIApplication) -> WSGIApplication:
    """Return an application that serves `metrics` only at PATH."""

    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == PATH:
            return metrics(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"nothing is at this path; the metrics are at {PATH}\n".encode()]

    return app
