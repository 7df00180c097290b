"""Runs spin over shared_mem/model/step_plane.pml: configurations that must hold, mutants that must not.

Invariant: every search is exhaustive, or it is an error: a search that ran out of time, memory or depth proves nothing.
The numbers of the row kinds come from flags.h. Needs spin and gcc (`apt-get install spin gcc`). Not responsible for:
mutants of the C code (see mutants.py).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "shared_mem" / "model" / "step_plane.pml"
HEADER = ROOT / "shared_mem" / "native" / "flags.h"

MAX_DEPTH = 1_000_000
MEMORY_MIB = 6000
_KINDS = re.compile(r"enum \{ (LS_KIND_ALL, [^}]*) \};")
_STORED = re.compile(r"(\d+(?:\.\d+e\+\d+)?) states, stored")


class Unsound(Exception):
    """spin could not search all states, or there is no spin."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One bounded system, of two rows."""

    name: str
    slots: int
    steps: int
    flags: tuple[str, ...] = ()
    """LATE: answers with rows missing. DEADLINES: a wait ends at any moment. CRASH: a kill at any point. OWNERS: a slot
    gets another owner. DEAD_ENDS: rows without a legal token. READ_LATER: rows are read after the next post. RECS:
    entries of the ring, 2 where it is not there."""
    is_small: bool = False
    """Below a second: the fast tests run it."""

    @property
    def options(self) -> tuple[str, ...]:
        """The definitions for spin."""
        return (f"SLOTS={self.slots}", f"STEPS={self.steps}", *self.flags)


CONFIGURATIONS = (
    Configuration("wake-ups", 2, 3, is_small=True),
    Configuration("owners", 1, 3, ("LATE", "OWNERS=1", "READ_LATER", "DEAD_ENDS"), is_small=True),
    Configuration("ring", 1, 3, ("RECS=1", "LATE", "DEADLINES", "OWNERS=1"), is_small=True),
    Configuration("unread", 2, 2, ("RECS=1", "DEADLINES", "OWNERS=1"), is_small=True),
    Configuration("late rows", 2, 3, ("LATE", "DEADLINES")),
    Configuration("all without a crash", 2, 2, ("LATE", "DEADLINES", "OWNERS=1", "READ_LATER", "DEAD_ENDS")),
    Configuration("crash", 2, 3, ("CRASH",)),
    Configuration("crash in late rows", 1, 2, ("LATE", "DEADLINES", "CRASH")),
    Configuration("crash in three late steps", 1, 3, ("LATE", "CRASH")),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one search."""

    states: int
    error: str
    """What spin found, or "": nothing in any state."""
    seconds: float


def missing_tools() -> str | None:
    """Return why the model cannot be checked here, or None."""
    missing = [name for name in ("spin", "gcc") if shutil.which(name) is None]
    return f"needs {' and '.join(missing)}: apt-get install {' '.join(missing)}" if missing else None


def kinds() -> dict[str, int]:
    """Return the row kinds of flags.h: name -> number."""
    found = _KINDS.search(HEADER.read_text())
    if found is None:
        raise Unsound(f"{HEADER} has no enum of row kinds")
    return {name.strip(): number for number, name in enumerate(found[1].split(","))}


def search(options: Sequence[str], *, timeout_s: float = 600.0, no_cycles: bool = False) -> Outcome:
    """Search all states of the model with these definitions, up to the first error.

    Args:
        options: definitions, without `-D`.
        timeout_s: bound of the search.
        no_cycles: look for a run without an end in place of errors within a state.

    Raises:
        Unsound: there is no spin, or the search did not end.
    """
    if problem := missing_tools():
        raise Unsound(problem)
    defines = [f"-D{option}" for option in options] + [f"-D{name}={value}" for name, value in kinds().items()]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        _run(["spin", "-a", *defines, str(MODEL)], folder, timeout_s)
        mode = "-DNP" if no_cycles else "-DSAFETY"
        limits = ["-DCOLLAPSE", f"-DMEMLIM={MEMORY_MIB}", "-DVECTORSZ=4096"]
        _run(["gcc", "-O1", "-w", mode, *limits, "-o", "pan", "pan.c"], folder, timeout_s)
        printed = _run(["./pan", f"-m{MAX_DEPTH}", *(["-l"] if no_cycles else [])], folder, timeout_s)
    errors = re.findall(r"^pan:\d+: (.*)", printed, re.MULTILINE)
    stored = _STORED.search(printed)
    partial = "error: max search depth too small" in printed or "Search not completed" in printed
    if stored is None or (partial and not errors):
        raise Unsound(f"the search did not end: {printed[-500:]}")
    return Outcome(int(float(stored[1])), errors[0].split(" (at depth")[0] if errors else "", time.monotonic() - begun)


def _run(command: list[str], folder: str, timeout_s: float) -> str:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise Unsound(f"{command[0]} did not end within {timeout_s:g} s") from None
    if done.returncode:
        raise Unsound(f"{command[0]} ended with {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
    return done.stdout
