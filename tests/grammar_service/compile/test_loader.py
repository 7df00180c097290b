"""What a library leaves behind when it reads a large artifact goes back to the system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from grammar_service.compile import loader as compile_loader

# Runs in its own process, because all tests share the memory of this one. The last block stays, so that the end of
# the heap is not returned to the system without the call.
SCRIPT = """
import asyncio, ctypes
from grammar_service.compile.loader import Artifact
from grammar_service.compile.loader import LARGE_BYTES, CompileLoader
from grammar_service.grammar.value import Kind, Whitespace, parse
from grammar_service.grammar.vocabulary import Vocabulary
from tests.grammar_service.toy import PADDED, STOPS, tokenizer_json

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
PLAN = {"path": None, "min_tokens": 1, "margin": 12, "single_token_cost": 0, "longest_way": None, "ends": []}

def resident_mb():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024

class Reads:
    name = "reads"

    def load(self, grammar, artifact):
        blocks = [libc.malloc(1000) for _ in range(64 << 10)]
        for block in blocks:
            ctypes.memset(block, 1, 1000)
        for block in blocks[:-1]:
            libc.free(ctypes.c_void_p(block))
        if self.fails:
            raise ValueError("no")
        return object()

async def grown_mb(size, fails=False):
    Reads.fails = fails
    before = resident_mb()
    try:
        await loader.load(Reads(), grammar, Artifact(bytes(size), PLAN, 0.0), vocabulary)
    except Exception as error:
        assert fails, error
    return resident_mb() - before

vocabulary = Vocabulary.load(tokenizer_json(), PADDED, STOPS)
grammar = parse(Kind.REGEX, "a", Whitespace.ANY)
loader = CompileLoader()
asyncio.run(loader.read_texts(vocabulary))
large = asyncio.run(grown_mb(LARGE_BYTES + 1))
failed = asyncio.run(grown_mb(LARGE_BYTES + 1, fails=True))
small = asyncio.run(grown_mb(1))
loader.close()
print(large < 20, failed < 20, small > 40)
"""


@pytest.mark.skipif(not hasattr(compile_loader._LIBC, "malloc_trim"), reason="this C library gives memory back itself")
def test_memory_of_a_large_artifact_is_returned_to_the_system() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[3]
    )
    assert done.stdout.split() == ["True", "True", "True"], done.stdout + done.stderr
