"""`python -m grammar_service`: reads the settings and runs the server; with `health` first, asks a running one."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from grammar_service.config import read
from service_runtime.logs import configure
from shared_mem.handover import RPC_SOCKET_NAME


def main() -> None:
    """Run a grammar process, or ask a running one for its health."""
    if sys.argv[1:2] == ["health"]:
        sys.exit(_ask_for_health(sys.argv[2:]))
    config, warnings = read(sys.argv[1:], os.environ)
    configure(config.log_level or "info", config.log_format)
    for warning in warnings:
        logging.getLogger("grammar_service.config").warning("%s", warning)
    # A compile worker calls exec right after fork, so it does not need gRPC's fork handlers.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    # A short switch interval: the threads that fill rows must get the GIL soon while the event loop or an import runs.
    sys.setswitchinterval(0.0005)
    from grammar_service.metrics_http import CannotListen
    from grammar_service.server import run
    from shared_mem.errors import SharedMemoryError

    try:
        run(config)
    except (CannotListen, SharedMemoryError) as error:
        sys.exit(f"python -m grammar_service: {error}")


def _ask_for_health(arguments: list[str]) -> int:
    from grammar_service.health import check

    path = Path(read(arguments, os.environ)[0].dir) / RPC_SOCKET_NAME
    status = check(path)
    print(f"{path}: {status}")
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    main()
