"""Has another engine prefill a prompt, and falls back to this one: which requests, which engine, and for how long.

A request whose prompt is long enough is submitted at once, and waits in the engine while its pages come. Its grammar is
compiled meanwhile. Pages that have come stay, however the fetch ends; the engine prefills what is missing.

Invariant: a request that waits for pages is released by the task that `start` returns, however that ends, or ends
itself. An engine that failed is not asked for a time that doubles, so a hung one delays few requests.

Not responsible for: how the pages travel (see grpc_transport.py), the pages of this engine (see pages.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from gpu_engine.api.errors import LockstepError
from gpu_engine.api.page_transfer import Fallback, PageAccess, PageFormat, PageTransport, TransferFailed, WantedPages
from gpu_engine.api.request import Request
from gpu_engine.extensions.transfer.metrics import TransferMetrics
from service_runtime.owned_tasks import OwnedTasks

log = logging.getLogger(__name__)

MIN_REST_S, MAX_REST_S = 1.0, 30.0
"""How long an engine that failed is not asked: the first time, and at most."""


@dataclass(slots=True, eq=False)
class _Peer:
    """A prefill engine."""

    transport: PageTransport
    running: int = 0
    """Fetches."""
    rests_until_s: float = 0.0
    rest_s: float = 0.0
    """The last rest; 0: the last fetch succeeded."""
    reason: Fallback = Fallback.GONE
    """Why the last fetch failed."""
    logged: str = ""
    """The problem that the log has; a fetch that succeeds clears it."""

    def failed(self, error: TransferFailed, now_s: float) -> None:
        """Do not ask the engine for a while, and log a new problem."""
        self.reason = error.reason
        if now_s >= self.rests_until_s:  # else this fetch ran at the same time as the one that failed first
            self.rest_s = min(max(2 * self.rest_s, MIN_REST_S), MAX_REST_S)
            self.rests_until_s = now_s + self.rest_s
        if self.logged != str(error):
            self.logged = str(error)
            log.warning("prompts are prefilled here, not by %s: %s", self.transport.address, error)

    def succeeded(self) -> None:
        """Note that the engine prefills."""
        self.rest_s = self.rests_until_s = 0.0
        if self.logged:
            self.logged = ""
            log.info("%s prefills prompts again", self.transport.address)


class RemotePrefill:
    """The prefill engines of one decode engine. Made and used on the event loop."""

    def __init__(
        self,
        pages: PageAccess,
        transports: Sequence[PageTransport],
        metrics: TransferMetrics,
        *,
        least_tokens: int,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: `least_tokens` is the shortest prompt, less its cached pages, that is worth a fetch."""
        self._pages, self._metrics, self._least_tokens, self._clock_s = pages, metrics, least_tokens, clock_s
        self._peers = [_Peer(transport) for transport in transports]
        self._tasks = OwnedTasks(LockstepError)
        self.form: PageFormat | None = None
        """Set before the first request."""

    def begin(self, requests: Sequence[Request]) -> WantedPages | None:
        """Return the pages that the sequences of a request, which have one prompt, should wait for; None: they are
        prefilled here.

        The caller submits them with `awaits_pages`, and calls `start`.
        """
        first, form = requests[0], self.form
        assert form is not None, "a request before the engine is identified"
        # All but the last token: its logits are the first step's.
        num_pages = (len(first.prompt_ids) - 1) // form.page_size
        least_pages = max(1, -(-self._least_tokens // form.page_size))
        if num_pages < least_pages or not _can_use(first):
            return None
        now_s = self._clock_s()
        if all(peer.rests_until_s > now_s for peer in self._peers):
            self._metrics.fell_back(self._peers[0].reason)
            return None
        tokens = first.prompt_ids[: num_pages * form.page_size]
        return WantedPages(tokens, first.scheduling.cache_salt, first.request_id, least_pages)

    def start(self, wanted: WantedPages, requests: Sequence[Request]) -> asyncio.Task[None]:
        """Fetch the pages, then let `requests` go on. Cancelling the task ends the fetch."""
        return self._tasks.spawn(self._bring(wanted, requests), f"prefill of {wanted.request_id}")

    async def _bring(self, wanted: WantedPages, requests: Sequence[Request]) -> None:
        pages = self._pages
        try:
            fallback = await self._fetch(pages, wanted)
        except Exception:
            self._metrics.fell_back(Fallback.FAILED)
            raise
        else:
            if fallback is not None:
                self._metrics.fell_back(fallback)
        finally:
            pages.close(wanted, requests)

    async def _fetch(self, pages: PageAccess, wanted: WantedPages) -> Fallback | None:
        """Fetch what the prefix cache lacks; return why that is not complete."""
        form, began_s = self.form, self._clock_s()
        assert form is not None
        opened = await asyncio.wrap_future(pages.open(wanted))
        at, end = opened.first_page, len(wanted.token_ids) // form.page_size
        if opened.refused is not None or at == end:
            return opened.refused
        fallback: Fallback | None = self._peers[0].reason
        for peer in self._in_order(wanted):
            peer.running += 1
            try:
                async with aclosing(peer.transport.fetch(wanted, at, form)) as pieces:
                    async for piece in pieces:
                        await asyncio.wrap_future(pages.write(wanted, at, piece))
                        at += piece.num_pages
                        self._metrics.received(piece.num_pages, len(piece.data))
            except TransferFailed as error:
                peer.failed(error, self._clock_s())
                fallback = error.reason
                if fallback is Fallback.SLOW:  # the client has waited long enough
                    break
            else:
                peer.succeeded()
                fallback = None
                break
            finally:
                peer.running -= 1
        self._metrics.fetched(self._clock_s() - began_s)
        return fallback

    def _in_order(self, wanted: WantedPages) -> list[_Peer]:
        """Return the engines to be asked, one after the other: the least busy first, then the one that has prompts with
        this beginning in its prefix cache."""
        assert self.form is not None
        beginning = f"{wanted.cache_salt} {wanted.token_ids[: self.form.page_size]}".encode()

        def key(peer: _Peer) -> tuple[int, bytes]:
            return peer.running, hashlib.sha256(peer.transport.address.encode() + beginning).digest()

        now_s = self._clock_s()
        return sorted((peer for peer in self._peers if peer.rests_until_s <= now_s), key=key)

    async def aclose(self) -> None:
        """Cancel what runs, and close the connections."""
        await self._tasks.aclose()
        for peer in self._peers:
            await peer.transport.close()

    def __repr__(self) -> str:
        return f"<RemotePrefill from {', '.join(peer.transport.address for peer in self._peers)}>"


def _can_use(request: Request) -> bool:
    """Return whether pages of another engine serve the request.

    Pages of an adapter are known by its number on one engine. Log-probabilities of a prompt and tensors of it come from
    its forward, which is here.
    """
    outputs = request.outputs
    with_context = any(wanted.context for wanted in outputs.tensors)
    return not request.adapters and outputs.prompt_logprobs is None and not with_context
