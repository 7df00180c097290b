"""A model of Triton's Python backend that answers from a Lockstep engine, over gRPC.

Each request is a task of one event loop in its own thread, and a stream of `lockstep_client`: the engine batches
all of them in flight. The model is decoupled: with `stream` each step's text is a response, without it the answer is
one. A request that its client cancelled ends in the engine as well.

Invariant: every request has exactly one final response, however it ends.

Not responsible for: limits of values (the engine checks them, and names the tensor), datatypes and shapes (Triton
checks them with config.pbtxt).
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from lockstep_client import TLS, AsyncClient, CallError, Delta, Grammar

OPTIONS = {
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "num_return_sequences": "n",
    "num_draft_tokens": "num_draft_tokens",
    "cache_salt": "cache_salt",
}
"""Tensor with one element -> option of the client."""
LISTS = {"stop_words": "stop", "bad_words": "bad_words"}
"""Tensor with any number of elements -> option of the client."""
TENSORS = {
    **{option: tensor for tensor, option in (OPTIONS | LISTS).items() if tensor != option},
    "text": "text_input",
    "ids": "input_ids",
    "stop_token_ids": "end_id",
    "grammar": "guided_decoding_guide",
}
"""Last name of a field in the engine's errors -> tensor, where the two differ."""
GUIDES = {
    "json_schema": Grammar.schema,
    "regex": Grammar.regex,
    "ebnf_grammar": Grammar.ebnf,
    "structural_tag": Grammar.structural_tag,
    "lark": Grammar.lark,
}
"""guided_decoding_guide_type -> the grammar of a guide; "json" needs none."""

CANCEL_POLL_S = 0.2
"""Triton does not say when a request is cancelled; it answers when it is asked."""
START_TIMEOUT_S = 600.0
"""Longest wait for an engine that loads its model."""


class TritonPythonModel:
    """The class that Triton's Python backend looks for. One object for each instance of the model."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Connect to the engine and wait until it serves. Raises TritonModelException when it does not."""
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config.get("parameters", {}).items()}
        self._running: dict[asyncio.Task[None], asyncio.Task[None]] = {}
        """The task that answers a request -> the one that reads the engine's responses."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="lockstep", daemon=True)
        self._thread.start()
        try:
            self._client = self._run(_connect(parameters)).result()
        except Exception as error:
            self._end_loop()
            raise pb_utils.TritonModelException(f"no Lockstep engine: {error}") from error

    def execute(self, requests: Sequence[Any]) -> None:
        """Begin requests. Their responses go to their senders, so that Triton may call this again at once."""
        for request in requests:
            self._run(self._answer(request, _Sender(request.get_response_sender())))

    def finalize(self) -> None:
        """End what still runs, and close the connection."""
        self._run(self._close_requests()).result()
        self._run(self._client.aclose()).result()
        self._end_loop()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close_requests(self) -> None:
        for reading in self._running.values():
            reading.cancel()
        await asyncio.gather(*self._running)

    async def _answer(self, request: Any, sender: _Sender) -> None:
        """Answer one request. Raises nothing: an error is the final response."""
        reading = asyncio.create_task(self._respond(request, sender))
        watching = asyncio.create_task(sender.cancelled())
        answering = asyncio.current_task()
        self._running[answering] = reading
        try:
            await asyncio.wait((reading, watching), return_when=asyncio.FIRST_COMPLETED)
            reading.cancel()
            await reading
        except asyncio.CancelledError:
            sender.refuse("the request was cancelled", pb_utils.TritonError.CANCELLED)
        except Exception as error:
            sender.refuse(*_reason(error))
        finally:
            watching.cancel()
            del self._running[answering]

    async def _respond(self, request: Any, sender: _Sender) -> None:
        tensors = _Tensors(request)
        prompt, grammar, options = tensors.prompt(), tensors.grammar(), tensors.options()
        stream = tensors.one("stream", default=False)
        echo = not tensors.one("exclude_input_in_output", default=stream)
        responses = _Responses(
            request.requested_output_names(),
            sequences=options.get("n", 1),
            pad_id=tensors.one("pad_id", default=0),
            with_logprobs="logprobs" in options,
        )
        async with self._client.stream_generate(prompt, grammar=grammar, echo=echo, **options) as deltas:
            async for delta in deltas:
                responses.take(delta)
                if stream or responses.ended:
                    rows = [delta.index] if stream else range(responses.sequences)
                    sender.send(responses.response(rows), final=responses.ended)
        if not responses.ended:
            raise RuntimeError("the engine closed the stream before the answer's end")


async def _connect(parameters: Mapping[str, str]) -> AsyncClient:
    """Return a client of an engine that serves. The parameters of config.pbtxt are described in the README."""
    ca, token_file = parameters.get("tls_ca"), parameters.get("token_file")
    client = AsyncClient(
        os.environ.get("LOCKSTEP_SERVER") or parameters.get("server"),
        tls=TLS(ca=ca) if ca else parameters.get("tls") == "true",
        token=(lambda: Path(token_file).read_text().split()[0]) if token_file else None,
    )
    deadline_s = asyncio.get_running_loop().time() + float(parameters.get("start_timeout_s", START_TIMEOUT_S))
    while True:
        try:
            await client.model_info(timeout_s=5.0)
            return client
        except CallError as error:
            if asyncio.get_running_loop().time() > deadline_s or error.code.name not in (
                "UNAVAILABLE",
                "DEADLINE_EXCEEDED",
            ):
                await client.aclose()
                raise
        await asyncio.sleep(0.5)


class _Sender:
    """Triton's sender of one request."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self._done = False

    def send(self, response: Any, *, final: bool) -> None:
        """Send a response; nothing is sent after the final one."""
        if not self._done:
            self._done = final
            self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)

    def refuse(self, message: str, code: Any) -> None:
        """Send an error as the final response."""
        self.send(pb_utils.InferenceResponse([], error=pb_utils.TritonError(message, code)), final=True)

    async def cancelled(self) -> None:
        """Return when the client has cancelled the request."""
        while not self._sender.is_cancelled():  # noqa: ASYNC110 - Triton has no event for it
            await asyncio.sleep(CANCEL_POLL_S)


