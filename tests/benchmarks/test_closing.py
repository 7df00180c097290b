"""The pairs that the closing benchmark asks for."""

from __future__ import annotations

import json

from benchmarks.quality.closing import LIMITS, calls_of, pairs
from benchmarks.quality.random_schemas import random_schema
from benchmarks.quality.schemas import Case


def test_pairs_are_the_same_for_one_seed_and_others_for_another() -> None:
    assert pairs(20, 1, []) == pairs(20, 1, [])
    assert pairs(20, 1, []) != pairs(20, 2, [])
    assert all(limit in LIMITS for _, limit in pairs(50, 3, []))


def test_a_file_gives_the_schemas_and_the_limits_are_still_drawn() -> None:
    cases = [Case("a", "g", "{}"), Case("b", "g", "true")]
    assert [case for case, _ in pairs(9, 0, cases)] == cases


def test_every_other_call_is_greedy_and_carries_its_limit() -> None:
    drawn = pairs(4, 0, [])
    calls = calls_of(drawn)
    assert [call.request.sampling.max_tokens for call in calls] == [limit for _, limit in drawn]
    assert [call.request.sampling.temperature > 0 for call in calls] == [False, True, False, True]
    assert [json.loads(call.request.grammar.json_schema) for call in calls] == [random_schema(i) for i in range(4)]
