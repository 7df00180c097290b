"""The calls of the API: from a body to the engine's call, and from its responses to an answer.

Invariant: an answer that has begun holds exactly the engine calls that it reads, and they are closed however it ends.
The status of a stream is sent with its first event, so that what an engine refuses has its own HTTP status. No
part of an answer is sent twice: of a lost engine's requests, those of which nothing was sent go to another one.

Not responsible for: connections and routes (app.py, stream.py), the Responses API (responses.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc

from http_gateway.answers import prompts, texts
from http_gateway.answers.chat import ChatShape, ChatStream, ChatWhole
from http_gateway.answers.completions import Completions, CompletionShape
from http_gateway.answers.messages import MessageAnswer, MessageShape
from http_gateway.answers.responses import ResponseAnswer, ResponseShape
from http_gateway.answers.sampling import begin, check_stream_options
from http_gateway.engines.engine import CALL_TIMEOUT_S, Call, Engine, Metadata
from http_gateway.engines.fleet import Fleet
from http_gateway.http.stream import Events, ended, event
from http_gateway.wire.chat import ChatRequest
from http_gateway.wire.completions import CompletionRequest, DetokenizeRequest, TokenizeRequest
from http_gateway.wire.errors import ApiError, EngineLost, from_grpc
from http_gateway.wire.messages import CountTokensRequest, MessagesRequest
from http_gateway.wire.messages import chat_body as chat_body_of_message
from http_gateway.wire.responses import ResponsesRequest, chat_body
from protos.engine.v1 import engine_pb2 as pb

log = logging.getLogger(__name__)

COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens in completions."""
Json = dict[str, Any]
Result = TypeVar("Result")


