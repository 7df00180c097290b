"""Tenants from a file: who calls, by token or by client certificate, and what that caller may use.

The file is TOML, with a table for each tenant (docs/access.md). Invariant: a token and a certificate name belong to
one tenant; tokens are stored as digests; a file that is malformed is an error that names the setting, the file and the
key, never the token.

Not responsible for: the headers that carry a token, or keeping the limits (see gpu_engine/extensions/tenants/).
"""

from __future__ import annotations

import hashlib
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from service_runtime.from_files import FromFiles, read_bytes
from service_runtime.tokens import Digests, check_token

MAX_NAME_CHARS = 64
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_NAME_CHARS}}}")
_DIGEST = re.compile(r"[0-9a-f]{64}")

PREFIX_CACHE, DRAFT_INDEX, GRAMMARS = "prefix_cache", "draft_index", "grammars"
SHARABLE = (PREFIX_CACHE, DRAFT_INDEX, GRAMMARS)
"""What a tenant may have in common with the other tenants that share it."""
EVERY = "*"
"""As the only entry of `adapters`: every adapter of the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant; 0 means no limit unless the field says otherwise."""

    name: str
    weight: float = 1.0
    """Share of the engine and of the compile workers, relative to the weights of others, while several wait."""
    max_running: int = 0
    """Sequences with a slot."""
    max_waiting: int | None = None
    """The most waiting sequences; None: running and waiting ones together have a share of the server's by weight."""
    tokens_per_minute: int = 0
    """Tokens of prompts and answers; so many may also come at once."""
    max_compilations: int = 2
    """Grammars that are compiled at once."""
    max_waiting_compilations: int = 16
    """Grammars that wait for one of these; 0: none may wait."""
    compiled_grammar_bytes: int = 64 << 20
    """Memory of its compiled grammars, as far as they are kept for later requests."""
    shares: frozenset[str] = frozenset()
    """Names in SHARABLE."""
    adapters: frozenset[str] = frozenset()
    """Names of adapters that it may use."""
    operator: bool = False
    """It may call what concerns all tenants."""

    def shares_in(self, what: str) -> bool:
        """Return whether it has `what`, one of SHARABLE, in common with others."""
        return what in self.shares

    def may_use(self, adapter: str) -> bool:
        """Return whether it may name the adapter."""
        return adapter in self.adapters or EVERY in self.adapters


@dataclass(frozen=True, slots=True)
class TenantTable:
    """The tenants of one file."""

    by_name: Mapping[str, Tenant] = field(default_factory=dict)
    by_digest: Mapping[bytes, Tenant] = field(default_factory=dict)
    """The tenant of each token, by the SHA-256 of the token."""
    by_certificate: Mapping[bytes, Tenant] = field(default_factory=dict)
    """The tenant of each name of a client certificate."""

    def of_certificate(self, names: Iterable[bytes]) -> Tenant | None:
        """Return the tenant of a certificate with these names; None if no tenant or several have them."""
        found = {tenant.name: tenant for name in names if (tenant := self.by_certificate.get(name)) is not None}
        return next(iter(found.values())) if len(found) == 1 else None

    @property
    def digests(self) -> Digests:
        """The digests of all tokens."""
        return tuple(self.by_digest)

    @property
    def operator_digests(self) -> Digests:
        """The digests of operators' tokens."""
        return tuple(digest for digest, tenant in self.by_digest.items() if tenant.operator)


def tenant_file(path: Path, setting: str = "tenant_file") -> FromFiles[TenantTable]:
    """Return the tenants of the file, read again when it changes. Raises ValueError with the key and the reason."""
    return FromFiles([path], lambda: parse_tenants(read_bytes(setting, path), path, setting))


