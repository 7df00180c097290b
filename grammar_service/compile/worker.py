"""A process that compiles grammars: reads a request, compiles, writes a reply, repeats. It may be killed at any time.

Invariant: no other process needs its state. It exits with its parent, is the first process that the kernel kills when
memory is short, runs at low priority, and has a bound on its allocations. It measures the nesting of a grammar before a
library reads it, and tries each artifact out (proof.py) before the grammar process loads it.

Frames on stdin and stdout: u32 length, a JSON head up to the first newline, then bytes. An artifact is written to the
memory file whose descriptor the first frame names. Started as `python -m grammar_service.compile.worker`.

With FORKS it compiles nothing. It reads the vocabulary once, and then forks workers that have it (see forks.py), each
within milliseconds and with a connection in place of stdin and stdout. It has one thread, so that a fork copies no lock
that another thread holds; the grammar process counts its threads and otherwise starts each worker by itself.

Not responsible for: the time limit (see pool.py).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import random
import resource
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, NoReturn

from grammar_service.backends.backend import Backend
from grammar_service.backends.registry import load_backend
from grammar_service.compile.proof import WORKER_STACK_BYTES, prove
from grammar_service.completion.texts import TokenTexts
from grammar_service.errors import InvalidGrammar, LimitExceeded, to_wire
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
FORKS = "--forks"
"""Flag, before the descriptor of a socket of the type SOCK_SEQPACKET: fork workers. Requests are `fork` or `fork IDLE`
with three descriptors (the connection, the artifact's memory file, stderr), answered in order by `forked PID` or
`refused ERRNO`, and `kill PID`. `ended PID STATUS` reports the end of a worker."""
_MESSAGE_BYTES = 64
_FIRST = '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'
_ORDINARY = """{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"},
"tags": {"type": "array", "items": {"type": "string"}}, "city": {"type": "string"}, "price": {"type": "number"}}}"""
"""An open object with a few properties: xgrammar looks at the whole vocabulary for every letter of their names."""
_GROUP_TRIES = 20
REFUSED_S = 0.05, 0.15
"""Where the kernel refused a niceness for the moment, another try is made after a time between these."""
_LOOKS, _LOOK_S = 100, 0.01
"""How often, and every how many seconds, a process with more than one thread looks whether it still has it."""


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
    """Serve frames until stdin ends, or fork workers until the socket is closed."""
    die_with_parent()
    lower_priority(NICENESS)
    # Libraries print to stdout, which must not mix with the frames.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    faulthandler.enable()
    if FORKS in sys.argv:
        _fork_workers(sys.stdin.buffer, out, socket.socket(fileno=int(sys.argv[-1])))
    else:
        _work(sys.stdin.buffer, out, None)


def _work(frames: BinaryIO, out: BinaryIO, forked: _Forked | None) -> None:
    """Serve frames until `frames` ends."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    # A stack of known size, smaller than the stacks of the loaders in the grammar process.
    threading.stack_size(WORKER_STACK_BYTES)
    serving = threading.Thread(target=_serve, args=(frames, out, forked), name="compile")
    serving.start()
    serving.join()


def lower_priority(niceness: int) -> None:
    """Lower the priority of this process and of a session of its own."""
    os.nice(niceness)
    _own_session(niceness)


def _own_session(niceness: int) -> None:
    """Give this process a session of this niceness.

    Where Linux groups tasks by session (sched(7), autogroup), a niceness counts only within its session, and all
    sessions get equal shares. So this process starts a new session and gives the session the niceness. Workers that
    shared one would share its part of the cores, a quick compilation with a slow one.
    """
    # Refused to the leader of a process group.
    with contextlib.suppress(PermissionError):
        os.setsid()
    for _ in range(_GROUP_TRIES):
        if weigh_session(os.getpid(), niceness):
            return
        time.sleep(random.uniform(*REFUSED_S))


def weigh_session(process: int, niceness: int) -> bool:
    """Set the niceness of a session, where Linux groups tasks by session (sched(7), autogroup).

    Returns False if the kernel refuses it for the moment: without privileges, such a niceness may be set once per 0.1 s
    on the whole machine. Does nothing if `process` leads no session or has ended, and on a kernel without autogroups.
    """
    try:
        if os.getsid(process) == process:
            with open(f"/proc/{process}/autogroup", "w", encoding="ascii") as file:
                file.write(str(niceness))
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _yield_to_others() -> None:
    """Put every thread of this process under SCHED_IDLE.

    Permanent: a process without privileges cannot leave it. Where it is refused, the niceness remains.
    """
    for thread in os.listdir("/proc/self/task"):  # a library may have started threads
        with contextlib.suppress(OSError):
            os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))


@dataclass(frozen=True, slots=True)
class _Forked:
    """What a worker has from the process that forked it."""

    toolchain: Toolchain
    artifact_fd: int
    idle: bool


