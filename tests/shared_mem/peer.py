"""A grammar process without grammars: it answers every record with a pattern made from its sequence number.

    python peer.py pattern PATH SPIN_NS    checks the tokens of every record, fills every word with the sequence
    python peer.py silent PATH             maps the segment and never answers

Invariant: it ends when the engine closes the connection, with status 1 and a line on stderr if a record was damaged.
"""

from __future__ import annotations

import socket
import sys
import time

from shared_mem.channel import GrammarEnd, Record
from shared_mem.errors import SharedMemoryError
from shared_mem.handover import hung_up, listen, recv_segment
from shared_mem.layout import RowKind

WORD = 0x7FFFFFFF


def expected(seq: int, slot: int, rows: int) -> Record:
    """Return the record that the stress test posts as `seq`: every field is computed from the sequence number."""
    n_commit, n_draft = seq % (rows + 1), seq % rows
    value = seq & WORD
    return Record(slot, value, value, (value,) * n_commit, (value,) * n_draft, seq % 3)


def answer(end: GrammarEnd, seq: int, record: Record) -> None:
    rows, value = end.layout.num_rows, seq & WORD
    end.mask_rows(seq)[record.slot] = value
    end.publish(seq, record.slot, record.slot_gen, [RowKind.APPLY] * rows, [value] * rows)


def serve(end: GrammarEnd, connection: socket.socket, spin_ns: int) -> None:
    last = end.start_seq
    while True:
        newest = end.wait(last, timeout_s=0.05, spin_ns=spin_ns)
        if newest == last and hung_up(connection):
            return
        for seq in range(last + 1, newest + 1):
            for record in end.records(seq):
                wanted = expected(seq, record.slot, end.layout.num_rows)
                if record != wanted:
                    sys.exit(f"sequence {seq}: {record} is not {wanted}")
                answer(end, seq, record)
        last = newest


def main(mode: str, path: str, spin_ns: str = "0") -> None:
    with listen(path) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
    with connection:
        try:
            segment = recv_segment(connection)
        except SharedMemoryError as error:
            sys.exit(f"{type(error).__name__}: {error}")
        if mode == "silent":
            while not hung_up(connection, timeout_s=0.5):
                time.sleep(0)
            return
        serve(GrammarEnd(segment), connection, int(spin_ns))


if __name__ == "__main__":
    main(*sys.argv[1:])
