"""The compiler: one flight for equal grammars, a cache in bytes, limits that name their setting."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from grammar_service.backends.verified import VerifiedCompiled
from grammar_service.compile.compiler import AUTO, Compiler
from grammar_service.compile.disk_cache import DiskCache, artifact_key
from grammar_service.compile.loader import CompileLoader
from grammar_service.compile.owned_cache import Owner
from grammar_service.compile.queue import NO_TENANT, Share
from grammar_service.config import GrammarConfig
from grammar_service.errors import InternalError, InvalidGrammar, LimitExceeded, NotEnforced, UnknownGrammar
from grammar_service.grammar.value import Kind, Whitespace, parse
from grammar_service.grammar.vocabulary import Vocabulary
from tests.grammar_service.compile.pretending import PRETEND
from tests.grammar_service.toy import spell
from tests.waiting import eventually

CONFIG = GrammarConfig(dir="unused", compile_workers=1, compile_timeout_s=20)
ANY = Whitespace.ANY
UNENFORCED = '{"type":"array","uniqueItems":true}'
EACH_NAME = pytest.mark.parametrize("name", ["llguidance", pytest.param(AUTO, marks=pytest.mark.slow)])
"""AUTO asks each library, and the compile process of xgrammar loads torch."""


@asynccontextmanager
async def compiler(vocabulary: Vocabulary, command: Sequence[str] = (), **settings: object) -> AsyncIterator[Compiler]:
    made = Compiler(dataclasses.replace(CONFIG, **settings), vocabulary, command)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def in_turns(vocabulary: Vocabulary, command: Sequence[str] = (), **settings: object) -> AsyncIterator[Compiler]:
    """A compiler that answers in the order of the turns, however late a thread or a process is.

    It has one loading thread, and no place in which a slow compilation goes on next to the others.
    """
    config = dataclasses.replace(CONFIG, **settings)  # type: ignore[arg-type]
    made = Compiler(config, vocabulary, command, loader=CompileLoader(ThreadPoolExecutor(1)))
    try:
        workers = made._pool("llguidance")
        assert workers._small.slow.try_acquire(NO_TENANT)
        await workers.ready()
        for worker in workers._all:
            worker.ordinary_s = 600.0  # so none is killed as a slow one
        yield made
    finally:
        await made.close()


async def test_a_closed_compiler_starts_no_worker_of_another_library(vocabulary: Vocabulary) -> None:
    async with compiler(vocabulary) as made:
        pass
    with pytest.raises(InternalError, match="the compile workers of llguidance are being ended"):
        await made.compile(Kind.REGEX, "[a-z]+", ANY, AUTO)


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


async def test_grammars_of_different_languages_have_different_ids(vocabulary: Vocabulary) -> None:
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


async def test_an_object_is_closed_as_the_request_says_or_else_the_server(vocabulary: Vocabulary) -> None:
    said, unsaid = '{"properties":{"a":{}},"additionalProperties":false}', '{"properties":{"a":{}}}'
    for default in (False, True):
        async with compiler(vocabulary, closed_objects=default) as made:

            async def grammar_id(text: str, asked: bool | None, made: Compiler = made) -> str:
                return (await made.compile(Kind.JSON_SCHEMA, text, ANY, "llguidance", closed_objects=asked))[
                    0
                ].grammar_id

            shut = await grammar_id(said, None)
            assert [await grammar_id(unsaid, asked) == shut for asked in (None, True, False)] == [default, True, False]


async def test_the_cache_is_bounded_in_bytes_and_drops_the_oldest(vocabulary: Vocabulary) -> None:
    async with compiler(vocabulary, cache_bytes=1 << 20) as made:
        ids = [(await made.compile(Kind.REGEX, f"a{i}", ANY, "llguidance"))[0].grammar_id for i in range(40)]
        assert made.stats()["cache_bytes"] <= 1 << 20
        assert made.get(ids[-1])
        with pytest.raises(UnknownGrammar, match="compile the grammar again"):
            made.get(ids[0])
        assert not (await made.compile(Kind.REGEX, "a0", ANY, "llguidance"))[1]


async def test_owners_share_neither_a_compilation_nor_a_file(vocabulary: Vocabulary, tmp_path: Path) -> None:
    async with compiler(vocabulary, cache_dir=str(tmp_path)) as made:
        owners = Owner("acme"), Owner("beta"), Owner()
        results = await asyncio.gather(
            *(made.compile(Kind.REGEX, "ab", ANY, "llguidance", owner=owner) for owner in owners)
        )
        assert [hit for _, hit in results] == [False, False, False]
        assert len({entry.grammar_id for entry, _ in results}) == 3
        assert len(os.listdir(tmp_path)) == 3
        assert (await made.compile(Kind.REGEX, "ab", ANY, "llguidance", owner=Owner("acme")))[1]
        with pytest.raises(
            LimitExceeded, match=r"compiled_grammar_bytes: the compiled grammar has \d+ bytes, the limit is 9"
        ):
            await made.compile(Kind.REGEX, "ab", ANY, "llguidance", owner=Owner("gamma", 9))


async def test_a_tenant_that_floods_the_queue_is_passed_by_another(vocabulary: Vocabulary) -> None:
    done: list[str] = []
    async with in_turns(vocabulary) as made:

        async def ask(source: str, share: Share) -> None:
            await made.compile(Kind.REGEX, source, ANY, "llguidance", share=share)
            done.append(source)

        async with asyncio.TaskGroup() as group:
            for i in range(12):
                group.create_task(ask(f"a{i}", Share("acme")))
            await asyncio.sleep(0)
            group.create_task(ask("b", Share("beta")))
        # The worker may have begun one more grammar of the flood before the other tenant asked.
        assert done.index("b") <= 2


async def test_a_failed_grammar_is_compiled_again(vocabulary: Vocabulary) -> None:
    async with compiler(vocabulary, PRETEND, compile_timeout_s=0.5) as made:
        for attempt in (1, 2):
            with pytest.raises(LimitExceeded, match="compile_timeout_s"):
                await made.compile(Kind.REGEX, "sleep", ANY, "llguidance")
            assert made.limited == attempt
        assert made.stats()["cached_grammars"] == 0
    async with compiler(vocabulary, PRETEND) as made:
        with pytest.raises(InvalidGrammar):
            await made.compile(Kind.REGEX, "refuse", ANY, "llguidance")
        assert made.rejected == 1
        assert made.stats()["cached_grammars"] == 0


async def test_the_length_of_a_grammar_is_bounded(vocabulary: Vocabulary) -> None:
    async with compiler(vocabulary, max_grammar_bytes=10) as made:
        with pytest.raises(LimitExceeded, match="max_grammar_bytes: the grammar has 12 bytes, the limit is 10"):
            await made.compile(Kind.REGEX, "éééééé", ANY, "llguidance")


@pytest.mark.slow
async def test_an_artifact_up_to_its_limit_is_loaded_and_a_larger_one_is_rejected(vocabulary: Vocabulary) -> None:
    """The worker's answer is brought back whole; nothing is compiled next to the matchers."""
    pytest.importorskip("xgrammar", reason="needs xgrammar")
    names = {f"name_{i}": {"type": "string", "pattern": f"^[a-z]{{{i % 9 + 1},20}}$"} for i in range(40)}
    wide = json.dumps({"type": "object", "properties": names})
    async with compiler(vocabulary, backend="xgrammar") as made:
        entry, _ = await made.compile(Kind.JSON_SCHEMA, wide, ANY, "xgrammar")
        assert entry.compiled.memory_bytes > 1 << 16
    async with compiler(vocabulary, backend="xgrammar", max_artifact_bytes=1 << 16) as made:
        with pytest.raises(LimitExceeded, match=r"max_artifact_bytes: xgrammar .* the limit is 65536"):
            await made.compile(Kind.JSON_SCHEMA, wide, ANY, "xgrammar")
        entry, _ = await made.compile(Kind.JSON_SCHEMA, wide, ANY, AUTO)
        assert entry.backend == "llguidance"


