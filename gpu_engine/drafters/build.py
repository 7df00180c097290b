"""Makes the drafter that the configuration names. Models are loaded here, once, before the first request.

Invariant: a drafter that does not fit the target is refused here, with the setting and the reason. Not responsible
for: drafting (see the module of each drafter).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_engine.api.config import EngineConfig
from gpu_engine.drafters.chain import ChainDrafter
from gpu_engine.drafters.eagle3 import Eagle3Net
from gpu_engine.drafters.eagle3_files import load_head
from gpu_engine.drafters.jump_forward import JumpForwardDrafter
from gpu_engine.drafters.mtp import MtpNet, load_mtp
from gpu_engine.drafters.nets import DraftNet, ModelNet
from gpu_engine.drafters.ngram import NgramDrafter, NoDrafter
from gpu_engine.drafters.suffix import SuffixDrafter
from gpu_engine.drafters.suffix_index import SuffixIndex
from gpu_engine.model.linear import pack_linears, thin_linears
from gpu_engine.model.loaded_model import ModelNotSupported
from gpu_engine.model.loader import LoadedModel, load_model, path_of
from gpu_engine.step.buffers import LaneBuffers, SlotBuffers
from gpu_engine.step.launches import StepLaunches
from gpu_engine.step.program import Drafter
from gpu_engine.step.stream import Stream
from gpu_engine.step.sync import Sync
from kernels.paged_attention import KVPages

SHIPPED_HEAD = Path(__file__).parent / "heads" / "smollm2-135m-instruct"
"""Trained for the embedded model; README.md in its folder names the data."""


@dataclass(frozen=True, slots=True)
class DrafterParts:
    """The parts that a drafter may be built from."""

    config: EngineConfig
    target: LoadedModel
    """On the stream's device."""
    stream: Stream
    launches: StepLaunches
    """Of the step, as is the sync."""
    sync: Sync
    num_pages: int
    """KV pages of the target; a drafting network gets as many of its own."""
    token_major: bool
    """Layout of KV pages that the device's kernels read."""
    slot: SlotBuffers
    lane: LaneBuffers
    """Of the step program, as are the slot's."""


Builder = Callable[[DrafterParts], Drafter]


def build_drafter(parts: DrafterParts, builders: Mapping[str, Builder] | None = None) -> Drafter:
    """Return the drafter that `config.drafter` names; `builders` replaces `BUILDERS`.

    Raises ModelNotSupported or HeadNotUsable when the drafter does not fit the target.
    """
    config = parts.config
    if config.num_drafts == 0:
        return NoDrafter()
    drafter = (BUILDERS if builders is None else builders)[config.drafter](parts)
    if not config.jump_forward_first:
        return drafter
    suggester = drafter if isinstance(drafter, SuffixDrafter) and config.draft_tree == "on" else None
    return JumpForwardDrafter(drafter, parts.sync, suggester)


def suffix_drafter(drafter: Drafter) -> SuffixDrafter | None:
    """Return the drafter that keeps answers, if `drafter` is one or has one behind jump-forward tokens."""
    own = drafter.behind if isinstance(drafter, JumpForwardDrafter) else drafter
    return own if isinstance(own, SuffixDrafter) and own.index is not None else None


def _no_drafter(parts: DrafterParts) -> Drafter:
    return NoDrafter()


def _ngram(parts: DrafterParts) -> Drafter:
    config = parts.config
    sizes, forced = (config.ngram_max, config.ngram_min), config.jump_forward_first
    if not parts.stream.runs_at_once:
        return NgramDrafter(parts.stream, parts.launches, *sizes, jump_forward=forced)
    max_bytes = config.max_draft_index_bytes
    index = SuffixIndex(max_bytes, len(parts.slot.length_S)) if max_bytes else None
    return SuffixDrafter(parts.stream, parts.slot, parts.lane, index, *sizes, jump_forward=forced)


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
    config, target = parts.config, parts.target
    if config.drafts_with_shipped_head:
        directory = SHIPPED_HEAD
    else:
        of_head = dataclasses.replace(config, model=config.draft_model, revision="")
        directory = path_of(of_head, setting="draft_model", with_tokenizer=False)
    head = load_head(directory, target.net.config.get_text_config(), target.dtype).to(target.device)
    head.requires_grad_(False)
    pages = _one_layer(parts, head.config.num_key_value_heads, head.config.head_dim)
    _prepare(parts, head)
    return _chain(parts, Eagle3Net(head, target.net.get_input_embeddings(), pages))


def _mtp(parts: DrafterParts) -> Drafter:
    target = parts.target
    mtp = load_mtp(str(path_of(parts.config)), target.net, target.dtype)
    _prepare(parts, mtp)
    return _chain(parts, MtpNet(mtp, target.num_layers, _one_layer(parts, target.num_kv_heads, target.head_dim)))


def _model(parts: DrafterParts) -> Drafter:
    config = parts.config
    model, d2t_V = _draft_model(config, parts.target)
    pages = model.allocate_pages(parts.num_pages, config.page_size, token_major=parts.token_major)
    return _chain(parts, ModelNet(model, pages, config.num_drafts, d2t_V))


BUILDERS: Mapping[str, Builder] = {
    "grammar": _no_drafter,
    "ngram": _ngram,
    "model": _model,
    "eagle3": _eagle3,
    "mtp": _mtp,
}
"""By the values of the setting `drafter`."""


def _one_layer(parts: DrafterParts, num_heads: int, head_dim: int) -> KVPages:
    """Return a cache of one layer, in the target's dtype."""
    shape = (parts.num_pages, num_heads, head_dim, parts.config.page_size)
    return KVPages.allocate(*shape, parts.target.dtype, parts.target.device, parts.token_major)


def _prepare(parts: DrafterParts, net: Any) -> None:
    """Replace the net's linear layers by faster ones."""
    if parts.target.device.type == "cpu" and not parts.token_major:
        pack_linears(net)
    thin_linears(net)


def _draft_model(config: EngineConfig, target: LoadedModel) -> tuple[LoadedModel, torch.Tensor | None]:
    """Load the draft model to the target's device; also return its `d2t_V`, None where its columns are the target's.

    Models of one family share a tokenizer and pad their logits to different widths. Then the columns of real tokens
    are the same, and `d2t_V` leaves the padding out.
    """
    own = {"model": config.draft_model, "revision": "", "drafter": "none", "draft_model": "", "tensor_parallel_size": 1}
    own |= {"data_parallel_attention": 1, "data_parallel_rank": 0, "data_parallel_dir": ""}
    if config.device != "cpu" and target.device.type == "cpu":
        own |= {"device": "cpu", "sync": "auto"}
    model = load_model(dataclasses.replace(config, **own), setting="draft_model")  # type: ignore[arg-type]
    vocabulary = model.tokenizer.get_vocab()
    if vocabulary != target.tokenizer.get_vocab():
        raise ModelNotSupported(
            f"draft_model: its tokenizer is not that of {target.name}, so its drafts mean other tokens"
        )
    if model.max_model_len < target.max_model_len:
        raise ModelNotSupported(
            f"draft_model: made for {model.max_model_len} tokens, the target serves {target.max_model_len}"
        )
    if model.vocab_size == target.vocab_size:
        return model, None
    count = min(max(vocabulary.values()) + 1, model.vocab_size, target.vocab_size)
    return model, torch.zeros(count, dtype=torch.int32, device=target.device)
