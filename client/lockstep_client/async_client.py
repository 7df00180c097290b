"""The asynchronous client. `client.py` is generated from this file: `python -m tools.client_twins --write`.

The invariant: however a stream is left (read to its end, closed, dropped, an exception), its call is cancelled, and the
server frees what it held. A call is sent again only while nothing of its answer has arrived (see retrying.py). A client
belongs to the event loop on which it is made.

Not responsible for: arguments (see calls.py), answers (see joining.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, TypeVar, Unpack, overload

import grpc

from lockstep_client import calls
from lockstep_client.access import TLS, Token, access_to
from lockstep_client.answers import (
    Adapter,
    Answer,
    ClearedGrammars,
    Delta,
    ModelInfo,
    Stats,
    Tokens,
    ValueEventKind,
    adapter_of,
    delta_of,
    from_message,
)
from lockstep_client.async_rpc import AsyncRpc
from lockstep_client.calls import LOAD_TIMEOUT_S, UNARY_TIMEOUT_S, AnyGrammar, Method, Prepared, Prompt, Q, R
from lockstep_client.concurrency import async_pause, async_read, in_thread
from lockstep_client.embedded import EmbeddedServer, Setting
from lockstep_client.errors import from_rpc
from lockstep_client.grammars import CompiledGrammar, Grammar
from lockstep_client.messages import AnyTool, Conversation
from lockstep_client.options import ChatOptions, Options
from lockstep_client.retrying import Attempts, Retries
from lockstep_client.statistics import StatsUpdate, update_of
from lockstep_client.tokenizer import TokenizerInfo, tokenizer_of
from lockstep_client.values import Value, Values, item_of
from lockstep_client.wire import engine_pb2 as pb

T = TypeVar("T")


class AsyncStream(Generic[T]):
    """The deltas of a request, as they arrive. An asynchronous iterator and context manager. Leaving it
    cancels the call."""

    def __init__(self, open_call: Callable[[float | None], Any], prepared: Prepared, attempts: Attempts) -> None:
        self._open, self._attempts = open_call, attempts
        self._joined = prepared.joined()
        self._call = open_call(attempts.remaining_s)
        self._started = False

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while True:
            try:
                response = await async_read(self._call)
            except grpc.RpcError as error:
                failed = from_rpc(error)
                pause_s = None if self._started else self._attempts.pause_after(failed)
                if pause_s is None:
                    raise failed from None
                await async_pause(pause_s)
                self._call = self._open(self._attempts.remaining_s)
                continue
            if response is None:
                raise StopAsyncIteration
            self._started = True
            delta = delta_of(response)
            self._joined.take(delta)
            return delta

    async def answer(self) -> Answer[T]:
        """Read what is left of the stream and return the whole answer."""
        async for _ in self:
            pass
        return self._joined.answer()

    async def aclose(self) -> None:
        """Cancel the call, if it is not done."""
        self._call.cancel()

    def __del__(self) -> None:
        # A call may outlive its last reference, and then the server would go on.
        with suppress(AttributeError, RuntimeError):  # there is no call yet, or no event loop any more
            self._call.cancel()

    async def __aenter__(self) -> AsyncStream[T]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<AsyncStream attempt {self._attempts.made}>"


class AsyncValueStream:
    """Values of an answer, as they begin and end. An asynchronous iterator and context manager. Leaving it
    cancels the call."""

    def __init__(self, stream: AsyncStream[Any]) -> None:
        self._stream, self._values = stream, Values()
        self._ready: deque[Value] = deque()

    def __aiter__(self) -> AsyncIterator[Value]:
        return self

    async def __anext__(self) -> Value:
        if not self._ready:
            async for delta in self._stream:
                self._ready += self._values.take(delta)
                if self._ready:
                    break
            else:
                raise StopAsyncIteration
        return self._ready.popleft()

    async def answer(self) -> Answer[Any]:
        """Read what is left of the stream and return the whole answer."""
        return await self._stream.answer()

    async def aclose(self) -> None:
        """Cancel the call, if it is not done."""
        await self._stream.aclose()

    async def __aenter__(self) -> AsyncValueStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncItemStream(Generic[T]):
    """Complete items of an array. An asynchronous iterator and context manager. Leaving it
    cancels the call."""

    def __init__(self, stream: AsyncStream[Any], parse: Callable[[str], T]) -> None:
        self._stream, self._parse = stream, parse
        self._ready: deque[str] = deque()

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        if not self._ready:
            async for delta in self._stream:
                items = (each for each in delta.value_events if each.kind is ValueEventKind.ITEM)
                self._ready += (each.value_json or "" for each in items)
                if self._ready:
                    break
            else:
                (await self._stream.answer()).parse()
                raise StopAsyncIteration
        return item_of(self._parse, self._ready.popleft())

    async def aclose(self) -> None:
        """Cancel the call, if it is not done."""
        await self._stream.aclose()

    async def __aenter__(self) -> AsyncItemStream[T]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncStatsStream:
    """Statistics of a server, as they arrive. An asynchronous iterator and context manager. Leaving it
    cancels the call."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __aiter__(self) -> AsyncIterator[StatsUpdate]:
        return self

    async def __anext__(self) -> StatsUpdate:
        try:
            response = await async_read(self._call)
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        if response is None:
            raise StopAsyncIteration
        return update_of(response)

    async def aclose(self) -> None:
        """Cancel the call, if it is not done."""
        self._call.cancel()

    def __del__(self) -> None:
        # A call may outlive its last reference, and then the server would go on.
        with suppress(AttributeError, RuntimeError):  # there is no call yet, or no event loop any more
            self._call.cancel()

    async def __aenter__(self) -> AsyncStatsStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncClient:
    """A client of one server, for one event loop. An asynchronous context manager."""

    def __init__(
        self,
        address: str | None = None,
        *,
        tls: TLS | bool = False,
        token: Token | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        timeout_s: float | None = None,
        retries: Retries | None = None,
    ) -> None:
        """Nothing is sent before the first call. Raises ValueError that names a wrong argument.

        Args:
            address: "host:port" or "unix:/path". Default: the environment's LOCKSTEP_SERVER, else 127.0.0.1:50051.
            tls: True: with the authorities of this system; or a TLS(...).
            token: a bearer token, or a function that returns the current one.
            metadata: sent with every call, such as `traceparent`.
            timeout_s: default limit of `generate`, `chat` and `compile`, attempts and pauses included. None: none.
            retries: how often a call is sent again that found no server, or a full queue. Default: Retries().

        """
        self._rpc = AsyncRpc(access_to(address, tls, token, metadata))
        self._timeout_s = timeout_s
        self._retries = retries or Retries()
        self._server: EmbeddedServer | None = None

    @classmethod
    def embedded(
        cls,
        *,
        command: Sequence[str] | None = None,
        start_timeout_s: float = 600.0,
        timeout_s: float | None = None,
        **settings: Setting,
    ) -> AsyncClient:
        """Return a client with its own server, which starts at the `async with` block, or at `await client.start()`.

        The server ends with the client, or with this process.

        Args:
            command: the `lockstep` command. Default: this environment's, else the one on the PATH.
            start_timeout_s: longest time until it serves.
            timeout_s: as for `AsyncClient`.
            settings: of `lockstep serve`, by name: `model="/models/Qwen3-0.6B", max_batch_size=4`.

        Raises EngineNotInstalled; the start raises EmbeddedServerError with the end of the server's log.

        """
        server = EmbeddedServer(settings, command, start_timeout_s)
        # sync: server.start()
        client = cls(server.address, timeout_s=timeout_s)
        client._server = server
        return client

    # async:
    async def start(self) -> None:
        """Start an embedded server and wait until it serves. Does nothing for another server, or one that runs."""
        if self._server is not None and self._server.pid is None:
            # After a cancellation, the thread that waits for the server sees its end.
            await in_thread(self._server.start, if_cancelled=self._server.close)

    # end
    @property
    def address(self) -> str:
        """The server's address."""
        return self._rpc.address

    @property
    def rpc(self) -> AsyncRpc:
        """The calls as messages, for what has no method here."""
        return self._rpc

    @overload
    async def generate(self, prompt: Prompt, *, schema: type[T], **options: Unpack[Options]) -> Answer[T]: ...
    @overload
    async def generate(
        self, prompt: Prompt, *, schema: object = None, grammar: AnyGrammar | None = None, **options: Unpack[Options]
    ) -> Answer[Any]: ...
    async def generate(
        self, prompt: Prompt, *, schema: object = None, grammar: AnyGrammar | None = None, **options: Unpack[Options]
    ) -> Answer[Any]:
        """Continue a text, or token ids. Raises CallError, and TypeError or ValueError for a wrong argument."""
        async with self._stream(calls.text_request(prompt, schema, grammar, options, self._timeout_s)) as stream:
            return await stream.answer()

    @overload
    def stream_generate(self, prompt: Prompt, *, schema: type[T], **options: Unpack[Options]) -> AsyncStream[T]: ...
    @overload
    def stream_generate(
        self, prompt: Prompt, *, schema: object = None, grammar: AnyGrammar | None = None, **options: Unpack[Options]
    ) -> AsyncStream[Any]: ...
    def stream_generate(
        self, prompt: Prompt, *, schema: object = None, grammar: AnyGrammar | None = None, **options: Unpack[Options]
    ) -> AsyncStream[Any]:
        """As `generate`, but return the deltas as they arrive."""
        return self._stream(calls.text_request(prompt, schema, grammar, options, self._timeout_s))

    @overload
    async def chat(self, messages: Conversation, *, schema: type[T], **options: Unpack[ChatOptions]) -> Answer[T]: ...
    @overload
    async def chat(
        self,
        messages: Conversation,
        *,
        schema: object = None,
        grammar: AnyGrammar | None = None,
        **options: Unpack[ChatOptions],
    ) -> Answer[Any]: ...
    async def chat(
        self,
        messages: Conversation,
        *,
        schema: object = None,
        grammar: AnyGrammar | None = None,
        **options: Unpack[ChatOptions],
    ) -> Answer[Any]:
        """Answer a conversation: a string (one user message), `Message`s, or mappings in OpenAI's form.

        Raises CallError, and TypeError or ValueError for a wrong argument.
        """
        async with self._stream(calls.chat_request(messages, schema, grammar, options, self._timeout_s)) as stream:
            return await stream.answer()

    @overload
    def stream_chat(
        self, messages: Conversation, *, schema: type[T], **options: Unpack[ChatOptions]
    ) -> AsyncStream[T]: ...
    @overload
    def stream_chat(
        self,
        messages: Conversation,
        *,
        schema: object = None,
        grammar: AnyGrammar | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncStream[Any]: ...
    def stream_chat(
        self,
        messages: Conversation,
        *,
        schema: object = None,
        grammar: AnyGrammar | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncStream[Any]:
        """As `chat`, but return the deltas as they arrive."""
        return self._stream(calls.chat_request(messages, schema, grammar, options, self._timeout_s))

    def stream_values(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Conversation | None = None,
        schema: object = None,
        grammar: AnyGrammar | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncValueStream:
        """Answer with JSON, and return its values as they begin and end; no returned value is taken back.

        Args:
            prompt: a text, or the ids of its tokens.
            messages: a conversation, in place of a prompt.
            schema: the answer's schema: a type, a model, or a JSON Schema.
            grammar: a JSON grammar, in place of a schema.
            options: as for `chat`; with `items_of` each item of that array is also returned whole.

        Raises TypeError or ValueError for a wrong argument; the iterator raises CallError, or NotParsed for a number
        with more digits than Python reads.

        """
        return AsyncValueStream(
            self._stream(calls.values_request(prompt, messages, schema, grammar, options, self._timeout_s))
        )

    @overload
    def stream_items(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Conversation | None = None,
        schema: type[list[T]],
        **options: Unpack[ChatOptions],
    ) -> AsyncItemStream[T]: ...
    @overload
    def stream_items(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Conversation | None = None,
        schema: object = None,
        grammar: AnyGrammar | None = None,
        item: type[T],
        **options: Unpack[ChatOptions],
    ) -> AsyncItemStream[T]: ...
    @overload
    def stream_items(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Conversation | None = None,
        schema: object = None,
        grammar: AnyGrammar | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncItemStream[Any]: ...
    def stream_items(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Conversation | None = None,
        schema: object = None,
        grammar: AnyGrammar | None = None,
        item: Any = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncItemStream[Any]:
        """Answer with JSON, and return the items of an array, each when it is complete.

        Args:
            prompt: a text, or the ids of its tokens.
            messages: a conversation, in place of a prompt.
            schema: of the whole answer: `list[Invoice]`, another type, a model, or a JSON Schema.
            grammar: a JSON grammar, in place of a schema.
            item: the type of the items, where `schema` is not `list[...]`. Default: JSON values, for a JSON Schema.
            options: as for `chat`; `items_of` is the JSON Pointer of the array, "" for the answer itself.

        Raises TypeError or ValueError for a wrong argument. The iterator raises CallError, and NotParsed after the last
        item where the answer was cut off.

        """
        prepared, parse = calls.items_request(prompt, messages, schema, grammar, item, options, self._timeout_s)
        return AsyncItemStream(self._stream(prepared), parse)

    async def choice_probs(
        self,
        prompt: Prompt | None = None,
        choices: Sequence[str] = (),
        *,
        messages: Conversation | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, float]:
        """Return the probability of each of some texts as the whole answer; they sum to one.

        A text's probability is the model's own, at temperature 1, of its tokens and the end of sequence after them,
        divided by the sum over all texts. So a text that begins another one is no more likely for that. One request per
        text is sent, which generates no more than a token.

        Args:
            prompt: a text, or the ids of its tokens.
            choices: the texts, each once, at least one.
            messages: a conversation, in place of a prompt.
            timeout_s: limit of each request. None: the client's.

        Raises CallError, and ValueError for a wrong argument.

        """
        calls.check_choices(prompt, messages, choices)
        ids = prompt
        if ids is None or isinstance(ids, str):
            ids = (await self.tokenize(ids, messages=messages)).token_ids
        end = (await self.model_info()).eos_token_ids[:1]
        scores = []
        for choice in choices:
            answer = (*(await self.tokenize(choice, add_special_tokens=False)).token_ids, *end)
            request = calls.scored_request([*ids, *answer], self._timeout_s if timeout_s is None else timeout_s)
            async with self._stream(request) as stream:
                logprobs = (await stream.answer()).prompt_logprobs[-len(answer) :]
            scores.append(sum(each.logprob for each in logprobs))
        return calls.shares(choices, scores)

    async def compile(
        self, *, schema: object = None, grammar: Grammar | None = None, timeout_s: float | None = None
    ) -> CompiledGrammar:
        """Compile a grammar that many requests share; `grammar=` takes what this returns."""
        request, source = calls.compile_request(schema, grammar)
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        return calls.compiled(await self._call(calls.COMPILE, request, limit_s), source)

    async def abort(self, request_id: str, *, timeout_s: float = UNARY_TIMEOUT_S) -> bool:
        """End a running request; its stream ends with ABORTED. Return False where none has this id."""
        return (await self._call(calls.ABORT, pb.AbortRequest(request_id=request_id), timeout_s)).aborted

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Conversation | None = None,
        tools: Sequence[AnyTool] = (),
        add_special_tokens: bool | None = None,
        with_texts: bool = False,
        timeout_s: float = UNARY_TIMEOUT_S,
    ) -> Tokens:
        """Return the token ids of a text, or of a conversation in the model's chat template."""
        request = calls.tokenize_request(text, messages, tools, special=add_special_tokens, texts=with_texts)
        return calls.tokens(await self._call(calls.TOKENIZE, request, timeout_s))

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, timeout_s: float = UNARY_TIMEOUT_S
    ) -> str:
        """Return the text of token ids."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return (await self._call(calls.DETOKENIZE, request, timeout_s)).text

    async def token_texts(self, token_ids: Sequence[int], *, timeout_s: float = UNARY_TIMEOUT_S) -> tuple[str, ...]:
        """Return the text of each token, as for log-probabilities; bytes that are no UTF-8 become U+FFFD."""
        request = pb.DetokenizeRequest(token_ids=token_ids, with_texts=True)
        response = await self._call(calls.DETOKENIZE, request, timeout_s)
        return tuple(response.texts)

    async def model_info(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> ModelInfo:
        """Describe the model and the limits of the server."""
        response = await self._call(calls.MODEL_INFO, pb.GetModelInfoRequest(), timeout_s)
        return from_message(ModelInfo, response)

    async def tokenizer_info(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> TokenizerInfo:
        """Return the server's tokenizer, which can be dumped to a file."""
        return tokenizer_of(await self._call(calls.TOKENIZER_INFO, pb.GetTokenizerInfoRequest(), timeout_s))

    async def load_adapter(self, name: str, path: str, *, timeout_s: float = UNARY_TIMEOUT_S) -> Adapter:
        """Load an adapter from a directory of the server, below its `adapter_dirs`."""
        request = pb.LoadAdapterRequest(name=name, path=path)
        return adapter_of((await self._call(calls.LOAD_ADAPTER, request, timeout_s)).adapter)

    async def unload_adapter(self, name: str, *, timeout_s: float = UNARY_TIMEOUT_S) -> None:
        """Take an adapter's name away, and wait until the last sequence that uses it has ended."""
        await self._call(calls.UNLOAD_ADAPTER, pb.UnloadAdapterRequest(name=name), timeout_s)

    async def adapters(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> tuple[Adapter, ...]:
        """Return the adapters of the server, by name."""
        response = await self._call(calls.LIST_ADAPTERS, pb.ListAdaptersRequest(), timeout_s)
        return tuple(map(adapter_of, response.adapters))

    async def exchange_drafter(self, path: str, *, timeout_s: float = LOAD_TIMEOUT_S) -> str:
        """Load another draft model from a directory or GGUF file of the server, below its `draft_dirs`; return its path
        once it drafts. Requests that run have the same tokens."""
        return (await self._call(calls.EXCHANGE_DRAFTER, pb.ExchangeDrafterRequest(path=path), timeout_s)).model

    async def clear_grammar_cache(self, *, disk: bool = False, timeout_s: float = UNARY_TIMEOUT_S) -> ClearedGrammars:
        """Drop the compiled grammars that no running request uses; with `disk` the files, too."""
        response = await self._call(calls.CLEAR_GRAMMAR_CACHE, pb.ClearGrammarCacheRequest(disk=disk), timeout_s)
        return from_message(ClearedGrammars, response)

    async def stats(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> Stats:
        """Return the counters and gauges of the server."""
        response = await self._call(calls.STATS, pb.GetStatsRequest(), timeout_s)
        return from_message(Stats, response)

    def watch_stats(
        self, *, history: int = 0, interval_ms: int | None = None, requests: bool = True
    ) -> AsyncStatsStream:
        """Return the statistics of the server's iterations, as they come, until the stream is closed.

        Args:
            history: iterations of the past to begin with, as far as the server keeps them.
            interval_ms: least time between two updates. None: the server's default, 100.
            requests: also those of the requests that wait or run.

        """
        request = pb.WatchStatsRequest(history=history, interval_ms=interval_ms, omit_requests=not requests)
        return AsyncStatsStream(self._rpc.stream(calls.WATCH_STATS, request))

    async def aclose(self) -> None:
        """Close the channel, cancel running calls, and end an embedded server."""
        await self._rpc.aclose()
        if self._server is not None:
            await in_thread(self._server.close)

    async def __aenter__(self) -> AsyncClient:
        # async:
        await self.start()
        # end
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<AsyncClient {self._rpc.address}>"

    def _attempts(self, timeout_s: float | None) -> Attempts:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        return Attempts(self._retries, deadline_s, time.monotonic)

    def _stream(self, prepared: Prepared) -> AsyncStream[Any]:
        def open_call(timeout_s: float | None) -> Any:
            return self._rpc.stream(calls.GENERATE, prepared.request, timeout_s)

        return AsyncStream(open_call, prepared, self._attempts(prepared.timeout_s))

    async def _call(self, method: Method[Q, R], request: Q, timeout_s: float | None) -> R:
        attempts = self._attempts(timeout_s)
        while True:
            try:
                response = await self._rpc.unary(method, request, attempts.remaining_s)
            except grpc.RpcError as error:
                failed = from_rpc(error)
                pause_s = attempts.pause_after(failed)
                if pause_s is None:
                    raise failed from None
                await async_pause(pause_s)
            else:
                return response
