"""A compile worker whose behaviour is in the grammar's text: sleep, crash, refuse, pause, begin PATH (makes the file
and sleeps), hold PATH (computes until the file is there), forget (an allocation fails), starve (killed by the system);
anything else is echoed."""

from __future__ import annotations

import os
import signal
import struct
import sys
import time
from pathlib import Path

from grammar_service.compile.worker import pack, unpack


def read() -> bytes:
    length = sys.stdin.buffer.read(4)
    return sys.stdin.buffer.read(struct.unpack("<I", length)[0]) if length else b""


def write(frame: bytes) -> None:
    sys.stdout.buffer.write(frame)
    sys.stdout.buffer.flush()


def main() -> None:
    head, _ = unpack(read())
    limits = head["limits"]
    if limits["memory_mb"] == 666:
        write(pack({"error": "InvalidField", "message": "tokenizer_json: cannot be read"}))
        return
    write(pack({"ready": os.getpid(), "modules": False}))
    while frame := read():
        _, body = unpack(frame)
        text = body.decode()
        if "sleep" in text:
            time.sleep(600)
        if "crash" in text:
            os.kill(os.getpid(), signal.SIGSEGV)
        if "refuse" in text:
            write(pack({"error": "InvalidGrammar", "message": "it says refuse"}))
            continue
        if "pause" in text:
            time.sleep(0.1)
        if "begin" in text:
            Path(text.rpartition(" ")[2]).touch()
            time.sleep(600)
        if "hold" in text:
            while not Path(text.rpartition(" ")[2]).exists():
                pass
        if "forget" in text:
            print("memory allocation of 99 bytes failed", file=sys.stderr, flush=True)
            os.abort()
        if "starve" in text:
            os.kill(os.getpid(), signal.SIGKILL)
        size = os.pwrite(limits["artifact_fd"], f"{os.getpid()} {text}".encode(), 0)
        plan = {"path": None, "min_tokens": 1, "margin": 12, "single_token_cost": 0, "longest_way": None, "ends": []}
        write(pack({"compile_ms": 1.5, "artifact_bytes": size, "plan": plan}))


main()
