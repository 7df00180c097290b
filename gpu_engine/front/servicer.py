"""The service `lockstep.engine.v1.Engine` on grpc.aio: every call of the public API.

Invariant: a method turns a message into a value, has another module work on it, and turns the result into a message.

Not responsible for: checking fields (see validation.py), the life of a Generate call (see calls.py), starting and
stopping the server (see server.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

from gpu_engine.api.adapters import AdapterUse
from gpu_engine.api.errors import GrammarNotConfigured
from gpu_engine.api.ports import GrammarStats
from gpu_engine.api.request import ValidatedRequest
from gpu_engine.front.caller import TenantView
from gpu_engine.front.calls import Calls, Check, Context
from gpu_engine.front.generate_many import ManyRequests
from gpu_engine.front.grammar_handles import GrammarHandles
from gpu_engine.front.responses import Responses, adapter_message, model_info, stats_response
from gpu_engine.front.stats_feed import StatsFeed
from gpu_engine.front.tokens.tokenisation import Tokenisation
from gpu_engine.front.tokens.tokenizer_info import TokenizerInfo
from gpu_engine.front.validation import check
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc
from service_runtime.aborted_calls import send


class EngineServicer(engine_pb2_grpc.EngineServicer):
    """Serves one engine. Made on the event loop."""

    def __init__(self, calls: Calls, *, version: str) -> None:
        """Args: `calls` may be shared with other services of the port; `version` is this distribution's."""
        self._calls = calls
        self._version = version
        self._handles: dict[str, GrammarHandles] = {}
        """The compiled grammars of each tenant; "" for the grammars that all callers share."""
        self._tokenisation = Tokenisation(calls.model.tokenizer, calls.limits)
        self._tokenizer_info = TokenizerInfo(calls.model)
        self._stats_feed = StatsFeed(calls.engine)
        calls.at_drain(self._stats_feed.close)

    async def Generate(  # type: ignore[override]  # the stub knows generators only
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        """Stream one answer."""
        respond = Responses(request.response).respond
        await self._calls.generate(context, request.request_id, self._check_of(request), respond)

    async def GenerateMany(  # type: ignore[override]  # the stub knows generators only
        self, requests: AsyncIterator[pb.GenerateManyRequest], context: Context
    ) -> None:
        """Answer many requests, in the order in which their responses come."""
        async with self._calls.errors_to_status(context):
            await ManyRequests(self._calls, context, self._check_of).run(requests)

    def _check_of(self, request: pb.GenerateRequest) -> Check:
        calls = self._calls

        def checked(visible: TenantView) -> ValidatedRequest:
            known = self._handles_of(visible).spec if calls.grammar else None
            return check(request, calls.limits, visible.running, known, visible.find_adapter)

        return checked

    def _handles_of(self, visible: TenantView) -> GrammarHandles:
        """Return the grammars that the caller may name by id."""
        owner = "" if visible.account is None else visible.account.grammars
        handles = self._handles.get(owner)
        if handles is None:
            handles = self._handles[owner] = GrammarHandles(self._calls.limits.grammar_handles_bytes, owner)
        return handles

    def _visible(self, context: Context) -> TenantView:
        return self._calls.visible_to(self._calls.caller_of(context))

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End a running request, by its id."""
        async with self._calls.errors_to_status(context):
            aborted = self._calls.abort(request.request_id, self._calls.caller_of(context))
            return pb.AbortResponse(aborted=aborted)
        raise AssertionError("abort raises")

    async def Compile(self, request: pb.CompileRequest, context: Context) -> pb.CompileResponse:
        """Compile a grammar ahead of time and give it an id."""
        grammar = self._calls.grammar
        async with self._calls.errors_to_status(context):
            self._calls.refuse_if_draining()
            visible = self._visible(context)
            owner = None if visible.account is None else visible.account.grammar_owner
            return await self._handles_of(visible).compile(request, grammar.compile if grammar else None, owner)
        raise AssertionError("abort raises")

    async def ClearGrammarCache(
        self, request: pb.ClearGrammarCacheRequest, context: Context
    ) -> pb.ClearGrammarCacheResponse:
        """Drop the compiled grammars that no running request uses."""
        async with self._calls.errors_to_status(context):
            if self._calls.grammar is None:
                raise GrammarNotConfigured("this server runs without a grammar process (its setting grammar=none)")
            cleared = await self._calls.grammar.clear_cache(disk=request.disk)
            return pb.ClearGrammarCacheResponse(
                dropped=cleared.dropped, kept=cleared.kept, freed_bytes=cleared.freed_bytes, files=cleared.files
            )
        raise AssertionError("abort raises")

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        """Describe the model and the limits."""
        calls = self._calls
        backends = calls.grammar.backends if calls.grammar else ()
        response = model_info(calls.model, calls.engine.config, calls.limits, backends, self._version)
        response.draft_model = calls.engine.draft_models.name
        response.receipt_key = calls.receipts.public_key if calls.receipts is not None else ""
        return response

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        """Return the counters of the engine and the gauges of the grammar process."""
        calls = self._calls
        grammar = await calls.grammar.stats() if calls.grammar else GrammarStats()
        response = stats_response(calls.engine.stats(), finished=calls.finished, failed=calls.failed)
        response.grammar_starts = grammar.starts
        response.grammar_ready = grammar.ready
        response.matchers = grammar.matchers
        response.cached_grammars = grammar.cached_grammars
        return response

    async def WatchStats(  # type: ignore[override]  # the stub knows generators only
        self, request: pb.WatchStatsRequest, context: Context
    ) -> None:
        """Stream the statistics of iterations and of running requests."""
        async with self._calls.errors_to_status(context):
            await self._stats_feed.run(request, partial(send, context))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Turn text or a conversation into token ids."""
        async with self._calls.errors_to_status(context):
            return await self._tokenisation.tokenize(request)
        raise AssertionError("abort raises")

    async def GetTokenizerInfo(
        self, request: pb.GetTokenizerInfoRequest, context: Context
    ) -> pb.GetTokenizerInfoResponse:
        """Return the tokenizer."""
        async with self._calls.errors_to_status(context):
            return await self._tokenizer_info.get()
        raise AssertionError("abort raises")

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Turn token ids into text."""
        async with self._calls.errors_to_status(context):
            return await self._tokenisation.detokenize(request)
        raise AssertionError("abort raises")

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        """Load an adapter."""
        adapters = self._calls.engine.adapters
        async with self._calls.errors_to_status(context):
            self._calls.refuse_if_draining()
            adapter = await asyncio.to_thread(adapters.load, request.name, request.path)
            return pb.LoadAdapterResponse(adapter=adapter_message(AdapterUse(adapter, 0)))
        raise AssertionError("abort raises")

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:
        """Unload an adapter when its last user has ended."""
        async with self._calls.errors_to_status(context):
            # A client that leaves meanwhile does not bring the name back.
            await asyncio.shield(asyncio.wrap_future(self._calls.engine.adapters.unload(request.name)))
            return pb.UnloadAdapterResponse()
        raise AssertionError("abort raises")

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        """List the adapters."""
        async with self._calls.errors_to_status(context):
            messages = [adapter_message(use) for use in self._visible(context).list_adapters()]
            return pb.ListAdaptersResponse(adapters=messages, max_bytes=self._calls.engine.adapters.max_bytes)
        raise AssertionError("abort raises")

    async def ExchangeDrafter(self, request: pb.ExchangeDrafterRequest, context: Context) -> pb.ExchangeDrafterResponse:
        """Load another draft model and draft with it."""
        async with self._calls.errors_to_status(context):
            self._calls.refuse_if_draining()
            # A client that leaves meanwhile does not bring the former model back.
            loaded = await asyncio.to_thread(self._calls.engine.draft_models.exchange, request.path)
            return pb.ExchangeDrafterResponse(model=loaded.name, num_parameters=loaded.num_parameters)
        raise AssertionError("abort raises")

    def __repr__(self) -> str:
        return f"<EngineServicer {self._calls!r}>"
