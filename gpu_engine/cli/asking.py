"""The commands that ask a running server: generate, compile, tokenize, detokenize, info, adapters, drafter, health.

The invariant: answers go to stdout and everything else to stderr, and the exit status says how the command ended. These
commands do not load the model's libraries.

Not responsible for: their flags (see request_flags.py), the conversation in a terminal (see chat.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import grpc
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gpu_engine.api.receipts import MIN_NONCE_BYTES
from gpu_engine.cli.access_flags import access_of
from gpu_engine.cli.grammar_flags import GRAMMAR_FLAGS, build_grammar
from gpu_engine.cli.inputs import json_of, read_stdin, read_text
from gpu_engine.cli.receipted import Receipted
from gpu_engine.cli.request_flags import build_request, conversation
from gpu_engine.cli.terminal import field_table, grammar_cost, logprob_table, origin_counts, summary
from lockstep_client import calls
from lockstep_client.access import DEFAULT_ADDRESS, Access
from lockstep_client.async_rpc import AsyncRpc
from lockstep_client.wire import engine_pb2 as pb

OK, FAILED, USAGE, NOT_COMPLETE, INTERRUPTED = 0, 1, 2, 3, 130
ASK_TIMEOUT_S = 5.0
"""Longest wait for what a server has at hand."""
TOKENIZE_TIMEOUT_S = 30.0
LOAD_ADAPTER_TIMEOUT_S = 60.0
INCOMPLETE = frozenset(
    {
        pb.FINISH_REASON_ABORTED,
        pb.FINISH_REASON_GRAMMAR_INCOMPLETE,
        pb.FINISH_REASON_GRAMMAR_ERROR,
        pb.FINISH_REASON_GRAMMAR_INVALID,
    }
)


def run_generate(flags: argparse.Namespace) -> int:
    """Send one request and stream the answer."""
    try:
        request, access = build_request(flags), access_of(flags)
        if request.response.cumulative and flags.output != "json":
            raise ValueError("--cumulative needs --output json")
    except ValueError as error:
        return usage(error)
    as_json, kept = flags.output == "json", list[str]()
    if flags.receipt is not None and not request.response.receipt_nonce:
        request.response.receipt_nonce = secrets.token_bytes(MIN_NONCE_BYTES)

    def keep(response: pb.GenerateResponse) -> None:
        if response.receipt:
            kept.append(response.receipt)

    status = ask(
        access, lambda client: stream_answer(client, request, as_json=as_json, timeout_s=flags.timeout, seen=keep)
    )
    if flags.receipt is None or not kept:
        return status
    try:
        Receipted(kept, request).write(flags.receipt)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    return status


async def stream_answer(
    client: AsyncRpc,
    request: pb.GenerateRequest,
    *,
    as_json: bool,
    timeout_s: float | None,
    quiet: bool = False,
    not_complete: frozenset[int] = INCOMPLETE,
    seen: Callable[[pb.GenerateResponse], None] = lambda response: None,
) -> int:
    """Send a request, stream its answer to stdout, and return the exit status. Raises grpc.aio.AioRpcError.

    Args:
        client: a connection to the server.
        request: what is sent.
        as_json: print each response as a line of JSON.
        timeout_s: end of the call; None: never.
        quiet: print no line about a complete answer.
        not_complete: ends of an answer that are NOT_COMPLETE.
        seen: called with each response.
    """
    output = _JsonLines() if as_json else _Text(request)
    status = FAILED
    async with contextlib.aclosing(responses_of(client, request, timeout_s)) as responses:
        async for response in responses:
            output.take(response)
            seen(response)
            if response.finish_reason:
                complete = response.finish_reason not in not_complete
                if not (quiet and complete):
                    print(summary(response), file=sys.stderr)
                status = NOT_COMPLETE if not complete or status == NOT_COMPLETE else OK
    await output.end(client)
    return status


async def responses_of(
    client: AsyncRpc, request: pb.GenerateRequest, timeout_s: float | None = None
) -> AsyncGenerator[pb.GenerateResponse]:
    """Stream the answer; leaving the generator cancels the call. Raises grpc.aio.AioRpcError."""
    call = client.stream(calls.GENERATE, request, timeout_s)
    try:
        async for response in call:
            yield response
    finally:
        call.cancel()


async def model_info(client: AsyncRpc) -> pb.GetModelInfoResponse:
    """Return the model and the limits of the server."""
    return await client.unary(calls.MODEL_INFO, pb.GetModelInfoRequest(), ASK_TIMEOUT_S)


class _JsonLines:
    """Prints each response as a line of JSON."""

    def take(self, response: pb.GenerateResponse) -> None:
        print(json_format.MessageToJson(response, preserving_proto_field_name=True, indent=None), flush=True)

    async def end(self, client: AsyncRpc) -> None:
        """Nothing is left."""


class _Text:
    """Prints the text: of one sequence as it arrives, of several each when all are done.

    Reasoning goes to stderr, and a tool call is a line of JSON.
    """

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = request
        self._streams = request.sampling.n <= 1
        self._texts: dict[int, list[str]] = {}
        self._calls: dict[tuple[int, int], dict[str, str]] = {}
        self._logprobs: list[tuple[int, list[int], list[pb.TokenLogprobs]]] = []
        self._fields: list[pb.FieldLogprob] = []
        self._outputs: dict[tuple[int, str], list[tuple[int, list[int], str]]] = {}
        """By sequence and name: the start, the shape and the dtype of each part."""
        self._origins: Counter[int] = Counter()
        self._prompt: tuple[list[int], list[pb.TokenLogprobs]] = ([], [])

    def take(self, response: pb.GenerateResponse) -> None:
        text = self._text(response)
        self._texts.setdefault(response.index, []).append(text)
        if self._streams:
            print(text, end="", flush=True)
            if response.finish_reason:
                print()
        if response.logprobs:
            self._logprobs.append((response.index, list(response.token_ids), list(response.logprobs)))
        if response.prompt_logprobs:
            self._prompt = (list(response.prompt_token_ids), list(response.prompt_logprobs))
        self._fields += response.field_logprobs
        for output in response.outputs:
            of_name = self._outputs.setdefault((response.index, output.name), [])
            of_name.append((output.start, list(output.shape), output.dtype))
        self._origins.update(response.token_origins)

    def _text(self, response: pb.GenerateResponse) -> str:
        if not (self._request.HasField("tools") or self._request.HasField("reasoning")):
            return response.text
        content = ""
        for part in response.parts:
            call = self._calls.setdefault((response.index, part.tool_call_index), {})
            if part.kind == pb.AnswerPart.KIND_REASONING:
                print(part.text, end="", file=sys.stderr, flush=True)
            elif part.kind == pb.AnswerPart.KIND_CONTENT:
                content += part.text
            elif part.kind == pb.AnswerPart.KIND_TOOL_CALL:
                call |= {"id": part.tool_call_id, "name": part.tool_name, "arguments": ""}
            else:
                call["arguments"] += part.text
        return content

    async def end(self, client: AsyncRpc) -> None:
        """Print what waited for the end: other sequences, tool calls, log-probabilities with their texts."""
        if not self._streams:
            for index in sorted(self._texts):
                print(f"[{index}] {''.join(self._texts[index])}")
        for _, call in sorted((place, call) for place, call in self._calls.items() if call):
            print(json.dumps(call, ensure_ascii=False))
        rows = [(0, *self._prompt), *self._logprobs] if self._prompt[1] else self._logprobs
        if rows:

            async def texts(token_ids: Sequence[int]) -> list[str]:
                asked = pb.DetokenizeRequest(token_ids=token_ids, with_texts=True)
                return list((await client.unary(calls.DETOKENIZE, asked, TOKENIZE_TIMEOUT_S)).texts)

            print(await logprob_table(rows, texts), file=sys.stderr)
        if self._fields:
            print(field_table(self._fields), file=sys.stderr)
        for (index, name), parts in sorted(self._outputs.items()):
            start, shape, dtype = parts[0]
            count = sum(part_shape[0] for _, part_shape, _ in parts)
            sizes = " x ".join(map(str, (count, *shape[1:])))
            print(f"[{index}] {name}: {sizes} {dtype} from position {start} on", file=sys.stderr)
        if self._origins:
            print(origin_counts(self._origins), file=sys.stderr)


def run_compile(flags: argparse.Namespace) -> int:
    """Compile a grammar ahead of time."""
    try:
        grammar, access = build_grammar(flags), access_of(flags)
        if grammar is None:
            raise ValueError(f"a grammar is required: {', '.join(GRAMMAR_FLAGS)}")
    except ValueError as error:
        return usage(error)

    async def question(client: AsyncRpc) -> int:
        response = await client.unary(calls.COMPILE, pb.CompileRequest(grammar=grammar), flags.timeout)
        print(response.grammar_id)
        print(grammar_cost(response), file=sys.stderr)
        for warning in response.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        return OK

    return ask(access, question)


def run_tokenize(flags: argparse.Namespace) -> int:
    """Print the token ids of a text or a conversation."""
    try:
        request, access = _tokenize_request(flags), access_of(flags)
    except ValueError as error:
        return usage(error)

    async def question(client: AsyncRpc) -> int:
        response = await client.unary(calls.TOKENIZE, request, TOKENIZE_TIMEOUT_S)
        if flags.with_texts:
            for token, text in zip(response.token_ids, response.texts, strict=True):
                print(f"{token}\t{json.dumps(text, ensure_ascii=False)}")
        else:
            print(",".join(map(str, response.token_ids)))
        print(f"{len(response.token_ids)} tokens", file=sys.stderr)
        return OK

    return ask(access, question)


def _tokenize_request(flags: argparse.Namespace) -> pb.TokenizeRequest:
    request = pb.TokenizeRequest(with_texts=flags.with_texts)
    if flags.no_special_tokens:
        request.add_special_tokens = False
    if flags.chat is not None:
        request.messages.messages.add(role="user", content=flags.chat)
    elif flags.messages is not None:
        source = json_of("--messages", read_text("--messages", flags.messages))
        request.messages.CopyFrom(conversation("--messages", source))
    else:
        request.text = flags.text if flags.text is not None else read_stdin(sys.stdin)
    return request


def run_detokenize(flags: argparse.Namespace) -> int:
    """Print the text of token ids."""
    try:
        words = (flags.ids if flags.ids is not None else read_stdin(sys.stdin)).replace(",", " ").split()
        if not all(word.isdecimal() for word in words):
            raise ValueError("token ids are numbers, separated by commas or white space")
        request = pb.DetokenizeRequest(token_ids=map(int, words), skip_special_tokens=flags.skip_special_tokens)
        access = access_of(flags)
    except ValueError as error:
        return usage(error)

    async def question(client: AsyncRpc) -> int:
        print((await client.unary(calls.DETOKENIZE, request, TOKENIZE_TIMEOUT_S)).text)
        return OK

    return ask(access, question)


def run_info(flags: argparse.Namespace) -> int:
    """Show the model, the limits and the counters of a server."""
    try:
        access = access_of(flags)
    except ValueError as error:
        return usage(error)

    async def question(client: AsyncRpc) -> int:
        stats = await client.unary(calls.STATS, pb.GetStatsRequest(), ASK_TIMEOUT_S)
        for title, message in (("model", await model_info(client)), ("stats", stats)):
            print(title)
            for field in message.DESCRIPTOR.fields:
                print(f"  {field.name:<24} {_shown(message, field.name)}")
        return OK

    return ask(access, question)


def run_drafter(flags: argparse.Namespace) -> int:
    """Exchange the draft model of a server if that is asked for, and print the one that drafts."""
    try:
        access = access_of(flags)
    except ValueError as error:
        return usage(error)

    async def question(client: AsyncRpc) -> int:
        if flags.exchange is not None:
            exchange = pb.ExchangeDrafterRequest(path=flags.exchange)
            await client.unary(calls.EXCHANGE_DRAFTER, exchange, calls.LOAD_TIMEOUT_S)
        info = await model_info(client)
        print(f"{info.drafter}\t{info.draft_model}")
        return OK

    return ask(access, question)


def run_adapters(flags: argparse.Namespace) -> int:
    """Load or unload an adapter if that is asked for, and list the adapters of a server."""
    name, sign, folder = (flags.load or "").partition("=")
    try:
        access = access_of(flags)
        if flags.load is not None and not (name and folder):
            raise ValueError(f"--load: {flags.load!r} is not NAME=DIR")
    except ValueError as error:
        return usage(error)

    async def question(client: AsyncRpc) -> int:
        if sign:
            request = pb.LoadAdapterRequest(name=name, path=folder)
            await client.unary(calls.LOAD_ADAPTER, request, LOAD_ADAPTER_TIMEOUT_S)
        if flags.unload is not None:
            await client.unary(calls.UNLOAD_ADAPTER, pb.UnloadAdapterRequest(name=flags.unload))
        response = await client.unary(calls.LIST_ADAPTERS, pb.ListAdaptersRequest(), ASK_TIMEOUT_S)
        for adapter in response.adapters:
            kind = pb.Adapter.Kind.Name(adapter.kind).removeprefix("KIND_").lower()
            print(f"{adapter.name}\t{kind} of {adapter.size}\t{adapter.memory_bytes} bytes\tin use {adapter.in_use}")
        taken = sum(adapter.memory_bytes for adapter in response.adapters)
        print(f"{taken} of {response.max_bytes} bytes", file=sys.stderr)
        return OK

    return ask(access, question)


def run_health(flags: argparse.Namespace) -> int:
    """Ask a server whether it serves."""
    try:
        access = access_of(flags)
    except ValueError as error:
        return usage(error)
    status = health_of(access, flags.timeout)
    print(f"{flags.server}: {status}")
    return OK if status == "SERVING" else FAILED


def health_of(access: Access, timeout_s: float) -> str:
    """Return "SERVING", "NOT_SERVING", or the reason for no answer."""
    address, tls = access.address, access.credentials
    with grpc.secure_channel(address, tls) if tls else grpc.insecure_channel(address) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s, metadata=access.metadata()
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}{hint(address, error.code(), error.details())}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


_MOST_NAMES = 6
"""Names of a list that a line of `info` has."""


def _shown(message: pb.GetModelInfoResponse | pb.GetStatsResponse, name: str) -> str:
    value = getattr(message, name)
    if name == "backends":
        return ", ".join(pb.Backend.Name(backend).removeprefix("BACKEND_").lower() for backend in value) or "none"
    if hasattr(value, "items"):
        return ", ".join(f"{key}: {count}" for key, count in sorted(value.items())) or "none"
    if isinstance(value, float):
        return f"{value:.1f}"
    if not hasattr(value, "extend"):
        return str(value)
    shown = ", ".join(map(str, value[:_MOST_NAMES])) or "none"
    return shown if len(value) <= _MOST_NAMES else f"{shown}, ... ({len(value)} in all)"


def ask(access: Access, question: Callable[[AsyncRpc], Awaitable[int]]) -> int:
    """Return the exit status of a question to a server."""

    async def run() -> int:
        try:
            async with AsyncRpc(access) as client:
                return await question(client)
        except grpc.aio.AioRpcError as error:
            return refused(access.address, error)

    return asyncio.run(run())


def refused(address: str, error: grpc.aio.AioRpcError) -> int:
    """Print why a call failed, and what helps; return the exit status."""
    explanation = hint(address, error.code(), error.details())
    print(f"{address}: {error.code().name}: {error.details()}{explanation}", file=sys.stderr)
    return FAILED


def hint(address: str, code: grpc.StatusCode, details: str | None) -> str:
    """Return advice about a failed call, on a new line, or ""."""
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return "\nGive the server's token with --token-file FILE."
    problem = (details or "").lower()
    if code is not grpc.StatusCode.UNAVAILABLE or "connect" not in problem:
        return ""
    if "wrong_version_number" in problem:
        return "\nThe server speaks no TLS."
    if "handshake" in problem or "verification" in problem:
        return "\nThe server's certificate is not from the authorities of --tls-ca, or is for another name."
    if "socket closed" in problem:
        return "\nA server with TLS needs --tls or --tls-ca."
    listen = "" if address == DEFAULT_ADDRESS else f" --listen {address}"
    return (
        f"\nNo server answers there. Start one with `lockstep serve{listen}`, or name another with --server or "
        "LOCKSTEP_SERVER."
    )


def usage(error: Exception) -> int:
    """Print what is wrong with a command line, and return the exit status."""
    print(f"error: {error}", file=sys.stderr)
    return USAGE
