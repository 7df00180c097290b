"""Makes the drafter that the configuration names. Models are loaded here, once, before the first request.

Invariant: a drafter that does not fit the target is refused here, with the setting and the reason. Not responsible
for: drafting (see the module of each drafter).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from gpu_engine.api.capabilities import OF_FILES, LoadedFiles, refuse
from gpu_engine.api.config import EngineConfig
from gpu_engine.api.engine_settings import DRAFTER_GROUP
from gpu_engine.drafters.bare_words import bare_words
from gpu_engine.drafters.chain import ChainDrafter
from gpu_engine.drafters.decoupled import DecoupledDrafter, DraftModel, ExchangingDrafter
from gpu_engine.drafters.decoupled_graphs import CapturedDecoupledDrafter
from gpu_engine.drafters.draft_device_replica import DraftDeviceReplica
from gpu_engine.drafters.exchange import load_draft_model
from gpu_engine.drafters.head_tree import TreeDrafter, TreeLaunches
from gpu_engine.drafters.heads.dflash import DFlashNet
from gpu_engine.drafters.heads.dflash_files import load_dflash
from gpu_engine.drafters.heads.eagle3 import Eagle3Net
from gpu_engine.drafters.heads.eagle3_files import load_head
from gpu_engine.drafters.jump_forward import JumpForwardDrafter
from gpu_engine.drafters.mtp import MtpNet, load_mtp
from gpu_engine.drafters.nets import DraftNet, ModelNet
from gpu_engine.drafters.ngram import NgramDrafter, NoDrafter
from gpu_engine.drafters.suffix import SuffixDrafter
from gpu_engine.drafters.suffix_index import SuffixIndex
from gpu_engine.model.cache_size import CachedShape
from gpu_engine.model.hub import path_of
from gpu_engine.model.linear import pack_linears, replace_linears
from gpu_engine.model.loaded_model import ModelNotSupported
from gpu_engine.model.loader import LoadedModel
from gpu_engine.step.buffers import LaneBuffers, SlotBuffers
from gpu_engine.step.launches import StepLaunches
from gpu_engine.step.program import Drafter
from gpu_engine.step.stream import Stream
from gpu_engine.step.sync import Sync
from kernels.cuda.row_state import SlotRows
from kernels.kv_pages import KVHeads, KVPages


@dataclass(frozen=True, slots=True)
class DrafterParts:
    """The parts that a drafter may be built from."""

    config: EngineConfig
    target: LoadedModel
    """On the stream's device."""
    stream: Stream
    launches: StepLaunches
    """The step's launches, shared like the sync."""
    sync: Sync
    num_pages: int
    """KV pages of the target; a drafting network gets as many."""
    token_major: bool
    """Layout of KV pages that the device's kernels read."""
    slot: SlotBuffers
    lane: LaneBuffers
    """The step program's lane buffers, shared like the slot's."""
    trees: TreeLaunches | None = None
    """The step's, on a GPU; None on a CPU."""
    rows: SlotRows | None = None
    """The buffers of the step's sampling on a GPU; None on a CPU."""


Builder = Callable[[DrafterParts], Drafter]


def build_drafter(parts: DrafterParts, builders: Mapping[str, Builder] | None = None) -> Drafter:
    """Return the drafter that `config.drafter` names; `builders` replaces `BUILDERS`.

    Raises ModelNotSupported or HeadNotUsable when the drafter does not fit the target.
    """
    config = parts.config
    if config.num_drafts == 0:
        return NoDrafter()
    known = BUILDERS if builders is None else builders
    build = known.get(config.drafter) or _installed_builder(config.drafter)
    drafter = build(parts)
    return JumpForwardDrafter(drafter, parts.sync) if config.jump_forward_first else drafter


def _installed_builder(name: str) -> Builder:
    """Return the builder that another distribution registers under `name`; the configuration has checked the name."""
    (entry,) = entry_points(group=DRAFTER_GROUP, name=name)
    builder: Builder = entry.load()
    return builder


def suffix_drafter(drafter: Drafter) -> SuffixDrafter | None:
    """Return the drafter that keeps answers, if `drafter` is one or runs one after jump-forward tokens."""
    own = _inner(drafter)
    return own if isinstance(own, SuffixDrafter) and own.index is not None else None


def exchanging_drafter(drafter: Drafter) -> ExchangingDrafter | None:
    """Return the drafter whose model can be exchanged, if `drafter` is one or runs one after jump-forward tokens."""
    own = _inner(drafter)
    return own if isinstance(own, DecoupledDrafter | CapturedDecoupledDrafter) else None


def captured_drafter(drafter: Drafter) -> CapturedDecoupledDrafter | None:
    """Return the drafter with launches outside the steps, if `drafter` is one or runs one after jump-forward
    tokens."""
    own = _inner(drafter)
    return own if isinstance(own, CapturedDecoupledDrafter) else None


def _inner(drafter: Drafter) -> Drafter:
    return drafter.next_drafter if isinstance(drafter, JumpForwardDrafter) else drafter


def _no_drafter(parts: DrafterParts) -> Drafter:
    return NoDrafter()


def _ngram(parts: DrafterParts) -> Drafter:
    config = parts.config
    longest, forced = config.ngram_max, config.jump_forward_first
    if not parts.stream.runs_at_once:
        return NgramDrafter(parts.stream, parts.launches, longest, jump_forward=forced)
    max_bytes = config.max_draft_index_bytes
    index = SuffixIndex(max_bytes, len(parts.slot.length_S)) if max_bytes else None
    words = bare_words(parts.target.tokenizer.backend_tokenizer, parts.target.vocab_size)
    return SuffixDrafter(parts.stream, parts.slot, parts.lane, index, longest, words=words, jump_forward=forced)


