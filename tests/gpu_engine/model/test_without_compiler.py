"""transformers is imported without torch's compiler, which then works as ever. In processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_IMPORTS = """
import sys
import torch
from gpu_engine.model.without_compiler import without_compiler
with without_compiler():
    import gpu_engine.model.loader
    from transformers import AutoModelForCausalLM, LlamaForCausalLM
compiler = [name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor.codegen"))]
"""
_AFTERWARDS = """
assert len(compiler) < 5, compiler
assert "torch._dynamo" not in sys.modules
@torch.compile(backend="eager")
def twice(x):
    return 2 * x
assert twice(torch.ones(2)).tolist() == [2.0, 2.0]
assert "torch._dynamo.convert_frame" in sys.modules
assert torch._dynamo.disable(len) is not len
"""
_INSIDE = """
import sys
import torch
from gpu_engine.model.without_compiler import without_compiler
with without_compiler():
    import torch._dynamo
    package = torch._dynamo

    @torch.compiler.disable
    def plain(): pass
    @torch.compiler.disable(recursive=False)
    def with_arguments(): pass
    assert plain.__module__ == with_arguments.__module__ == "__main__"
    assert "torch._dynamo.convert_frame" not in sys.modules

    torch._dynamo.reset()  # a name that it has not
    assert "torch._dynamo.convert_frame" in sys.modules
    assert torch._dynamo.disable(len) is not len
assert sys.modules["torch._dynamo"] is package is torch._dynamo
with without_compiler():
    assert sys.modules["torch._dynamo"] is package
"""


pytestmark = pytest.mark.slow


def _run(program: str, root: Path) -> None:
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_loader_needs_none_of_it_and_a_later_use_gets_all_of_it(root: Path) -> None:
    _run(_IMPORTS + _AFTERWARDS, root)


def test_a_name_that_is_asked_for_inside_loads_the_real_package(root: Path) -> None:
    _run(_INSIDE, root)
