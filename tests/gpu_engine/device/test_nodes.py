"""The number of graph nodes of a step without its models, so that a new node is a decision and not an accident.

A node costs one or two microseconds of every step. The nodes of a model depend on its family and on transformers.
"""

from __future__ import annotations

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
PAIR = {
    # One copy each way, since a batch's arrays are contiguous in memory. The fetch is a separate kernel because the
    # answer determines its rows.
    "host_callback": (["_pack", "copy", "host"], ["host", "copy", "_fetch", "_cache_rows"]),
    # The wait also fetches the rows, and stores the time that it took where the output ring reads it.
    "device_flag": (["_pack", "_post"], ["_wait", "_cache_rows"]),
}
"""Names of the nodes of a post and of a wait. `_cache_rows` also reports the sequence."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny.save(tiny.FAMILIES["llama"](), tmp_path_factory.mktemp("tiny"))
    return load_model(config(model=str(folder), fuse_parts=False))


def parts_of(model: LoadedModel, guided: bool, num_rows: int = ROWS, **fields: Any) -> list[tuple[str, int]]:
    """Return (name, nodes) of the graph of one lane."""
    settings = with_drafts(ROWS - 1, device="cuda", max_batch_size=1, max_model_len=64, max_batched_tokens=32, **fields)
    device = RecordedDevice()
    model = replace(model, max_model_len=settings.max_model_len)
    try:
        with Segment.create(Layout(1, ROWS, model.vocab_size)) as segment, opaque_launches():
            executor = device.build_executor(settings, model, EngineEnd(segment), num_pages=16, max_inflight_steps=1)
            executor.warm_up()
            graphs = executor.runner.launcher.captured  # type: ignore[attr-defined]
            parts: list[tuple[str, int]] = graphs[1, num_rows, guided].parts
            executor.close()
        return parts
    finally:
        device.stream.close()


def named(parts: list[tuple[str, int]]) -> list[str]:
    return [name for name, _ in parts]


@pytest.mark.parametrize("sync", list(PAIR))
@pytest.mark.parametrize("jumps", [0, 1])
def test_nodes_of_a_guided_step(llama: LoadedModel, sync: str, jumps: int) -> None:
    parts = parts_of(llama, True, sync=sync, jump_forward_tokens=jumps)
    post, wait = PAIR[sync]
    # A proposal has no rows; the kernel after the wait writes the tokens where drafters read them.
    pair = [*post, *(name for name in wait if name not in ("_fetch", "_cache_rows")), "_take_jump_forward"] * jumps
    assert named(parts) == ["_load", *post, "_forward", *wait, "_accept", "_advance", *pair, "_propose", "_pack"]
    counts = [(name, count) for name, count in parts if name != "_forward"]
    # `_accept` launches four kernels: rows, filters, acceptance and logprobs. Every other part is one launch: the
    # `_pack` of the sync checks for stopped slots in its own kernel, and the `_pack` of the ring is one concatenation.
    assert {name: count for name, count in counts if count != 1} == {"_accept": 4}
    assert sum(count for _, count in counts) == {"host_callback": 15 + 6 * jumps, "device_flag": 12 + 4 * jumps}[sync]
    if jumps:
        parts = parts_of(llama, True, num_rows=1, sync=sync, jump_forward_tokens=1)
        unproposed = ["_load", *post, "_forward", *wait, "_accept", "_advance", "_pack"]
        assert named(parts) == unproposed, "a step that verifies no drafts proposes none"


def test_nodes_of_an_unguided_step(llama: LoadedModel) -> None:
    parts = parts_of(llama, False, sync="host_callback")
    assert named(parts) == ["_load", "_no_seq", "_forward", "free_rows", "_accept", "_advance", "_propose", "_pack"]
    assert parts == parts_of(llama, False, sync="host_callback", jump_forward_tokens=0)
    # Two parts occur only here: `_no_seq` reports that nothing was posted, and `free_rows` makes every row ALL.
    assert sum(count for name, count in parts if name != "_forward") == 10


@pytest.mark.parametrize("sync", list(PAIR))
def test_a_masked_draft_adds_a_post_and_a_wait(llama: LoadedModel, sync: str) -> None:
    masked, unmasked = (
        parts_of(llama, True, sync=sync, draft_model=llama.name, draft_masks=masks) for masks in ("on", "off")
    )
    # The chain's forward of every draft runs between its post and its wait, as the target's does.
    assert named(masked).count("_forward") == named(unmasked).count("_forward") == ROWS
    pair = [*PAIR[sync][0], *PAIR[sync][1]]
    counts = [sum(count for name, count in parts if name != "_forward") for parts in (masked, unmasked)]
    # Without masks one launch makes the row ALL.
    assert counts[0] - counts[1] == (ROWS - 1) * (len(pair) - 1)


def test_trees_of_drafts_add_two_nodes(llama: LoadedModel) -> None:
    chains, trees = (parts_of(llama, False, draft_tree=tree) for tree in ("off", "on"))
    names = named(chains)
    assert named(trees) == [*names[: names.index("_advance")], "_compact", *names[names.index("_advance") :]]
    more = {name: count for name, count in trees if (name, count) not in chains}
    # The branch of the lookup, and the keys of the accepted path.
    assert more == {"_compact": 1, "_propose": 2}
    # A step without drafts has no tree.
    assert parts_of(llama, False, num_rows=1, draft_tree="on") == parts_of(llama, False, num_rows=1)


def test_a_head_grows_a_tree_with_a_forward_for_each_level(llama: LoadedModel, tmp_path: Path) -> None:
    eagle.save_random(Path(llama.name), tmp_path / "eagle3")
    parts = parts_of(llama, False, draft_model=str(tmp_path / "eagle3"), draft_tree="on")
    levels = ["_begin", "_grow", *["_forward", "_grow"] * (ROWS - 2), "_take"]
    names = ["_load", "_no_seq", "_forward", "free_rows", "_accept", "_compact", "_advance", *levels, "_pack"]
    assert named(parts) == names
    # Memory for the scores, which is no node of a real graph; a level is scored, normalised, sorted and grown.
    assert {count for name, count in parts if name == "_grow"} == {5}