def _serve(frames: BinaryIO, out: BinaryIO, forked: _Forked | None) -> None:
    first = _read(frames)
    if not first:
        return
    head, body = unpack(first)
    limits = Limits(**head["limits"])
    if forked is None:
        toolchain, idle = _load(head, body, out), IDLE in sys.argv[1:]
    else:
        toolchain, idle = forked.toolchain, forked.idle
        limits = replace(limits, artifact_fd=forked.artifact_fd)
    if toolchain is None:
        return
    _limit_memory(limits.memory_mb)
    if idle:
        _yield_to_others()
    _write(out, pack({"ready": os.getpid(), "modules": "torch" in sys.modules}))
    while frame := _read(frames):
        head, body = unpack(frame)
        _write(out, reply(toolchain, limits, head, body))


def _load(head: dict[str, Any], tokenizer_json: bytes, out: BinaryIO) -> Toolchain | None:
    """Return the toolchain that the first frame describes; None: `out` has the error."""
    try:
        vocabulary = Vocabulary.load(tokenizer_json, head["size"], tuple(head["stop_ids"]))
        return Toolchain(load_backend(head["backend"], vocabulary), TokenTexts.of(vocabulary))
    except Exception as error:
        name, message = to_wire(error)
        _write(out, pack({"error": name, "message": message}))
        return None


def _fork_workers(frames: BinaryIO, out: BinaryIO, control: socket.socket) -> None:
    """Read the first frame, then fork a worker for each request on `control` until that is closed."""
    first = _read(frames)
    toolchain = _load(*unpack(first), out) if first else None
    if toolchain is None:
        return
    _compile_one(toolchain, _FIRST)  # what the libraries build at their first grammar is built before a fork
    begun_s = time.process_time()
    _compile_one(toolchain, _ORDINARY)
    ordinary_s = time.process_time() - begun_s
    gc.collect()
    gc.freeze()  # a collection in a worker would otherwise copy the pages that it shares with this process
    _write(out, pack({"threads": _num_threads(), "ordinary_s": ordinary_s}))
    woken, waking = socket.socketpair()
    for each in (woken, waking):
        each.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    children: set[int] = set()
    with selectors.DefaultSelector() as selector:
        for each in (woken, control):
            selector.register(each, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if woken in ready:
                woken.recv(1 << 16)
                _report_ended(children, control)
            if control not in ready:
                continue
            message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 3)
            word, _, rest = message.decode().partition(" ")
            if word == "":
                return
            if word == "kill":
                if int(rest) in children:  # else it has ended, and its id may belong to another process
                    os.kill(int(rest), signal.SIGKILL)
                continue
            try:
                child = os.fork()
            except OSError as error:
                control.send(f"refused {error.errno}".encode())
            else:
                if child == 0:
                    for inherited in (selector, woken, waking, control, out):
                        inherited.close()
                    _become_worker(toolchain, descriptors, idle=rest == IDLE)
                children.add(child)
                control.send(f"forked {child}".encode())
            for descriptor in descriptors:
                os.close(descriptor)


def _num_threads() -> int:
    """Return how many threads this process has.

    On a busy machine the kernel lists a thread for a while after `Thread.join` has returned, so a second one is looked
    for again.
    """
    looks = 1
    while (listed := len(os.listdir("/proc/self/task"))) > 1 and looks < _LOOKS:
        time.sleep(_LOOK_S)
        looks += 1
    return listed


def _compile_one(toolchain: Toolchain, schema: str) -> None:
    grammar = Grammar(Kind.JSON_SCHEMA, schema, Whitespace.COMPACT)
    with contextlib.suppress(InvalidGrammar):  # no tokens of this vocabulary spell JSON
        prove(toolchain.backend, grammar, toolchain.backend.compile(grammar), toolchain.texts)


def _become_worker(toolchain: Toolchain, descriptors: list[int], *, idle: bool) -> NoReturn:
    """Work in the child of a fork, and exit."""
    status = 1
    try:
        connection, artifact_fd, stderr_fd = descriptors
        die_with_parent()  # a parent that has died already has closed the other end of `connection`
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, standard in ((nothing, 0), (stderr_fd, 1), (stderr_fd, 2)):
            os.dup2(source, standard)
        os.close(nothing)
        os.close(stderr_fd)
        _own_session(NICENESS)
        with os.fdopen(os.dup(connection), "rb") as frames, os.fdopen(connection, "wb") as out:
            _work(frames, out, _Forked(toolchain, artifact_fd, idle))
        status = 0
    except BrokenPipeError:
        status = 0  # nobody waits for the answer
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)  # nothing of the parent's is flushed or ended twice


def _report_ended(children: set[int], control: socket.socket) -> None:
    """Reap every child that has ended, and report it."""
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            return
        children.remove(child)
        control.send(f"ended {child} {os.waitstatus_to_exitcode(status)}".encode())


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


def _write(stream: BinaryIO, frame: bytes) -> None:
    stream.write(frame)
    stream.flush()


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