def parse_tenants(content: bytes, path: Path, setting: str = "tenant_file") -> TenantTable:
    """Return the tenants. Raises ValueError."""
    where = f"{setting}: {path}"
    try:
        document = tomllib.loads(content.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{where}: {error}") from error
    if unknown := document.keys() - {"tenants"}:
        raise ValueError(f"{where}: {min(unknown)!r} is unknown; the only table is `tenants`")
    tables = document.get("tenants")
    if not isinstance(tables, dict) or not tables:
        raise ValueError(f"{where} has no tenant; [tenants.NAME] begins one")
    by_name: dict[str, Tenant] = {}
    by_digest: dict[bytes, Tenant] = {}
    by_certificate: dict[bytes, Tenant] = {}
    for name, table in tables.items():
        place = f"{where}: tenants.{name}"
        if not _NAME.fullmatch(name):
            raise ValueError(f"{place}: a name has 1 to {MAX_NAME_CHARS} letters, digits, '_' and '-'")
        if not isinstance(table, dict):
            raise ValueError(f"{place}: is no table; [tenants.{name}] begins one")
        tenant = by_name[name] = _tenant(name, table, place)
        digests, certificates = _digests(table, place), [text.encode() for text in _texts(table, "certificates", place)]
        if not digests and not certificates:
            raise ValueError(f"{place}: needs tokens, token_sha256 or certificates")
        for known, keys, noun in ((by_digest, digests, "token"), (by_certificate, certificates, "certificate")):
            for key in keys:
                if (other := known.setdefault(key, tenant)) is not tenant:
                    raise ValueError(f"{place}: has a {noun} of the tenant {other.name}")
    return TenantTable(by_name, by_digest, by_certificate)


_IDENTITIES = ("tokens", "token_sha256", "certificates")
_COUNTS = (
    *("max_running", "max_waiting", "tokens_per_minute", "max_compilations"),
    *("max_waiting_compilations", "compiled_grammar_bytes"),
)
_LISTS = ("shares", "adapters")


def _tenant(name: str, table: dict[str, Any], place: str) -> Tenant:
    known = {each.name for each in fields(Tenant)} - {"name"} | set(_IDENTITIES)
    if unknown := table.keys() - known:
        raise ValueError(f"{place}.{min(unknown)}: is unknown; there are {', '.join(sorted(known))}")
    values: dict[str, Any] = {}
    for key in table.keys() & set(_COUNTS):
        value = values[key] = table[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{place}.{key}: is {value!r}, must be a whole number from 0 on")
    for key in table.keys() & set(_LISTS):
        values[key] = frozenset(_texts(table, key, place))
    if wrong := values.get("shares", frozenset()) - set(SHARABLE):
        raise ValueError(f"{place}.shares: {min(wrong)!r} is not one of {', '.join(SHARABLE)}")
    weight = table.get("weight", 1.0)
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0.01 <= weight <= 100:
        raise ValueError(f"{place}.weight: is {weight!r}, must be a number in [0.01, 100]")
    operator = table.get("operator", False)
    if not isinstance(operator, bool):
        raise ValueError(f"{place}.operator: is {operator!r}, must be true or false")
    return Tenant(name=name, weight=float(weight), operator=operator, **values)


def _digests(table: dict[str, Any], place: str) -> list[bytes]:
    digests = []
    for i, text in enumerate(_texts(table, "tokens", place)):
        if (problem := check_token(text.encode())) is not None:
            raise ValueError(f"{place}.tokens[{i}]: {problem}")
        digests.append(hashlib.sha256(text.encode()).digest())
    for i, text in enumerate(_texts(table, "token_sha256", place)):
        if not _DIGEST.fullmatch(text):
            raise ValueError(f"{place}.token_sha256[{i}]: is no SHA-256 in 64 small hexadecimal digits")
        digests.append(bytes.fromhex(text))
    return digests


def _texts(table: dict[str, Any], key: str, place: str) -> list[str]:
    values = table.get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise ValueError(f"{place}.{key}: must be a list of texts that are not empty")
    return values


def share_of(tenant: Tenant, table: TenantTable, total: int) -> int:
    """Return the tenant's part of `total`, by weight, at least 1."""
    weights = math.fsum(each.weight for each in table.by_name.values())
    return max(1, int(total * tenant.weight / weights)) if weights else total
