"""A Ray Serve application: each replica owns one engine, its own process, and a front sends requests to them.

    serve run deploy.ray.serve_app:app model=/models/Qwen3-0.6B max_batch_size=16 max_replicas=4
    curl http://127.0.0.1:8000/chat -d '{"messages": "Describe Paris.", "options": {"max_tokens": 64}, "stream": true}'

The invariant: a request of which no token was sent is not lost with its replica: the front asks another one, until
`retry_s` is over. A request that has begun ends with an error that says so, and is never repeated silently.

Not responsible for: the engine (its settings are those of `lockstep serve`), a batch over a file (see batch.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from lockstep_client import AsyncClient, CallError, Delta, InvalidRequest, LimitExceeded, Unavailable

HEALTH_PERIOD_S = 5.0
HEALTH_TIMEOUT_S = 10.0
RETRY_PAUSE_S = 0.2
DEFAULT_SLOTS = 8

_OWN = {"min_replicas": 1, "max_replicas": 1, "retry_s": 120.0, "engine_cpus": 1.0, "engine_gpus": 0.0}
"""Arguments of `app` next to the engine's settings, with their defaults."""


@serve.deployment
class Engine:
    """A replica: one engine process, which ends with it, also by SIGKILL."""

    async def __init__(self, settings: Mapping[str, Any]) -> None:
        """Start the engine, and return when it serves. Raises EmbeddedServerError with the end of its log."""
        self._client = AsyncClient.embedded(**settings)
        await self._client.start()

    async def check_health(self) -> None:
        """Raise where the engine does not answer; Serve then replaces the replica."""
        await self._client.stats(timeout_s=HEALTH_TIMEOUT_S)

    async def chat(self, messages: Any, options: Mapping[str, Any]) -> AsyncIterator[Delta]:
        """Yield the deltas of an answer to a conversation; `options` are those of the client's `stream_chat`."""
        async with self._client.stream_chat(messages, **options) as stream:
            async for delta in stream:
                yield delta

    async def generate(self, prompt: Any, options: Mapping[str, Any]) -> AsyncIterator[Delta]:
        """Yield the deltas of a continuation of a text or of token ids."""
        async with self._client.stream_generate(prompt, **options) as stream:
            async for delta in stream:
                yield delta

    async def process_id(self) -> int:
        """Return the id of the replica's process, whose child the engine is."""
        return os.getpid()

    async def __del__(self) -> None:
        await self._client.aclose()


class Interrupted(RuntimeError):
    """A replica was lost when a part of the answer had been sent."""


def _is_lost(error: BaseException) -> bool:
    """Return whether a request may go to another replica: its own is gone, or refuses because it ends or is full."""
    if isinstance(error, RayActorError | Unavailable | LimitExceeded):
        return True
    if isinstance(error, RayTaskError):
        return error.cause is not None and _is_lost(error.cause)
    return isinstance(error, RayServeException)


async def deltas(
    engines: DeploymentHandle, method: str, prompt: Any, options: Mapping[str, Any], retry_s: float
) -> AsyncIterator[Delta]:
    """Yield the deltas of an answer of any replica.

    Args:
        engines: handle of `Engine`.
        method: "chat" or "generate".
        prompt: the conversation or the text.
        options: of the client's stream of that name.
        retry_s: time in which a request of which nothing came yet is sent again.

    Raises Interrupted, CallError, TypeError or ValueError, and after `retry_s` the last error.
    """
    give_up_s, begun = time.monotonic() + retry_s, False
    while True:
        try:
            call = getattr(engines.options(stream=True), method)
            async for delta in call.remote(prompt, dict(options)):
                begun = True
                yield delta
        except Exception as error:
            if not _is_lost(error):
                raise
            if begun:
                raise Interrupted("the replica was lost when a part of the answer had been sent") from error
            if time.monotonic() > give_up_s:
                raise
            await asyncio.sleep(RETRY_PAUSE_S)
            continue
        return