class Calls:
    """Runs the calls on the engines."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    async def chat(self, fields: ChatRequest, metadata: Metadata) -> Json | Events:
        """Return the answer, or its events. Raises ApiError."""
        await self.fleet.learn(fields.model)
        request = chat_request(fields, thinks=self.fleet.thinks(fields.model))

        async def begin(lost: Sequence[Engine] = ()) -> tuple[Call, ChatShape]:
            call = await self.fleet.open(request, fields.model, metadata, lost)
            try:
                return call, await self._chat_shape(fields, request, call.engine, metadata)
            except BaseException:
                call.close()
                raise

        async def answer(lost: Sequence[Engine]) -> Json:
            call, shape = await begin(lost)
            whole = ChatWhole(shape)
            async with call:
                async for response in read(call, metadata):
                    whole.take(response)
            return whole.result()

        if not fields.stream:
            return await self._whole(answer)
        call, shape = await begin()
        return Events(ended(_chat_events(call, ChatStream(shape), metadata)), call.close)

    async def complete(self, fields: CompletionRequest, metadata: Metadata) -> Json | Events:
        """Return the answer to each prompt, or its events. Raises ApiError."""
        await self.fleet.learn(fields.model)
        request_id = fields.request_id or f"cmpl-{uuid.uuid4().hex}"
        requests = [
            completion_request(fields, prompt, _nth_id(request_id, i, len(fields.prompts())))
            for i, prompt in enumerate(fields.prompts())
        ]

        async def begin(lost: Sequence[Engine] = ()) -> tuple[list[Call], Completions]:
            calls = await self._open_all(requests, fields.model, metadata, lost)
            try:
                shape = await self._completion_shape(fields, request_id, requests, calls, metadata)
            except BaseException:
                _close(calls)
                raise
            return calls, Completions(shape)

        async def answer(lost: Sequence[Engine]) -> Json:
            calls, completions = await begin(lost)
            with _closing(calls):
                async for prompt, response in _merged(calls, metadata):
                    completions.take(prompt, response)
            return completions.result()

        if not fields.stream:
            return await self._whole(answer)
        calls, completions = await begin()
        return Events(ended(_completion_events(calls, completions, metadata)), partial(_close, calls))

    async def respond(self, fields: ResponsesRequest, metadata: Metadata) -> Json | Events:
        """Return the answer of the Responses API, or its events. Raises ApiError."""
        await self.fleet.learn(fields.model)
        request_id = f"resp_{uuid.uuid4().hex}"
        request = chat_request(chat_body(fields, request_id), thinks=self.fleet.thinks(fields.model))

        async def begin(lost: Sequence[Engine]) -> tuple[Call, ResponseAnswer]:
            call = await self.fleet.open(request, fields.model, metadata, lost)
            shape = ResponseShape(
                id=request_id,
                model=fields.model or call.engine.names[0],
                fields=fields,
                custom=prompts.custom_names(request.tools),
                apart=parts_expected(request),
                texts=call.engine.texts,
            )
            return call, ResponseAnswer(shape)

        return await self._answered(begin, bool(fields.stream), metadata)

    async def message(self, fields: MessagesRequest, metadata: Metadata) -> Json | Events:
        """Return the answer of Anthropic's API, or its events. Raises ApiError."""
        await self.fleet.learn(fields.model)
        thinks, request_id = self.fleet.thinks(fields.model), f"msg_{uuid.uuid4().hex}"
        request = chat_request(chat_body_of_message(fields, request_id, thinks=thinks), thinks=thinks)

        async def begin(lost: Sequence[Engine]) -> tuple[Call, MessageAnswer]:
            call = await self.fleet.open(request, fields.model, metadata, lost)
            try:
                counted = await _prompt_tokens(call.engine, request, fields.model, metadata) if fields.stream else 0
            except BaseException:
                call.close()
                raise
            shape = MessageShape(
                id=request_id,
                model=fields.model or call.engine.names[0],
                apart=parts_expected(request),
                prompt_tokens=counted,
                max_tokens=fields.max_tokens,
                max_model_len=call.engine.info.max_model_len if call.engine.info else 0,
            )
            return call, MessageAnswer(shape)

        return await self._answered(begin, bool(fields.stream), metadata)

    async def count_tokens(self, fields: CountTokensRequest, metadata: Metadata) -> Json:
        """Return the number of tokens of a prompt of Anthropic's API. Raises ApiError."""
        await self.fleet.learn(fields.model)
        thinks = self.fleet.thinks(fields.model)
        request = chat_request(chat_body_of_message(fields, "", thinks=thinks), thinks=thinks)
        engine = self.fleet.choose(fields.model, b"")
        return {"input_tokens": await _prompt_tokens(engine, request, fields.model, metadata)}

    async def tokenize(self, fields: TokenizeRequest, metadata: Metadata) -> Json:
        """Return the tokens of a text or a conversation. Raises ApiError."""
        if (fields.prompt is None) == (fields.messages is None):
            raise ApiError("prompt: exactly one of prompt and messages is required", param="prompt")
        request = pb.TokenizeRequest(with_texts=bool(fields.return_token_strs))
        if fields.prompt is not None:
            request.text = fields.prompt
        else:
            messages = prompts.chat_messages(
                fields.messages or (), fields.chat_template_kwargs, go_on=bool(fields.continue_final_message)
            )
            request.messages.CopyFrom(messages)
        if (tools := prompts.chat_tools(fields.tools, None, None)) is not None:
            request.tools.CopyFrom(tools)
        if fields.add_special_tokens is not None:
            request.add_special_tokens = fields.add_special_tokens
        await self.fleet.learn(fields.model)
        engine = self.fleet.choose(fields.model, b"")
        response = await _asked(engine.stub.Tokenize(request, timeout=CALL_TIMEOUT_S, metadata=[*metadata]))
        info = engine.info
        return {
            "count": len(response.token_ids),
            "max_model_len": info.max_model_len if info else None,
            "tokens": list(response.token_ids),
            "token_strs": list(response.texts) if fields.return_token_strs else None,
        }

    async def detokenize(self, fields: DetokenizeRequest, metadata: Metadata) -> Json:
        """Return the text of token ids. Raises ApiError."""
        request = pb.DetokenizeRequest(token_ids=fields.tokens, skip_special_tokens=bool(fields.skip_special_tokens))
        await self.fleet.learn(fields.model)
        engine = self.fleet.choose(fields.model, b"")
        response = await _asked(engine.stub.Detokenize(request, timeout=CALL_TIMEOUT_S, metadata=[*metadata]))
        return {"prompt": response.text}

    async def _answered(
        self,
        begin: Callable[[Sequence[Engine]], Awaitable[tuple[Call, ResponseAnswer | MessageAnswer]]],
        streams: bool,
        metadata: Metadata,
    ) -> Json | Events:
        """Return the answer of a call that `begin` opens, given the engines that it lost, or its events."""

        async def answer(lost: Sequence[Engine]) -> Json:
            call, made = await begin(lost)
            async with call:
                async for response in read(call, metadata):
                    for _ in made.take(response):
                        pass
            return made.json()

        if not streams:
            return await self._whole(answer)
        call, made = await begin(())
        return Events(_answer_events(call, made, metadata), call.close)

    async def _whole(self, answer: Callable[[Sequence[Engine]], Awaitable[Json]]) -> Json:
        """Return what `answer` returns, given the engines that it lost. Raises ApiError.

        Nothing of a whole answer is sent before its end, so that of an engine that is lost meanwhile begins anew on
        another one.
        """
        lost: list[Engine] = []
        while True:
            try:
                return await answer(lost)
            except EngineLost as error:
                found = [e for e in self.fleet.engines if e.address == error.address and e not in lost]
                if not found or len(lost) + 1 == len(self.fleet.engines):
                    raise
                lost += found
                log.info("an answer of %s begins anew: %s", error.address, error.message)

    async def _chat_shape(
        self, fields: ChatRequest, request: pb.GenerateRequest, engine: Engine, metadata: Metadata
    ) -> ChatShape:
        return ChatShape(
            id=request.request_id,
            model=fields.model or engine.names[0],
            fields=fields,
            custom=prompts.custom_names(request.tools),
            apart=parts_expected(request),
            texts=engine.texts,
            prompt_ids=await self._prompt_ids(fields, request, engine, metadata),
            virtual_tokens=engine.virtual_tokens(fields.model),
        )

    async def _completion_shape(
        self,
        fields: CompletionRequest,
        request_id: str,
        requests: Sequence[pb.GenerateRequest],
        calls: Sequence[Call],
        metadata: Metadata,
    ) -> CompletionShape:
        shape = CompletionShape(
            id=request_id,
            model=fields.model or calls[0].engine.names[0],
            fields=fields,
            texts=[call.engine.texts for call in calls],
            virtual_tokens=calls[0].engine.virtual_tokens(fields.model),
        )
        for number, (request, call) in enumerate(zip(requests, calls, strict=True)):
            echo_alone = fields.max_tokens == 0
            if ids := await self._prompt_ids(fields, request, call.engine, metadata):
                shape.prompt_ids[number] = ids
            if echo_alone:
                prompt = pb.DetokenizeRequest(token_ids=ids)
                asked = call.engine.stub.Detokenize(prompt, timeout=CALL_TIMEOUT_S, metadata=[*metadata])
                shape.echo_alone[number] = (await _asked(asked)).text if fields.echo else ""
        return shape

    async def _prompt_ids(
        self,
        fields: ChatRequest | CompletionRequest,
        request: pb.GenerateRequest,
        engine: Engine,
        metadata: Metadata,
    ) -> tuple[int, ...]:
        """Return the prompt's tokens where the answer shows or counts them, with the texts that it shows known."""
        if not _shows_prompt(fields):
            return ()
        ids = await prompt_ids(engine, request, metadata)
        if fields.prompt_logprobs is not None:
            await texts.load(engine, metadata, ids)
        return ids

    async def _open_all(
        self, requests: Sequence[pb.GenerateRequest], model: str | None, metadata: Metadata, lost: Sequence[Engine]
    ) -> list[Call]:
        """Open a call for each request; none stays open if one fails."""
        if len(requests) == 1:
            return [await self.fleet.open(requests[0], model, metadata, lost)]
        tasks = [
            asyncio.ensure_future(_named(f"prompt[{number}]", self.fleet.open(request, model, metadata, lost)))
            for number, request in enumerate(requests)
        ]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            opened = await asyncio.gather(*tasks, return_exceptions=True)
            _close([call for call in opened if isinstance(call, Call)])
            raise


