"""Log lines of the grammar process carry the id of the request that they are about."""

from __future__ import annotations

import numpy as np
import pytest

from grammar_service.backends.backend import MatcherFailed, Rows
from grammar_service.fill.matchers import MatcherTable, SlotMatcher
from grammar_service.grammar.mask_rows import Classifier
from shared_mem.records import Record
from tests.grammar_service.toy import ToyMatcher


class Broken(ToyMatcher):
    """Fails on every token."""

    def accept(self, token: int) -> bool:
        raise MatcherFailed("out of fuel")


def test_a_matcher_that_fails_is_logged_with_its_request(caplog: pytest.LogCaptureFixture) -> None:
    table = MatcherTable(Classifier(32))
    slot = SlotMatcher(1, lambda: Broken([(1, 2)]), Broken([(1, 2)]), [], 0)
    slot.request_id = "r-7"
    table.bind(0, slot)
    table.answer(Record(0, 1, 0, (1,), (), 1), Rows(np.zeros((1, 4), dtype=np.int32)), 0)
    (line,) = caplog.records
    assert vars(line)["request_id"] == "r-7"
    assert "out of fuel" in line.getMessage()
