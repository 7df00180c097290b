"""With masked and with unmasked drafts of a drafting network, the tokens are those of one token a step."""

from __future__ import annotations

from collections import Counter

import pytest

from gpu_engine.model.loader import LoadedModel
from shared_mem.layout import Stage
from tests.fakes import EOS
from tests.gpu_engine.core.guided_requests import legal
from tests.gpu_engine.harness import (
    UNHURRIED_MS,
    answer_all,
    ask,
    config,
    tokens,
    with_drafts,
)
from tests.gpu_engine.toy_sidecar import guided_engine

PATIENT = {"row_timeout_ms": UNHURRIED_MS, "draft_timeout_ms": UNHURRIED_MS}


@pytest.mark.parametrize("masks", ["on", "off"])
def test_each_row_is_requested_once(
    llama: LoadedModel, draft_models: dict[str, str], masks: str, overlap: bool
) -> None:
    settings = with_drafts(3, draft_model=draft_models["same"], draft_masks=masks, overlap=overlap, **PATIENT)
    with guided_engine(llama, settings) as (engine, grammar):
        answers = [ask(tokens(20, seed), grammar="90", max_tokens=120) for seed in range(3)]
        answer_all(engine, answers)
        records = grammar.sidecar.records
    assert all(map(legal, answers))
    # A stop token has no row after it, so the engine requests such a row again.
    wanted = [record for record in records if EOS not in record.drafts]
    verified = Counter(record.need_rows.bit_count() for record in wanted if record.stage == Stage.VERIFY)
    drafted = sum(record.stage not in (Stage.VERIFY, Stage.PROPOSE) for record in records)
    if masks == "on":
        assert set(verified) == {1}
    else:
        assert drafted == 0
        assert verified[4] > 3
    # A row is identified by the tokens before it.
    # Two records request the same row only if tokens were rejected between them.
    rows = Counter(
        (record.slot, record.commit_pos + len(record.committed) + row, record.drafts[:row])
        for record in wanted
        for row in range(4)
        if record.need_rows >> row & 1 and record.stage != Stage.PROPOSE
    )
    assert set(rows.values()) == {1}


def test_draft_masks_are_on_or_off() -> None:
    with pytest.raises(ValueError, match="draft_masks: 'auto' is not on or off"):
        config(draft_masks="auto")
