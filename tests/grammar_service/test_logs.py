"""The shape of the sidecar's lines."""

from __future__ import annotations

import json
import logging
import sys

import numpy as np
import pytest

from grammar_service.backends.backend import MatcherFailed, Rows
from grammar_service.fill.matchers import Slot, SlotTable
from grammar_service.grammar.mask_rows import Classifier
from grammar_service.logs import JsonFormatter, TextFormatter
from shared_mem.grammar_end import Record
from tests.grammar_service.toy import ToyMatcher


def record(message: str, *arguments: object, **fields: object) -> logging.LogRecord:
    logger = logging.getLogger("grammar_service.test")
    return logger.makeRecord(logger.name, logging.WARNING, __file__, 1, message, arguments, None, extra=fields)


def test_a_json_line_is_one_object_whatever_the_message_quotes() -> None:
    line = JsonFormatter().format(record('said "%s"', 'a\n"b"\u2028', request_id="r-1"))
    assert len(line.splitlines()) == 1
    fields = json.loads(line)
    assert fields["message"] == 'said "a\n"b"\u2028"'
    assert (fields["level"], fields["logger"], fields["request_id"]) == ("warning", "grammar_service.test", "r-1")
    assert fields["time"].endswith("+00:00")


def test_a_json_line_without_a_request_has_no_id_and_an_error_its_traceback() -> None:
    line = record("broke")
    try:
        raise ZeroDivisionError("why")
    except ZeroDivisionError:
        line.exc_info = sys.exc_info()
    fields = json.loads(JsonFormatter().format(line))
    assert "request_id" not in fields
    assert fields["exception"].endswith("ZeroDivisionError: why")


def test_a_text_line_ends_with_the_request() -> None:
    assert (
        TextFormatter()
        .format(record("a slot failed", request_id="r-1"))
        .endswith(" WARNING grammar_service.test: a slot failed request_id=r-1")
    )
    assert TextFormatter().format(record("ready")).endswith(" WARNING grammar_service.test: ready")


class Broken(ToyMatcher):
    """Fails on every token."""

    def accept(self, token: int) -> bool:
        raise MatcherFailed("out of fuel")


def test_a_matcher_that_fails_is_logged_with_its_request(caplog: pytest.LogCaptureFixture) -> None:
    table = SlotTable(Classifier(32))
    slot = Slot(1, lambda: Broken([(1, 2)]), Broken([(1, 2)]), [], 0)
    slot.request_id = "r-7"
    table.bind(0, slot)
    table.answer(Record(0, 1, 0, (1,), (), 1), Rows(np.zeros((1, 4), dtype=np.int32)), 0)
    (line,) = caplog.records
    assert vars(line)["request_id"] == "r-7"
    assert "out of fuel" in line.getMessage()