def chat_request(fields: ChatRequest, *, thinks: bool) -> pb.GenerateRequest:
    """Return the engine's request of a chat body. Raises ApiError.

    thinks: the model has markers of its own for what it thinks.
    """
    check_stream_options(fields)
    if fields.max_tokens is not None and fields.max_completion_tokens not in (None, fields.max_tokens):
        raise ApiError("max_tokens: max_completion_tokens says otherwise", param="max_tokens", code="invalid_value")
    if fields.top_logprobs is not None and not fields.logprobs:
        raise ApiError("top_logprobs: needs logprobs: true", param="top_logprobs", code="invalid_value")
    most = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    request = begin(
        fields,
        fields.request_id or f"chatcmpl-{uuid.uuid4().hex}",
        max_tokens=most,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
    )
    go_on = bool(fields.continue_final_message)
    request.messages.CopyFrom(prompts.chat_messages(fields.messages, fields.chat_template_kwargs, go_on=go_on))
    tools = prompts.chat_tools(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
    if tools is not None:
        request.tools.CopyFrom(tools)
    if (phase := prompts.reasoning(fields, thinks=thinks)) is not None:
        request.reasoning.CopyFrom(phase)
    return request


def completion_request(fields: CompletionRequest, prompt: str | list[int], request_id: str) -> pb.GenerateRequest:
    """Return the engine's request of one prompt. Raises ApiError."""
    check_stream_options(fields)
    most = COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens
    if most == 0 and not fields.echo:
        raise ApiError("max_tokens: must be at least 1, or 0 with echo", param="max_tokens", code="invalid_value")
    request = begin(fields, request_id, max_tokens=max(1, most), logprobs=fields.logprobs)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    if fields.echo and most:
        request.response.echo = True
    if fields.echo and fields.logprobs is not None:
        request.response.echo = True
        request.response.prompt_logprobs = fields.logprobs
    return request


def parts_expected(request: pb.GenerateRequest) -> bool:
    """Return whether the engine tells the parts of the answer apart, its text being more than its content."""
    return request.HasField("tools") or request.HasField("reasoning")


async def prompt_ids(engine: Engine, request: pb.GenerateRequest, metadata: Metadata) -> tuple[int, ...]:
    """Return the tokens of a request's prompt. Raises ApiError."""
    if request.WhichOneof("prompt") == "token_ids":
        return tuple(request.token_ids.ids)
    asked = pb.TokenizeRequest(tools=request.tools if request.HasField("tools") else None)
    if request.WhichOneof("prompt") == "text":
        asked.text = request.text
    else:
        asked.messages.CopyFrom(request.messages)
    response = await _asked(engine.stub.Tokenize(asked, timeout=CALL_TIMEOUT_S, metadata=[*metadata]))
    return tuple(response.token_ids)


async def _prompt_tokens(engine: Engine, request: pb.GenerateRequest, model: str | None, metadata: Metadata) -> int:
    return len(await prompt_ids(engine, request, metadata)) + engine.virtual_tokens(model)


def _shows_prompt(fields: ChatRequest | CompletionRequest) -> bool:
    echo_alone = isinstance(fields, CompletionRequest) and fields.max_tokens == 0
    return echo_alone or bool(fields.return_token_ids) or fields.prompt_logprobs is not None or fields.usage_events()[1]


def _nth_id(request_id: str, number: int, of: int) -> str:
    return request_id if of == 1 else f"{request_id}-{number}"


async def _named(prompt: str, call: Awaitable[Result]) -> Result:
    """Return the call's result. Raises its ApiError, in which `prompt` is the name of the prompt at fault."""
    try:
        return await call
    except ApiError as error:
        if error.param is not None and re.fullmatch(r"prompt(\[\d+\])?", error.param):
            error.rename(prompt + error.param.removeprefix("prompt"))
        raise


async def _asked(call: Awaitable[Result]) -> Result:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_grpc(error) from error


async def read(call: Call, metadata: Metadata) -> AsyncIterator[pb.GenerateResponse]:
    """Yield the responses, with the texts of all tokens that they name known. Raises ApiError."""
    try:
        async for response in call.responses():
            if ids := texts.ids_of(response):
                await texts.load(call.engine, metadata, ids)
            yield response
    except grpc.aio.AioRpcError as error:
        failed = from_grpc(error)
        if isinstance(failed, EngineLost):
            failed.address = call.engine.address
        raise failed from error


async def _merged(calls: Sequence[Call], metadata: Metadata) -> AsyncIterator[tuple[int, pb.GenerateResponse]]:
    """Yield (number of the call, response) of all calls, as they come. Raises ApiError."""
    if len(calls) == 1:
        async for response in read(calls[0], metadata):
            yield 0, response
        return
    readers = [read(call, metadata) for call in calls]
    waiting = {asyncio.ensure_future(anext(reader)): number for number, reader in enumerate(readers)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                number = waiting.pop(task)
                try:
                    response = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(readers[number]))] = number
                yield number, response
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _chat_events(call: Call, stream: ChatStream, metadata: Metadata) -> AsyncIterator[bytes]:
    async for response in read(call, metadata):
        for chunk in stream.chunks(response):
            yield event(chunk)
    if (last := stream.last()) is not None:
        yield event(last)


async def _answer_events(
    call: Call, answer: ResponseAnswer | MessageAnswer, metadata: Metadata
) -> AsyncGenerator[bytes]:
    try:
        for made in answer.begin():
            yield event(made, made["type"])
        async for response in read(call, metadata):
            for made in answer.take(response):
                yield event(made, made["type"])
    except ApiError as error:
        yield event(answer.failed(error), "error")


async def _completion_events(
    calls: Sequence[Call], completions: Completions, metadata: Metadata
) -> AsyncIterator[bytes]:
    async for prompt, response in _merged(calls, metadata):
        for chunk in completions.chunks(prompt, response):
            yield event(chunk)
    if (last := completions.last()) is not None:
        yield event(last)


@contextlib.contextmanager
def _closing(calls: Sequence[Call]) -> Iterator[None]:
    try:
        yield
    finally:
        _close(calls)


def _close(calls: Sequence[Call]) -> None:
    for call in calls:
        call.close()
