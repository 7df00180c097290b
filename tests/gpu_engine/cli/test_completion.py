"""`lockstep completion`, in the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gpu_engine.cli import commands as cli

pytest.importorskip("shtab", reason="needs shtab, of the extra `engine`")

LINES = ("lockstep genera", "lockstep run --sch", "lockstep generate --whitespace comp", "lockstep completion zs")
ENDS = ["generate", "--schema", "compact", "zsh"]
BASH = """\
source "$1"
shift
for line in "$@"; do
  COMP_WORDS=($line) COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
  _shtab_lockstep lockstep "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
  echo "${COMPREPLY[@]}"
done
"""
FISH = """\
source $argv[1]
for line in $argv[2..]
  complete --do-complete $line | string split --fields 1 \\t
end
"""


@pytest.mark.parametrize(("shell", "script"), [("bash", BASH), ("fish", FISH), ("zsh", "")])
def test_a_shell_completes_commands_flags_and_values(
    shell: str, script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    assert cli.main(["completion", shell]) == cli.OK
    path = tmp_path / "completion"
    path.write_text(capsys.readouterr().out)
    asked = ["-c", script, *(["bash"] if shell == "bash" else []), str(path), *LINES] if script else ["-n", str(path)]
    done = subprocess.run([shell, *asked], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == (ENDS if script else [])
