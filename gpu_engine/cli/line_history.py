"""The lines of earlier chats, which the keys of the line editor bring back: a file under the user's state directory.

The invariant: only its owner can read the file, and each line is in it as soon as it was entered.

Not responsible for: the line editor (readline), conversations (`/save` of chat.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

MAX_LINES = 1000
"""The newest ones that the file keeps."""


def history_path(environment: Mapping[str, str]) -> Path:
    """Return the file, by the XDG specification. Raises RuntimeError where the user has no known home directory."""
    state = environment.get("XDG_STATE_HOME", "")
    # The specification has a relative path ignored.
    folder = Path(state) if os.path.isabs(state) else Path.home() / ".local/state"
    return folder / "lockstep/chat_history"


class LineHistory:
    """The file of readline's history."""

    def __init__(self, path: Path, readline: ModuleType) -> None:
        """Read the file into readline. Raises OSError."""
        if not hasattr(readline, "append_history_file"):
            raise OSError("the readline of this Python appends to no file (libedit)")
        self._readline, self._path = readline, path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            os.fchmod(file, 0o600)  # another program may have made it
        finally:
            os.close(file)
        readline.set_history_length(MAX_LINES)
        readline.read_history_file(path)
        self._kept = readline.get_current_history_length()

    def keep(self) -> None:
        """Add the line that was just entered to the file. Raises OSError."""
        length = self._readline.get_current_history_length()
        if length > self._kept:  # an empty line, and a line that repeats the last one, are no entries
            self._readline.append_history_file(length - self._kept, self._path)
            self._kept = length
