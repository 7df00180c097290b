"""What a failed call of the grammar process leaves in the log."""

from __future__ import annotations

import logging

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from gpu_engine.api.errors import InternalError
from gpu_engine.sidecar.compilations import grammar_error


def test_no_line_above_debug_has_the_grammar(caplog: pytest.LogCaptureFixture) -> None:
    """The library's message may quote the grammar, which SECURITY.md promises to keep out of the log."""
    error = AioRpcError(grpc.StatusCode.INTERNAL, Metadata(), Metadata(), details='panic at "secret rule"')
    with caplog.at_level(logging.DEBUG):
        found = grammar_error(error, "Compile", 5.0)
    assert isinstance(found, InternalError)
    assert "secret" not in str(found)
    lines = {record.levelno: record.getMessage() for record in caplog.records}
    assert "secret rule" in lines[logging.DEBUG]
    assert "INTERNAL" in lines[logging.ERROR]
    assert "secret" not in lines[logging.ERROR]
