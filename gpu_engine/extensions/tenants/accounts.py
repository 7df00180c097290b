"""The tenants of a server, and what each of them uses now.

A tenant's requests are its own by their names: request ids, salts of the prefix cache and owners of grammars begin with
the tenant's name, which contains no separator. So no table of the engine needs to know tenants to keep
them apart. Invariant: what `enter` has counted is given back by one `leave`; a refusal counts nothing. Tokens are a
bucket that refills at the limit's rate and holds one minute of it. An answer that runs is never cut: it may leave the
bucket in debt, which the next request waits for. So over any time the tokens exceed the limit by no more than the
answers that ran at its end. Used on the event loop.

Not responsible for: slots and their order between tenants (see fair_shares.py), compilations
(see sidecar/compile_admission.py).
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from gpu_engine.api.admission import EngineAdmission
from gpu_engine.api.errors import LimitExceeded
from gpu_engine.api.request import GrammarOwner, TenantShare, ValidatedRequest
from gpu_engine.front.port.auth import HEADER, bearer
from service_runtime.from_files import FromFiles
from service_runtime.tenants import DRAFT_INDEX, GRAMMARS, PREFIX_CACHE, Tenant, TenantTable, share_of

MINUTE_S = 60.0
GATEWAY = Tenant(name="<gateway>", operator=True)
"""The gateway process that the server starts: its own calls, not its clients'. No file can have its name."""


class Account:
    """One tenant, from its first call to the end of the server."""

    def __init__(self, tenant: Tenant, share: int, slots: int, clock_s: Callable[[], float]) -> None:
        """Args: see below.

        share: sequences that run or wait, of a tenant without `max_waiting`.
        slots: the engine's.
        """
        self._slots, self._clock_s = slots, clock_s
        self.tenant, self._share = tenant, share
        self.sequences = 0
        """The sequences of running requests."""
        self.prompt_tokens = self.answer_tokens = 0
        """Tokens since the start of the server."""
        self.requests: Counter[str] = Counter()
        """That have ended, by the name of their gRPC status."""
        self.refusals: Counter[str] = Counter()
        """Refused requests, by the name of the limit."""
        self._tokens = float(tenant.tokens_per_minute)
        """Tokens in the bucket; negative: debt."""
        self._refilled_s = clock_s()

    def renew(self, tenant: Tenant, share: int) -> None:
        """Take the limits of a file that was read again."""
        if tenant is self.tenant and share == self._share:
            return
        self._refill()
        limit, before = tenant.tokens_per_minute, self.tenant.tokens_per_minute
        self._tokens = float(limit) if not before else min(self._tokens, float(limit))
        self.tenant, self._share = tenant, share

    # -- names ---------------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The tenant's name."""
        return self.tenant.name

    def internal_id(self, request_id: str) -> str:
        """Return the name of a request inside the server, given the client's."""
        return f"{self.name}/{request_id}"

    @property
    def identity(self) -> bytes:
        """The identity by which answers draft for its requests (see front/suffix_scopes.py)."""
        return b"tenants" if self.tenant.shares_in(DRAFT_INDEX) else b"tenant\0" + self.name.encode()

    @property
    def grammars(self) -> str:
        """The owner of its grammars: its own name, or "" for grammars that tenants share."""
        return "" if self.tenant.shares_in(GRAMMARS) else self.name

    @property
    def grammar_owner(self) -> GrammarOwner:
        """For whom its grammars are compiled."""
        tenant = self.tenant
        return GrammarOwner(
            self.grammars,
            tenant.name,
            tenant.max_compilations,
            tenant.max_waiting_compilations,
            tenant.compiled_grammar_bytes,
            tenant.weight,
        )

    def own(self, valid: ValidatedRequest) -> ValidatedRequest:
        """Return a request under the names that it has inside the server."""
        tenant, params = self.tenant, valid.params
        space = "" if tenant.shares_in(PREFIX_CACHE) else tenant.name
        scheduling = replace(
            params.scheduling,
            cache_salt=f"{space}\0{params.scheduling.cache_salt}",
            tenant=TenantShare(tenant.name, tenant.weight, tenant.max_running),
        )
        grammar = None if params.grammar is None else replace(params.grammar, owner=self.grammar_owner)
        return replace(
            valid,
            request_id=self.internal_id(valid.request_id),
            params=replace(params, scheduling=scheduling, grammar=grammar),
        )

    @property
    def is_operator(self) -> bool:
        """It may see what concerns all tenants."""
        return self.tenant.operator

    def may_use(self, adapter: str) -> bool:
        """Return whether its requests may name the adapter."""
        return self.tenant.may_use(adapter)

    # -- limits --------------------------------------------------------------------------------------------------------

    def enter(self, sequences: int, *, together: bool) -> None:
        """Count the sequences of a request. Raises LimitExceeded. `together`: they run all at once or not at all."""
        tenant = self.tenant
        if together and 0 < tenant.max_running < sequences:
            problem = f"the beams of a search run together, and {sequences} are more than {tenant.max_running}"
            raise self._refusal("max_running", problem)
        if self._balance() <= 0:
            raise self._no_tokens(1)
        if self.sequences + sequences > self.max_sequences:
            problem = f"{self.sequences} sequences run or wait, and {self.max_sequences} may"
            raise self._refusal("max_waiting", problem)
        self.sequences += sequences

    def leave(self, sequences: int) -> None:
        """Give back what `enter` has counted."""
        self.sequences -= sequences
        assert self.sequences >= 0, self

    def charge_prompt(self, tokens: int) -> None:
        """Take the tokens of a prompt out of the bucket; one with more than a minute's needs a full bucket. Raises
        LimitExceeded."""
        limit = self.tenant.tokens_per_minute
        if limit and self._balance() < min(tokens, limit):
            raise self._no_tokens(min(tokens, limit))
        self.prompt_tokens += tokens
        self._take(tokens)

    def charge_answer(self, tokens: int) -> None:
        """Take tokens of an answer out of the bucket."""
        self.answer_tokens += tokens
        self._take(tokens)

    def _take(self, tokens: int) -> None:
        if self.tenant.tokens_per_minute:
            self._tokens -= tokens

    @property
    def max_sequences(self) -> int:
        """The most sequences that run or wait."""
        waiting = self.tenant.max_waiting
        return self._share if waiting is None else (self.tenant.max_running or self._slots) + waiting

    def _balance(self) -> float:
        if not self.tenant.tokens_per_minute:
            return 1.0
        self._refill()
        return self._tokens

    def _refill(self) -> None:
        now_s, limit = self._clock_s(), self.tenant.tokens_per_minute
        self._tokens = min(float(limit), self._tokens + (now_s - self._refilled_s) * limit / MINUTE_S)
        self._refilled_s = now_s

    def _no_tokens(self, needed: int) -> LimitExceeded:
        limit = self.tenant.tokens_per_minute
        wait_s = (needed - self._tokens) * MINUTE_S / limit
        return self._refusal("tokens_per_minute", f"the limit is {limit}; try again in {wait_s:.1f} s")

    def _refusal(self, limit: str, problem: str) -> LimitExceeded:
        self.refusals[limit] += 1
        return LimitExceeded(f"{limit}: tenant {self.name}: {problem}")

    def __repr__(self) -> str:
        return f"<Account {self.name} sequences={self.sequences} tokens={self._tokens:.0f}>"


