"""What the front needs of the extension that makes receipts, and of the receipt of one sequence.

Invariant: a receipt names exactly the tokens that count for the client. Not responsible for: what a receipt says (see
extensions/receipts/).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpu_engine.api.request import FinishReason, Request, Telemetry


class Receipt(Protocol):
    """The receipt of one sequence while it is written."""

    def push(self, token_ids: Sequence[int]) -> None:
        """Add tokens of the answer."""

    def write(self, finish: FinishReason, telemetry: Telemetry) -> str:
        """Return the signed receipt of the sequence, which has ended."""


class Receipts(Protocol):
    """Makes the receipts of a server. Used on the event loop."""

    @property
    def public_key(self) -> str:
        """The key that checks them, as the text of a JSON Web Key."""

    async def ready(self) -> None:
        """Wait until the server knows what its receipts say of the model. Raises LockstepError."""

    def begin(self, request: Request) -> Receipt | None:
        """Return the receipt of a sequence; None: its request asks for none."""
