"""Policies are those of Linux, they pass to threads and processes, and they can be taken back."""

from __future__ import annotations

import subprocess
import sys

TOLD = """
import os, subprocess, sys, threading
from shared_mem.turns import be_prompt, give_way
names = {os.SCHED_OTHER: "other", os.SCHED_BATCH: "batch"}
def tell(who): print(who, names[os.sched_getscheduler(0)], flush=True)
give_way()
tell("process")
def run():
    tell("thread")
    be_prompt()
    tell("prompt thread")
thread = threading.Thread(target=run)
thread.start()
thread.join()
tell("process")
subprocess.run([sys.executable, "-c", "import os; print('child', os.sched_getscheduler(0) == os.SCHED_BATCH)"])
"""


def test_who_gives_way_hands_it_on_and_a_thread_takes_it_back() -> None:
    told = subprocess.check_output([sys.executable, "-c", TOLD], text=True).splitlines()
    assert told == ["process batch", "thread batch", "prompt thread other", "process batch", "child True"]
