"""`python -m grammar_service`: read the settings, run the server."""

from __future__ import annotations

import logging
import os
import sys

from grammar_service.config import read


def main() -> None:
    """Run a sidecar in this process."""
    config = read(sys.argv[1:], os.environ)
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    # Compile workers are forked and executed at once; gRPC's fork handlers are for children that go on with gRPC.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    # The worker thread must get the GIL soon, whatever the event loop or an import is doing.
    sys.setswitchinterval(0.0005)
    from grammar_service.server import run
    from shared_mem.errors import SharedMemoryError

    try:
        run(config)
    except SharedMemoryError as error:
        sys.exit(f"python -m grammar_service: {error}")


if __name__ == "__main__":
    main()
