"""The distribution in an environment of its own: the page's example runs, without torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.fakes import EOS, byte_tokenizer
from tools.grammar_wheel import ROOT, build

pytestmark = pytest.mark.slow


def test_the_example_of_the_page_runs_from_the_wheel_without_torch(tmp_path: Path) -> None:
    wheel = build(tmp_path / "dist")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", f"{wheel}[process]"], check=True)
    installed = subprocess.run([python, "-m", "pip", "list"], check=True, capture_output=True, text=True).stdout
    assert not re.search("^(torch|lockstep-engine|transformers) ", installed, re.MULTILINE)
    page = (ROOT / "lockstep_grammar" / "README.md").read_text()
    example = re.search("## In your own decoding loop\n\n```python example\n(.*?)```", page, re.DOTALL)
    assert example is not None
    program = example[1].replace("49152", "258").replace("[2]", f"[{EOS}]")
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().to_str())
    (tmp_path / "example.py").write_text(f"{program}\nprint(bytes(matcher.tokens[:-1]).decode())\n")
    environment = {"PATH": "/usr/bin:/bin"}
    ran = subprocess.run(
        [python, "example.py"], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True, timeout=120
    )
    assert json.loads(ran.stdout)["a"] == 1


def test_the_client_imports_no_torch() -> None:
    program = "import lockstep_grammar, sys; assert not {'torch', 'transformers', 'gpu_engine'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
