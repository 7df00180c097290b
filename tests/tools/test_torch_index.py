"""Which machine gets torch's CPU build."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.torch_index import CPU_INDEX, flag


@pytest.mark.parametrize(
    ("platform", "devices", "pip_config", "is_cpu"),
    [
        ("linux", set(), "", True),
        ("linux", set(), "global.cert='/etc/ca'\n:env:.timeout='9'", True),
        ("linux", set(), ":env:.extra-index-url=''", True),
        ("linux", {"/dev/nvidiactl"}, "", False),
        ("linux", {"/dev/dxg"}, "", False),
        ("darwin", set(), "", False),
        ("linux", set(), "global.index-url='https://mirror'", False),
        ("linux", set(), "global.extra-index-url='file:///simple'", False),
        ("linux", set(), ":env:.find-links='/wheels'", False),
        ("linux", set(), "install.no-index='true'", False),
    ],
)
def test_a_machine_without_a_gpu_and_an_index_of_its_own(
    platform: str, devices: set[str], pip_config: str, is_cpu: bool
) -> None:
    assert flag(platform, devices.__contains__, pip_config) == (f"--extra-index-url={CPU_INDEX}" if is_cpu else "")


def test_it_runs_before_anything_is_installed(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(root / "tools/torch_index.py")]
    environment = {"PATH": "/usr/bin:/bin", "PIP_INDEX_URL": "https://mirror", "PYTHONPATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")