class Tenants:
    """The accounts of a server. Made and used on the event loop."""

    def __init__(
        self,
        file: FromFiles[TenantTable],
        *,
        admission: EngineAdmission,
        gateway_digest: bytes = b"",
    ) -> None:
        """Args: see below.

        file: the tenants' file.
        admission: the engine's, which the tenants share.
        gateway_digest: SHA-256 of the token of the server's own gateway process; b"": there is none.
        """
        self._file, self._admission = file, admission
        self._gateway = {gateway_digest: GATEWAY} if gateway_digest else {}
        self._accounts: dict[str, Account] = {}

    @property
    def table(self) -> TenantTable:
        """The tenants of the current file."""
        return self._file.get()

    def of_token(self, token: bytes) -> Tenant | None:
        """Return the tenant of a token. The time of the search tells no more than a part of a digest."""
        digest = hashlib.sha256(token).digest()
        return self._gateway.get(digest) or self.table.by_digest.get(digest)

    def find(self, metadata: Iterable[tuple[str, str | bytes]], names: Iterable[bytes] | None) -> Tenant | str:
        """Return the tenant of a call, or why there is none. A token decides, where one was sent.

        `names` are the names in the client's certificate.
        """
        values = [value for key, value in metadata if key == HEADER]
        if not values and names:
            found = self.table.of_certificate(names)
            return "is missing, and the client's certificate is of no tenant" if found is None else found
        token = bearer(values)
        if isinstance(token, str):
            return token
        return self.of_token(token) or "holds an unknown token"

    def account_of_call(
        self, metadata: Iterable[tuple[str, str | bytes]], names: Iterable[bytes] | None
    ) -> Account | None:
        """Return the account of a call's tenant, or None if the caller is no tenant. Takes the arguments of `find`."""
        found = self.find(metadata, names)
        return None if isinstance(found, str) else self.account_of(found)

    def account_of(self, tenant: Tenant) -> Account:
        """Return the account of a tenant, with the limits that it has now."""
        share = share_of(tenant, self.table, self._admission.max_sequences)
        account = self._accounts.get(tenant.name)
        if account is None:
            account = self._accounts[tenant.name] = Account(tenant, share, self._admission.max_running, time.monotonic)
        account.renew(tenant, share)
        return account

    def ended(self, name: str, status: str) -> None:
        """Count a request of the tenant of that name, which has ended with this gRPC status."""
        if (account := self._accounts.get(name)) is not None:
            account.requests[status] += 1

    @property
    def accounts(self) -> Collection[Account]:
        """The accounts of tenants that have called."""
        return tuple(self._accounts.values())

    def __repr__(self) -> str:
        return f"<Tenants {', '.join(self.table.by_name)}>"
