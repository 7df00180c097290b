"""The process of `tritonclient`, one for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu_engine.doors.kserve.client_process import TritonProcess, triton_process


@pytest.fixture(scope="module")
def triton() -> Iterator[TritonProcess]:
    with triton_process() as process:
        yield process