async def test_a_grammar_that_is_too_deep_is_rejected_with_the_setting(vocabulary: Vocabulary) -> None:
    sources = {
        Kind.REGEX: "(" * 129 + "a" + ")" * 129,
        Kind.JSON_SCHEMA: '{"items":' * 129 + "{}" + "}" * 129,
        Kind.EBNF: "root ::= " + "(" * 200 + '"a"' + ")" * 200,
        Kind.LARK: "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(600)) + 'r600: "a"',
    }
    named = dict.fromkeys(sources, "")
    async with compiler(vocabulary) as made:
        for kind, source in sources.items():
            try:
                await made.compile(kind, source, ANY, "llguidance")
            except LimitExceeded as error:
                named[kind] = str(error).partition(":")[0]
    depth = "max_grammar_depth"
    assert named == {Kind.REGEX: depth, Kind.JSON_SCHEMA: depth, Kind.EBNF: depth, Kind.LARK: "max_rule_depth"}


@pytest.mark.parametrize("backend", ["llguidance", pytest.param("xgrammar", marks=pytest.mark.slow)])
async def test_a_grammar_without_any_answer_is_invalid(vocabulary: Vocabulary, backend: str) -> None:
    sources = ((Kind.REGEX, r"[^\s\S]"), (Kind.REGEX, r"[^\s\S]a"), (Kind.EBNF, 'root ::= root "a"'))
    async with compiler(vocabulary) as made:
        for kind, source in sources:
            with pytest.raises(InvalidGrammar):
                await made.compile(kind, source, ANY, backend)


