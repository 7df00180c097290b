"""The calls of the service next to Generate: statistics, the tokenizer, grammars, adapters, the draft model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import tokenizers

from gpu_engine.api.request import GrammarKind, GrammarSpec
from gpu_engine.api.stats import IterationRing
from gpu_engine.front.grammar_handles import grammar_id
from gpu_engine.front.tokens.tokenizer_info import TokenizerInfo
from protos.engine.v1 import engine_pb2 as pb
from tests.fakes import EOS, answers_with
from tests.gpu_engine.front.serving import Setup, answer, ask, ran, refusal, serving
from tests.waiting import eventually

Code = grpc.StatusCode


async def refused(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), str(caught.value.details())


def test_a_ring_has_the_last_iterations_and_says_where_they_end() -> None:
    ring = IterationRing(4)
    assert ring.since(0) == ([], 0)
    ran(ring, 3)
    assert [each.number for each in ring.since(1)[0]] == [1, 2]
    ran(ring, 7)
    found, end = ring.since(2)
    assert ([each.number for each in found], end) == ([6, 7, 8, 9], 10)
    assert ring.since(10) == ([], 10)


async def read(call: Any) -> pb.WatchStatsResponse:
    response = await call.read()
    assert isinstance(response, pb.WatchStatsResponse)
    return response


async def test_a_watcher_gets_the_past_then_what_is_new_until_the_server_drains(tmp_path: Path) -> None:
    async with serving(tmp_path) as s, asyncio.timeout(30):
        ran(s.engine.iterations, 5)
        call = s.stub.WatchStats(pb.WatchStatsRequest(history=2, interval_ms=10, omit_requests=True))
        first = await read(call)
        assert ([each.iteration for each in first.iterations], first.missed, len(first.requests)) == ([3, 4], 0, 0)
        assert first.iterations[1] == pb.IterationStats(
            iteration=4, time_s=1e9 + 4, iteration_ms=4, waiting=5, running=6, num_slots=4, decoding=7,
            prefill_tokens=8, generated_tokens=9, draft_tokens=10, accepted_draft_tokens=11, parked=12, preempted=13,
            pages_used=14, num_pages=64,
        )  # fmt: skip
        ran(s.engine.iterations, 1)
        assert [each.iteration for each in (await read(call)).iterations] == [5]
        ran(s.engine.iterations, s.engine.iterations.size + 3)
        third = await read(call)
        assert (third.iterations[-1].iteration, third.missed + len(third.iterations)) == (16, 11)
        whole = await read(s.stub.WatchStats(pb.WatchStatsRequest(history=2**31)))
        assert (len(whole.iterations), whole.missed) == (s.engine.iterations.size, 0)
        await s.calls.drain(1)
        assert await call.read() is grpc.aio.EOF  # type: ignore[attr-defined]  # not in the stub


async def test_a_watcher_sees_the_requests_with_their_client(tmp_path: Path) -> None:
    async with serving(tmp_path) as s, asyncio.timeout(30):
        running = s.stub.Generate(ask(request_id="r", client_id="team"))
        reading = asyncio.create_task(running.read())
        await eventually(lambda: s.engine.submitted)
        ran(s.engine.iterations, 1)
        assert list((await read(s.stub.WatchStats(pb.WatchStatsRequest(history=1)))).requests) == [
            pb.RequestStats(request_id="r", client_id="team", stage=pb.RequestStats.STAGE_DECODE, prompt_tokens=2)
        ]
        running.cancel()
        await asyncio.wait([reading])


async def test_info_stats_and_the_tokenizer(tmp_path: Path) -> None:
    async with serving(tmp_path, num_draft_tokens=3) as s:
        info, stats = await s.client.info(), await s.client.stats()
        found = await s.stub.GetTokenizerInfo(pb.GetTokenizerInfoRequest())
        again = await s.stub.GetTokenizerInfo(pb.GetTokenizerInfoRequest())
        vocab = s.calls.model.tokenizer.backend_tokenizer.get_vocab()
        ids = (await s.stub.Tokenize(pb.TokenizeRequest(text="h\u00e9"))).token_ids
        assert (await s.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == "h\u00e9"
    assert (info.model, info.version, info.max_model_len, info.num_draft_tokens) == ("fake-model", "1.2", 256, 3)
    assert (list(info.served_names), list(info.backends)) == (
        ["embedded"],
        [pb.BACKEND_LLGUIDANCE, pb.BACKEND_XGRAMMAR],
    )
    assert (stats.num_slots, stats.matchers, stats.cached_grammars, stats.grammar_starts) == (4, 2, 3, 1)
    assert stats.grammar_ready
    assert {token: i for i, token in enumerate(found.encoded_vocab)} == vocab
    assert tokenizers.Tokenizer.from_str(found.tokenizer_str).encode("h\u00e9").ids == [104, 195, 169]
    assert list(found.stop_token_ids) == [EOS]
    assert json.loads(again.tokenizer_str) == json.loads(found.tokenizer_str)


async def test_a_tokenizer_that_could_not_be_described_is_asked_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        tokenizer: Any = s.calls.model.tokenizer
        backend, tokenizer.backend_tokenizer = tokenizer.backend_tokenizer, None
        assert (await refused(s.stub.GetTokenizerInfo(pb.GetTokenizerInfoRequest())))[0] is Code.INTERNAL
        tokenizer.backend_tokenizer = backend
        assert (await s.stub.GetTokenizerInfo(pb.GetTokenizerInfoRequest())).encoded_vocab[97] == "a"
        info = TokenizerInfo(s.calls.model)
        assert await info.get() is await info.get(), "it is made once"


async def test_grammars_are_compiled_ahead_named_by_id_and_cleared(tmp_path: Path) -> None:
    async with serving(tmp_path, answers_with("ok")) as s:
        made = await s.client.compile(pb.Grammar(regex="[a-z]+", backend=pb.BACKEND_AUTO, allow_unenforced=True))
        assert (made.backend, made.memory_bytes) == (pb.BACKEND_LLGUIDANCE, 99)
        assert (made.min_tokens, made.known_answer_tokens, list(made.warnings)) == (4, 6, ["w"])
        assert (made.compile_ms, made.cache_hit) == (3.0, False)
        await answer(s.client, ask(grammar=pb.Grammar(grammar_id=made.grammar_id)))
        assert [spec for _, spec in s.grammar.prepared] == s.grammar.compiled
        assert (s.grammar.compiled[0].backend, s.grammar.compiled[0].allow_unenforced) == (pb.BACKEND_AUTO, True)
        for disk, files in ((False, 0), (True, 2)):
            cleared = await s.stub.ClearGrammarCache(pb.ClearGrammarCacheRequest(disk=disk))
            assert (cleared.dropped, cleared.kept, cleared.files, cleared.freed_bytes) == (3, 1, files, 99)


async def test_a_server_without_a_grammar_process_refuses_grammars(tmp_path: Path) -> None:
    async with serving(tmp_path, with_grammar=False) as s:
        assert list((await s.client.info()).backends) == []
        assert not (await s.client.stats()).grammar_ready
        for grammar in (pb.Grammar(json_object=True), pb.Grammar(grammar_id="g-1")):
            error = await refusal(s.client, ask(grammar=grammar))
            assert error.code() is Code.FAILED_PRECONDITION
            assert "grammar=none" in str(error.details())
        compiled, cleared = (
            s.client.compile(pb.Grammar(regex="a")),
            s.stub.ClearGrammarCache(pb.ClearGrammarCacheRequest()),
        )
        assert [(await refused(call))[0] for call in (compiled, cleared)] == [Code.FAILED_PRECONDITION] * 2


async def test_adapters_are_loaded_listed_and_unloaded(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        want = pb.Adapter(name="low", kind=pb.Adapter.KIND_LORA, path="/a/low", size=4, memory_bytes=64)
        assert await s.client.load_adapter("low", "/a/low") == want
        listed = await s.client.adapters()
        assert (list(listed.adapters), listed.max_bytes) == ([want], 1 << 20)
        await s.client.unload_adapter("low")
        assert not (await s.client.adapters()).adapters


async def test_a_request_has_the_adapters_that_it_names(tmp_path: Path) -> None:
    async with serving(tmp_path, answers_with("x")) as s:
        low, virtual = s.engine.adapters.load("low", "low"), s.engine.adapters.load("virtual", "prompt")
        request = ask("hi", lora="low", prompt_adapter="virtual", response=pb.ResponseOptions(echo=True))
        responses = await answer(s.client, request)
        submitted = s.engine.submitted[0]
        assert (submitted.lora, submitted.prompt_adapter) == (low, virtual)
        assert submitted.prompt_ids == [1000, 1001, 1002, 1003, *b"hi"]
        assert [token for response in responses for token in response.prompt_token_ids] == list(b"hi")
        assert "".join(response.text for response in responses) == "hix"
        assert responses[-1].usage.prompt_tokens == 6, "virtual tokens count"
        error = await refusal(s.client, ask("x" * 252, prompt_adapter="virtual"))
        assert str(error.details()).startswith("text: has 256 tokens, at most 255 fit"), "for the context as well"
        for field in ("lora", "prompt_adapter"):
            error = await refusal(s.client, ask("hi", **{field: "other"}))
            assert error.code() is Code.INVALID_ARGUMENT
            assert str(error.details()) == f"{field}: there is no 'other'; there are: low, virtual"


async def test_the_draft_model_is_named_and_exchanged(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        assert (await s.client.info()).draft_model == ""
        loaded = await s.client.exchange_drafter("/models/small")
        assert (loaded.model, loaded.num_parameters) == ("/models/small", 1000)
        assert (await refused(s.client.exchange_drafter("/models/other")))[1] == "path: its tokenizer is another one"
        assert (await s.client.info()).draft_model == "/models/small"


def named(grammar: str) -> pb.GenerateRequest:
    return ask(grammar=pb.Grammar(grammar_id=grammar))


BAD = GrammarSpec(GrammarKind.REGEX, "bad")
REFUSED: dict[str, tuple[Callable[[Setup], Awaitable[object]], str]] = {
    **{
        f"interval {ms}": (
            lambda s, ms=ms: s.stub.WatchStats(pb.WatchStatsRequest(interval_ms=ms)).read(),
            f"INVALID_ARGUMENT interval_ms: is {ms}, must be in [10, 3600000]",
        )
        for ms in (0, 9, 3_600_001)
    },
    "token id": (
        lambda s: s.stub.Detokenize(pb.DetokenizeRequest(token_ids=[320])),
        "INVALID_ARGUMENT token_ids[0]: is 320, token ids are in [0, 320)",
    ),
    "grammar": (lambda s: s.client.compile(pb.Grammar(regex="bad")), "INVALID_ARGUMENT grammar: line 1: no"),
    "grammar that failed": (lambda s: answer(s.client, named(grammar_id(BAD))), "NOT_FOUND grammar.grammar_id: "),
    "grammar id": (lambda s: answer(s.client, named("g-none")), "NOT_FOUND grammar.grammar_id: 'g-none'"),
    "adapter": (lambda s: s.client.unload_adapter("low"), "NOT_FOUND name: there is no adapter 'low'; there are: "),
}


async def test_a_wrong_call_is_refused_with_its_field(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        for name, (call, expected) in REFUSED.items():
            code, details = await refused(call(s))
            assert f"{code.name} {details}"[: len(expected)] == expected, name
        assert dict((await s.client.stats()).failed)["NOT_FOUND"] == 3
