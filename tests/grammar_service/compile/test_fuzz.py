"""Any text as a grammar, through real compile processes: it compiles, or a typed error says why not."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.faults.fuzz_cases import fuzz_case
from grammar_service.backends.registry import NAMES
from grammar_service.compile.compiler import AUTO, Compiler
from grammar_service.config import GrammarConfig
from grammar_service.errors import InvalidGrammar, LimitExceeded, NotSupported
from grammar_service.grammar.value import Kind, Whitespace
from grammar_service.grammar.vocabulary import Vocabulary

SCHEMAS = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 20, "pattern": "^[a-z]+$"},
            "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "minItems": 1},
            "next": {"$ref": "#/$defs/node"},
        },
        "required": ["name"],
        "additionalProperties": False,
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
    },
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "string", "format": "date"}]},
]
Outcome = Callable[[Kind, str, bool], str]


@pytest.fixture(
    scope="module", params=[NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in (*NAMES[1:], AUTO))]
)
def outcome(request: pytest.FixtureRequest) -> Iterator[Outcome]:
    """Compile with one backend in real workers; an error that is no answer to a user passes through."""
    if any(importlib.util.find_spec(name) is None for name in NAMES if request.param in (name, AUTO)):
        pytest.skip(f"{request.param} is not installed")
    from tests.grammar_service.toy import PADDED, STOPS, tokenizer_json

    vocabulary = Vocabulary.load(tokenizer_json(), PADDED, STOPS)
    # Small limits: what needs long is refused early, since every worker that is killed takes seconds to replace.
    config = GrammarConfig(
        dir="unused",
        compile_workers=1,
        compile_timeout_s=2.0,
        max_grammar_bytes=3000,
        max_grammar_depth=10,
        max_rule_depth=50,
    )
    with asyncio.Runner() as runner:

        async def make() -> Compiler:
            return Compiler(config, vocabulary)

        compiler = runner.run(make())

        def compile_one(kind: Kind, source: str, allow_unenforced: bool) -> str:
            compiling = compiler.compile(
                kind, source, Whitespace.BOUNDED, request.param, allow_unenforced=allow_unenforced
            )
            try:
                runner.run(compiling)
            except (InvalidGrammar, LimitExceeded, NotSupported) as error:
                return str(error)
            return "compiled"

        yield compile_one
        runner.run(compiler.close())


FEW = settings(max_examples=12, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True)


@FEW
@given(number=st.integers(0, 10_000))
def test_a_mutated_grammar_gets_an_answer(outcome: Outcome, number: int) -> None:
    case = fuzz_case(SCHEMAS, 3, number)
    assert outcome(Kind[case.kind.upper()], case.source, case.allow_unenforced)


@FEW
@given(kind=st.sampled_from(Kind), noise=st.binary(max_size=200) | st.text(max_size=100))
def test_random_bytes_get_an_answer(outcome: Outcome, kind: Kind, noise: bytes | str) -> None:
    text = noise.decode("latin-1") if isinstance(noise, bytes) else noise
    assert outcome(kind, text.encode("utf-8", "replace").decode(), False)
