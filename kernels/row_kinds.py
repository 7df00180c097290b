"""The numbers that the grammar process writes for a mask row, as the kernels read them, and one of the engine.

Invariant: except for FAILED they are equal to `RowKind` and `STEERED` of shared_mem/layout.py, which this package may
not import; a test compares them, with those in the C headers. Triton kernels take their constants from here. Not
responsible for: the use of a row (see kernels/accept.py).
"""

ALL = 0
"""Every token is legal."""
APPLY = 1
"""The mask row says which tokens are legal."""
FORCED = 2
"""One token is legal."""
DEFER = 3
"""The answer is late: the row emits nothing."""
DEAD_END = 4
"""No token is legal: the request ends."""
ERROR = 5
"""The matcher rejected a committed token: the request ends."""
FAILED = 6
"""A logits processor failed for the row: FAILED and the processor's number. The request ends. Written by the engine
alone, after the grammar process's answer; the kernels take it as any kind from DEFER on."""
STEERED = -2
"""In place of the forced token of a row that is not FORCED: budgeted completion narrows the rest of the answer."""
