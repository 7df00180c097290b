"""Writes the client's messages from protos/engine/v1: `python -m tools.client_wire --write`; `make protos` runs it.

The module differs from the engine's in two points. Its messages live in a descriptor pool of their
own, so that a client and an engine of different versions may be installed in one environment: the default pool takes
one definition of a file. And it does not ask for the runtime that generated it, so that the client works with the
protobuf that a user's other packages need; `client/pyproject.toml` has the range that the tests try.

The invariant: the messages are those of the engine, byte for byte; a test compares the files with `files()`.

Not responsible for: the engine's own generated code (see the Makefile).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tools.client_twins import write_or_list

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "protos/engine/v1"
TARGET = ROOT / "client/lockstep_client/wire"
DEFAULT_POOL = "_descriptor_pool.Default()"
_RUNTIME_IMPORT = "from google.protobuf import runtime_version as _runtime_version\n"
_RUNTIME_CHECK = re.compile(r"^_runtime_version\.ValidateProtobufRuntimeVersion\(\n(?:    .*\n)*\)\n", re.MULTILINE)


def files() -> dict[Path, str]:
    """Return the text of each file that this writes. Raises ValueError for generated code of an unknown form."""
    code = (SOURCE / "engine_pb2.py").read_text(encoding="utf-8")
    for part, found in (
        (DEFAULT_POOL, code.count(DEFAULT_POOL)),
        (_RUNTIME_IMPORT, code.count(_RUNTIME_IMPORT)),
        (_RUNTIME_CHECK.pattern, len(_RUNTIME_CHECK.findall(code))),
    ):
        if found != 1:
            raise ValueError(f"{SOURCE}/engine_pb2.py: {part!r} is there {found} times, not once")
    code = _RUNTIME_CHECK.sub("", code.replace(_RUNTIME_IMPORT, ""))
    code = code.replace(DEFAULT_POOL, "_descriptor_pool.DescriptorPool()")
    code = code.replace("'protos.engine.v1.engine_pb2'", "'lockstep_client.wire.engine_pb2'")
    return {
        TARGET / "engine_pb2.py": code,
        TARGET / "engine_pb2.pyi": (SOURCE / "engine_pb2.pyi").read_text(encoding="utf-8"),
    }


if __name__ == "__main__":
    sys.exit(write_or_list(files(), "The client's messages, from protos/engine/v1."))
