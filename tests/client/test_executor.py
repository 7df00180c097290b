"""Both executors against the engine's own service, with a fake engine after it."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gpu_engine.api.request import FinishReason as EngineReason
from gpu_engine.api.request import Logprobs, TokenEvent
from gpu_engine.api.request import Request as EngineRequest
from lockstep_client import (
    NO_END,
    AsyncExecutor,
    CallError,
    Executor,
    FinishReason,
    Grammar,
    GuidedDecodingParams,
    GuideType,
    InvalidRequest,
    LimitExceeded,
    OutputConfig,
    Request,
    Response,
    SamplingConfig,
    TokenizerInfo,
    Unavailable,
)
from lockstep_client.executing.book import Book
from lockstep_client.wire import engine_pb2 as pb
from tests.fakes import EOS, Script, answers_with
from tests.gpu_engine.front.serving import Setup, ran, serving
from tests.waiting import eventually

ABC = (*b"abc", EOS)


class Either:
    """One of the executors, called from a test that is a coroutine."""

    def __init__(self, executor: Executor | AsyncExecutor, setup: Setup) -> None:
        self.executor, self.setup = executor, setup

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        function = getattr(self.executor, method)
        if inspect.iscoroutinefunction(function):
            return await function(*arguments, **options)
        return await asyncio.to_thread(function, *arguments, **options)

    async def enqueue(self, **fields: Any) -> int:
        request_id = await self.call("enqueue_request", Request(**{"text": "hi", **fields}))
        assert isinstance(request_id, int)
        return request_id

    def end(self, request: EngineRequest) -> None:
        """End a sequence of the engine."""
        event = TokenEvent(request.index, (EOS,), finish=EngineReason.STOP, matched_token_id=EOS)
        self.setup.engine.emit(request, event)

    async def submitted(self, count: int = 1) -> list[EngineRequest]:
        await eventually(lambda: len(self.setup.engine.submitted) == count)
        return list(self.setup.engine.submitted)

    async def responses(self, *arguments: Any) -> Any:
        return await self.call("await_responses", *arguments, timeout_s=20)

    async def until_final(self, request_id: int) -> list[Response]:
        found: list[Response] = []
        while not found or not found[-1].is_last:
            found += await self.responses(request_id)
        return found


@pytest.fixture(params=[Executor, AsyncExecutor], ids=["Executor", "AsyncExecutor"])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@asynccontextmanager
async def executing(kind: Any, tmp_path: Path, script: Script | None = None, **options: Any) -> AsyncIterator[Either]:
    async with serving(tmp_path, script) as s, asyncio.timeout(60):
        address = f"unix:{tmp_path}/s"
        if kind is Executor:
            executor = await asyncio.to_thread(lambda: Executor(address=address, **options))
        else:
            executor = AsyncExecutor(address=address, **options)
            await executor.start()
        either = Either(executor, s)
        try:
            yield either
        finally:
            await either.call("shutdown", cancel=True)


def spoken(request: EngineRequest) -> Iterable[TokenEvent]:
    """Yield "abc" with log-probabilities, one token at a time."""
    for token in ABC:
        ends = token == EOS
        logprobs = (Logprobs(-0.25, ((token, -0.25),)),) if request.outputs.logprobs is not None else ()
        finish = EngineReason.STOP if ends else None
        yield TokenEvent(request.index, (token,), logprobs, finish, EOS if ends else None)


async def test_without_streaming_a_request_has_one_response(kind: Any, tmp_path: Path) -> None:
    async with executing(kind, tmp_path, spoken) as executor:
        request_id = await executor.enqueue(client_id=7, output_config=OutputConfig(log_probs=1))
        (response,) = await executor.responses(request_id)
        assert executor.setup.engine.submitted[0].scheduling.client_id == "7"
    assert (response.request_id, response.client_id) == (request_id, 7)
    assert (response.has_error, response.error_msg) == (False, "")
    result = response.result
    assert (result.is_final, result.is_sequence_final, result.sequence_index) == (True, True, 0)
    assert (result.output_token_ids, result.texts) == ((ABC,), ("abc",))
    assert (result.finish_reasons, result.usage.completion_tokens) == ((FinishReason.STOP,), 4)
    assert ([len(each) for each in result.log_probs], result.cum_log_probs) == ([4], (-1.0,))


@pytest.mark.parametrize("has_all", [False, True], ids=["new tokens", "all tokens"])
async def test_with_streaming_results_come_as_tokens_do(kind: Any, tmp_path: Path, has_all: bool) -> None:
    async with executing(kind, tmp_path) as executor:
        request_id = await executor.enqueue(
            streaming=True, return_all_generated_tokens=has_all, output_config=OutputConfig(log_probs=0)
        )
        (submitted,) = await executor.submitted()
        first, *others = spoken(submitted)
        executor.setup.engine.emit(submitted, first)
        found = await executor.responses(request_id)
        for event in others:
            executor.setup.engine.emit(submitted, event)
        results = [response.result for response in [*found, *await executor.until_final(request_id)]]
    assert len(results) > 1
    assert [result.is_final for result in results] == [False] * (len(results) - 1) + [True]
    assert [result.is_sequence_final for result in results] == [result.is_final for result in results]
    tokens = [result.output_token_ids[0] for result in results]
    if has_all:
        assert all(ABC[: len(each)] == each for each in tokens)
        assert tokens[-1] == ABC
    else:
        assert sum(tokens, ()) == ABC
    assert results[-1].cum_log_probs == (-1.0,)
    assert results[0].cum_log_probs[0] > -1.0


@pytest.mark.parametrize("streaming", [False, True])
async def test_sequences_end_one_by_one_and_the_input_may_be_a_part_of_the_output(
    kind: Any, tmp_path: Path, streaming: bool
) -> None:
    async with executing(kind, tmp_path) as executor:
        request_id = await executor.enqueue(num_return_sequences=3, streaming=streaming)
        sequences = await executor.submitted(3)
        found: list[Response] = []
        for index in (1, 0, 2):
            executor.end(sequences[index])
            found += await executor.responses(request_id)
        ends = [(r.result.sequence_index, r.result.is_sequence_final, r.result.is_final) for r in found]
        assert ends == [(1, True, False), (0, True, False), (2, True, True)]

        executor.setup.engine.script = spoken
        with_input = OutputConfig(exclude_input_from_output=False)
        request_id = await executor.enqueue(streaming=streaming, num_return_sequences=2, output_config=with_input)
        results = [response.result for response in await executor.until_final(request_id)]
    for index in range(2):
        mine = [result for result in results if result.sequence_index == index]
        assert sum((result.output_token_ids[0] for result in mine), ()) == (*b"hi", *ABC)
        assert "".join(result.texts[0] for result in mine) == "hiabc"


async def test_responses_are_awaited_of_one_of_several_and_of_any(kind: Any, tmp_path: Path) -> None:
    async with executing(kind, tmp_path) as executor:
        ids = await executor.call("enqueue_requests", [Request(text=text) for text in "abcd"])
        assert len(set(ids)) == 4
        by_text = {bytes(request.prompt_ids).decode(): request for request in await executor.submitted(4)}
        assert await executor.call("await_responses", ids[0], timeout_s=0.05) == []
        executor.end(by_text["b"])
        assert [each.request_id for each in await executor.responses()] == [ids[1]]
        executor.end(by_text["d"])
        executor.end(by_text["a"])
        found = await executor.responses([ids[0], ids[3]])
        assert [[each.request_id for each in one] for one in found] == [[ids[0]], [ids[3]]]
        executor.end(by_text["c"])
        await executor.responses(ids[2])
        assert await executor.responses() == [], "no request is left"
        with pytest.raises(ValueError, match=f"request_id: {ids[2]} is not known, or its last response was taken"):
            await executor.responses(ids[2])


async def test_a_request_that_is_refused_has_an_error_and_disturbs_no_other(kind: Any, tmp_path: Path) -> None:
    async with executing(kind, tmp_path, answers_with("abc")) as executor:
        wrong = await executor.enqueue(max_tokens=0)
        right = await executor.enqueue()
        (refused,), (fine,) = await executor.responses([wrong, right])
    assert refused.has_error
    assert refused.is_last
    assert "sampling.max_tokens: is 0" in refused.error_msg
    with pytest.raises(InvalidRequest, match=r"sampling\.max_tokens"):
        _ = refused.result
    assert fine.result.texts == ("abc",)


async def test_a_request_is_cancelled_whether_it_runs_or_waits(kind: Any, tmp_path: Path) -> None:
    async with executing(kind, tmp_path, max_at_server=1) as executor:

        async def reason(request_id: int) -> FinishReason:
            (response,) = await executor.responses(request_id)
            assert response.result.is_final
            (found,) = response.result.finish_reasons
            return found

        runs, waits, follows = [await executor.enqueue() for _ in range(3)]
        await executor.submitted(1)
        for request_id in (waits, runs):
            await executor.call("cancel_request", request_id)
            assert await reason(request_id) is FinishReason.ABORTED
        executor.end((await executor.submitted(2))[1])
        assert await reason(follows) is FinishReason.STOP
        await executor.call("cancel_request", follows)
        with pytest.raises(ValueError, match="request_id: 99 is not known"):
            await executor.call("cancel_request", 99)


async def test_requests_above_the_servers_room_wait_in_their_order(kind: Any, tmp_path: Path) -> None:
    async with executing(kind, tmp_path, answers_with("abc"), max_at_server=2) as executor:
        ids = await executor.call("enqueue_requests", [Request(text=f"{i:02}") for i in range(30)])
        found: list[Response] = []
        while len(found) < 30:
            found += await executor.responses()
        prompts = [bytes(request.prompt_ids).decode() for request in executor.setup.engine.submitted]
    assert sorted(response.request_id for response in found) == ids
    assert not any(response.has_error for response in found)
    assert [prompts[i] for i in (0, 10, 29)] == ["00", "10", "29"]


async def test_a_lost_server_ends_every_request_with_an_error(kind: Any, tmp_path: Path) -> None:
    async with executing(kind, tmp_path, max_at_server=1) as executor:
        ids = [await executor.enqueue() for _ in range(2)]
        await executor.submitted()
        await executor.setup.stop()
        for (response,) in await executor.responses(ids):
            assert isinstance(response.error, CallError)
            assert response.is_last
        (response,) = await executor.responses(await executor.enqueue())
        assert isinstance(response.error, Unavailable)


async def test_statistics_are_returned_once(kind: Any, tmp_path: Path) -> None:
    async with executing(kind, tmp_path) as executor:
        ran(executor.setup.engine.iterations, 3)
        request_id = await executor.enqueue(client_id="team")
        await eventually(lambda: executor.setup.engine.submitted)
        first = await executor.call("get_latest_iteration_stats", timeout_s=10)
        assert [each.iteration for each in first] == [0, 1, 2]
        (requests,) = await executor.call("get_latest_request_stats", timeout_s=10)
        assert (requests.iteration, [each.client_id for each in requests.requests]) == (2, ["team"])
        assert requests.requests[0].request_id.endswith(f"-{request_id}")
        assert await executor.call("get_latest_iteration_stats", timeout_s=0) == []
        ran(executor.setup.engine.iterations, 1)
        assert [each.iteration for each in await executor.call("get_latest_iteration_stats", timeout_s=10)] == [3]


async def test_shutting_down_waits_for_the_requests_unless_they_take_too_long(kind: Any, tmp_path: Path) -> None:
    async with executing(kind, tmp_path) as executor:
        assert executor.executor.can_enqueue()
        request_id = await executor.enqueue()
        (request,) = await executor.submitted()
        closing = asyncio.create_task(executor.call("shutdown"))
        await eventually(lambda: not executor.executor.can_enqueue())
        with pytest.raises(RuntimeError, match="is shut down"):
            await executor.enqueue()
        executor.end(request)
        await closing
        assert executor.executor.get_num_responses_ready(request_id) == 1
        (response,) = await executor.responses(request_id)
        assert response.result.is_final
    async with executing(kind, tmp_path) as executor:
        request_id = await executor.enqueue()
        await executor.submitted()
        await executor.call("shutdown", timeout_s=0.05)
        (response,) = await executor.responses(request_id)
        assert response.result.finish_reasons == (FinishReason.ABORTED,)


async def test_the_client_changes_adapters_and_the_draft_model(kind: Any, tmp_path: Path) -> None:
    async with executing(kind, tmp_path, spoken) as executor:

        async def call(method: str, *arguments: Any) -> Any:
            found = await asyncio.to_thread(getattr(executor.executor.client, method), *arguments)
            return await found if isinstance(executor.executor, AsyncExecutor) else found

        low = await call("load_adapter", "low", "/a/low")
        assert (low.name, low.kind, low.path, low.size, low.memory_bytes) == ("low", "lora", "/a/low", 4, 64)
        assert await call("adapters") == (low,)
        await executor.responses(await executor.enqueue(lora="low"))
        assert executor.setup.engine.submitted[0].lora.name == "low"
        await call("unload_adapter", "low")
        assert await call("adapters") == ()
        assert await call("exchange_drafter", "/models/small") == "/models/small"
        assert (await call("model_info")).draft_model == "/models/small"


async def test_the_tokenizer_is_dumped_and_loaded(tmp_path: Path) -> None:
    async with executing(Executor, tmp_path) as executor:
        info = await asyncio.to_thread(executor.executor.client.tokenizer_info)  # type: ignore[arg-type]
        cleared = await asyncio.to_thread(executor.executor.client.clear_grammar_cache)  # type: ignore[arg-type]
    assert cleared.dropped == 3
    info.dump(tmp_path / "t.json")
    assert TokenizerInfo.load(tmp_path / "t.json") == info
    assert (info.encoded_vocab[97], info.stop_token_ids) == ("a", (EOS,))
    for text, problem in (
        ("[", "is no JSON"),
        ("{}", "must be a JSON object with encoded_vocab"),
        ('{"encoded_vocab": [1], "tokenizer_str": "", "stop_token_ids": []}', "has the wrong type"),
    ):
        (tmp_path / "t.json").write_text(text)
        with pytest.raises(ValueError, match=problem):
            TokenizerInfo.load(tmp_path / "t.json")


def test_the_twins_have_the_same_methods() -> None:
    def methods(kind: type[Any]) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(function).parameters)
            for name, function in vars(kind).items()
            if not name.startswith("_") and callable(function)
        }

    asynchronous = methods(AsyncExecutor)
    assert asynchronous.pop("start") == ["self"]
    assert methods(Executor) == asynchronous
    assert inspect.signature(Executor.__init__) == inspect.signature(AsyncExecutor.__init__)


def test_wrong_arguments_are_named(kind: Any) -> None:
    for arguments, problem in (
        ({"model": "embedded"}, "model: starts a server of the executor's own"),
        ({"max_batch_size": 4}, "max_batch_size: is for a server of the executor's own"),
    ):
        with pytest.raises(ValueError, match=problem):
            kind(address="x:1", **arguments)


def message(**fields: Any) -> pb.GenerateRequest:
    return Request(**{"text": "x", **fields}).message("n")


def test_every_argument_of_a_request_has_its_field() -> None:
    made = message(
        max_tokens=5,
        streaming=True,
        return_all_generated_tokens=True,
        num_return_sequences=2,
        sampling_config=SamplingConfig(
            temperature=0.5, top_k=7, top_p=0.75, min_p=0.25, seed=9, min_tokens=1, repetition_penalty=1.5,
            presence_penalty=0.5, frequency_penalty=0.25, logit_bias={8: -1.0},
        ),
        output_config=OutputConfig(
            log_probs=2, prompt_log_probs=1, context_logits=True, generation_logits=True,
            exclude_input_from_output=False, text=False, additional_outputs=["logits"],
        ),
        end_id=3,
        pad_id=0,
        stop_words=["a", [4]],
        bad_words=["b", [5]],
        guided_decoding_params=GuidedDecodingParams(GuideType.REGEX, "a+"),
        client_id=7,
        priority=2,
        lora="l",
        prompt_adapter="p",
        logits_processors=["q"],
        max_queue_ms=11,
        never_preempt=True,
        cache_salt="s",
        num_draft_tokens=0,
    )  # fmt: skip
    assert made == pb.GenerateRequest(
        request_id="n", text="x", client_id="7", priority=2, lora="l", prompt_adapter="p", max_queue_ms=11,
        never_preempt=True, cache_salt="s", logits_processors=[pb.LogitsProcessor(name="q")],
        speculation=pb.Speculation(num_draft_tokens=0), grammar=pb.Grammar(regex="a+"),
        sampling=pb.SamplingParams(
            max_tokens=5, n=2, temperature=0.5, top_k=7, top_p=0.75, min_p=0.25, seed=9, min_tokens=1,
            repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={8: -1.0}, logprobs=2,
            stop=["a"], stop_token_ids=[4, 3], bad_words=["b"], bad_token_ids=[5],
        ),
        response=pb.ResponseOptions(
            cumulative=True, echo=True, omit_text=True, prompt_logprobs=1, context_logits=True, generation_logits=True,
            additional_outputs=[pb.AdditionalOutput(name="logits")],
        ),
    )  # fmt: skip
    assert message() == pb.GenerateRequest(
        request_id="n", text="x", sampling=pb.SamplingParams(n=1), response=pb.ResponseOptions(whole=True)
    )
    assert message(streaming=True, end_id=NO_END).sampling.ignore_eos
    assert message(text=None, input_token_ids=[1, 2]).token_ids.ids == [1, 2]
    assert message(text=None, messages="Hello").messages.messages[0].content == "Hello"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"text": None}, "input_token_ids, text, messages: exactly one is required, none is there"),
        ({"messages": "a"}, "exactly one is required, text and messages is there"),
        ({"stop_words": [[1, 2]]}, r"stop_words\[0\]: has 2 token ids"),
        ({"bad_words": "ab"}, "bad_words: is one text"),
        ({"return_all_generated_tokens": True}, "return_all_generated_tokens: needs streaming"),
        ({"guided_decoding_params": GuidedDecodingParams(GuideType.JSON_SCHEMA)}, "guide: none is for JSON_SCHEMA"),
        ({"guided_decoding_params": GuidedDecodingParams(GuideType.JSON, "{}")}, "guide: is not for JSON"),
    ],
)
def test_a_wrong_request_is_named_before_it_is_sent(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        message(**fields)


@pytest.mark.parametrize("kind", list(GuideType), ids=lambda kind: kind.name)
def test_each_kind_of_guide_is_its_grammar(kind: GuideType) -> None:
    guide = {GuideType.JSON: None, GuideType.CHOICE: json.dumps(["a", "b"])}.get(kind, '{"type": "object"}')
    made = message(guided_decoding_params=GuidedDecodingParams(kind, guide)).grammar
    own = {GuideType.JSON: Grammar.json_object(), GuideType.CHOICE: Grammar.choice("a", "b")}
    expected = own.get(kind, Grammar(kind.value, guide or ""))
    assert made == expected.message()
    assert made.WhichOneof("spec") == kind.value


def whole(index: int, tokens: list[int], *, last: bool = False, **fields: Any) -> pb.GenerateManyResponse:
    response = pb.GenerateResponse(
        index=index, token_ids=tokens, finish_reason=pb.FINISH_REASON_STOP, usage=pb.Usage(), **fields
    )
    return pb.GenerateManyResponse(request_id="p-1", response=response, last=last)


def test_the_beams_of_a_search_are_one_result_with_the_best_first() -> None:
    book = Book("p-", 8)
    search = Request(text="x", num_return_sequences=2, sampling_config=SamplingConfig(beam_width=3, length_penalty=0.5))
    (request_id,) = book.enqueue([search])
    (sent,) = book.to_send()
    assert sent.generate.beam_search == pb.BeamSearch(beam_width=3, length_penalty=0.5)
    assert sent.generate.response.whole
    book.take(whole(1, [3], beam_score=-2.0))
    assert not book.has_ready([request_id])
    book.take(whole(0, [1, 2], beam_score=-1.0, last=True))
    (response,) = book.pop(request_id)
    result = response.result
    assert (result.sequence_index, result.is_final, result.is_sequence_final) == (0, True, True)
    assert (result.output_token_ids, result.cum_log_probs) == (((1, 2), (3,)), (-1.0, -2.0))


def test_rows_of_tensors_that_come_before_a_whole_result_are_in_it() -> None:
    def rows(start: int, *fields: str) -> pb.OutputTensor:
        return pb.OutputTensor(name=fields[0], dtype="float32", shape=[1, 1], data=bytes(4), start=start)

    book = Book("p-", 8)
    book.enqueue([Request(text="x", output_config=OutputConfig(generation_logits=True, additional_outputs=["m"]))])
    book.to_send()
    early = pb.GenerateResponse(outputs=[rows(0, "generation_logits"), rows(0, "m")])
    book.take(pb.GenerateManyResponse(request_id="p-1", response=early))
    assert book.num_ready() == 0
    book.take(whole(0, [5], outputs=[rows(1, "generation_logits")], last=True))
    (response,) = book.pop_any()
    logits = response.result.generation_logits
    assert logits is not None
    assert (logits.shape, list(response.result.additional_outputs)) == ((2, 1), ["m"])
    assert response.result.output_token_ids == ((5,),)


def test_an_error_above_the_servers_queue_says_so() -> None:
    book = Book("p-", 1)
    book.enqueue([Request(text="x")])
    book.to_send()
    error = pb.RequestError(code=8, message="max_queue_size = 4")
    book.take(pb.GenerateManyResponse(request_id="p-1", error=error, last=True))
    book.take(pb.GenerateManyResponse(request_id="p-1", error=error, last=True))
    (response,) = book.pop(1)
    assert isinstance(response.error, LimitExceeded)
    assert book.waits_for_nothing
