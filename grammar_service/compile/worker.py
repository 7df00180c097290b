"""The process that compiles: reads one request, compiles, writes one reply, and again; made to be killed.

Invariant: it holds nothing that anybody needs. It dies with its parent, is the first that the kernel ends when memory
is short, runs at low priority, and may allocate only so much. A grammar's nesting is measured before a library sees it,
and what a library made is tried out here (`compile_proof`) before the sidecar loads it. Frames on stdin and stdout: u32
length, then a JSON head up to the first newline, then bytes; an artifact lies in the memory file that the first frame
names. Started as `python -m grammar_service.compile.worker`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import random
import resource
import signal
import struct
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, BinaryIO

from grammar_service.backends.backend import Backend
from grammar_service.backends.registry import load_backend
from grammar_service.compile.proof import WORKER_STACK_BYTES, prove
from grammar_service.completion.texts import TokenTexts
from grammar_service.errors import LimitExceeded, to_wire
from grammar_service.grammar.limits import check_nesting, check_rule_depth
from grammar_service.grammar.value import Grammar, Kind, Whitespace
from grammar_service.grammar.vocabulary import Vocabulary

_LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1
NICENESS = 5
"""Of workers and loaders. At 10, on a machine whose cores the engine fills, small schemas ran out of their time."""
IDLE = "--idle"
"""As an argument: run when nobody else wants the core, sched(7). Who wakes up then takes that core for a free one."""
_GROUP_TRIES = 20


@dataclass(frozen=True, slots=True)
class _Terms:
    """What the first frame said."""

    artifact_fd: int
    memory_mb: int
    max_depth: int
    max_chain: int
    max_artifact_bytes: int


@dataclass(frozen=True, slots=True)
class _Bench:
    """What a vocabulary was made into; every grammar needs it."""

    backend: Backend
    texts: TokenTexts


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
    step_back(NICENESS)
    if IDLE in sys.argv[1:]:
        # For good: whoever is not root does not come back from there. Refused, the niceness has to do.
        for thread in os.listdir("/proc/self/task"):  # a library may have started some
            with contextlib.suppress(OSError):
                os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    # Libraries print to stdout; the frames must not meet that.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    faulthandler.enable()
    # On a stack of known size, which the sidecar's loaders exceed.
    threading.stack_size(WORKER_STACK_BYTES)
    serving = threading.Thread(target=_serve, args=(sys.stdin.buffer, out), name="compile")
    serving.start()
    serving.join()


def step_back(niceness: int) -> None:
    """Take less of a core than other processes.

    Where Linux groups tasks by session (sched(7), autogroup), a niceness counts within its session alone, and a session
    gets as much as any other: so this process has one of its own, and the session has the niceness.
    """
    os.nice(niceness)
    # Refused to a process that leads its group.
    with contextlib.suppress(PermissionError):
        os.setsid()
    if os.getsid(0) != os.getpid():
        return  # the session is others', too
    for _ in range(_GROUP_TRIES):
        try:
            with open("/proc/self/autogroup", "w", encoding="ascii") as file:
                file.write(str(niceness))
        except BlockingIOError:
            # Whoever is not root may write such a file once in 0.1 s, on the whole machine.
            time.sleep(random.uniform(0.05, 0.15))
        except OSError:
            return  # no autogroups here: then the niceness is enough
        else:
            return


def _serve(frames: BinaryIO, out: BinaryIO) -> None:
    first = _read(frames)
    if not first:
        return
    head, body = unpack(first)
    bench = _start(head, body, out)
    if bench is None:
        return
    terms = _Terms(**head["terms"])
    while frame := _read(frames):
        head, body = unpack(frame)
        out.write(_reply(bench, terms, head, body))
        out.flush()


def _start(head: dict[str, Any], tokenizer_json: bytes, out: BinaryIO) -> _Bench | None:
    try:
        vocabulary = Vocabulary.load(tokenizer_json, head["size"], tuple(head["stop_ids"]))
        bench = _Bench(load_backend(head["backend"], vocabulary), TokenTexts.of(vocabulary))
    except Exception as error:
        name, message = to_wire(error)
        out.write(pack({"error": name, "message": message}))
        out.flush()
        return None
    _limit_memory(int(head["terms"]["memory_mb"]))
    out.write(pack({"ready": os.getpid(), "modules": "torch" in sys.modules}))
    out.flush()
    return bench


def _reply(bench: _Bench, terms: _Terms, head: dict[str, Any], body: bytes) -> bytes:
    grammar = Grammar(Kind(head["kind"]), body.decode(), Whitespace(head["whitespace"]))
    bench.texts.choices.clear()  # what a grammar may allocate does not depend on those before
    backend, begun = bench.backend, time.perf_counter()
    try:
        check_nesting(grammar.kind, grammar.text, terms.max_depth)
        check_rule_depth(grammar.kind, grammar.text, terms.max_chain)
        artifact = backend.compile(grammar, allow_unenforced=head["allow_unenforced"])
        if len(artifact) > terms.max_artifact_bytes:
            raise LimitExceeded(
                f"max_artifact_bytes: {backend.name} compiled the grammar into {len(artifact)} bytes, the limit is "
                f"{terms.max_artifact_bytes}"
            )
        compiled_ms = (time.perf_counter() - begun) * 1e3
        proof = prove(backend, grammar, artifact, bench.texts)
    except RecursionError:
        return _refusal(LimitExceeded("max_grammar_depth: the grammar is nested too deeply to be walked"))
    except MemoryError:
        return _refusal(
            LimitExceeded(f"compile_memory_mb: the compilation needs more than its {terms.memory_mb} MiB of memory")
        )
    except BaseException as error:  # a library's panic is no Exception
        return _refusal(error)
    _store(terms.artifact_fd, artifact)
    return pack(
        {
            "compile_ms": compiled_ms,
            "load_ms": proof.loaded_s * 1e3,
            "artifact_bytes": len(artifact),
            "plan": proof.plan.to_wire(),
        }
    )


def _refusal(error: BaseException) -> bytes:
    name, message = to_wire(error)
    return pack({"error": name, "message": message})


def _store(descriptor: int, artifact: bytes) -> None:
    rest = memoryview(artifact)
    while rest:
        rest = rest[os.pwrite(descriptor, rest, len(artifact) - len(rest)) :]


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
