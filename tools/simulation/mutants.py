"""Defects to be found: each mutant changes a few lines of a source, and some seed must break a promise with it.

While a mutant is in effect, the functions that are loaded have the code of the changed source; the files stay as they
are. Invariant: the text of an edit is in its file exactly once, so that no mutant is silently left out, and after the
context the functions have their own code again. Not responsible for: native code (see tools/step_plane/mutants.py).
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

ROOT = Path(__file__).parents[2]
_PACKAGES = (
    "client",
    "gpu_engine",
    "grammar_service",
    "kernels",
    "protos",
    "service_runtime",
    "shared_mem",
    "tests",
    "tools",
)
_TESTS = {
    "gpu_engine/front/validation.py": ("gpu_engine/front/test_every_field_reaches_the_engine.py",),
    "gpu_engine/core/scheduler.py": ("gpu_engine/core/test_scheduler.py", "gpu_engine/core/test_guided.py"),
    "gpu_engine/core/loop.py": ("gpu_engine/core/test_engine.py", "gpu_engine/core/test_guided.py"),
    "gpu_engine/core/grammar_slots.py": ("gpu_engine/core/test_grammar_slots.py", "gpu_engine/core/test_guided.py"),
    "gpu_engine/step/mask_rows.py": ("gpu_engine/core/test_guided.py",),
    "gpu_engine/step/stream_sync.py": ("gpu_engine/core/test_guided.py",),
    "gpu_engine/sidecar/client.py": ("gpu_engine/sidecar/test_client.py",),
    "gpu_engine/sidecar/link.py": ("gpu_engine/sidecar/test_client.py",),
    "gpu_engine/sidecar/supervisor.py": ("gpu_engine/sidecar/test_supervisor.py",),
    "grammar_service/fill/matchers.py": ("grammar_service/fill/test_matchers.py",),
    "grammar_service/fill/answers.py": ("grammar_service/fill/test_worker.py",),
    "grammar_service/fill/worker.py": ("grammar_service/fill/test_worker.py",),
    "grammar_service/fill/work_queues.py": ("grammar_service/fill/test_work_queues.py",),
    "grammar_service/compile/pool.py": ("grammar_service/compile/test_pool.py",),
    "grammar_service/compile/queue.py": ("grammar_service/compile/test_queue.py",),
    "gpu_engine/sidecar/compilations.py": ("gpu_engine/sidecar/test_admission.py",),
    "service_runtime/single_flight.py": ("service_runtime/test_single_flight.py",),
}
"""The tests of each file that mutants change, below tests/."""

Edit = tuple[str, str, str]
"""A file, the text in it, and the text of the mutant."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One defect."""

    name: str
    edits: tuple[Edit, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """The files that it changes, each once."""
        return tuple(dict.fromkeys(file for file, _, _ in self.edits))


@contextmanager
def in_effect(mutant: Mutant) -> Iterator[None]:
    """Give the functions of the mutant's files the changed code, until the end of the block.

    Raises:
        ValueError: the text of an edit is not in its file exactly once, or the mutant changes no function.
    """
    own: list[tuple[FunctionType, CodeType]] = []
    try:
        for file in mutant.files:
            module = import_module(file.removesuffix(".py").replace("/", "."))
            text = (ROOT / file).read_text()
            before = dict(_functions(compile(text, file, "exec", dont_inherit=True)))
            after = dict(_functions(compile(changed(text, mutant, file), file, "exec", dont_inherit=True)))
            if before.keys() != after.keys():
                raise ValueError(f"{mutant.name}: the edits of {file} add or remove a function")
            for name, code in after.items():
                if _content(code) != _content(before[name]):
                    function = _function(module, name)
                    own.append((function, function.__code__))
                    function.__code__ = code
        if not own:
            raise ValueError(f"{mutant.name}: no function is changed")
        yield
    finally:
        for function, code in own:
            function.__code__ = code


def copy_with(mutant: Mutant, folder: Path) -> tuple[str, ...]:
    """Write a copy of the packages with the mutant's edits into `folder`; return the tests of the changed files."""
    for package in _PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for file in mutant.files:
        (folder / file).write_text(changed((ROOT / file).read_text(), mutant, file))
    return tuple(dict.fromkeys(f"tests/{test}" for file in mutant.files for test in _TESTS[file]))


def changed(text: str, mutant: Mutant, file: str) -> str:
    """Return the text of a file with the mutant's edits. Raises ValueError."""
    for name, old, new in mutant.edits:
        if name == file:
            if text.count(old) != 1:
                raise ValueError(f"{mutant.name}: {file} has {text.count(old)} times {old!r}")
            text = text.replace(old, new)
    return text


def _functions(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """Yield the functions of a module and of its classes, by qualified name; a function's own functions are in it."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & inspect.CO_OPTIMIZED:
                if not constant.co_name.startswith("<"):
                    yield constant.co_qualname, constant
            else:
                yield from _functions(constant)


def _content(code: CodeType) -> tuple[object, ...]:
    """Return what a function does, without its lines."""
    constants = tuple(_content(each) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars


def _function(module: Any, name: str) -> FunctionType:
    found: Any = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    return inspect.unwrap(found)  # type: ignore[no-any-return]


_CLIENT, _LINK, _SUPERVISOR = (f"gpu_engine/sidecar/{name}.py" for name in ("client", "link", "supervisor"))
_LOOP, _SCHEDULER, _SLOTS = (f"gpu_engine/core/{name}.py" for name in ("loop", "scheduler", "grammar_slots"))
_VALIDATION = "gpu_engine/front/validation.py"
_SYNC, _ROWS = "gpu_engine/step/stream_sync.py", "gpu_engine/step/mask_rows.py"
_WORKER, _MATCHERS, _QUEUES, _ANSWERS, _BATCH = (
    f"grammar_service/fill/{name}.py" for name in ("worker", "matchers", "work_queues", "answers", "batch")
)
_POOL, _COMPILE_QUEUE = "grammar_service/compile/pool.py", "grammar_service/compile/queue.py"
_COMPILE_ADMISSION = "gpu_engine/sidecar/compile_admission.py"
_FLIGHTS = "service_runtime/single_flight.py"

_CHANGES = "        while self._inbox:\n            self._queues.put(self._inbox.popleft())\n"
_RECORDS = "        for seq in range(self._last + 1, newest + 1):\n            self._read(seq)\n"

_ALL = (
    # -- the scheduler and the loop ----------------------------------------------------------------------------------
    Mutant(
        "an event of an earlier owner reaches the slot's present one",
        ((_SCHEDULER, "holder is not None and holder.slot_gen == slot_gen else", "holder is not None else"),),
    ),
    Mutant("owners of a slot share a generation", ((_SCHEDULER, "        self._gens[slot] += 1\n", ""),)),
    Mutant(
        "an aborted sequence keeps its slot and pages",
        (
            (
                _LOOP,
                "        if self.transfers is None or not self.transfers.ended(sequence):\n",
                "        if finish is not FinishReason.ABORTED:\n",
            ),
        ),
    ),
    Mutant(
        "a preempted sequence keeps its matcher",
        (
            (
                _LOOP,
                "            self.executor.scorer.drop(sequence)\n        self.grammar_slots.close(sequence)\n",
                "            self.executor.scorer.drop(sequence)\n        sequence.bound = None\n",
            ),
        ),
    ),
    Mutant(
        "cached rows stay when a slot has another owner or matcher",
        (
            (
                _ROWS,
                "        self.cached_SR[slot].fill_(False)\n        self.kind_SR[slot].fill_(int(RowKind.DEFER))",
                "        return",
            ),
        ),
    ),
    Mutant(
        "late rows are cached although the sequence has advanced",
        ((_SYNC, "        if advanced:\n            return len(rows)\n", ""),),
    ),
    Mutant(
        "a matcher is opened without the committed tokens",
        ((_SLOTS, "sequence.request, committed, dead_texts", "sequence.request, (), dead_texts"),),
    ),
    Mutant(
        "a record that was overwritten is waited for",
        ((_SLOTS, "return not self._silent and self._sync.unread(", "return False and self._sync.unread("),),
    ),
    Mutant(
        "a sequence does not go on after a silence",
        (
            (
                _SLOTS,
                "if sequence.grammar_state is GrammarState.SILENT:",
                "if sequence.grammar_state is GrammarState.LOST:",
            ),
        ),
    ),
    Mutant(
        "an incomplete late answer counts as complete",
        ((_SYNC, "if answer.num_missing or answer.num_late:", "if answer.num_missing:"),),
    ),
    Mutant(
        "a lost process is not forgiven",
        ((_SLOTS, "        crash_attribution.forgive(", "        (lambda *_: None)("),),
    ),
    # -- the client, the link, the supervisor ------------------------------------------------------------------------
    Mutant(
        "slots are not opened again after a loss", ((_CLIENT, "            self._engine.grammar_restored()\n", ""),)
    ),
    Mutant(
        "an ended request keeps its compilation",
        ((_CLIENT, "        self._compiler.forget(request_id)\n", "        return\n"),),
    ),
    Mutant(
        "a Release overtakes its Bind",
        ((_CLIENT, "        if state.task:\n            await asyncio.wait([state.task])\n", ""),),
    ),
    Mutant(
        "the abort word stays after a silence",
        (
            (
                _CLIENT,
                "        self._abort_word.clear_abort()\n        self._engine.grammar_alive()\n",
                "        self._engine.grammar_alive()\n",
            ),
        ),
    ),
    Mutant(
        "the abort word stays after a loss",
        (
            (
                _CLIENT,
                "            self._abort_word.clear_abort()\n            self._engine.grammar_restored()\n",
                "            self._engine.grammar_restored()\n",
            ),
        ),
    ),
    Mutant("a loss is not reported", ((_LINK, "                self._events.link_lost()\n", ""),)),
    Mutant("attachments have one number", ((_LINK, "                    self.attached += 1\n", ""),)),
    Mutant(
        "a process that hangs is not killed",
        ((_LINK, "                    self._on_stuck()\n                    return", "                    return"),),
    ),
    Mutant(
        "a process that hangs and loses its sockets is not killed",
        ((_LINK, "        if self._was_attached():\n", "        if False:\n"),),
    ),
    Mutant(
        "no start follows one that failed",
        ((_SUPERVISOR, "                reason = exhausted(error)\n", "                raise\n"),),
    ),
    Mutant(
        "the end of a process ends its supervision",
        ((_SUPERVISOR, "            if len(self._failures) >= allowed:", "            if self._failures:"),),
    ),
    # -- the worker --------------------------------------------------------------------------------------------------
    Mutant(
        "a Release drops the next owner's matcher",
        ((_MATCHERS, "if current is not None and current.slot_gen <= slot_gen:", "if current is not None:"),),
    ),
    Mutant(
        "a Bind of an earlier owner wins",
        ((_MATCHERS, "        if state.slot_gen >= newest:\n", "        if state.slot_gen >= 0:\n"),),
    ),
    Mutant(
        "a matcher takes the record of another owner",
        (
            (
                _MATCHERS,
                "        if slot is None or slot.slot_gen != record.slot_gen:\n            newest",
                "        if slot is None:\n            newest",
            ),
        ),
    ),
    Mutant(
        "a gap is not noticed",
        ((_MATCHERS, "        if record.commit_pos > slot.num_committed:\n", "        if False:\n"),),
    ),
    Mutant(
        "a repeated record is applied twice",
        (
            (
                _MATCHERS,
                "start, committed = record.commit_pos,",
                "start, committed = max(record.commit_pos, slot.num_committed),",
            ),
        ),
    ),
    Mutant("rejected drafts stay in the matcher", ((_MATCHERS, "        slot.rollback(common)\n", ""),)),
    Mutant(
        "rows after the deadline are lost",
        (
            (_ANSWERS, "            self._channel.add_rows(seq, slot, *answer, late=False)\n", "            pass\n"),
            (
                _ANSWERS,
                "                    self._channel.add_rows(task.seq, task.slot, *task.answer, late=True)\n",
                "                    pass\n",
            ),
        ),
    ),
    Mutant(
        "only the newest record is read",
        ((_WORKER, "for seq in range(self._last + 1, newest + 1):", "for seq in range(newest, newest + 1):"),),
    ),
    Mutant(
        "records are read before the changes that came first", ((_WORKER, _CHANGES + _RECORDS, _RECORDS + _CHANGES),)
    ),
    Mutant(
        "two threads work on one slot",
        (
            (
                _QUEUES,
                "                if not self._busy.keys().isdisjoint(task.slots):\n",
                "                if False:\n",
            ),
        ),
    ),
    Mutant(
        "a task that waits is forgotten",
        (
            (
                _QUEUES,
                "        self._todo.extendleft(reversed([*rest, *waiting]))\n",
                "        self._todo.extendleft(reversed(rest))\n",
            ),
        ),
    ),
    Mutant(
        "no thread takes the lead",
        (
            (
                _QUEUES,
                "            if not self._idle:\n                self._leader = me\n",
                "            if False:\n                self._leader = me\n",
            ),
        ),
    ),
    # -- compilations ----------------------------------------------------------------------------
    Mutant(
        "a compile worker that cannot be started is not replaced",
        (
            (
                _POOL,
                "            if task.done() and not task.cancelled() and task.exception() is not None:\n",
                "            if False:\n",
            ),
            (
                _POOL,
                "GrammarServiceError:\n                self._add_spare()\n                raise\n",
                "GrammarServiceError:\n                raise\n",
            ),
        ),
    ),
    Mutant(
        "a full queue refuses a tenant within its share",
        ((_COMPILE_QUEUE, "<= (counts[share.tenant] + 1) / share.weight:\n", "<= math.inf:\n"),),
    ),
    Mutant(
        "the engine refuses a tenant within its share",
        (
            (
                _COMPILE_ADMISSION,
                "        if full and (mine.taken + 1) / weight >= max("
                "places.taken / places.weight for places in all_places.values()):\n",
                "        if full:\n",
            ),
        ),
    ),
    # -- fields of a request, and bounds in time ------------------------------------------------
    Mutant(
        "min_tokens is ignored",
        ((_VALIDATION, "        min_tokens=sampling.min_tokens,\n", "        min_tokens=0,\n"),),
    ),
    Mutant(
        "the priority is ignored",
        ((_VALIDATION, "        priority=_priority(request.priority),\n", "        priority=_priority(0),\n"),),
    ),
    Mutant(
        "failures count within a second",
        ((_SUPERVISOR, "now_s - self._failures[0] > FAILURE_WINDOW_S", "now_s - self._failures[0] > 1.0"),),
    ),
    Mutant(
        "a sequence without rows waits ten times as long",
        ((_SLOTS, "self._clock() > since_s + self.stall_s", "self._clock() > since_s + 10 * self.stall_s"),),
    ),
    Mutant(
        "one waiter that leaves cancels a compilation for all",
        ((_FLIGHTS, "        flight.waiters += 1\n", "        flight.waiters = 1\n"),),
    ),
)

MUTANTS = {mutant.name: mutant for mutant in _ALL}
"""By what each mutant does."""