def _chain(parts: DrafterParts, net: DraftNet) -> Drafter:
    config = parts.config
    return ChainDrafter(
        parts.stream,
        net,
        parts.sync,
        masked=config.draft_masks == "on",
        jump_forward=config.jump_forward_first,
        num_lanes=config.max_batch_size,
        num_links=config.num_drafts,
    )


def _eagle3(parts: DrafterParts) -> Drafter:
    target = parts.target
    head = load_head(_head_directory(parts), target.net.config.get_text_config(), target.dtype).to(target.device)
    head.requires_grad_(False)
    pages = _one_layer(parts, KVHeads(head.config.num_key_value_heads, head.config.head_dim))
    _prepare(parts, head)
    net, config = Eagle3Net(head, target.net.get_input_embeddings(), pages), parts.config
    if not config.verifies_trees:
        return _chain(parts, net)
    assert parts.trees is not None, "a CPU verifies chains; EngineConfig refuses trees there"
    return TreeDrafter(
        parts.stream,
        net,
        parts.trees,
        jump_forward=config.jump_forward_first,
        num_lanes=config.max_batch_size,
        num_drafts=config.num_drafts,
    )


def _dflash(parts: DrafterParts) -> Drafter:
    target, directory = parts.target, _head_directory(parts)
    head = load_dflash(directory, target.net.config.get_text_config(), target.dtype).to(target.device)
    head.requires_grad_(False)
    config = head.config
    embedding = getattr(target.net.get_input_embeddings(), "weight", None)
    given = LoadedFiles(
        parts.config,
        head=str(directory),
        block_size=config.block_size,
        embeds_rows=embedding is not None and embedding.shape == (config.vocab_size, config.hidden_size),
        model_type=target.model_type,
    )
    refuse(OF_FILES, given, ModelNotSupported)
    assert embedding is not None
    _prepare(parts, head)
    pages = [_one_layer(parts, KVHeads(config.num_key_value_heads, config.head_dim)) for _ in config.kinds]
    return _chain(parts, DFlashNet(head, embedding.detach(), target.net.get_output_embeddings(), pages))


def _mtp(parts: DrafterParts) -> Drafter:
    target = parts.target
    mtp = load_mtp(str(path_of(parts.config)), target.net, target.dtype)
    _prepare(parts, mtp)
    # The layer attends as transformers' do: to keys and values in expanded form, also next to latent ones.
    heads = CachedShape.of(target.net.config.get_text_config()).heads[-1]
    return _chain(parts, MtpNet(mtp, target.num_layers, _one_layer(parts, heads)))


def _model(parts: DrafterParts) -> Drafter:
    config = parts.config
    model, d2t_V = load_draft_model(config, parts.target)
    pages = model.allocate_pages(parts.num_pages, config.page_size, token_major=parts.token_major)
    return _chain(parts, ModelNet(model, pages, config.num_drafts, d2t_V))


def _decoupled(parts: DrafterParts) -> Drafter:
    config, (num_slots, num_tokens) = parts.config, parts.slot.history_SL.shape
    model, d2t_V = load_draft_model(config, parts.target)
    links, budget = config.num_drafts, config.prefill_shapes.budget
    if not parts.stream.runs_at_once:
        return CapturedDecoupledDrafter(
            stream=parts.stream,
            slot=parts.slot,
            lane=parts.lane,
            sync=parts.sync,
            draft=DraftModel.for_device(model, d2t_V, parts.slot, config.page_size),
            num_links=links,
            catch_up=budget,
            jump_forward=config.jump_forward_first,
            page_size=config.page_size,
            replica=_replica(parts, model.device) if config.draft_device else None,
        )
    return DecoupledDrafter(
        parts.stream,
        parts.slot,
        DraftModel.allocate(model, d2t_V, num_slots, num_tokens, config.page_size),
        parts.target.vocab_size,
        num_links=links,
        catch_up=budget,
        jump_forward=config.jump_forward_first,
        page_size=config.page_size,
    )


def _replica(parts: DrafterParts, device: torch.device) -> DraftDeviceReplica:
    assert parts.rows is not None, "EngineConfig refuses a draft_device on a CPU"
    return DraftDeviceReplica(parts.stream, parts.slot, parts.lane, parts.rows, device)


BUILDERS: Mapping[str, Builder] = {
    "grammar": _no_drafter,
    "ngram": _ngram,
    "model": _model,
    "decoupled": _decoupled,
    "eagle3": _eagle3,
    "dflash": _dflash,
    "mtp": _mtp,
}
"""By the values of the setting `drafter`. Other distributions register drafters as entry points (`DRAFTER_GROUP`)."""


def _head_directory(parts: DrafterParts) -> Path:
    of_head = dataclasses.replace(parts.config, model=parts.config.draft_model, revision="")
    return path_of(of_head, setting="draft_model", with_tokenizer=False)


def _one_layer(parts: DrafterParts, heads: KVHeads) -> KVPages:
    """Return a cache of one layer, in the target's dtype."""
    target = parts.target
    sizes = (parts.num_pages, parts.config.page_size)
    return KVPages.allocate_layers([heads], *sizes, target.dtype, target.device, parts.token_major)[0]


def _prepare(parts: DrafterParts, net: Any) -> None:
    """Replace the net's linear layers by faster ones."""
    if parts.target.device.type == "cpu" and not parts.token_major:
        pack_linears(net)
    replace_linears(net)