async def test_a_grammar_at_the_depth_limits_does_not_end_a_worker(vocabulary: Vocabulary) -> None:
    """As far as references lead, with objects in each: 1,024 steps ended a thread with a stack of 8 MiB."""
    definitions: dict[str, object] = {"d511": {"type": "null"}}
    for i in range(511):
        inner: object = {"$ref": f"#/$defs/d{i + 1}"}
        for _ in range(4):
            inner = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
        definitions[f"d{i}"] = inner
    source = json.dumps({"$ref": "#/$defs/d0", "$defs": definitions})
    async with compiler(vocabulary) as made:
        entry, _ = await made.compile(Kind.JSON_SCHEMA, source, ANY, "llguidance")
        assert entry.compiled.matcher().accept(spell("{")[0])


@pytest.mark.slow
async def test_auto_selects_the_first_backend_that_enforces_all_of_a_grammar(vocabulary: Vocabulary) -> None:
    pytest.importorskip("xgrammar", reason="needs xgrammar")
    async with compiler(vocabulary, backend="xgrammar") as made:
        plain, _ = await made.compile(Kind.REGEX, "ab", ANY, AUTO)
        assert plain.backend == "xgrammar"
        lark, hit = await made.compile(Kind.LARK, 'start: "a"', ANY, AUTO)
        assert (lark.backend, hit) == ("llguidance", False)
        again, hit = await made.compile(Kind.LARK, 'start: "a"', ANY, AUTO)
        assert again is lark
        assert hit
        with pytest.raises(NotEnforced, match=r"no backend .* xgrammar .*uniqueItems.* \| llguidance .*uniqueItems"):
            await made.compile(Kind.JSON_SCHEMA, UNENFORCED, ANY, AUTO)


class CountingCompiler(Compiler):
    """Counts the compilations that begin."""

    begun = 0

    async def _compile_once(self, *args: Any) -> Any:
        self.begun += 1
        return await super()._compile_once(*args)


@EACH_NAME
async def test_unenforced_parts_are_refused_warned_of_or_verified(vocabulary: Vocabulary, name: str) -> None:
    made, kind = CountingCompiler(CONFIG, vocabulary), Kind.JSON_SCHEMA
    try:
        entry, hit = await made.compile(kind, UNENFORCED, ANY, name, verify=True)
        assert not hit
        (line,) = entry.warnings
        assert line.startswith("verified: not enforced by llguidance: /uniqueItems")
        assert isinstance(entry.compiled, VerifiedCompiled)
        begun = made.begun
        assert await made.compile(kind, UNENFORCED, ANY, name, verify=True) == (entry, True)
        assert made.begun == begun >= 2, "a verified grammar in the cache is not refused once more"
        warned, _ = await made.compile(kind, UNENFORCED, ANY, name, verify=True, allow_unenforced=True)
        assert any("uniqueItems" in warning for warning in warned.warnings)
        assert not isinstance(warned.compiled, VerifiedCompiled)
        plain, _ = await made.compile(kind, '{"type":"integer"}', ANY, "llguidance")
        assert await made.compile(kind, '{"type":"integer"}', ANY, "llguidance", verify=True) == (plain, True)
        regex = '{"type":"string","format":"regex"}'
        first, _ = await made.compile(kind, regex, ANY, name)
        assert [line.startswith("not verified: /format: ") for line in first.warnings] == [True]
        second, _ = await made.compile(kind, regex, ANY, name, verify=True)
        assert isinstance(second.compiled, VerifiedCompiled)
        assert not isinstance(first.compiled, VerifiedCompiled)
        with pytest.raises(NotEnforced, match="uniqueItems"):
            await made.compile(kind, UNENFORCED, ANY, "llguidance")
        with pytest.raises(NotEnforced, match="uniqueItems"):
            await made.compile(Kind.LARK, f"start: %json {UNENFORCED}", ANY, "llguidance", verify=True)
    finally:
        await made.close()


