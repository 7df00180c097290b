"""A server of OpenAI's HTTP API, in the dialect of its fields for grammars.

Invariant: one request is one POST to /v1/chat/completions, streamed, with a single user message. A grammar that a
dialect cannot express is NOT_OFFERED, and is not sent in another form.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from lockstep_bench.cases import Grammar, Json
from lockstep_bench.endpoint import About, Ask, Outcome, Reply


def _openai(grammar: Grammar) -> Json | None:
    if grammar.kind != "json":
        return None
    named = {"name": "answer", "schema": grammar.source, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def _vllm(grammar: Grammar) -> Json:
    name = {"json": "json", "regex": "regex", "choice": "choice", "ebnf": "grammar"}[grammar.kind]
    return {"structured_outputs": {name: grammar.source}}


def _llama_cpp(grammar: Grammar) -> Json | None:
    if grammar.kind == "json":
        return {"response_format": {"type": "json_object", "schema": grammar.source}}
    return {"grammar": grammar.source} if grammar.kind == "ebnf" else None


DIALECTS: Mapping[str, Callable[[Grammar], Json | None]] = {
    "openai": _openai,
    "vllm": _vllm,
    "lockstep": _vllm,
    "llama.cpp": _llama_cpp,
}
"""From a grammar to the fields of the body, by dialect; None: not offered."""
_OWNERS = {"vllm": "vllm", "lockstep": "lockstep", "me": "llama.cpp", "llamacpp": "llama.cpp"}
"""`owned_by` of the first model -> dialect."""


class HttpEndpoint:
    """One server.

    Args:
        url: of the API, with or without /v1.
        dialect: one of DIALECTS, or "auto": by what the list of models says.
        model: its name; None: the first one that is served.
        api_key: sent as a bearer token.
        timeout_s: the longest pause between two pieces of an answer.
        transport: what carries the requests; None: the network.
    """

    def __init__(
        self,
        url: str,
        *,
        dialect: str = "auto",
        model: str | None = None,
        api_key: str = "",
        timeout_s: float = 120.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        # No limit on connections: a flood must reach the server. None is used twice: a server may close an idle one at
        # the moment of the next request, which would count as its failure.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(
            base_url=base, timeout=timeout_s, headers=headers, limits=limits, transport=transport
        )
        self._dialect, self._model = dialect, model

    def __repr__(self) -> str:
        return f"<HttpEndpoint {self._http.base_url} {self._dialect}>"

    @property
    def drafts_by_request(self) -> bool:
        """See `Endpoint`: only Lockstep has a field for it."""
        return self._dialect == "lockstep"

    async def about(self) -> About:
        """See `Endpoint`. Finds the dialect and the model where they were not given."""
        try:
            answer = await self._http.get("/v1/models")
            answer.raise_for_status()
            first: Json = answer.json()["data"][0]
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            raise ConnectionError(f"{self._http.base_url}/v1/models: {error or type(error).__name__}") from error
        if self._dialect == "auto":
            self._dialect = _OWNERS.get(str(first.get("owned_by")), "openai")
        self._model = self._model or str(first["id"])
        return About(f"{self._dialect} {await self._version()}".strip(), self._model)

    async def _version(self) -> str:
        try:
            answer = await self._http.get("/version")
            found = answer.json() if answer.is_success else {}
        except (httpx.HTTPError, ValueError):
            return ""
        return str(found.get("version", "")) if isinstance(found, dict) else ""

    async def ask(self, ask: Ask) -> Reply:
        """See `Endpoint`."""
        body: Json = {
            "model": self._model,
            "messages": [{"role": "user", "content": ask.prompt}],
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ask.seed is not None:
            body["seed"] = ask.seed
        if not ask.drafts and self.drafts_by_request:
            body["speculation"] = {"num_draft_tokens": 0}
        if ask.grammar is not None:
            fields = DIALECTS[self._dialect](ask.grammar)
            if fields is None:
                return Reply(Outcome.NOT_OFFERED)
            body |= fields
        return await self._post(body)

    async def _post(self, body: Json) -> Reply:
        reply = Reply(Outcome.FAILED, began_s=time.perf_counter())
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    text = (await answer.aread()).decode(errors="replace")
                    reply.outcome = Outcome.REFUSED if _refuses(answer.status_code) else Outcome.FAILED
                    reply.detail = f"{answer.status_code}: {text[:300]}"
                    return reply
                async for line in answer.aiter_lines():
                    if line.startswith("data:") and line[5:].strip() != "[DONE]":
                        _take(json.loads(line[5:]), reply)
        except (httpx.HTTPError, ValueError) as error:
            reply.detail = f"{type(error).__name__}: {error}"
            return reply
        if reply.finish and not reply.detail:
            reply.outcome = Outcome.DONE
            reply.tokens = reply.tokens or len(reply.arrivals)
        reply.detail = reply.detail or ("" if reply.finish else "the stream ended without a finish reason")
        return reply

    async def aclose(self) -> None:
        """See `Endpoint`."""
        await self._http.aclose()


def _refuses(code: object) -> bool:
    """Return whether a status says that the request itself cannot be served."""
    return isinstance(code, int) and httpx.codes.is_client_error(code) and code != httpx.codes.TOO_MANY_REQUESTS


def _take(event: Mapping[str, Any], reply: Reply) -> None:
    """Add one event of a stream to the reply."""
    if "error" in event:
        error = event["error"]
        reply.detail = f"in the stream: {json.dumps(error)[:300]}"
        # A server that compiles grammars after it has begun to answer can refuse one only here.
        if not reply.text and isinstance(error, Mapping) and _refuses(error.get("code")):
            reply.outcome = Outcome.REFUSED
        return
    if usage := event.get("usage"):
        reply.tokens = int(usage.get("completion_tokens", 0))
    for choice in event.get("choices", ()):
        if text := (choice.get("delta") or {}).get("content"):
            reply.arrivals.append(time.perf_counter())
            reply.text += text
        reply.finish = choice.get("finish_reason") or reply.finish
