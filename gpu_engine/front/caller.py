"""Who calls: the client of a gRPC call, its account where the server has tenants, and what it can see of the server.

The protocols are the seam to the extension for tenants; a server without it has no accounts.

Not responsible for: what tenants there are, and their limits (extensions/tenants/accounts.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from gpu_engine.api.adapters import Adapter, AdapterKind, AdapterUse
from gpu_engine.api.errors import InvalidRequest, NotAdmitted
from gpu_engine.api.ports import AdapterAccess
from gpu_engine.api.request import GrammarOwner, ValidatedRequest
from gpu_engine.front.port.auth import HEADER


class CallerAccount(Protocol):
    """What the calls ask of a tenant's account. Used on the event loop."""

    @property
    def name(self) -> str:
        """The tenant's name."""

    @property
    def identity(self) -> bytes:
        """The identity by which answers draft for its requests (see suffix_scopes.py)."""

    @property
    def grammars(self) -> str:
        """The owner of its grammar ids: its own name, or "" for those that are shared."""

    @property
    def grammar_owner(self) -> GrammarOwner:
        """The owner for whom its grammars are compiled."""

    @property
    def is_operator(self) -> bool:
        """It may see what concerns all tenants."""

    def may_use(self, adapter: str) -> bool:
        """Return whether its requests may name the adapter."""

    def internal_id(self, request_id: str) -> str:
        """Return the name of a request inside the server, given the client's."""

    def own(self, valid: ValidatedRequest) -> ValidatedRequest:
        """Return a request under the names that it has inside the server."""

    def enter(self, sequences: int, *, together: bool) -> None:
        """Count the sequences of a request. Raises LimitExceeded. `together`: they run all at once or not at all."""

    def leave(self, sequences: int) -> None:
        """Give back what `enter` has counted."""

    def charge_prompt(self, tokens: int) -> None:
        """Charge the tokens of a prompt. Raises LimitExceeded."""

    def charge_answer(self, tokens: int) -> None:
        """Charge tokens of an answer."""


class Accounts(Protocol):
    """The accounts of a server with tenants. Used on the event loop."""

    def account_of_call(
        self, metadata: Iterable[tuple[str, str | bytes]], names: Iterable[bytes] | None
    ) -> CallerAccount | None:
        """Return the account of a call's tenant; None: the caller is no tenant.

        `names` are the names in the client's certificate.
        """


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of a gRPC call."""

    metadata: tuple[tuple[str, str | bytes], ...] = ()
    identity: bytes = b""
    """See `client_identity`."""
    account: CallerAccount | None = None
    """The account of its tenant; None: the server has no tenants, or the caller is none of them."""

    @property
    def tenant(self) -> str:
        """The name of its tenant; "" without one."""
        return "" if self.account is None else self.account.name


@dataclass(frozen=True, slots=True)
class TenantView:
    """What a request can see of a server; with tenants, only what belongs to its tenant."""

    internal_ids: Collection[str]
    """The internal ids of all running requests."""
    adapters: AdapterAccess
    account: CallerAccount | None = None

    @property
    def running(self) -> Collection[str]:
        """The ids in use, as clients name them."""
        return self.internal_ids if self.account is None else _OwnIds(self.internal_ids, self.account)

    def find_adapter(self, kind: AdapterKind, name: str) -> Adapter:
        """See `AdapterAccess.find`."""
        account = self.account
        if account is None or account.may_use(name):
            return self.adapters.find(kind, name)
        names = ", ".join(use.adapter.name for use in self.list_adapters() if use.adapter.kind is kind) or "none"
        field, noun = ("lora", "LoRA") if kind is AdapterKind.LORA else ("prompt_adapter", "prompt")
        raise InvalidRequest(field, f"there is no {noun} adapter {name!r}; there are: {names}")

    def list_adapters(self) -> list[AdapterUse]:
        """See `AdapterAccess.listed`. Only operators see how many requests use an adapter."""
        listed, account = self.adapters.listed(), self.account
        if account is None or account.is_operator:
            return listed
        return [replace(use, in_use=0) for use in listed if account.may_use(use.adapter.name)]


class _OwnIds(Collection[str]):
    """The request ids of one tenant, as its clients name them."""

    def __init__(self, internal_ids: Collection[str], account: CallerAccount) -> None:
        self._internal_ids, self._account = internal_ids, account

    def __contains__(self, request_id: object) -> bool:
        return isinstance(request_id, str) and self._account.internal_id(request_id) in self._internal_ids

    def __iter__(self) -> Iterator[str]:
        prefix = self._account.internal_id("")
        return (each.removeprefix(prefix) for each in self._internal_ids if each.startswith(prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def refuse_stranger() -> NotAdmitted:
    """Return the error of a call without a tenant."""
    return NotAdmitted(f"{HEADER}: is missing")