async def test_a_compilation_without_a_waiter_is_killed(vocabulary: Vocabulary) -> None:
    async with compiler(vocabulary, PRETEND) as made:
        for text in ("sleep 1", "sleep 2"):
            waiting = [asyncio.create_task(made.compile(Kind.REGEX, text, ANY, "llguidance")) for _ in range(2)]
            await asyncio.sleep(0.05)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
        # Both would have held the only worker for 20 s each.
        await eventually(lambda: "running=0 abandoned=2" in repr(made))
        assert (await made._pool("llguidance").compile(parse(Kind.REGEX, "next", ANY))).data.endswith(b" next")


async def test_an_accepted_caller_promotes_the_compilation_that_it_joins(
    vocabulary: Vocabulary, tmp_path: Path
) -> None:
    async with in_turns(vocabulary, PRETEND, compile_queue=2) as made:
        order: list[str] = []

        async def ask(text: str, *, accepted: bool = False) -> None:
            source = f"{text} hold {tmp_path / 'go_on'}"
            # What the pretended worker compiles no library loads: each had its turn.
            with pytest.raises(InternalError):
                await made.compile(Kind.REGEX, source, ANY, "llguidance", accepted=accepted)
            order.append(text)

        def waiting() -> int:
            return made._pool("llguidance").stats()["waiting"]

        calls = [asyncio.create_task(ask("pause 1"))]
        await eventually(lambda: made._flights and "free=0" in repr(made._pool("llguidance")._small.first))
        calls += [asyncio.create_task(ask(f"pause {number}")) for number in (2, 3)]
        await eventually(lambda: waiting() == 2)
        with pytest.raises(LimitExceeded, match="compile_queue"):
            await made.compile(Kind.REGEX, "pause 4", ANY, "llguidance")
        calls += [asyncio.create_task(ask(f"pause {number}", accepted=True)) for number in (3, 4, 1)]
        await eventually(lambda: "accepted=2 others=1" in repr(made._pool("llguidance")._small.first))
        assert "running=4 " in repr(made), "equal ones share one compilation, accepted or not"
        (tmp_path / "go_on").touch()
        await asyncio.gather(*calls)
        assert order == ["pause 1", "pause 1", "pause 3", "pause 3", "pause 4", "pause 2"]
        assert not made._accepted


@pytest.mark.parametrize(("priority", "policy"), [("low", os.SCHED_OTHER), ("idle", os.SCHED_IDLE)])
async def test_workers_run_at_the_configured_priority(vocabulary: Vocabulary, priority: str, policy: int) -> None:
    async with compiler(vocabulary, compile_priority=priority) as made:
        assert (await made.compile(Kind.REGEX, "a+", ANY, "llguidance"))[0].compiled.warnings == ()
        await made._pool("llguidance").ready()  # a worker takes its priority while it starts
        worker = next(iter(made._pool("llguidance")._all))
        threads = [int(name) for name in os.listdir(f"/proc/{worker._process.pid}/task")]
        assert {os.sched_getscheduler(thread) for thread in threads} == {policy}


