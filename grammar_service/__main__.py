"""`python -m grammar_service`: read the settings, run the server."""

from __future__ import annotations

import os
import sys

from grammar_service.config import read
from grammar_service.logs import configure


def main() -> None:
    """Run a sidecar in this process."""
    config = read(sys.argv[1:], os.environ)
    configure(config.log_level, config.log_format)
    # Compile workers are forked and executed at once; gRPC's fork handlers are for children that go on with gRPC.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    # The worker thread must get the GIL soon, whatever the event loop or an import is doing.
    sys.setswitchinterval(0.0005)
    from grammar_service.metrics_http import CannotListen
    from grammar_service.server import run
    from shared_mem.errors import SharedMemoryError

    try:
        run(config)
    except (CannotListen, SharedMemoryError) as error:
        sys.exit(f"python -m grammar_service: {error}")


if __name__ == "__main__":
    main()
