"""The two ends of the step plane: the role of the engine and the role of the grammar process.

    EngineEnd                       GrammarEnd
    seq = post(...)          --->   seq = wait(last)
    forward of the model            for record in records(seq): fill row_address(seq, slot, row), publish(...)
    await_rows(seq, ...)     <---
    mask_rows(seq)                  (read in place)

Invariant: each end writes only the words, rows and records that layout.py gives to its process, and every hand-over
goes through native/flags.c. A row that did not arrive in time is DEFER, never unconstrained.
Not responsible for: matchers, models, and the death of a peer (see handover.py).

Threads: one thread (or CUDA stream) posts and awaits. `set_abort`, `clear_abort`, `heartbeat` and the ages are for any
thread. On the other side one thread waits and reads records; threads with different slots may publish at the same time.
"""

from __future__ import annotations

from shared_mem.engine_end import AwaitResult, EngineEnd, HostCall
from shared_mem.grammar_end import GrammarEnd
from shared_mem.native import DEFAULT_SPIN_NS
from shared_mem.records import Record, Records

__all__ = ["DEFAULT_SPIN_NS", "AwaitResult", "EngineEnd", "GrammarEnd", "HostCall", "Record", "Records"]
