"""KV pages that one engine computes and another one uses: their format, and the seams on both sides of the transfer.

A prefill engine *exports* the pages of a sequence that it prefills. A decode engine *imports* pages for a
sequence that waits for them. `PageTransport` is what lies between the two.

Invariant: pages cross only between engines whose `PageFormat` is equal, so a page has the same bits on both sides.

Not responsible for: the pages themselves, and which requests use a transfer (extensions/transfer/).
"""

from __future__ import annotations

import enum
import math
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import asyncio

    from gpu_engine.api.request import Request

PIECE_BYTES = 4 << 20
"""The most bytes of pages in a message, which has at least one page: an engine copies it between two iterations."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class PageFormat:
    """What the bits of a page depend on."""

    fingerprint: str
    """Digest of the weights; after the start, with the keys and values of a fixed prompt."""
    dtype: str
    page_size: int
    """Tokens of a page."""
    layout: str
    """Of the keys: "channel-major" or "token-major"; "joined": they begin with the values."""
    num_layers: int
    num_kv_heads: int
    """0 where layers differ, as `head_dim`."""
    head_dim: int
    layers: tuple[tuple[int, int], ...] = ()
    """`num_kv_heads` and `head_dim` of each layer, where layers differ."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, keys and values of every layer."""
        width = {"float32": 4, "bfloat16": 2}[self.dtype]
        numbers = self.num_layers * self.num_kv_heads * self.head_dim + sum(map(math.prod, self.layers))
        return (1 if self.layout == "joined" else 2) * numbers * self.page_size * width

    @property
    def piece_pages(self) -> int:
        """The most pages of a message."""
        return max(1, PIECE_BYTES // self.page_bytes)

    def difference(self, other: PageFormat) -> str:
        """Return the first field that differs, with both values; empty where the formats are equal."""
        for field in reversed(fields(self)):  # the fingerprint differs with every other field
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return f"{field.name} is {mine}, and {theirs} at the other engine"
        return ""


class Fallback(enum.Enum):
    """Why an engine with role=decode prefills a prompt, or the rest of it, itself."""

    GONE = "gone"
    """No prefill engine answers."""
    SLOW = "slow"
    """No page came within prefill_timeout_s."""
    REFUSED = "refused"
    """The prefill engine refused: it is full, or does not know the token."""
    DIFFERS = "differs"
    """The formats differ."""
    BUSY = "busy"
    """The fetches that run have transfer_bytes already."""
    NO_PAGES = "no_pages"
    """The KV cache has no room for the prompt now."""
    FAILED = "failed"
    """This engine failed to import the pages; its log has the details."""


class TransferFailed(Exception):
    """A transport brought fewer pages than were wanted; `str(error)` says why."""

    def __init__(self, reason: Fallback, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason


@dataclass(frozen=True, slots=True, eq=False)
class WantedPages:
    """A prompt, and the pages of it that are to be fetched. Equal only to itself: an import of pages is known by it."""

    token_ids: Sequence[int]
    """Tokens of whole pages, from the prompt's first token on."""
    cache_salt: str
    request_id: str
    least_pages: int = 1
    """Fewer pages than these are not worth a fetch."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Pages that follow each other in a prompt."""

    num_pages: int
    data: bytes | Bytes
    """For each layer the keys of the pages, then their values."""


class PageTransport(Protocol):
    """Brings pages from one prefill engine. Used on the event loop."""

    @property
    def address(self) -> str:
        """The engine's address, for log lines."""

    def fetch(self, wanted: WantedPages, first_page: int, form: PageFormat) -> AsyncGenerator[Piece]:
        """Yield the pages from `first_page` to the last one, in order. Raises TransferFailed.

        A caller that stops early closes the iterator, which cancels the transfer on the other side.
        """

    async def close(self) -> None:
        """Cancel what runs, and release the connection."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The beginning of an import."""

    first_page: int
    """Pages of the prompt that the prefix cache has already; these are not fetched."""
    refused: Fallback | None = None
    """There is no room; nothing is held."""


class PageAccess(Protocol):
    """The KV pages of an engine. Every method is thread-safe and returns at once; results come from its thread.

    The messages of one thread are handled in their order. A future whose engine has ended is cancelled.
    """

    @property
    def form(self) -> PageFormat:
        """The format of the pages, with only the digest of the weights as its fingerprint."""

    def read(self, request: Request, first_page: int, most: int) -> Future[Piece]:
        """Return the next pages, at most `most`, of a submitted request with `prefill_only`, as soon as some are
        prefilled. Raises InternalError when the request has ended."""

    def open(self, wanted: WantedPages) -> Future[Opened]:
        """Take the cached pages of a prompt, and free pages for the others, until `close`."""

    def write(self, wanted: WantedPages, first_page: int, piece: Piece) -> Future[None]:
        """Write pages of an import; the pages before `first_page` are written. Raises InternalError when the import
        has ended, because the engine failed meanwhile."""

    def close(self, wanted: WantedPages, requests: Sequence[Request]) -> None:
        """Put the pages that were written into the prefix cache, give up their ownership, and let `requests`, which
        were submitted with `awaits_pages`, into the waiting queue. No error without `open`, or for a request that has
        ended."""


class PrefillElsewhere(Protocol):
    """Other engines that prefill prompts, as far as a call uses them. Used on the event loop."""

    def begin(self, requests: Sequence[Request]) -> WantedPages | None:
        """Return the pages that the sequences of a request, which have one prompt, should wait for; None: they are
        prefilled here.

        The caller submits them with `awaits_pages`, and calls `start`.
        """

    def start(self, wanted: WantedPages, requests: Sequence[Request]) -> asyncio.Task[None]:
        """Fetch the pages, then let `requests` go on. Cancelling the task ends the fetch."""
