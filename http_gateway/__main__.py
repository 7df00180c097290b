"""`python -m http_gateway`, and `lockstep gateway`: reads the settings and runs the gateway."""

from __future__ import annotations

import logging
import os
import resource
import sys

from http_gateway.config import read
from service_runtime.logs import configure

GRPC_EXPERIMENTS = "-event_engine_client"
"""gRPC's older poller: a message of a stream costs two context switches, and six with the newer (docs/log/)."""


def main() -> None:
    """Run a gateway."""
    config, warnings = read(sys.argv[1:], os.environ)
    configure(config.log_level or "info", config.log_format)
    for warning in warnings:
        logging.getLogger("http_gateway.config").warning("%s", warning)
    # The gateway starts no processes, so it does not need gRPC's fork handlers.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_EXPERIMENTS", GRPC_EXPERIMENTS)
    # Every client that waits is a descriptor; many systems begin with a soft limit of 1024.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    from http_gateway.http.server import CannotListen, run

    try:
        run(config)
    except (CannotListen, ValueError) as error:
        sys.exit(f"lockstep gateway: {error}")


if __name__ == "__main__":
    main()
