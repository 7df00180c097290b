"""Pages of sequences that are prefilled for another engine, and pages that another engine sends.

Invariant: an import owns its pages from `open` to `close`, as a sequence does; `close` indexes those that were written,
and gives them up, so that the sequences that waited find them as they find any prefix. A page that was not written is
never indexed. A sequence that waits for an import is in no queue until that is closed, and it may end meanwhile.

Not responsible for: what the pages are asked for (see remote_prefill.py), copying (see mover.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from gpu_engine.api.errors import InternalError
from gpu_engine.api.page_transfer import Fallback, Opened, PageFormat, Piece, WantedPages
from gpu_engine.api.request import Request
from gpu_engine.core.hooks import TransferParts
from gpu_engine.core.kv_cache import PageAllocator
from gpu_engine.core.running import RunningSequence
from gpu_engine.extensions.transfer.mover import PageMover, page_format


@dataclass(slots=True, eq=False)
class _Import:
    """The pages of a prompt while they come."""

    pages: list[int]
    num_cached: int
    """The number of first pages that the prefix cache had."""
    num_written: int
    """Pages, from the first on, with their keys and values."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """A call of `PageTransfers.read` whose pages are not prefilled yet."""

    first_page: int
    most: int
    done: Future[Piece]


class PageTransfers:
    """The `Transfers` of an engine. Used only by the engine thread.

    Args:
        allocator: owns the pages.
        mover: copies pages.
        max_bytes: the most bytes of the pages that running imports may wait for; a single import may have more.
        admit: puts a sequence into the waiting queue.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        mover: PageMover,
        max_bytes: int,
        admit: Callable[[RunningSequence], None],
    ) -> None:
        self._allocator, self.mover, self._admit = allocator, mover, admit
        self._max_pages = max_bytes // mover.form.page_bytes
        self._readings: dict[RunningSequence, _Reading] = {}
        self._imports: dict[WantedPages, _Import] = {}
        self._awaiting: dict[Request, RunningSequence] = {}
        """Sequences whose pages are being imported."""

    def __bool__(self) -> bool:
        """Return whether `serve` has something to look at."""
        return bool(self._readings)

    @classmethod
    def of(cls, parts: TransferParts) -> PageTransfers:
        """Return the transfers of an engine, which the loop's hook asks for."""
        config, executor = parts.config, parts.executor
        mover = PageMover(executor.stream, executor.pages, page_format(config, parts.model, executor.pages))
        return cls(parts.allocator, mover, config.transfer.transfer_bytes, parts.admit)

    def warm_up(self) -> None:
        """Run every copy once."""
        self.mover.warm_up()

    def access(
        self, post: Callable[[Callable[[], None]], None], find: Callable[[Request], RunningSequence | None]
    ) -> PageTransferClient:
        """See `Transfers`."""
        return PageTransferClient(self, post, find)

    # -- a sequence that is prefilled for another engine --------------------------------------------------------------

    def read(self, sequence: RunningSequence | None, first_page: int, most: int, done: Future[Piece]) -> None:
        """Set the result of `done` once pages from `first_page` on are prefilled; None: the sequence has ended."""
        if sequence is None:
            _fail(done, InternalError("the sequence has ended"))
            return
        self._readings[sequence] = _Reading(first_page, most, done)
        self.serve()

    def serve(self) -> None:
        """Answer the calls of `read` whose pages are prefilled."""
        for sequence, reading in list(self._readings.items()):
            ready = sequence.prefilled // self._allocator.page_size if sequence.slot >= 0 else 0
            if ready <= reading.first_page:
                continue
            del self._readings[sequence]
            if not reading.done.set_running_or_notify_cancel():
                continue
            pages = sequence.pages[reading.first_page : min(ready, reading.first_page + reading.most)]
            try:
                reading.done.set_result(Piece(len(pages), self.mover.read(pages)))
            except Exception as error:  # of a device; it ends the iteration as well
                reading.done.set_exception(error)
                raise

    def ended(self, sequence: RunningSequence) -> bool:
        """Forget a sequence that ends. True: it waited for an import, and was in no queue."""
        reading = self._readings.pop(sequence, None)
        if reading is not None:
            _fail(reading.done, InternalError("the sequence has ended"))
        return self._awaiting.pop(sequence.request, None) is not None

    # -- pages that come ----------------------------------------------------------------------------------------------

    def await_pages(self, sequence: RunningSequence) -> None:
        """Keep a submitted sequence out of the waiting queue until its import is closed."""
        self._awaiting[sequence.request] = sequence

    def open(self, wanted: WantedPages, done: Future[Opened]) -> None:
        """Begin an import, which holds its pages until `close` even if the caller has given up."""
        opened = self._open(wanted)
        if done.set_running_or_notify_cancel():
            done.set_result(opened)

    def _open(self, wanted: WantedPages) -> Opened:
        allocator, num_pages = self._allocator, len(wanted.token_ids) // self._allocator.page_size
        pages = allocator.match_prefix(wanted.token_ids, wanted.cache_salt)
        cached, missing = len(pages), num_pages - len(pages)
        if missing < wanted.least_pages:
            allocator.free(pages)
            return Opened(num_pages)
        refused = None
        coming = sum(len(each.pages) - each.num_written for each in self._imports.values())
        if coming and coming + missing > self._max_pages:
            refused = Fallback.BUSY
        elif not allocator.grow(pages, len(wanted.token_ids)):
            refused = Fallback.NO_PAGES
        if refused is not None:
            allocator.free(pages)
            return Opened(0, refused)
        self._imports[wanted] = _Import(pages, cached, cached)
        return Opened(cached)

    def write(self, wanted: WantedPages, first_page: int, piece: Piece, done: Future[None]) -> None:
        """Write pages of an import, after the pages that are written."""
        if not done.set_running_or_notify_cancel():
            return
        found = self._imports.get(wanted)
        if found is None:
            done.set_exception(InternalError("the import of pages has ended"))
            return
        assert first_page == found.num_written, (first_page, found)
        try:
            self.mover.write(found.pages[first_page : first_page + piece.num_pages], piece.data)
        except Exception as error:  # told to the caller: the engine's iteration has not failed
            done.set_exception(error)
            return
        found.num_written += piece.num_pages
        done.set_result(None)

    def close(self, wanted: WantedPages, requests: Sequence[Request]) -> None:
        """Index what was written, let `requests` into the waiting queue, and give the pages up, in this order."""
        found = self._imports.pop(wanted, None)
        try:
            if found is not None:
                self._index(wanted, found)
        finally:
            for request in requests:
                sequence = self._awaiting.pop(request, None)
                if sequence is not None:
                    self._admit(sequence)
            if found is not None:
                self._allocator.free(found.pages)

    def _index(self, wanted: WantedPages, found: _Import) -> None:
        """Index the written pages, or take the pages with the same tokens that the index has by now."""
        tokens, allocator = wanted.token_ids[: found.num_written * self._allocator.page_size], self._allocator
        indexed = allocator.insert(tokens, found.pages, found.num_cached, wanted.cache_salt)
        while indexed < found.num_written:
            others = allocator.match_prefix(tokens, wanted.cache_salt)
            exchanged, found.pages[: len(others)] = found.pages[: len(others)], others
            allocator.free(exchanged)
            indexed = allocator.insert(tokens, found.pages, len(others), wanted.cache_salt)

    def reset(self) -> None:
        """Give up every import without indexing a page, after a failed step."""
        for found in self._imports.values():
            self._allocator.free(found.pages)
        self._imports.clear()

    @property
    def owned(self) -> list[list[int]]:
        """The pages of each import, for checks."""
        return [found.pages for found in self._imports.values()]

    def __repr__(self) -> str:
        return f"<PageTransfers {len(self._readings)} reads, {len(self._imports)} imports>"


