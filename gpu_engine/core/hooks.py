"""Seams of the loop that extensions fill: which sequence gets the next slot, and pages from and for other engines.

Invariant: the core imports no extension. An engine without hooks is whole: its waiting queue decides, and its pages are
its own.

Not responsible for: the extensions, and when one is wanted (see extensions/).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gpu_engine.api.page_transfer import PageAccess
from gpu_engine.api.request import Request

if TYPE_CHECKING:
    from gpu_engine.api.config import EngineConfig
    from gpu_engine.core.executor import Executor
    from gpu_engine.core.kv_cache import PageAllocator
    from gpu_engine.core.running import RunningSequence
    from gpu_engine.core.scheduler import SlotOrder
    from gpu_engine.model.loaded_model import LoadedModel


class Transfers(Protocol):
    """Pages that are read for another engine, or imported from one. Used only by the engine thread."""

    def __bool__(self) -> bool:
        """Return whether `serve` has something to look at."""

    def warm_up(self) -> None:
        """Run every copy once, after the executor's own warm-up."""

    def serve(self) -> None:
        """Answer the reads whose pages are prefilled."""

    def await_pages(self, sequence: RunningSequence) -> None:
        """Keep a submitted sequence out of the waiting queue until its import is closed."""

    def ended(self, sequence: RunningSequence) -> bool:
        """Forget a sequence that ends. True: it waited for an import, and was in no queue."""

    def reset(self) -> None:
        """Give up every import without indexing a page, after a failed step."""

    @property
    def owned(self) -> list[list[int]]:
        """The pages of each import, for checks."""

    def access(
        self, post: Callable[[Callable[[], None]], None], find: Callable[[Request], RunningSequence | None]
    ) -> PageAccess:
        """Return what other threads use: `post` leaves a message for the engine's thread, which calls `find`."""


@dataclass(frozen=True, slots=True)
class TransferParts:
    """The parts of an engine that transfers work on."""

    config: EngineConfig
    model: LoadedModel
    executor: Executor
    allocator: PageAllocator
    admit: Callable[[RunningSequence], None]
    """Puts a sequence into the waiting queue."""


@dataclass(frozen=True, slots=True)
class EngineHooks:
    """What extensions add to an engine. Each is called once, when the engine is built."""

    slot_order: Callable[[], SlotOrder[RunningSequence]] | None = None
    """None: the first sequence of the waiting queue gets the next slot."""
    transfers: Callable[[TransferParts], Transfers] | None = None
    """None: the engine's role is "both", and no page leaves or comes."""


NO_HOOKS = EngineHooks()
