"""The synchronous client. Generated from async_client.py: `python -m tools.client_twins --write`.

The invariant: however a stream is left (read to its end, closed, dropped, an exception), its call is cancelled, and the
server frees what it held. A call is sent again only while nothing of its answer has arrived (see retrying.py). A client
may be used from several threads.

Not responsible for: arguments (see calls.py), answers (see joining.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
from lockstep_client.calls import LOAD_TIMEOUT_S, UNARY_TIMEOUT_S, AnyGrammar, Method, Prepared, Prompt, Q, R
from lockstep_client.concurrency import in_this_thread, pause, read
from lockstep_client.embedded import EmbeddedServer, Setting
from lockstep_client.errors import from_rpc
from lockstep_client.grammars import CompiledGrammar, Grammar
from lockstep_client.messages import AnyTool, Conversation
from lockstep_client.options import ChatOptions, Options
from lockstep_client.retrying import Attempts, Retries
from lockstep_client.rpc import Rpc
from lockstep_client.statistics import StatsUpdate, update_of
from lockstep_client.tokenizer import TokenizerInfo, tokenizer_of
from lockstep_client.values import Value, Values, item_of
from lockstep_client.wire import engine_pb2 as pb

T = TypeVar("T")


class Stream(Generic[T]):
    """The deltas of a request, as they arrive. An iterator and a context manager; leaving it cancels the call."""

    def __init__(self, open_call: Callable[[float | None], Any], prepared: Prepared, attempts: Attempts) -> None:
        self._open, self._attempts = open_call, attempts
        self._joined = prepared.joined()
        self._call = open_call(attempts.remaining_s)
        self._started = False

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        while True:
            try:
                response = read(self._call)
            except grpc.RpcError as error:
                failed = from_rpc(error)
                pause_s = None if self._started else self._attempts.pause_after(failed)
                if pause_s is None:
                    raise failed from None
                pause(pause_s)
                self._call = self._open(self._attempts.remaining_s)
                continue
            if response is None:
                raise StopIteration
            self._started = True
            delta = delta_of(response)
            self._joined.take(delta)
            return delta

    def answer(self) -> Answer[T]:
        """Read what is left of the stream and return the whole answer."""
        for _ in self:
            pass
        return self._joined.answer()

    def close(self) -> None:
        """Cancel the call, if it is not done."""
        self._call.cancel()

    def __del__(self) -> None:
        # A call may outlive its last reference, and then the server would go on.
        with suppress(AttributeError, RuntimeError):  # there is no call yet, or no event loop any more
            self._call.cancel()

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Stream attempt {self._attempts.made}>"


class ValueStream:
    """Values of an answer, as they begin and end. An iterator and a context manager; leaving it cancels the call."""

    def __init__(self, stream: Stream[Any]) -> None:
        self._stream, self._values = stream, Values()
        self._ready: deque[Value] = deque()

    def __iter__(self) -> Iterator[Value]:
        return self

    def __next__(self) -> Value:
        if not self._ready:
            for delta in self._stream:
                self._ready += self._values.take(delta)
                if self._ready:
                    break
            else:
                raise StopIteration
        return self._ready.popleft()

    def answer(self) -> Answer[Any]:
        """Read what is left of the stream and return the whole answer."""
        return self._stream.answer()

    def close(self) -> None:
        """Cancel the call, if it is not done."""
        self._stream.close()

    def __enter__(self) -> ValueStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ItemStream(Generic[T]):
    """Complete items of an array. An iterator and a context manager; leaving it cancels the call."""

    def __init__(self, stream: Stream[Any], parse: Callable[[str], T]) -> None:
        self._stream, self._parse = stream, parse
        self._ready: deque[str] = deque()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if not self._ready:
            for delta in self._stream:
                items = (each for each in delta.value_events if each.kind is ValueEventKind.ITEM)
                self._ready += (each.value_json or "" for each in items)
                if self._ready:
                    break
            else:
                self._stream.answer().parse()
                raise StopIteration
        return item_of(self._parse, self._ready.popleft())

    def close(self) -> None:
        """Cancel the call, if it is not done."""
        self._stream.close()

    def __enter__(self) -> ItemStream[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StatsStream:
    """Statistics of a server, as they arrive. An iterator and a context manager; leaving it cancels the call."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __iter__(self) -> Iterator[StatsUpdate]:
        return self

    def __next__(self) -> StatsUpdate:
        try:
            response = read(self._call)
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        if response is None:
            raise StopIteration
        return update_of(response)

    def close(self) -> None:
        """Cancel the call, if it is not done."""
        self._call.cancel()

    def __del__(self) -> None:
        # A call may outlive its last reference, and then the server would go on.
        with suppress(AttributeError, RuntimeError):  # there is no call yet, or no event loop any more
            self._call.cancel()

    def __enter__(self) -> StatsStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """A client of one server. A context manager; may be used from several threads."""

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
        self._rpc = Rpc(access_to(address, tls, token, metadata))
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
    ) -> Client:
        """Start a server of the client's own, and return when it serves.

        The server ends with the client, or with this process.

        Args:
            command: the `lockstep` command. Default: this environment's, else the one on the PATH.
            start_timeout_s: longest time until it serves.
            timeout_s: as for `Client`.
            settings: of `lockstep serve`, by name: `model="/models/Qwen3-0.6B", max_batch_size=4`.

        Raises EngineNotInstalled, or EmbeddedServerError with the end of the server's log.

        """
        server = EmbeddedServer(settings, command, start_timeout_s)
        server.start()
        client = cls(server.address, timeout_s=timeout_s)
        client._server = server
        return client

    @property
    def address(self) -> str:
        """The server's address."""
        return self._rpc.address

    @property
    def rpc(self) -> Rpc:
        """The calls as messages, for what has no method here."""
        return self._rpc

    @overload
    def generate(self, prompt: Prompt, *, schema: type[T], **options: Unpack[Options]) -> Answer[T]: ...
    @overload
    def generate(
        self, prompt: Prompt, *, schema: object = None, grammar: AnyGrammar | None = None, **options: Unpack[Options]
    ) -> Answer[Any]: ...
    def generate(
        self, prompt: Prompt, *, schema: object = None, grammar: AnyGrammar | None = None, **options: Unpack[Options]
    ) -> Answer[Any]:
        """Continue a text, or token ids. Raises CallError, and TypeError or ValueError for a wrong argument."""
        with self._stream(calls.text_request(prompt, schema, grammar, options, self._timeout_s)) as stream:
            return stream.answer()

    @overload
    def stream_generate(self, prompt: Prompt, *, schema: type[T], **options: Unpack[Options]) -> Stream[T]: ...
    @overload
    def stream_generate(
        self, prompt: Prompt, *, schema: object = None, grammar: AnyGrammar | None = None, **options: Unpack[Options]
    ) -> Stream[Any]: ...
    def stream_generate(
        self, prompt: Prompt, *, schema: object = None, grammar: AnyGrammar | None = None, **options: Unpack[Options]
    ) -> Stream[Any]:
        """As `generate`, but return the deltas as they arrive."""
        return self._stream(calls.text_request(prompt, schema, grammar, options, self._timeout_s))

    @overload
    def chat(self, messages: Conversation, *, schema: type[T], **options: Unpack[ChatOptions]) -> Answer[T]: ...
    @overload
    def chat(
        self,
        messages: Conversation,
        *,
        schema: object = None,
        grammar: AnyGrammar | None = None,
        **options: Unpack[ChatOptions],
    ) -> Answer[Any]: ...
    def chat(
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
        with self._stream(calls.chat_request(messages, schema, grammar, options, self._timeout_s)) as stream:
            return stream.answer()

    @overload
    def stream_chat(self, messages: Conversation, *, schema: type[T], **options: Unpack[ChatOptions]) -> Stream[T]: ...
    @overload
    def stream_chat(
        self,
        messages: Conversation,
        *,
        schema: object = None,
        grammar: AnyGrammar | None = None,
        **options: Unpack[ChatOptions],
    ) -> Stream[Any]: ...
    def stream_chat(
        self,
        messages: Conversation,
        *,
        schema: object = None,
        grammar: AnyGrammar | None = None,
        **options: Unpack[ChatOptions],
    ) -> Stream[Any]:
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
    ) -> ValueStream:
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
        return ValueStream(
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
    ) -> ItemStream[T]: ...
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
    ) -> ItemStream[T]: ...
    @overload
    def stream_items(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Conversation | None = None,
        schema: object = None,
        grammar: AnyGrammar | None = None,
        **options: Unpack[ChatOptions],
    ) -> ItemStream[Any]: ...
    def stream_items(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Conversation | None = None,
        schema: object = None,
        grammar: AnyGrammar | None = None,
        item: Any = None,
        **options: Unpack[ChatOptions],
    ) -> ItemStream[Any]:
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
        return ItemStream(self._stream(prepared), parse)

    def choice_probs(
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
            ids = self.tokenize(ids, messages=messages).token_ids
        end = self.model_info().eos_token_ids[:1]
        scores = []
        for choice in choices:
            answer = (*self.tokenize(choice, add_special_tokens=False).token_ids, *end)
            request = calls.scored_request([*ids, *answer], self._timeout_s if timeout_s is None else timeout_s)
            with self._stream(request) as stream:
                logprobs = stream.answer().prompt_logprobs[-len(answer) :]
            scores.append(sum(each.logprob for each in logprobs))
        return calls.shares(choices, scores)

    def compile(
        self, *, schema: object = None, grammar: Grammar | None = None, timeout_s: float | None = None
    ) -> CompiledGrammar:
        """Compile a grammar that many requests share; `grammar=` takes what this returns."""
        request, source = calls.compile_request(schema, grammar)
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        return calls.compiled(self._call(calls.COMPILE, request, limit_s), source)

    def abort(self, request_id: str, *, timeout_s: float = UNARY_TIMEOUT_S) -> bool:
        """End a running request; its stream ends with ABORTED. Return False where none has this id."""
        return self._call(calls.ABORT, pb.AbortRequest(request_id=request_id), timeout_s).aborted

    def tokenize(
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
        return calls.tokens(self._call(calls.TOKENIZE, request, timeout_s))

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, timeout_s: float = UNARY_TIMEOUT_S
    ) -> str:
        """Return the text of token ids."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return self._call(calls.DETOKENIZE, request, timeout_s).text

    def token_texts(self, token_ids: Sequence[int], *, timeout_s: float = UNARY_TIMEOUT_S) -> tuple[str, ...]:
        """Return the text of each token, as for log-probabilities; bytes that are no UTF-8 become U+FFFD."""
        request = pb.DetokenizeRequest(token_ids=token_ids, with_texts=True)
        response = self._call(calls.DETOKENIZE, request, timeout_s)
        return tuple(response.texts)

    def model_info(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> ModelInfo:
        """Describe the model and the limits of the server."""
        response = self._call(calls.MODEL_INFO, pb.GetModelInfoRequest(), timeout_s)
        return from_message(ModelInfo, response)

    def tokenizer_info(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> TokenizerInfo:
        """Return the server's tokenizer, which can be dumped to a file."""
        return tokenizer_of(self._call(calls.TOKENIZER_INFO, pb.GetTokenizerInfoRequest(), timeout_s))

    def load_adapter(self, name: str, path: str, *, timeout_s: float = UNARY_TIMEOUT_S) -> Adapter:
        """Load an adapter from a directory of the server, below its `adapter_dirs`."""
        request = pb.LoadAdapterRequest(name=name, path=path)
        return adapter_of(self._call(calls.LOAD_ADAPTER, request, timeout_s).adapter)

    def unload_adapter(self, name: str, *, timeout_s: float = UNARY_TIMEOUT_S) -> None:
        """Take an adapter's name away, and wait until the last sequence that uses it has ended."""
        self._call(calls.UNLOAD_ADAPTER, pb.UnloadAdapterRequest(name=name), timeout_s)

    def adapters(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> tuple[Adapter, ...]:
        """Return the adapters of the server, by name."""
        response = self._call(calls.LIST_ADAPTERS, pb.ListAdaptersRequest(), timeout_s)
        return tuple(map(adapter_of, response.adapters))

    def exchange_drafter(self, path: str, *, timeout_s: float = LOAD_TIMEOUT_S) -> str:
        """Load another draft model from a directory or GGUF file of the server, below its `draft_dirs`; return its path
        once it drafts. Requests that run have the same tokens."""
        return self._call(calls.EXCHANGE_DRAFTER, pb.ExchangeDrafterRequest(path=path), timeout_s).model

    def clear_grammar_cache(self, *, disk: bool = False, timeout_s: float = UNARY_TIMEOUT_S) -> ClearedGrammars:
        """Drop the compiled grammars that no running request uses; with `disk` the files, too."""
        response = self._call(calls.CLEAR_GRAMMAR_CACHE, pb.ClearGrammarCacheRequest(disk=disk), timeout_s)
        return from_message(ClearedGrammars, response)

    def stats(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> Stats:
        """Return the counters and gauges of the server."""
        response = self._call(calls.STATS, pb.GetStatsRequest(), timeout_s)
        return from_message(Stats, response)

    def watch_stats(self, *, history: int = 0, interval_ms: int | None = None, requests: bool = True) -> StatsStream:
        """Return the statistics of the server's iterations, as they come, until the stream is closed.

        Args:
            history: iterations of the past to begin with, as far as the server keeps them.
            interval_ms: least time between two updates. None: the server's default, 100.
            requests: also those of the requests that wait or run.

        """
        request = pb.WatchStatsRequest(history=history, interval_ms=interval_ms, omit_requests=not requests)
        return StatsStream(self._rpc.stream(calls.WATCH_STATS, request))

    def close(self) -> None:
        """Close the channel, cancel running calls, and end an embedded server."""
        self._rpc.close()
        if self._server is not None:
            in_this_thread(self._server.close)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client {self._rpc.address}>"

    def _attempts(self, timeout_s: float | None) -> Attempts:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        return Attempts(self._retries, deadline_s, time.monotonic)

    def _stream(self, prepared: Prepared) -> Stream[Any]:
        def open_call(timeout_s: float | None) -> Any:
            return self._rpc.stream(calls.GENERATE, prepared.request, timeout_s)

        return Stream(open_call, prepared, self._attempts(prepared.timeout_s))

    def _call(self, method: Method[Q, R], request: Q, timeout_s: float | None) -> R:
        attempts = self._attempts(timeout_s)
        while True:
            try:
                response = self._rpc.unary(method, request, attempts.remaining_s)
            except grpc.RpcError as error:
                failed = from_rpc(error)
                pause_s = attempts.pause_after(failed)
                if pause_s is None:
                    raise failed from None
                pause(pause_s)
            else:
                return response
