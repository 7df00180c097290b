"""The client of an executor: of a server that the executor starts, or of one that runs.

Not responsible for: when a server starts (see async_executor.py), its process (see embedded.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep_client.access import TLS, Token


def open_client(
    kind: Any,
    model: str | None,
    address: str | None,
    settings: dict[str, str | float | bool],
    tls: TLS | bool,
    token: Token | None,
    metadata: Sequence[tuple[str, str]],
    command: Sequence[str] | None,
    start_timeout_s: float,
) -> Any:
    """Return a client of `kind`: of a server for `model`, or of the one at `address`. Raises ValueError."""
    if model is None:
        if settings or command is not None:
            given = ", ".join([*settings, *(["command"] if command is not None else [])])
            raise ValueError(f"{given}: is for a server of the executor's own, which needs `model`")
        return kind(address, tls=tls, token=token, metadata=metadata)
    if address is not None or tls or token is not None or metadata:
        raise ValueError("model: starts a server of the executor's own, which has no address, TLS, token or metadata")
    return kind.embedded(command=command, start_timeout_s=start_timeout_s, model=model, **settings)
