"""An error of the system names the limit that was reached."""

from __future__ import annotations

import errno
import os

import pytest

from service_runtime.exhausted import exhausted


@pytest.mark.parametrize(
    ("number", "named"),
    [
        (errno.EMFILE, r"^Too many open files: this process may have \d+ open files \(ulimit -n\)$"),
        (errno.ENFILE, r"fs\.file-max"),
        (errno.EAGAIN, r"pids\.max"),
        (errno.ENOMEM, r"memory\.max"),
        (errno.ENOENT, r"^\[Errno 2\] No such file or directory: 'python'$"),
    ],
)
def test_a_limit_of_the_system_is_named(number: int, named: str) -> None:
    with pytest.raises(OSError, match=named) as reported:
        raise OSError(exhausted(OSError(number, os.strerror(number), "python")))
    assert reported.value.errno is None
