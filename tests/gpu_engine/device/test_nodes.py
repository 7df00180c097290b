"""The number of graph nodes of a step without its models, so that a new node is a decision and not an accident.

A node costs one or two microseconds of every step. The nodes of a model depend on its family and on transformers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_engine.model.loader import LoadedModel, load_model
from shared_mem.channel import EngineEnd
from shared_mem.layout import Layout
from shared_mem.segment import Segment
from tests.gpu_engine import eagle, tiny
from tests.gpu_engine.device.device_engine import RecordedDevice, opaque_launches
from tests.gpu_engine.device.device_requests import INTERPRETED
from tests.gpu_engine.harness import config, with_drafts

pytestmark = INTERPRETED

ROWS = 3


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny.save(tiny.FAMILIES["llama"](), tmp_path_factory.mktemp("tiny"))
    return load_model(config(model=str(folder), fuse_parts=False))


def parts_of(model: LoadedModel, guided: bool, num_rows: int = ROWS, **fields: Any) -> Counter[str]:
    """Return the number of nodes of each part of the graph of one lane, by the name of its launch."""
    settings = with_drafts(ROWS - 1, device="cuda", max_batch_size=1, max_model_len=64, max_batched_tokens=32, **fields)
    device = RecordedDevice()
    model = replace(model, max_model_len=settings.max_model_len)
    try:
        with Segment.create(Layout(1, ROWS, model.vocab_size)) as segment, opaque_launches():
            executor = device.build_executor(settings, model, EngineEnd(segment), num_pages=16, max_inflight_steps=1)
            executor.warm_up()
            graphs, parts = executor.runner.launcher.captured, Counter[str]()  # type: ignore[attr-defined]
            for name, count in graphs[1, num_rows, guided].parts:
                parts[name] += count
            executor.close()
        return parts
    finally:
        device.stream.close()


# One copy each way, since a batch's arrays are contiguous in memory. The fetch is a separate kernel because the answer
# determines its rows. With flags the wait fetches them, and stores its time where the output ring reads it.
HOST = Counter(_pack=1, copy=2, host=2, _fetch=1, _cache_rows=1)
FLAG = Counter(_pack=1, _post=1, _wait=1, _cache_rows=1)
PAIR = {"host_callback": HOST, "device_flag": FLAG}
"""The nodes of a post and of a wait for its rows."""
STEP = Counter(_load=1, _accept=4, _advance=1, _propose=1, _pack=1)
"""Acceptance is rows, filters, acceptance and log-probabilities; every other part is one launch."""
FREE = Counter(_no_seq=1, free_rows=1)
"""Only of unguided steps: one reports that nothing was posted, and one makes every row ALL."""


@pytest.mark.parametrize("sync", list(PAIR))
def test_nodes_of_a_guided_step(llama: LoadedModel, sync: str) -> None:
    def nodes(**fields: Any) -> Counter[str]:
        parts = parts_of(llama, True, sync=sync, **fields)
        del parts["_forward"]
        return parts

    pair = PAIR[sync]
    assert nodes(jump_forward_tokens=0) == STEP + pair
    # A proposal has no rows; the kernel after the wait writes the tokens where drafters read them.
    proposal = pair - Counter(_fetch=1, _cache_rows=1) + Counter(_take_jump_forward=1)
    assert nodes(jump_forward_tokens=1) == STEP + pair + proposal
    assert nodes(jump_forward_tokens=1, num_rows=1) == STEP + pair - Counter(_propose=1), "no drafts, no proposal"
    masked, unmasked = (nodes(draft_model=llama.name, draft_masks=masks) for masks in ("on", "off"))
    # Without masks one launch makes the row of a draft ALL.
    assert masked.total() - unmasked.total() == (ROWS - 1) * (pair.total() - 1)


def test_nodes_of_an_unguided_step(llama: LoadedModel, tmp_path: Path) -> None:
    def nodes(num_rows: int = ROWS, **fields: Any) -> Counter[str]:
        parts = parts_of(llama, False, num_rows, **fields)
        del parts["_forward"]
        return parts

    chain = nodes()
    assert chain == STEP + FREE
    assert nodes(jump_forward_tokens=0) == chain
    # The branch of the lookup, and the keys of the accepted path.
    assert nodes(draft_tree="on") == chain + Counter(_propose=1, _compact=1)
    assert nodes(1, draft_tree="on") == nodes(1), "a step without drafts has no tree"
    eagle.save_random(Path(llama.name), tmp_path / "eagle3")
    head = nodes(draft_model=str(tmp_path / "eagle3"), draft_tree="on")
    # A level is scored, normalised, sorted and grown, into memory that is no node of a real graph.
    grown = Counter(_begin=head["_begin"], _grow=5 * (ROWS - 1), _take=head["_take"], _compact=1)
    assert head == chain - Counter(_propose=1) + grown
