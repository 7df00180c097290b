"""A process that compiles grammars: reads a request, compiles, writes a reply, repeats. It may be killed at any time.

Invariant: no other process needs its state. It exits with its parent, is the first process that the kernel kills when
memory is short, runs at low priority, and has a bound on its allocations. It measures the nesting of a grammar before a
library reads it, and tries each artifact out (proof.py) before the grammar process loads it.

Frames on stdin and stdout: u32 length, a JSON head up to the first newline, then bytes. An artifact is written to the
memory file whose descriptor the first frame names. Started as `python -m grammar_service.compile.worker`.

Not responsible for: the time limit (see pool.py).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import resource
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
from grammar_service.grammar.value import Grammar, Kind, Reading, Whitespace
from grammar_service.grammar.vocabulary import Vocabulary
from service_runtime.parent_death import die_with_parent

_LENGTH = struct.Struct("<I")
NICENESS = 5
"""The niceness of workers and loaders. At 10, small schemas exceeded their time on a machine whose cores the engine
filled."""
IDLE = "--idle"
"""Flag: compile under SCHED_IDLE (sched(7)), when no other process wants the core; woken threads find it idle. A worker
starts at the niceness, so that it also starts on a machine that is never idle; pool.py notices when it gets no core."""
_GROUP_TRIES = 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a compilation, from the first frame."""

    artifact_fd: int
    memory_mb: int
    max_depth: int
    max_chain: int
    max_artifact_bytes: int


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A backend with the vocabulary, used for every grammar."""

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
    die_with_parent()
    lower_priority(NICENESS)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    # Libraries print to stdout, which must not mix with the frames.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    faulthandler.enable()
    # A stack of known size, smaller than the stacks of the loaders in the grammar process.
    threading.stack_size(WORKER_STACK_BYTES)
    serving = threading.Thread(target=_serve, args=(sys.stdin.buffer, out), name="compile")
    serving.start()
    serving.join()


def lower_priority(niceness: int) -> None:
    """Lower the priority of this process.

    Where Linux groups tasks by session (sched(7), autogroup), a niceness counts only within its session, and all
    sessions get equal shares. So this process starts a new session and gives the session the niceness.
    """
    os.nice(niceness)
    # Refused to the leader of a process group.
    with contextlib.suppress(PermissionError):
        os.setsid()
    if os.getsid(0) != os.getpid():
        return  # other processes share the session
    for _ in range(_GROUP_TRIES):
        try:
            with open("/proc/self/autogroup", "w", encoding="ascii") as file:
                file.write(str(niceness))
        except BlockingIOError:
            # Without privileges, this file may be written once per 0.1 s on the whole machine.
            time.sleep(random.uniform(0.05, 0.15))
        except OSError:
            return  # this kernel has no autogroups, so the niceness is enough
        else:
            return


def _yield_to_others() -> None:
    """Put every thread of this process under SCHED_IDLE.

    Permanent: a process without privileges cannot leave it. Where it is refused, the niceness remains.
    """
    for thread in os.listdir("/proc/self/task"):  # a library may have started threads
        with contextlib.suppress(OSError):
            os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))


def _serve(frames: BinaryIO, out: BinaryIO) -> None:
    first = _read(frames)
    if not first:
        return
    head, body = unpack(first)
    toolchain = _start(head, body, out)
    if toolchain is None:
        return
    limits = Limits(**head["limits"])
    while frame := _read(frames):
        head, body = unpack(frame)
        out.write(reply(toolchain, limits, head, body))
        out.flush()


def _start(head: dict[str, Any], tokenizer_json: bytes, out: BinaryIO) -> Toolchain | None:
    try:
        vocabulary = Vocabulary.load(tokenizer_json, head["size"], tuple(head["stop_ids"]))
        toolchain = Toolchain(load_backend(head["backend"], vocabulary), TokenTexts.of(vocabulary))
    except Exception as error:
        name, message = to_wire(error)
        out.write(pack({"error": name, "message": message}))
        out.flush()
        return None
    _limit_memory(int(head["limits"]["memory_mb"]))
    if IDLE in sys.argv[1:]:
        _yield_to_others()
    out.write(pack({"ready": os.getpid(), "modules": "torch" in sys.modules}))
    out.flush()
    return toolchain


def reply(toolchain: Toolchain, limits: Limits, head: dict[str, Any], body: bytes) -> bytes:
    """Compile the grammar of one frame; return the frame that answers it. An artifact is in the memory file then."""
    grammar = Grammar(Kind(head["kind"]), body.decode(), Whitespace(head["whitespace"]), Reading(**head["reading"]))
    toolchain.texts.choices.clear()  # so that the memory of a compilation does not depend on earlier grammars
    backend, begun = toolchain.backend, time.perf_counter()
    try:
        check_nesting(grammar.kind, grammar.text, limits.max_depth)
        check_rule_depth(grammar.kind, grammar.text, limits.max_chain)
        artifact = backend.compile(grammar, allow_unenforced=head["allow_unenforced"])
        if len(artifact) > limits.max_artifact_bytes:
            raise LimitExceeded(
                f"max_artifact_bytes: {backend.name} compiled the grammar into {len(artifact)} bytes, the limit is "
                f"{limits.max_artifact_bytes}"
            )
        compiled_ms = (time.perf_counter() - begun) * 1e3
        proof = prove(backend, grammar, artifact, toolchain.texts)
    except RecursionError:
        return _error_reply(LimitExceeded("max_grammar_depth: the grammar is nested too deeply to be walked"))
    except MemoryError:
        return _error_reply(
            LimitExceeded(f"compile_memory_mb: the compilation needs more than its {limits.memory_mb} MiB of memory")
        )
    except BaseException as error:  # a panic of a Rust library is not an Exception
        return _error_reply(error)
    _store(limits.artifact_fd, artifact)
    return pack(
        {
            "compile_ms": compiled_ms,
            "load_ms": proof.loaded_s * 1e3,
            "artifact_bytes": len(artifact),
            "plan": proof.plan.to_wire(),
        }
    )


def _error_reply(error: BaseException) -> bytes:
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


def _limit_memory(megabytes: int) -> None:
    with open("/proc/self/status", encoding="ascii") as file:
        data_kb = next(int(line.split()[1]) for line in file if line.startswith("VmData:"))
    limit = (data_kb << 10) + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


if __name__ == "__main__":
    main()