def _reason(error: BaseException) -> tuple[str, Any]:
    """Return the error's message, with names of tensors in place of the engine's fields, and its code in Triton."""
    codes = {
        "INVALID_ARGUMENT": pb_utils.TritonError.INVALID_ARG,
        "NOT_FOUND": pb_utils.TritonError.NOT_FOUND,
        "UNIMPLEMENTED": pb_utils.TritonError.UNSUPPORTED,
        "UNAVAILABLE": pb_utils.TritonError.UNAVAILABLE,
        "RESOURCE_EXHAUSTED": pb_utils.TritonError.UNAVAILABLE,
    }
    if isinstance(error, CallError):
        return _in_tensors(error.details), codes.get(error.code.name, pb_utils.TritonError.INTERNAL)
    if isinstance(error, ValueError):
        return _in_tensors(str(error)), pb_utils.TritonError.INVALID_ARG
    return f"{type(error).__name__}: {error}", pb_utils.TritonError.INTERNAL


def _in_tensors(message: str) -> str:
    """Return a message of the engine or the client with the name of a tensor for that of a field."""
    field, colon, problem = message.partition(": ")
    path, bracket, index = field.partition("[")
    last = "grammar" if path.startswith("grammar") else path.rpartition(".")[2]
    return f"{TENSORS.get(last, last)}{bracket}{index}{colon}{problem}" if colon and " " not in field else message


