"""A server of Lockstep's gRPC API, through its client (`pip install 'lockstep-bench[grpc]'`)."""

from __future__ import annotations

import time
from typing import Any

from lockstep_bench.cases import Grammar
from lockstep_bench.endpoint import About, Ask, Outcome, Reply


class GrpcEndpoint:
    """One server.

    Args:
        address: host:port, or unix:PATH.
        timeout_s: the longest time of a call.

    Raises ModuleNotFoundError where lockstep-client is not installed.
    """

    drafts_by_request = True

    def __init__(self, address: str, *, timeout_s: float = 120.0) -> None:
        import lockstep_client

        self._package = lockstep_client
        self._client = lockstep_client.AsyncClient(address, timeout_s=timeout_s)

    async def about(self) -> About:
        """See `Endpoint`."""
        try:
            info = await self._client.model_info(timeout_s=10.0)
        except self._package.CallError as error:
            raise ConnectionError(str(error)) from error
        return About(f"lockstep {info.version}", info.model)

    async def ask(self, ask: Ask) -> Reply:
        """See `Endpoint`."""
        options: dict[str, Any] = {"max_tokens": ask.max_tokens, "temperature": ask.temperature}
        if ask.seed is not None:
            options["seed"] = ask.seed
        if not ask.drafts:
            options["num_draft_tokens"] = 0
        if ask.grammar is not None:
            options["grammar"] = self._grammar(ask.grammar)
        reply = Reply(Outcome.FAILED, began_s=time.perf_counter())
        try:
            async with self._client.stream_chat(ask.prompt, **options) as stream:
                async for delta in stream:
                    if delta.text:
                        reply.arrivals.append(time.perf_counter())
                        reply.text += delta.text
                    reply.tokens += len(delta.token_ids)
                    reply.finish = delta.finish_reason.name.lower() if delta.finish_reason else reply.finish
        except (self._package.InvalidRequest, self._package.NotSupported) as error:
            reply.outcome, reply.detail = Outcome.REFUSED, str(error)
            return reply
        except self._package.CallError as error:
            reply.detail = str(error)
            return reply
        # An answer that the grammar led to its end is cut at max_tokens and complete.
        reply.finish = "length" if reply.finish == "grammar_closed" else reply.finish
        reply.outcome = Outcome.DONE
        return reply

    def _grammar(self, grammar: Grammar) -> Any:
        make = self._package.Grammar
        if grammar.kind == "choice":
            return make.choice(*grammar.source)
        return {"json": make.schema, "regex": make.regex, "ebnf": make.ebnf}[grammar.kind](grammar.source)

    async def aclose(self) -> None:
        """See `Endpoint`."""
        await self._client.aclose()
