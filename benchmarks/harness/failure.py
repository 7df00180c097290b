"""Why a harness cannot go on.

Invariant: a harness lets this error through; `python -m benchmarks` prints it in one place, and exits with 2. Not
responsible for: wrong flags (argparse's), and findings, which a harness reports itself with 1.
"""

from __future__ import annotations


class CannotRun(RuntimeError):
    """A server or a peer did not start, or refused a call. The message says so to the person who runs the harness."""
