"""Which limit of the system a failed start of a process ran into, in words that say what to raise.

Not responsible for: what is done about it, which is to try again.
"""

from __future__ import annotations

import errno
import resource


def exhausted(error: OSError) -> str:
    """Return the text of an error of the system, with the limit that it names."""
    match error.errno:
        case errno.EMFILE:
            limit = f"this process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} open files (ulimit -n)"
        case errno.ENFILE:
            limit = "the machine has no file left (sysctl fs.file-max)"
        case errno.EAGAIN:
            limit = "no process is left (ulimit -u, or pids.max of the container)"
        case errno.ENOMEM:
            limit = "no memory is left (of the machine, or memory.max of the container)"
        case _:
            return str(error)
    return f"{error.strerror}: {limit}"
