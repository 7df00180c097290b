"""A child dies with its parent, even if the parent is killed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest

from service_runtime.parent_death import dying_with_us
from tests.waiting import alive, eventually

STARTS_A_CHILD = """
import subprocess, sys
from service_runtime.parent_death import dying_with_us

print(subprocess.Popen(dying_with_us(["sleep", "600"])).pid, flush=True)
sys.stdin.read()
"""
STARTS_A_CHILD_THAT_ASKS = """
import subprocess, sys

asks = '''
import time
from service_runtime.parent_death import die_with_parent
die_with_parent()
print(flush=True)
time.sleep(600)
'''
child = subprocess.Popen([sys.executable, "-c", asks], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""
STARTS_A_GRANDCHILD = "import subprocess, sys; subprocess.run(sys.argv[1:], check=True)"


@pytest.mark.parametrize("script", [STARTS_A_CHILD, STARTS_A_CHILD_THAT_ASKS])
def test_a_child_dies_with_a_parent_that_is_killed(script: str) -> None:
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.send_signal(signal.SIGKILL)
        assert parent.wait(20) == -signal.SIGKILL
    asyncio.run(eventually(lambda: not alive(child)))


def test_a_child_of_another_process_does_not_become_the_program() -> None:
    """As one whose parent died before it asked the kernel."""
    command = dying_with_us(["echo", "became the program"])
    done = subprocess.run([sys.executable, "-c", STARTS_A_GRANDCHILD, *command], capture_output=True, check=True)
    assert done.stdout == b""


def test_a_child_becomes_the_program_with_its_arguments() -> None:
    command = dying_with_us([sys.executable, "-c", "import sys; print(sys.argv[1:], sys.flags.isolated)", "a b", "-c"])
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "['a b', '-c'] 0\n"
