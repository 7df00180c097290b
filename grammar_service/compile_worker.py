"""The process that compiles: reads one request, compiles, writes one reply, and again; made to be killed.

Invariant: it holds nothing that anybody needs. It dies with its parent, runs at low priority, and may allocate only
so much. Frames on stdin and stdout: u32 length, then a JSON head up to the first newline, then bytes. Started as
`python -m grammar_service.compile_worker`; the first frame is the backend and the vocabulary, and its reply says
"ready".
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
import time
from typing import Any, BinaryIO

from grammar_service.backends import Backend, load_backend
from grammar_service.errors import to_wire
from grammar_service.grammar import Grammar, Kind, Whitespace
from grammar_service.vocabulary import Vocabulary

_LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1
_NICENESS = 5


def pack(head: dict[str, Any], body: bytes = b"") -> bytes:
    """Return one frame."""
    text = json.dumps(head).encode() + b"\n"
    return _LENGTH.pack(len(text) + len(body)) + text + body


def unpack(frame: bytes) -> tuple[dict[str, Any], bytes]:
    """Return head and body of a frame without its length."""
    at = frame.index(b"\n")
    return json.loads(frame[:at]), frame[at + 1 :]


def main() -> None:
    """Serve frames until stdin ends."""
    _die_with_parent()
    os.nice(_NICENESS)
    # Libraries print to stdout; the frames must not meet that.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    frames = sys.stdin.buffer
    head, body = unpack(_read(frames) or sys.exit(0))
    backend = _start(head, body, out)
    while frame := _read(frames):
        head, body = unpack(frame)
        out.write(_reply(backend, head, body))
        out.flush()


def _start(head: dict[str, Any], tokenizer_json: bytes, out: BinaryIO) -> Backend:
    try:
        vocabulary = Vocabulary.load(tokenizer_json, head["size"], tuple(head["stop_ids"]))
        backend = load_backend(head["backend"], vocabulary)
    except Exception as error:
        name, message = to_wire(error)
        out.write(pack({"error": name, "message": message}))
        out.flush()
        sys.exit(1)
    _limit_memory(int(head["memory_mb"]))
    out.write(pack({"ready": os.getpid(), "modules": "torch" in sys.modules}))
    out.flush()
    return backend


def _reply(backend: Backend, head: dict[str, Any], body: bytes) -> bytes:
    grammar = Grammar(Kind(head["kind"]), body.decode(), Whitespace(head["whitespace"]))
    begun = time.perf_counter()
    try:
        artifact = backend.compile(grammar)
    except Exception as error:
        name, message = to_wire(error)
        return pack({"error": name, "message": message})
    return pack({"compile_ms": (time.perf_counter() - begun) * 1e3}, artifact)


def _read(stream: BinaryIO) -> bytes:
    length = stream.read(_LENGTH.size)
    if len(length) < _LENGTH.size:
        return b""
    return stream.read(_LENGTH.unpack(length)[0])


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _limit_memory(megabytes: int) -> None:
    with open("/proc/self/status", encoding="ascii") as file:
        data_kb = next(int(line.split()[1]) for line in file if line.startswith("VmData:"))
    limit = (data_kb << 10) + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


if __name__ == "__main__":
    main()
