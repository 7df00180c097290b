"""The faults that are seeded into the step plane, in the model and in a copy of the sources, and what catches each.

Invariant: an edit replaces text that is in its file exactly once, so a fault is never silently left out. The copy has
its own library and its own package `shared_mem`; the checkout is not touched. Not responsible for: the model (see
model.py).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.step_plane.model import ROOT

FLAGS, LAYOUT, SEGMENT, ENGINE = "native/flags.c", "layout.py", "segment.py", "engine_end.py"
TESTS = ("tests/shared_mem/test_channel.py", "tests/shared_mem/test_two_processes.py")
SLICE = (FLAGS, "LS_PARK_SLICE_NS 2000000LL", "LS_PARK_SLICE_NS 3600000000000LL")
"""Without the slices of a park, which hide a lost wake-up after 2 ms."""
RACE_ROUNDS = 50_000
SEARCHED_SEEDS = 20_000
ENDLESS = "no end"

Edit = tuple[str, str, str]
"""A file of shared_mem, the text in it, and the text of the mutant."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault."""

    name: str
    what: str
    found_in: str = ""
    """The configuration that catches it; "": it is not in the model."""
    edits: tuple[Edit, ...] = ()
    """The same fault in the sources; (): it is in no source of shared_mem."""


_GRAMMAR_PARKS = """        atomic_store_explicit(parked, 1, memory_order_relaxed);
        atomic_thread_fence(memory_order_seq_cst);
        futex_wait_until((word32 *)req, (uint32_t)seq, deadline);
"""
_ENGINE_PARKS = """        atomic_store_explicit(parked, 1, memory_order_relaxed);
        atomic_thread_fence(memory_order_seq_cst);
        futex_wait_until(bell, rung, until < deadline ? until : deadline);
"""
_ENTRY_ZERO = "    atomic_store_explicit(at64(entry, 0), 0, memory_order_relaxed);\n"
_REQ = "    atomic_store_explicit(at64(v->words, LS_REQ_SEQ), seq, memory_order_release);\n"
_POST_WAKES = "    if (get32(v->words, LS_GRAMMAR_PARKED)) futex_wake(at32(v->words, LS_REQ_SEQ));\n"
_RINGS = "    atomic_fetch_add_explicit(at64(v->words, LS_DOORBELL), 1, memory_order_release);\n"
_RING_WAKES = "    if (get32(v->words, LS_ENGINE_PARKED)) futex_wake(at32(v->words, LS_DOORBELL));\n"
_FENCE = "    atomic_thread_fence(memory_order_seq_cst);\n"
_LAST_LOOK = """    atomic_thread_fence(memory_order_acquire);
    if (atomic_load_explicit(at64(entry, 0), memory_order_relaxed) != a->seq) return;
"""
_ANSWER_GEN = "    put32(answer, ANS_SLOT_GEN, (uint32_t)a->slot_gen);\n"
_ANSWER_SEQ = "    atomic_store_explicit(at64(answer, 0), a->seq, memory_order_release);\n"
_LATE_CLEARED = "    if (!a->late) atomic_store_explicit(at64(answer, v->ans_late), 0, memory_order_release);\n"
_ADD_LOOP = """    for (uint32_t r = 0; r < v->num_rows; r++) {
        word8 *kind = at8(answer, ANS_KIND + r);
"""
_ADDED_TOKEN = "        put32(answer, v->ans_forced + 4 * r, (uint32_t)a->forced[r]);\n"
_ADDED_KIND = "        atomic_store_explicit(kind, a->kinds[r], memory_order_release);\n"
_LATE_READ = "    a->late += atomic_load_explicit(at64(answer, v->ans_late), memory_order_acquire) == seq;\n"
_KINDS_READ = """        a->forced[row + r] = (int32_t)get32(answer, v->ans_forced + 4 * r);
    }
"""
_BELL_READ = "        uint32_t rung = atomic_load_explicit(bell, memory_order_acquire);\n"
_TAKES = "        i = take_from(a, seq, i);\n        if (i == a->batch || atomic_load"
_PUBLISHES = "    if (!stale) ls_ring(a->view);\n"

