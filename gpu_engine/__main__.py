"""`python -m gpu_engine`: see `cli.py`."""

from __future__ import annotations

import sys

from gpu_engine import cli


def main() -> None:
    """Run the command line and exit with its status."""
    sys.exit(cli.main())


if __name__ == "__main__":
    main()