class _Tensors:
    """The inputs of one request as plain values. Raises ValueError that names the tensor."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def all(self, name: str) -> list[Any] | None:
        """Return the elements of a tensor, or None when the request has none of this name."""
        tensor = pb_utils.get_input_tensor_by_name(self._request, name)
        if tensor is None:
            return None
        items = tensor.as_numpy().reshape(-1).tolist()
        try:
            return [item.decode() if isinstance(item, bytes) else item for item in items]
        except UnicodeDecodeError as error:
            raise ValueError(f"{name}: is not UTF-8 at byte {error.start}") from None

    def one(self, name: str, default: Any = None) -> Any:
        """Return the only element of a tensor, or the default."""
        items = self.all(name)
        return default if items is None else items[0]

    def prompt(self) -> str | list[int]:
        text, ids = self.one("text_input"), self.all("input_ids")
        if (text is None) == (ids is None):
            raise ValueError("text_input, input_ids: one of them is required, and not both")
        return ids if text is None else text

    def options(self) -> dict[str, Any]:
        options = {option: self.one(tensor) for tensor, option in OPTIONS.items()}
        words = {option: self.all(tensor) for tensor, option in LISTS.items()}
        options |= {option: texts for option, texts in words.items() if texts != [""]}  # one empty text means none
        end = self.one("end_id")
        if end == -1:
            options["ignore_eos"] = True
        elif end is not None:
            options["stop_token_ids"] = [end]
        if self.one("return_log_probs", default=False):
            options["logprobs"] = 0
        return {name: value for name, value in options.items() if value is not None}

    def grammar(self) -> Grammar | None:
        kind, guide = self.one("guided_decoding_guide_type"), self.one("guided_decoding_guide")
        if kind is None and guide is None:
            return None
        if kind is None:
            raise ValueError("guided_decoding_guide: needs a guided_decoding_guide_type")
        if kind == "json":
            if guide is not None:
                raise ValueError("guided_decoding_guide: is given with the type json, which has none")
            return Grammar.json_object()
        if kind not in GUIDES:
            known = ", ".join(["json", *GUIDES])
            raise ValueError(f"guided_decoding_guide_type: {kind!r} is not known; known are {known}")
        if guide is None:
            raise ValueError(f"guided_decoding_guide: is required with the type {kind}")
        return GUIDES[kind](guide)


class _Responses:
    """Makes responses of the deltas of one request: a row for each sequence."""

    def __init__(self, outputs: Sequence[str], *, sequences: int, pad_id: int, with_logprobs: bool) -> None:
        left_out = () if with_logprobs else ("output_log_probs", "cum_log_probs")
        self._outputs = [name for name in outputs if name not in left_out]
        self.sequences, self._pad_id = sequences, pad_id
        self._deltas: defaultdict[int, list[Delta]] = defaultdict(list)
        """Of each sequence, since its last response."""
        self._sums: defaultdict[int, float] = defaultdict(float)
        self._unfinished = sequences

    @property
    def ended(self) -> bool:
        """Every sequence has its finish reason."""
        return self._unfinished == 0

    def take(self, delta: Delta) -> None:
        """Add a delta."""
        self._deltas[delta.index].append(delta)
        self._sums[delta.index] += sum(entry.logprob for entry in delta.logprobs)
        self._unfinished -= delta.finish_reason is not None

    def response(self, rows: Sequence[int]) -> Any:
        """Return what is new of the sequences `rows`."""
        new = [self._deltas[row] for row in rows]
        ids = [[token for delta in row for token in (*delta.prompt_token_ids, *delta.token_ids)] for row in new]
        finish = [row[-1].finish_reason if row else None for row in new]
        values = {
            "text_output": _texts("".join(delta.text for delta in row) for row in new),
            "output_ids": _padded(ids, self._pad_id, np.int32),
            "sequence_length": np.array([len(row) for row in ids], np.int32),
            "sequence_index": np.array(rows, np.int32),
            "finish_reason": _texts(reason.value if reason else "" for reason in finish),
            "cum_log_probs": np.array([self._sums[row] for row in rows], np.float32),
            "output_log_probs": _padded(
                [[entry.logprob for delta in row for entry in delta.logprobs] for row in new], 0.0, np.float32
            ),
        }
        for row in rows:
            self._deltas[row] = []
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, values[name]) for name in self._outputs])


def _texts(texts: Any) -> np.ndarray[Any, Any]:
    return np.array([text.encode() for text in texts], np.object_)


def _padded(rows: Sequence[Sequence[Any]], pad: Any, dtype: Any) -> np.ndarray[Any, Any]:
    padded = np.full((len(rows), max(map(len, rows))), pad, dtype)
    for row, items in zip(padded, rows, strict=True):
        row[: len(items)] = items
    return padded