@serve.deployment
class Front:
    """HTTP and handles in front of the engines: `POST /chat` and `POST /generate`, JSON or JSON lines."""

    def __init__(self, engines: DeploymentHandle, retry_s: float) -> None:
        self._engines, self._retry_s = engines, retry_s

    async def chat(self, messages: Any, **options: Any) -> AsyncIterator[Delta]:
        """Yield the deltas of an answer to a conversation; for handles."""
        async for delta in deltas(self._engines, "chat", messages, options, self._retry_s):
            yield delta

    async def generate(self, prompt: Any, **options: Any) -> AsyncIterator[Delta]:
        """Yield the deltas of a continuation of a text; for handles."""
        async for delta in deltas(self._engines, "generate", prompt, options, self._retry_s):
            yield delta

    async def __call__(self, request: Request) -> Response:
        """Answer one HTTP request: {"messages" or "prompt", "options", "stream"}."""
        method = request.url.path.rsplit("/", 1)[-1]
        field = {"chat": "messages", "generate": "prompt"}.get(method)
        if field is None or request.method != "POST":
            return JSONResponse({"error": "POST /chat or POST /generate"}, 404)
        try:
            body = await request.json()
            prompt, options = body.pop(field), body.pop("options", {})
            streamed = bool(body.pop("stream", False))
            if body:
                return JSONResponse({"error": f"{', '.join(body)}: no such field"}, 400)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            return JSONResponse({"error": f"the body is no JSON object with {field}: {error}"}, 400)
        if streamed:
            return await _lines(deltas(self._engines, method, prompt, options, self._retry_s))
        return await self._whole(method, prompt, options)

    async def _whole(self, method: str, prompt: Any, options: Mapping[str, Any]) -> Response:
        """Return a whole answer. Nothing of it was sent before, so a replica that is lost in its middle is no end."""
        give_up_s = time.monotonic() + self._retry_s
        while True:
            try:
                return _answers([d async for d in deltas(self._engines, method, prompt, options, self._retry_s)])
            except Interrupted as error:
                if time.monotonic() > give_up_s:
                    return JSONResponse({"error": _message(error)}, _status(error))
            except Exception as error:
                return JSONResponse({"error": _message(error)}, _status(error))


def _answers(found: list[Delta]) -> Response:
    answers = [
        {
            "text": "".join(delta.text for delta in found if delta.index == last.index),
            **_end(last),
        }
        for last in sorted((delta for delta in found if delta.finish_reason), key=lambda delta: delta.index)
    ]
    return JSONResponse({"answers": answers})


async def _lines(parts: AsyncIterator[Delta]) -> Response:
    """Return a stream of JSON lines; an error before the first one is a status."""
    try:
        first = await anext(parts)
    except Exception as error:
        return JSONResponse({"error": _message(error)}, _status(error))

    async def lines() -> AsyncIterator[str]:
        yield json.dumps(_line(first)) + "\n"
        try:
            async for delta in parts:
                yield json.dumps(_line(delta)) + "\n"
        except Exception as error:
            yield json.dumps({"error": _message(error)}) + "\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def _line(delta: Delta) -> dict[str, Any]:
    return {"index": delta.index, "text": delta.text, **(_end(delta) if delta.finish_reason else {})}


def _end(delta: Delta) -> dict[str, Any]:
    assert delta.finish_reason is not None
    usage = dataclasses.asdict(delta.usage) if delta.usage else None
    return {"finish_reason": delta.finish_reason.name.lower(), "usage": usage}


def _cause(error: Exception) -> BaseException:
    return error.cause if isinstance(error, RayTaskError) and error.cause is not None else error


def _message(error: Exception) -> str:
    cause = _cause(error)
    return f"{type(cause).__name__}: {cause}"


def _status(error: Exception) -> int:
    cause = _cause(error)
    if isinstance(cause, InvalidRequest | TypeError | ValueError):
        return 400
    return 500 if isinstance(cause, CallError) and not isinstance(cause, Unavailable | LimitExceeded) else 503


def app(args: Mapping[str, Any]) -> serve.Application:
    """Return the application. The arguments are the engine's settings by name, and those of `_OWN`.

    Autoscaling follows the requests that wait: a replica is to have as many requests as its engine has slots, and what
    is beyond waits. `max_ongoing_requests` leaves those in the front's queue, where they survive a replica.
    """
    own = {name: type(default)(args.get(name, default)) for name, default in _OWN.items()}
    settings = {name: value for name, value in args.items() if name not in _OWN}
    slots = int(settings.setdefault("max_batch_size", DEFAULT_SLOTS))
    engines = Engine.options(
        max_ongoing_requests=slots + 1,
        autoscaling_config={
            "min_replicas": own["min_replicas"],
            "initial_replicas": own["min_replicas"],
            "max_replicas": own["max_replicas"],
            "target_ongoing_requests": slots,
        },
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=60,
        ray_actor_options={"num_cpus": own["engine_cpus"], "num_gpus": own["engine_gpus"]},
    )
    front = Front.options(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
    return front.bind(engines.bind(settings), own["retry_s"])
