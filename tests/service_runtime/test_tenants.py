"""The file of tenants: what it may say, and what is wrong with it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from service_runtime.tenants import Tenant, TenantTable, parse_tenants, share_of

TOKEN, OTHER = "0123456789abcdef-one", "0123456789abcdef-two"


def parse(text: str) -> TenantTable:
    return parse_tenants(text.encode(), Path("t"))


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def test_a_tenant_has_tokens_certificates_and_limits() -> None:
    table = parse(
        f"""
        [tenants.acme]
        tokens = ["{TOKEN}"]
        token_sha256 = ["{digest(OTHER).hex()}"]
        certificates = ["job 7"]
        weight = 2
        max_running = 3
        tokens_per_minute = 1000
        shares = ["prefix_cache"]
        adapters = ["legal"]
        operator = true
        [tenants.beta]
        certificates = ["job 8"]
        """
    )
    acme = table.by_name["acme"]
    assert (acme.weight, acme.max_running, acme.max_waiting, acme.tokens_per_minute) == (2.0, 3, None, 1000)
    assert acme.operator
    assert [acme.shares_in(what) for what in ("prefix_cache", "grammars")] == [True, False]
    assert [acme.may_use(name) for name in ("legal", "other")] == [True, False]
    assert table.by_digest == {digest(TOKEN): acme, digest(OTHER): acme}
    assert table.operator_digests == table.digests
    assert table.of_certificate([b"x", b"job 7"]) is acme
    assert table.of_certificate([b"x"]) is None
    assert table.of_certificate([b"job 7", b"job 8"]) is None, "a certificate with the names of two is nobody's"
    assert table.by_name["beta"] == Tenant(name="beta")
    assert TOKEN not in repr(table)
    assert (share_of(acme, table, 30), share_of(table.by_name["beta"], table, 30)) == (20, 10)


def test_every_adapter_may_be_used_by_a_tenant_that_says_so() -> None:
    assert parse(f'[tenants.a]\ntokens=["{TOKEN}"]\nadapters=["*"]').by_name["a"].may_use("any")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tenants.a", r"tenant_file: t: Expected"),
        ("", "tenant_file: t has no tenant"),
        ("other = 1", "'other' is unknown"),
        (f'[tenants."a b"]\ntokens=["{TOKEN}"]', "tenants.a b: a name has"),
        ("[tenants]\na = 1", "tenants.a: is no table"),
        ("[tenants.a]", "tenants.a: needs tokens"),
        ('[tenants.a]\ntokens=["short"]', r"tenants.a.tokens\[0\]: a token has at least 16"),
        ('[tenants.a]\ntoken_sha256=["AB"]', r"tenants.a.token_sha256\[0\]: is no SHA-256"),
        ('[tenants.a]\ntokens="x"', "tenants.a.tokens: must be a list"),
        (f'[tenants.a]\ntokens=["{TOKEN}"]\nmax_runing=1', "tenants.a.max_runing: is unknown"),
        (f'[tenants.a]\ntokens=["{TOKEN}"]\nmax_running=-1', "tenants.a.max_running: is -1"),
        (f'[tenants.a]\ntokens=["{TOKEN}"]\nmax_running=true', "tenants.a.max_running: is True"),
        (f'[tenants.a]\ntokens=["{TOKEN}"]\nweight=0', "tenants.a.weight: is 0"),
        (f'[tenants.a]\ntokens=["{TOKEN}"]\noperator=1', "tenants.a.operator: is 1"),
        (f'[tenants.a]\ntokens=["{TOKEN}"]\nshares=["all"]', "tenants.a.shares: 'all' is not one of"),
        (f'[tenants.a]\ntokens=["{TOKEN}"]\n[tenants.b]\ntokens=["{TOKEN}"]', "tenants.b: has a token of the tenant a"),
        (
            '[tenants.a]\ncertificates=["x"]\n[tenants.b]\ncertificates=["x"]',
            "tenants.b: has a certificate of the tenant a",
        ),
    ],
)
def test_what_is_wrong_is_named_and_no_token_is(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse(text)
    assert TOKEN not in str(caught.value)