class PageTransferClient:
    """`PageAccess` of an engine: leaves messages in the inbox of its thread."""

    def __init__(
        self,
        transfers: PageTransfers,
        post: Callable[[Callable[[], None]], None],
        find: Callable[[Request], RunningSequence | None],
    ) -> None:
        """Args: `post` leaves a message for the engine's thread, on which `find` returns the sequence of a request."""
        self._transfers, self._post, self._find = transfers, post, find

    @property
    def form(self) -> PageFormat:
        """The format of the pages."""
        return self._transfers.mover.form

    def read(self, request: Request, first_page: int, most: int) -> Future[Piece]:
        """See `PageAccess`."""
        done: Future[Piece] = Future()
        self._post(lambda: self._transfers.read(self._find(request), first_page, most, done))
        return done

    def open(self, wanted: WantedPages) -> Future[Opened]:
        """See `PageAccess`."""
        done: Future[Opened] = Future()
        self._post(lambda: self._transfers.open(wanted, done))
        return done

    def write(self, wanted: WantedPages, first_page: int, piece: Piece) -> Future[None]:
        """See `PageAccess`."""
        done: Future[None] = Future()
        self._post(lambda: self._transfers.write(wanted, first_page, piece, done))
        return done

    def close(self, wanted: WantedPages, requests: Sequence[Request]) -> None:
        """See `PageAccess`."""
        self._post(lambda: self._transfers.close(wanted, requests))

    def __repr__(self) -> str:
        return f"<PageTransferClient of {self._transfers!r}>"


def _fail(done: Future[Piece], error: Exception) -> None:
    if done.set_running_or_notify_cancel():
        done.set_exception(error)
