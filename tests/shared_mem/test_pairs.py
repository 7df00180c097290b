"""The table of pairs at the top of flags.c names every acquire, release and fence that the file has, and no other."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import shared_mem

SOURCE = (Path(shared_mem.__file__).parent / "native" / "flags.c").read_text()
COMMENT, CODE = SOURCE.split("#ifndef _GNU_SOURCE", 1)
_CELL = re.compile(r"\b(\w+) (acquire|release|seq_cst)( fence)?")
_FUNCTION = re.compile(r"^[a-z][\w *]*?(\w+)\([^;{]*?\) \{(?:\n(.*?)^\}|([^\n]*)\}$)", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"atomic_thread_fence\(memory_order_(\w+)\)")
_ACCESS = re.compile(r"atomic_(?:load|store|fetch_add)_explicit\(.*?memory_order_(\w+)\)")


def orders_of_the_code() -> Counter[str]:
    found: Counter[str] = Counter()
    for name, lines, line in _FUNCTION.findall(CODE):
        body = lines or line
        found.update(f"{name} {order} fence" for order in _FENCE.findall(body))
        found.update(f"{name} {order}" for order in _ACCESS.findall(body) if order != "relaxed")
    return found


def test_every_order_has_a_pair_in_the_table() -> None:
    rows = COMMENT.split("Pairs.", 1)[1].splitlines()[3:]
    cells = Counter(f"{name} {order}{fence}" for row in rows for name, order, fence in _CELL.findall(row))
    assert cells == orders_of_the_code()


def test_every_order_of_the_file_was_read() -> None:
    in_functions = sum(orders_of_the_code().values())
    assert in_functions == len(re.findall(r"memory_order_(?:acquire|release|seq_cst|acq_rel|consume)", CODE))
