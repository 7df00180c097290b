"""The compiler: one flight for equal grammars, a cache in bytes, limits that name their setting."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from grammar_service.compile_pool import COMMAND
from grammar_service.compiler import Compiler
from grammar_service.config import GrammarConfig
from grammar_service.errors import InvalidGrammar, LimitExceeded, UnknownGrammar
from grammar_service.grammar import Kind, Whitespace
from grammar_service.vocabulary import Vocabulary
from tests.grammar_service.test_compile_pool import PRETEND

CONFIG = GrammarConfig(dir="unused", compile_workers=1, compile_timeout_s=20)
ANY = Whitespace.ANY


@asynccontextmanager
async def compiler(
    vocabulary: Vocabulary, command: Sequence[str] = COMMAND, **settings: object
) -> AsyncIterator[Compiler]:
    made = Compiler(dataclasses.replace(CONFIG, **settings), vocabulary, command)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        await made.close()


async def test_equal_grammars_share_one_compilation(vocabulary: Vocabulary) -> None:
    async with compiler(vocabulary) as made:
        spellings = ['{"type": "integer"}', '{"type":"integer"}', '\n{ "type":"integer" }']
        results = await asyncio.gather(
            *(made.compile(Kind.JSON_SCHEMA, spellings[i % 3], ANY, "llguidance") for i in range(100))
        )
        assert len({entry.grammar_id for entry, _ in results}) == 1
        assert [hit for _, hit in results].count(False) == 1
        assert made.stats() | {"cache_bytes": 0} == {
            "cached_grammars": 1,
            "cache_bytes": 0,
            "compiled": 1,
            "cache_hits": 99,
            "compile_rejected": 0,
            "compile_limited": 0,
        }


async def test_what_makes_another_language_makes_another_key(vocabulary: Vocabulary) -> None:
    async with compiler(vocabulary) as made:
        asked = [
            (Kind.JSON_SCHEMA, '{"type":"object"}', Whitespace.COMPACT),
            (Kind.JSON_SCHEMA, '{"type":"object"}', Whitespace.ANY),
            (Kind.JSON_SCHEMA, '{"properties":{"a":{},"b":{}}}', Whitespace.ANY),
            (Kind.JSON_SCHEMA, '{"properties":{"b":{},"a":{}}}', Whitespace.ANY),
            (Kind.REGEX, "a", Whitespace.ANY),
            (Kind.CHOICE, '["a"]', Whitespace.ANY),
        ]
        keys = [(await made.compile(*each, "llguidance"))[0].grammar_id for each in asked]
        assert len(set(keys)) == len(asked)
        assert (await made.compile(Kind.JSON_OBJECT, "", Whitespace.ANY, "llguidance"))[0].grammar_id == keys[1]
        assert (await made.compile(Kind.REGEX, "a", Whitespace.COMPACT, "llguidance"))[1]


async def test_one_caller_leaving_does_not_end_the_flight(vocabulary: Vocabulary) -> None:
    async with compiler(vocabulary) as made:
        first = asyncio.create_task(made.compile(Kind.REGEX, "ab", ANY, "llguidance"))
        await asyncio.sleep(0)
        second = asyncio.create_task(made.compile(Kind.REGEX, "ab", ANY, "llguidance"))
        await asyncio.sleep(0)
        first.cancel()
        entry, hit = await second
        assert hit
        assert made.get(entry.grammar_id) is entry


async def test_the_cache_is_bounded_in_bytes_and_drops_the_oldest(vocabulary: Vocabulary) -> None:
    async with compiler(vocabulary, cache_bytes=1 << 20) as made:
        ids = [(await made.compile(Kind.REGEX, f"a{i}", ANY, "llguidance"))[0].grammar_id for i in range(40)]
        assert made.stats()["cache_bytes"] <= 1 << 20
        assert made.get(ids[-1])
        with pytest.raises(UnknownGrammar, match="compile the grammar again"):
            made.get(ids[0])
        assert not (await made.compile(Kind.REGEX, "a0", ANY, "llguidance"))[1]


async def test_what_failed_is_tried_again(vocabulary: Vocabulary) -> None:
    async with compiler(vocabulary, PRETEND, compile_timeout_s=0.5) as made:
        for attempt in (1, 2):
            with pytest.raises(LimitExceeded, match="compile_timeout_s"):
                await made.compile(Kind.REGEX, "sleep", ANY, "llguidance")
            assert made.limited == attempt
        with pytest.raises(InvalidGrammar):
            await made.compile(Kind.REGEX, "refuse", ANY, "llguidance")
        assert made.rejected == 1
        assert made.stats()["cached_grammars"] == 0


async def test_the_length_of_a_grammar_is_bounded(vocabulary: Vocabulary) -> None:
    async with compiler(vocabulary, max_grammar_bytes=10) as made:
        with pytest.raises(LimitExceeded, match="max_grammar_bytes: the grammar has 12 bytes, the limit is 10"):
            await made.compile(Kind.REGEX, "éééééé", ANY, "llguidance")
