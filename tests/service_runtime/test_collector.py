"""The garbage collector while libraries are imported. In a process of its own, since frozen objects stay frozen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import gc, weakref
from service_runtime.collector import importing

class Node:
    def __init__(self):
        self.itself = self

with importing():
    assert not gc.isenabled()
    lasting, before = Node(), len(gc.get_objects())
    with importing():  # the inner block leaves everything to the outer one
        pass
    assert not gc.isenabled()
    assert gc.get_freeze_count() == 0
assert gc.isenabled()
assert gc.get_freeze_count() > before * 0.9
assert len(gc.get_objects()) < 1000, len(gc.get_objects())

later = Node()
gone = weakref.ref(later)
del later
gc.collect()
assert gone() is None, "objects made after the block are collected"

gc.disable()
with importing():
    pass
assert not gc.isenabled(), "a collector that was off stays off"

gc.enable()
try:
    with importing():
        raise ImportError
except ImportError:
    assert gc.isenabled()
"""


def test_nothing_is_collected_during_imports_and_what_they_made_is_not_looked_at_again(root: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
