"""The grammar process of `bench_sync`: answers every record at once, with its sequence number in every word.

Invariant: the process serves one engine and ends when that engine closes its connection.
Not responsible for: any grammar.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared_mem.channel import GrammarEnd
from shared_mem.handover import connect, hung_up, listen, recv_segment, send_segment
from shared_mem.layout import RowKind
from shared_mem.segment import Segment


@contextmanager
def attached(segment: Segment, spin_us: float) -> Iterator[subprocess.Popen[str]]:
    """Start the process, send it the segment, and end it with the context."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "s"
        command = [sys.executable, "-m", "benchmarks.gpu.sync_peer", str(path), str(spin_us)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as peer:
            try:
                assert peer.stdout is not None
                assert peer.stdout.readline() == "listening\n"
                with connect(path) as socket:
                    send_segment(socket, segment)
                    yield peer
                peer.wait(timeout=10)
            finally:
                peer.kill()


def main() -> None:
    """Serve one engine until it closes its connection."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu.sync_peer", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, help="unix socket to listen on")
    parser.add_argument("spin_us", type=float, help="microseconds to spin for the next post before waiting")
    args = parser.parse_args()
    with listen(args.path) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
    with connection:
        end = GrammarEnd(recv_segment(connection))
        rows, last = end.layout.num_rows, end.start_seq
        kinds = [int(RowKind.APPLY)] * rows
        while True:
            newest = end.wait(last, timeout_s=0.05, spin_ns=int(args.spin_us * 1e3))
            if newest == last and hung_up(connection):
                return
            for seq in range(last + 1, newest + 1):
                masks = end.mask_rows(seq)
                for record in end.records(seq):
                    masks[record.slot] = seq & 0x7FFFFFFF
                    end.publish(seq, record.slot, record.slot_gen, kinds)
            last = newest


if __name__ == "__main__":
    main()
