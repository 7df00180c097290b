"""The account of a tenant: its limits, with a clock of the test, and the names of what is its own."""

from __future__ import annotations

import pytest

from gpu_engine.api.errors import LimitExceeded
from gpu_engine.extensions.tenants.accounts import Account
from service_runtime.tenants import Tenant


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def account(clock: Clock | None = None, share: int = 8, **limits: object) -> Account:
    return Account(Tenant(name="acme", **limits), share, 4, clock or Clock())  # type: ignore[arg-type]


def test_sequences_that_run_and_wait_are_bounded_and_given_back() -> None:
    mine = account(max_running=2, max_waiting=1)
    mine.enter(2, together=False)
    mine.enter(1, together=False)
    with pytest.raises(LimitExceeded, match=r"^max_waiting: tenant acme: 3 sequences run or wait, and 3 may$"):
        mine.enter(1, together=False)
    assert mine.sequences == 3
    mine.leave(2)
    mine.enter(2, together=False)
    with pytest.raises(LimitExceeded, match="max_running: tenant acme: the beams"):
        mine.enter(3, together=True)
    assert mine.sequences == 3, "beams that never fit are refused at once"


def test_a_tenant_without_a_limit_of_its_own_has_its_share_and_counts_no_tokens() -> None:
    mine = account(share=5)
    mine.charge_prompt(1 << 40)
    mine.charge_answer(1 << 40)
    mine.enter(5, together=False)
    with pytest.raises(LimitExceeded, match=r"max_waiting: .* 5 may"):
        mine.enter(1, together=False)
    assert account(max_waiting=3).max_sequences == 7, "it may have all 4 slots"


def test_tokens_come_back_at_the_rate_of_the_limit() -> None:
    clock = Clock()
    mine = account(clock, tokens_per_minute=600)
    mine.charge_prompt(500)
    with pytest.raises(LimitExceeded, match=r"tokens_per_minute: tenant acme: the limit is 600; try again in 10\.0 s"):
        mine.charge_prompt(200)
    clock.now_s += 9.9
    with pytest.raises(LimitExceeded, match="tokens_per_minute"):
        mine.charge_prompt(200)
    clock.now_s += 0.1
    mine.charge_prompt(200)
    with pytest.raises(LimitExceeded, match="tokens_per_minute"):
        mine.enter(1, together=False)
    clock.now_s += 3600.0
    mine.charge_prompt(600)  # an hour of rest saves one minute up
    with pytest.raises(LimitExceeded, match="tokens_per_minute"):
        mine.charge_prompt(1)


def test_a_long_prompt_or_answer_is_never_cut_and_leaves_a_debt() -> None:
    clock = Clock()
    mine = account(clock, tokens_per_minute=60)
    mine.charge_prompt(180)
    clock.now_s += 120.0
    with pytest.raises(LimitExceeded):
        mine.enter(1, together=False)
    clock.now_s += 1.0
    mine.enter(1, together=False)
    mine.charge_answer(41)
    with pytest.raises(LimitExceeded, match=r"try again in 41\.0 s"):
        mine.enter(1, together=False)


@pytest.mark.parametrize(("tokens", "seconds"), [(7, 3600.0), (40, 1800.0)])
def test_over_an_hour_no_more_than_the_limit_and_one_minute_are_let_through(tokens: int, seconds: float) -> None:
    clock, limit = Clock(), 120
    mine = account(clock, tokens_per_minute=limit)
    taken = 0
    for _ in range(int(seconds * 5)):
        try:
            mine.charge_prompt(tokens)
            taken += tokens
        except LimitExceeded:
            pass
        clock.now_s += 0.2
    assert limit * seconds / 60 - tokens <= taken <= limit * (seconds / 60 + 1)


def test_a_file_that_was_read_again_changes_limits_and_keeps_what_is_used() -> None:
    mine = account(tokens_per_minute=1000)
    mine.enter(2, together=False)
    mine.charge_prompt(900)
    mine.renew(Tenant(name="acme", tokens_per_minute=50, max_running=1, max_waiting=1), 8)
    assert mine.sequences == 2
    with pytest.raises(LimitExceeded, match="max_waiting"):
        mine.enter(1, together=False)
    mine.charge_prompt(50)
    with pytest.raises(LimitExceeded, match="the limit is 50"):
        mine.charge_prompt(1)
    mine.renew(Tenant(name="acme"), 8)
    mine.charge_prompt(10_000)


def test_what_is_shared_has_one_name_for_all_and_the_rest_the_tenants_own() -> None:
    own, shared = account(), account(shares=frozenset({"grammars", "draft_index"}))
    assert (own.grammars, shared.grammars) == ("acme", "")
    assert own.identity != shared.identity
    assert own.internal_id("x") == "acme/x"
