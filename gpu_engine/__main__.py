"""`lockstep` and `python -m gpu_engine`: settings of the process, then the command line (cli/commands.py)."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line and exit with its status."""
    # gRPC reads this when it is imported. Its fork handlers are for children that use gRPC; our children exec at once.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    # Its core writes raw lines to stderr, also where logs are JSON. Every failure of ours has a line of its own.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Prompts are tokenised one at a time. The library's thread pool only warns when a child is started after its use.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # The engine's thread needs the GIL soon after each operation, even while the event loop is busy.
    sys.setswitchinterval(0.0001)
    from gpu_engine.cli import commands as cli

    sys.exit(cli.main())


if __name__ == "__main__":
    main()