@pytest.mark.parametrize("backend", ["llguidance", pytest.param("xgrammar", marks=pytest.mark.slow)])
async def test_artifacts_outlive_a_restart_on_disk(vocabulary: Vocabulary, tmp_path: Path, backend: str) -> None:
    pytest.importorskip(backend, reason=f"needs {backend}")
    settings = {"backend": backend, "cache_dir": str(tmp_path / "cache")}
    async with compiler(vocabulary, **settings) as made:
        entry, hit = await made.compile(Kind.REGEX, "ab+", ANY, backend)
        assert not hit
        assert entry.compile_ms > 0
        plan = entry.plan
        assert plan.path is not None
    # With a command that compiles nothing: an artifact on disk needs no worker, for an accepted caller as well.
    for accepted in (False, True):
        async with compiler(vocabulary, command=("false",), **settings) as made:
            entry, hit = await made.compile(Kind.REGEX, "ab+", ANY, backend, accepted=accepted)
            assert hit
            assert (entry.compile_ms, made.compiled, entry.plan, entry.warnings) == (0, 0, plan, ())
            assert entry.compiled.matcher().accept(spell("a")[0])
            assert made._pools == {}
            assert not made._accepted
    # Whole by its digest, and no artifact, or none of the library's: it is compiled again and replaced.
    told = json.dumps(plan.to_wire()).encode()
    foreign = {
        "ab+": b"no line",
        "ac+": b"no plan\n[]\nnonsense",
        "ad+": b"{}\n[]\nnonsense",
        "ae+": told + b"\n[]\nnonsense",
    }
    async with compiler(vocabulary, **settings) as made:
        for number, (source, content) in enumerate(foreign.items(), 1):
            name = artifact_key(parse(Kind.REGEX, source, ANY), backend, vocabulary.digest, allow_unenforced=False)
            DiskCache(tmp_path / "cache", 1 << 20).put(name, content)
            entry, hit = await made.compile(Kind.REGEX, source, ANY, backend)
            assert not hit, content
            assert made.compiled == number
    async with compiler(vocabulary, **settings) as made:
        for source in foreign:
            assert (await made.compile(Kind.REGEX, source, ANY, backend))[1]


async def test_clearing_drops_what_is_not_in_use(vocabulary: Vocabulary, tmp_path: Path) -> None:
    async with compiler(vocabulary, cache_dir=str(tmp_path / "cache")) as made:
        used, gone = [(await made.compile(Kind.REGEX, source, ANY, "llguidance"))[0] for source in ("ab+", "ac+")]
        await made.compile(Kind.REGEX, "ac+", ANY, AUTO)
        cleared = await made.clear({used.grammar_id, "unknown"}, disk=False)
        assert (cleared.dropped, cleared.kept, cleared.files) == (1, 1, 0)
        assert cleared.freed_bytes == gone.compiled.memory_bytes > 0
        assert made.get(used.grammar_id) is used
        with pytest.raises(UnknownGrammar):
            made.get(gone.grammar_id)
        assert made.stats()["cache_bytes"] == used.compiled.memory_bytes
        again, hit = await made.compile(Kind.REGEX, "ac+", ANY, AUTO)
        assert (again.grammar_id, hit, again.compile_ms, made.compiled) == (gone.grammar_id, True, 0, 2), (
            "from the disk"
        )
        in_memory = made.stats()["cache_bytes"]
        cleared = await made.clear((), disk=True)
        assert (cleared.dropped, cleared.kept, cleared.files) == (2, 0, 2)
        assert cleared.freed_bytes > in_memory, "with the bytes of the files"
        assert made.stats()["cached_grammars"] == made.stats()["cache_bytes"] == 0
        assert not (await made.compile(Kind.REGEX, "ac+", ANY, "llguidance"))[1]


async def test_without_a_cache_each_grammar_is_compiled_anew(vocabulary: Vocabulary, tmp_path: Path) -> None:
    async with compiler(vocabulary, cache_bytes=0, cache_dir=str(tmp_path / "cache")) as made:
        for count, backend in enumerate(("llguidance", "llguidance", AUTO, AUTO), 1):
            entry, hit = await made.compile(Kind.REGEX, "ab+", ANY, backend)
            assert (hit, made.compiled) == (False, count)
            assert made.get(entry.grammar_id) is entry, "it is held for its matchers"
        assert made.stats()["cached_grammars"] == 1
        one, other = await asyncio.gather(*(made.compile(Kind.REGEX, "ac+", ANY, "llguidance") for _ in range(2)))
        assert one[0] is other[0], "compilations at the same time are one"
    assert not (tmp_path / "cache").exists()
