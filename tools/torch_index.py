"""Prints the pip flag with which this machine gets torch's CPU build, or nothing: `python tools/torch_index.py`.

On Linux, PyPI's torch brings gigabytes of CUDA, which a machine without an NVIDIA GPU cannot use. A pip that is
configured with its own index is left alone: its owner has decided where packages come from.

The invariant: a plain script of the standard library, because it runs before anything is installed.

Not responsible for: which torch is compatible (see pyproject.toml).
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NVIDIA_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvhost-gpu", "/dev/dxg")
"""Of the driver on Linux, on Jetson, and of Windows' subsystem for Linux."""
_OWN_INDEX = re.compile(r"\b(index-url|extra-index-url|find-links|no-index)=(?!'')")
"""An empty variable names no index."""


def flag(platform: str, exists: Callable[[str], bool], pip_config: str) -> str:
    """Return the flag for pip, or "".

    Args:
        platform: as `sys.platform`.
        exists: whether a device file is there.
        pip_config: what `pip config list` prints, variables of the environment included.
    """
    if platform != "linux" or any(map(exists, NVIDIA_DEVICES)) or _OWN_INDEX.search(pip_config):
        return ""
    return f"--extra-index-url={CPU_INDEX}"


def main() -> None:
    """Print the flag for this machine and this Python's pip."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    pip_config = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    print(flag(sys.platform, lambda path: Path(path).exists(), pip_config))


if __name__ == "__main__":
    main()