_LOOKS_FIRST = f"""    const int asleep = (int)get32(v->words, LS_ENGINE_PARKED);
{_RINGS}    if (asleep) futex_wake(at32(v->words, LS_DOORBELL));
"""
_POSTS_LATE = f"""    const int asleep = (int)get32(v->words, LS_GRAMMAR_PARKED);
{_REQ}    if (asleep) futex_wake(at32(v->words, LS_REQ_SEQ));
"""
_PARKED = "        atomic_store_explicit(parked, 1, memory_order_relaxed);\n"


def _relaxed(name: str, what: str, text: str) -> Mutant:
    """Return a mutant whose one order in `text` is relaxed."""
    (order,) = re.findall(r"memory_order_(?:acquire|release|seq_cst)", text)
    return Mutant(name, what, "", ((FLAGS, text, text.replace(order, "memory_order_relaxed")),))


ORDERS = (
    _relaxed("REQ_RELAXED", "ls_post stores REQ_SEQ without release", _REQ),
    _relaxed("REQ_READ_RELAXED", "ls_wait_req loads REQ_SEQ without acquire",
             "        seq = atomic_load_explicit(req, memory_order_acquire);\n"),
    _relaxed("ENTRY_UNFENCED", "ls_post has no fence between an entry's mark and its contents",
             _ENTRY_ZERO + "    atomic_thread_fence(memory_order_release);\n"),
    _relaxed("COPY_UNFENCED", "ls_records has no fence between its copy and its second look",
             _LAST_LOOK.splitlines(keepends=True)[0] + "    if (atomic_load_explicit(at64(entry, 0), memory_order_re"),
    _relaxed("ANSWER_RELAXED", "ls_put_answer stores the sequence without release", _ANSWER_SEQ),
    _relaxed("ANSWER_READ_RELAXED", "take_answer loads the sequence without acquire",
             "answered = atomic_load_explicit(at64(answer, 0), memory_order_acquire);"),
    _relaxed("KIND_RELAXED", "ls_add_rows stores a kind without release", _ADDED_KIND),
    _relaxed("KIND_READ_RELAXED", "take_answer loads a kind without acquire",
             "atomic_load_explicit(at8(answer, ANS_KIND + r), memory_order_acquire)"),
    _relaxed("LATE_RELAXED", "ls_add_rows clears `late` without release", _LATE_CLEARED),
    _relaxed("LATE_READ_RELAXED", "take_answer loads `late` without acquire", _LATE_READ),
    _relaxed("BELL_RELAXED", "ls_ring rings without release", _RINGS),
    _relaxed("BELL_READ_RELAXED", "ls_await reads the bell without acquire", _BELL_READ),
    _relaxed("RING_UNFENCED", "ls_ring has no fence between bell and sleeper", _FENCE + _RING_WAKES),
    _relaxed("POST_UNFENCED", "ls_post has no fence between REQ_SEQ and sleeper", _FENCE + _POST_WAKES),
    _relaxed("GRAMMAR_PARKS_UNFENCED", "ls_wait_req has no fence between `parked` and its comparison",
             "        atomic_thread_fence(memory_order_seq_cst);\n        futex_wait_until((word32 *)req"),
    _relaxed("ENGINE_PARKS_UNFENCED", "ls_await has no fence between `parked` and its comparison",
             "        atomic_thread_fence(memory_order_seq_cst);\n        futex_wait_until(bell"),
)  # fmt: skip
"""Each order of flags.c that is not relaxed, weakened, except those that docs/log names."""

