"""Each safeguard is asked with and without, the same prompts in turn, and the table divides within a turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from benchmarks.cost import safeguards
from benchmarks.cost.safeguards import BOUNDS, Cost, dead_ends, with_unique_items, without_bounds
from benchmarks.harness.measure import Answer, EngineTimes, Run
from benchmarks.harness.server import ServerOptions
from benchmarks.harness.workloads import Item, workload
from benchmarks.speed.builds import Comparison
from grammar_service.backends.backend import Backend
from grammar_service.backends.registry import load_backend
from grammar_service.errors import NotEnforced
from grammar_service.grammar.value import Kind, Whitespace, parse
from grammar_service.grammar.vocabulary import Vocabulary
from protos.engine.v1 import engine_pb2 as pb
from tests.benchmarks.conftest import Serve
from tests.benchmarks.fake_engine import Script
from tests.grammar_service.toy import PADDED, STOPS, tokenizer_json

EXTRACTION = workload("extraction")


@pytest.fixture(scope="module")
def backend() -> Backend:
    return load_backend("llguidance", Vocabulary.load(tokenizer_json(), PADDED, STOPS))


def compiles(backend: Backend, item: Item) -> bool:
    """Return whether the grammar enforces all of an item's schema."""
    assert item.schema is not None
    try:
        backend.compile(parse(Kind.JSON_SCHEMA, item.schema, Whitespace.BOUNDED))
    except NotEnforced:
        return False
    return True


def run_of(name: str, tokens: int, wall_s: float, text: str, backtracks: int = 0) -> Run:
    times = EngineTimes(1.0, 2.0, 0.0, tokens, 0, 0, 0, backtracks)
    return Run((Answer(name, text, tuple(range(tokens)), "stop", 0.0, 0.1, wall_s, tokens, times),), wall_s)


def test_both_sides_differ_in_the_safeguard_alone() -> None:
    sides: dict[str, Sequence[pb.GenerateRequest]] = {
        name: [each.calls(change)[0].request for change in (each.without, each.with_it)]
        for name, each in safeguards.safeguards(1, 16).items()
    }
    for name, (without, with_it) in sides.items():
        assert without != with_it, name
        assert without.messages == with_it.messages, name
        assert without.grammar.json_schema == with_it.grammar.json_schema, name
    for bound, most in BOUNDS.items():
        without, with_it = sides[bound.replace("_", "-")]
        assert not without.grammar.HasField(bound)
        assert getattr(with_it.grammar, bound) == getattr(sides["bounds"][1].grammar, bound) == most
    assert [each.grammar.unenforced for each in sides["verify"]] == [pb.UNENFORCED_WARN, pb.UNENFORCED_VERIFY]
    assert [each.grammar.hold_tokens for each in sides["hold"]] == [0, 32]
    assert [each.grammar.max_backtracks for each in sides["way-back"]] == [0, 8]
    assert sides["repetition"][1].sampling.repetition_max_pattern_size > 0
    assert not sides["repetition-free"][1].HasField("grammar")


@pytest.mark.parametrize("items", [EXTRACTION, without_bounds(EXTRACTION)], ids=["as they are", "without bounds"])
def test_a_grammar_enforces_all_of_the_schemas_that_are_not_verified(backend: Backend, items: list[Item]) -> None:
    assert all(compiles(backend, item) for item in items)


@pytest.mark.parametrize("items", [with_unique_items(EXTRACTION), dead_ends(64)], ids=["unique items", "dead ends"])
def test_the_schemas_that_are_verified_have_a_part_for_it(backend: Backend, items: list[Item]) -> None:
    assert len(items) >= 6
    assert not any(compiles(backend, item) for item in items)


def test_ratios_are_taken_within_a_turn_and_only_complete_answers_count_as_valid() -> None:
    lists = dead_ends(64)[:1]
    known = {"way-back": safeguards.Safeguard(lists, safeguards.nothing, safeguards.guard)}
    name, text = lists[0].name, '["red","blue","green","grey","black"]'

    first = run_of(name, 10, 1.0, '["red"'), run_of(name, 10, 2.0, text, backtracks=3)
    second = run_of(name, 10, 4.0, text), run_of(name, 10, 5.0, text)
    cost = Cost(Comparison([first, second]))
    assert cost.comparison.ratios() == [0.5, 0.8]
    line = safeguards.report({("way-back", 1): cost}, known).splitlines()[2]
    assert [cell.strip() for cell in line.split("|")[1:-1]] == [
        "way-back", "1", "6.2", "3.5", "0.500", "0.650", "0.800", "1, 2 of 2", "3", "2 of 2"
    ]  # fmt: skip


def test_a_safeguard_that_costs_too_much_fails_the_run(serve_fake: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    @contextmanager
    def start(options: ServerOptions) -> Iterator[str]:
        yield serve_fake(Script())[0]

    arguments = ["--only", "bounds", "--count", "1", "--rounds", "1", "--concurrency", "1", "--at-least", "1000"]
    assert safeguards.main(arguments, start) == 1
    assert "too slow: bounds at 1" in capsys.readouterr().out
