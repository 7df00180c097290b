"""The service `lockstep.transfer.v1.KvTransfer`: a prompt comes, and its KV pages go out while they are computed.

Invariant: a piece is read from the cache when the one before it is on its way, so a reader has at most one piece of
memory here. However a call ends, its sequence and its pages are released.

Not responsible for: prefilling (see core/), and admission of callers (see front/port/).
"""

from __future__ import annotations

import asyncio

from gpu_engine.api.errors import InvalidRequest, PagesDiffer, ShuttingDown, TransferStalled
from gpu_engine.api.page_transfer import PageFormat
from gpu_engine.extensions.transfer.identity import prefill_request
from gpu_engine.extensions.transfer.metrics import TransferMetrics
from gpu_engine.front.calls import Calls, Context
from gpu_engine.front.validation import MAX_SALT_BYTES
from protos.transfer.v1 import transfer_pb2 as pb
from protos.transfer.v1 import transfer_pb2_grpc
from service_runtime.aborted_calls import send
from service_runtime.tenants import MAX_NAME_CHARS

MAX_INTERNAL_SALT_BYTES = MAX_SALT_BYTES + MAX_NAME_CHARS + 1
"""The other engine puts the name of its tenant, and a separator, before a client's salt."""
SERVICE = pb.DESCRIPTOR.services_by_name["KvTransfer"].full_name


class KvTransferServicer(transfer_pb2_grpc.KvTransferServicer):
    """Serves the pages of one engine. Made on the event loop."""

    def __init__(self, calls: Calls, metrics: TransferMetrics, *, timeout_s: float) -> None:
        """Args: `timeout_s` is the longest time that a reader may take for a piece."""
        self._calls, self._metrics, self._timeout_s = calls, metrics, timeout_s
        self.form: PageFormat | None = None
        """Set before `calls.warm`."""

    async def Fetch(  # type: ignore[override]  # the stub knows generators only
        self, request: pb.FetchRequest, context: Context
    ) -> None:
        """Prefill, and stream pages."""
        calls = self._calls
        async with calls.errors_to_status(context):
            calls.refuse_if_draining()
            await calls.until_warm()
            num_pages = self._check(request)
            await self._send(request, num_pages, context)

    def _check(self, request: pb.FetchRequest) -> int:
        """Return how many pages the prompt has. Raises InvalidRequest or PagesDiffer."""
        form, limits = self.form, self._calls.limits
        assert form is not None, "served before the engine is identified"
        if problem := form.difference(_format(request.format)):
            raise PagesDiffer(f"format: {problem}")
        count = len(request.token_ids)
        if not count or count % form.page_size:
            raise InvalidRequest("token_ids", f"has {count} tokens, and whole pages of {form.page_size} are required")
        if count + 2 > limits.max_model_len:
            raise InvalidRequest("token_ids", f"has {count} tokens; max_model_len = {limits.max_model_len}")
        if max(request.token_ids) >= limits.vocab_size:
            raise InvalidRequest("token_ids", f"has an id that is not below {limits.vocab_size}")
        if request.first_page >= count // form.page_size:
            raise InvalidRequest("first_page", f"is {request.first_page} of {count // form.page_size} pages")
        if (size := len(request.cache_salt.encode())) > MAX_INTERNAL_SALT_BYTES:
            raise InvalidRequest("cache_salt", f"has {size} bytes, at most {MAX_INTERNAL_SALT_BYTES} are allowed")
        return count // form.page_size

    async def _send(self, request: pb.FetchRequest, num_pages: int, context: Context) -> None:
        engine, form = self._calls.engine, self.form
        assert form is not None
        prefill = prefill_request(request.token_ids, request.cache_salt, request.request_id or "fetch")
        engine.submit(prefill)
        try:
            at = request.first_page
            while at < num_pages:
                reading = asyncio.wrap_future(engine.pages.read(prefill, at, form.piece_pages))
                try:
                    piece = await reading
                except asyncio.CancelledError:
                    if reading.cancelled() and not _cancelling():
                        raise ShuttingDown("the engine has ended") from None
                    raise
                response = pb.FetchResponse(num_pages=piece.num_pages, data=bytes(piece.data))
                try:
                    async with asyncio.timeout(self._timeout_s):
                        await send(context, response)
                except TimeoutError:
                    problem = f"no page was read within {self._timeout_s:g} s (prefill_timeout_s)"
                    raise TransferStalled(problem) from None
                at += piece.num_pages
                self._metrics.sent(piece.num_pages, len(response.data))
        finally:
            engine.drop(prefill)

    def __repr__(self) -> str:
        return f"<KvTransferServicer {self.form}>"


def _format(message: pb.PageFormat) -> PageFormat:
    return PageFormat(
        message.fingerprint,
        message.dtype,
        message.page_size,
        message.layout,
        message.num_layers,
        message.num_kv_heads,
        message.head_dim,
        tuple((layer.num_kv_heads, layer.head_dim) for layer in message.layers),
    )


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