MUTANTS = (
    Mutant("RING_LOOKS_FIRST", "ls_ring looks at the sleeper before it rings (no fence)", "wake-ups",
           ((FLAGS, _RINGS + _FENCE + _RING_WAKES, _LOOKS_FIRST), SLICE)),
    Mutant("POST_LOOKS_FIRST", "ls_post looks at the sleeper before it stores REQ_SEQ (no fence)", "wake-ups",
           ((FLAGS, _REQ + _FENCE + _POST_WAKES, _POSTS_LATE),)),
    Mutant("GRAMMAR_PARKS_LATE", "ls_wait_req says that it sleeps after it has compared (no fence)", "wake-ups",
           ((FLAGS, _GRAMMAR_PARKS, _GRAMMAR_PARKS.replace(_PARKED, "", 1) + _PARKED),)),
    Mutant("ENGINE_PARKS_LATE", "ls_await says that it sleeps after it has compared (no fence)", "wake-ups",
           ((FLAGS, _ENGINE_PARKS, _ENGINE_PARKS.replace(_PARKED, "", 1) + _PARKED), SLICE)),
    Mutant("SLEEPS_UNCOMPARED", "futex_wait compares with the word's present value", "wake-ups",
           ((FLAGS, "FUTEX_WAIT_BITSET, seen, &t", "FUTEX_WAIT_BITSET, atomic_load(word), &t"), SLICE)),
    Mutant("BELL_READ_LATE", "ls_await reads the bell after the answers", "wake-ups",
           ((FLAGS, _BELL_READ, ""), (FLAGS, _TAKES, _TAKES.replace("\n", "\n" + _BELL_READ)), SLICE)),
    Mutant("BELL_BEFORE_ANSWER", "ls_publish rings before it stores the answer", "wake-ups",
           ((FLAGS, "    const int32_t stale = ls_put_answer(a);\n" + _PUBLISHES,
             "    ls_ring(a->view);\n    const int32_t stale = ls_put_answer(a);\n"), SLICE)),
    Mutant("NO_BELL", "ls_publish does not ring", "wake-ups", ((FLAGS, _PUBLISHES, ""), SLICE)),
    Mutant("NO_WAKE", "ls_post wakes nobody", "wake-ups", ((FLAGS, _POST_WAKES, ""),)),
    Mutant("ANSWER_SEQ_FIRST", "ls_put_answer stores the sequence before kinds and tokens", "owners",
           ((FLAGS, _ANSWER_SEQ, ""), (FLAGS, _ANSWER_GEN, _ANSWER_SEQ + _ANSWER_GEN))),
    Mutant("ROWS_AFTER_SEQ", "mask rows are written after the answer's sequence", "owners"),
    Mutant("ONE_HALF", "both parities of a sequence have one half of the masks", "owners",
           ((LAYOUT, "self.mask_offset + (seq & 1) * self.mask_buffer_bytes", "self.mask_offset"),
            (SEGMENT, "memory[first + i * size : first + (i + 1) * size]", "memory[first : first + size]"))),
    Mutant("KIND_BEFORE_ROW", "ls_add_rows stores a kind before what it announces", "owners",
           ((FLAGS, _ADDED_TOKEN + _ADDED_KIND, _ADDED_KIND + _ADDED_TOKEN),)),
    Mutant("LATE_CLEARED_FIRST", "ls_add_rows clears `late` before it adds rows", "owners",
           ((FLAGS, _LATE_CLEARED, ""), (FLAGS, _ADD_LOOP, _LATE_CLEARED + _ADD_LOOP))),
    Mutant("KINDS_BEFORE_LATE", "take_answer reads `late` after the kinds", "owners",
           ((FLAGS, _LATE_READ, ""), (FLAGS, _KINDS_READ, _KINDS_READ + _LATE_READ))),
    Mutant("NO_GENERATION_CHECK", "a matcher takes the record of another owner of its slot", "ring"),
    Mutant("REQ_BEFORE_RECORD", "ls_post stores REQ_SEQ before the record", "wake-ups",
           ((FLAGS, _REQ, ""), (FLAGS, _ENTRY_ZERO, _REQ + _ENTRY_ZERO))),
    Mutant("ENTRY_NOT_INVALIDATED", "ls_post does not mark the entry that it overwrites", "ring",
           ((FLAGS, _ENTRY_ZERO, ""),)),
    Mutant("NO_SECOND_LOOK", "ls_records does not look at the entry again after the copy", "ring",
           ((FLAGS, _LAST_LOOK, ""),)),
    Mutant("ANY_ANSWER", "take_answer takes an answer to any sequence", "wake-ups",
           ((FLAGS, "if ((int64_t)(answered - seq) < 0) return 0;", "if (!answered) return 0;"),
            (FLAGS, "answered != seq || get32(answer, ANS_SLOT_GEN)", "get32(answer, ANS_SLOT_GEN)"))),
    Mutant("NEWEST_ALONE", "the grammar process reads the newest record and skips those before it",
           "all without a crash"),
    Mutant("UNREAD_IS_FORGOTTEN", "the engine waits for the answer to a record that was overwritten", "unread",
           ((ENGINE, "return gone and bool(", "return False and bool("),)),
    Mutant("ABORT_IGNORED", "ls_await does not look at the abort word", "crash",
           ((FLAGS, "if (i == a->batch || atomic_load_explicit(at64(v->words, LS_ABORT), memory_order_acquire)) break;",
             "if (i == a->batch) break;"),)),
    Mutant("START_SEQ_LATE", "a new process starts after posts that were made for it", "crash"),
    Mutant("LOSS_KEEPS_DEFERRED", "the engine waits for late rows of a process that has ended", "crash in late rows"),
    *ORDERS,
    Mutant("STALE_ANSWER_REPLACES", "ls_put_answer replaces a newer answer", "",
           ((FLAGS, "memory_order_relaxed) - a->seq) >= 0) return 1;",
             "memory_order_relaxed) - a->seq) >= 0 && !v) return 1;"),)),
    Mutant("GENERATION_UNCHECKED", "take_answer takes the answer to another owner of the slot", "",
           ((FLAGS, "answered != seq || get32(answer, ANS_SLOT_GEN) != (uint32_t)a->slot_gens[i]",
             "answered != seq"),)),
    Mutant("ADDS_TO_ANY_ANSWER", "ls_add_rows adds to the answer of another sequence", "",
           ((FLAGS, "if (atomic_load_explicit(at64(answer, 0), memory_order_relaxed) != a->seq) return 1;", ""),)),
    Mutant("ROW_CHANGES_TWICE", "ls_add_rows writes a row that is there", "",
           ((FLAGS, "a->kinds[r] == LS_KIND_DEFER || atomic_load_explicit(kind, memory_order_relaxed) != LS_KIND_DEFER",
             "a->kinds[r] == LS_KIND_DEFER"),)),
    Mutant("COUNT_UNBOUNDED", "ls_records believes the count of a torn entry", "",
           ((FLAGS, "    if (count > v->num_slots) return;\n", ""),)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TestRun:
    """The tests over one copy."""

    failure: str
    """The test that failed or did not end, or "": all passed."""
    seconds: float


def copy_sources(folder: Path, edits: Sequence[Edit]) -> None:
    """Write a copy of shared_mem and its tests with the edits into `folder`, and build its library.

    Raises:
        ValueError: the text of an edit is not in its file exactly once.
    """
    shutil.copytree(ROOT / "shared_mem", folder / "shared_mem", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copytree(
        ROOT / "tests" / "shared_mem", folder / "tests" / "shared_mem", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name, text in edited(edits).items():
        (folder / "shared_mem" / name).write_text(text)
    build_flags(folder / "shared_mem")


def edited(edits: Sequence[Edit]) -> dict[str, str]:
    """Return the files of shared_mem that the edits change: name -> text.

    Raises:
        ValueError: the text of an edit is not in its file exactly once.
    """
    texts: dict[str, str] = {}
    for name, old, new in edits:
        text = texts.get(name) or (ROOT / "shared_mem" / name).read_text()
        if text.count(old) != 1:
            raise ValueError(f"{name} has {text.count(old)} times {old!r}")
        texts[name] = text.replace(old, new)
    return texts


def build_flags(package: Path, *options: str) -> None:
    """Compile the library of a copy of the package, with further options of gcc."""
    sources = [str(package / "native" / name) for name in ("flags.c", "chains.c")]
    command = ["gcc", "-O2", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden", "-w", *options, *sources]
    subprocess.run([*command, "-o", str(package / "_flags.abi3.so")], check=True)


def run_tests(folder: Path, limit_s: float, arguments: Sequence[str] = TESTS) -> TestRun:
    """Run the tests of a copy that are not slow, up to the first failure or `limit_s`."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
    ]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    begun = time.monotonic()
    with subprocess.Popen(
        [*command, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as tests:
        try:
            printed, _ = tests.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(tests.pid, 9)
            return TestRun(ENDLESS, time.monotonic() - begun)
    failed = [line for line in printed.splitlines() if line.startswith(("FAILED", "ERROR", "Fatal"))]
    failure = failed[0].split(" - ")[0].removeprefix("FAILED ") if failed else ""
    if tests.returncode and not failure:
        failure = f"status {tests.returncode}: {printed[-300:]}"
    return TestRun(failure, time.monotonic() - begun)


def run_race(folder: Path, limit_s: float, rounds: int = RACE_ROUNDS) -> TestRun:
    """Run both ends of a copy as two threads (tests/shared_mem/race.c) for so many rounds, up to `limit_s`."""
    native, program = folder / "shared_mem" / "native", folder / "race"
    sources = [str(folder / "tests" / "shared_mem" / "race.c"), str(native / "flags.c")]
    options = ["-O2", "-std=gnu11", "-w", "-pthread", f"-I{native}", "-o", str(program)]
    subprocess.run(["gcc", *options, *sources], check=True)
    begun = time.monotonic()
    try:
        run = subprocess.run([program, str(rounds)], capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return TestRun(f"race.c: {ENDLESS}", time.monotonic() - begun)
    failure = f"race.c: {run.stderr.strip() or run.returncode}" if run.returncode else ""
    return TestRun(failure, time.monotonic() - begun)


def run_search(folder: Path, limit_s: float, seeds: int = SEARCHED_SEEDS) -> TestRun:
    """Run flags.c of a copy over a simulated memory (tests/shared_mem/interleave.c), so many seeds, up to `limit_s`."""
    program = folder / "interleave"
    build_search(folder / "shared_mem" / "native", program)
    begun = time.monotonic()
    try:
        run = subprocess.run([program, "1", str(seeds)], capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return TestRun(f"interleave.c: {ENDLESS}", time.monotonic() - begun)
    failure = f"interleave.c: {run.stdout.strip() or run.returncode}" if run.returncode else ""
    return TestRun(failure, time.monotonic() - begun)


def build_search(native: Path, program: Path) -> None:
    """Compile interleave.c with the flags.c of the folder `native`."""
    source = ROOT / "tests" / "shared_mem" / "interleave.c"
    subprocess.run(["gcc", "-O1", "-std=gnu11", "-w", f"-I{native}", "-o", str(program), str(source)], check=True)


def try_sources(edits: Sequence[Edit], limit_s: float) -> TestRun:
    """Search a copy with the edits; if that finds nothing run its tests, then the race; each up to `limit_s`."""
    with tempfile.TemporaryDirectory() as name:
        folder, seconds = Path(name), 0.0
        copy_sources(folder, edits)
        for check in (run_search, run_tests, run_race):
            run = check(folder, limit_s)
            seconds += run.seconds
            if run.failure:
                return TestRun(run.failure, seconds)
        return TestRun("", seconds)
