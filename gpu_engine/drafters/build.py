"""Makes the drafter that the configuration names. Models are loaded here, once, before the first request."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from gpu_engine.api.config import EngineConfig
from gpu_engine.drafters.chain import ModelChain
from gpu_engine.drafters.eagle3 import Eagle3Net
from gpu_engine.drafters.eagle3_files import load_head
from gpu_engine.drafters.jump_forward import JumpForwardDrafter, JumpForwardLaunches, NothingBehind
from gpu_engine.drafters.model import ModelDrafter
from gpu_engine.drafters.mtp import MtpNet, load_mtp
from gpu_engine.drafters.nets import DraftNet, ModelNet
from gpu_engine.drafters.ngram import NgramDrafter, NoDrafter
from gpu_engine.model.linear import pack_linears, thin_linears
from gpu_engine.model.loaded_model import ModelNotSupported
from gpu_engine.model.loader import LoadedModel, load_model
from gpu_engine.step.device_program import DeviceDrafter, NgramKernel, NoDrafts
from gpu_engine.step.program import Drafter
from gpu_engine.step.stream import Stream
from gpu_engine.step.sync import Sync
from kernels.paged_attention import KVPages

SHIPPED_HEAD = Path(__file__).parent / "heads" / "smollm2-135m-instruct"
"""Trained for the embedded model; README.md beside it says on what."""


def build_drafter(config: EngineConfig, target: LoadedModel, sync: Sync, num_pages: int) -> Drafter:
    """Return the drafter. Raises ModelNotSupported or HeadNotUsable: it does not fit the target."""
    drafter = _drafter(config, target, sync, num_pages)
    return JumpForwardDrafter(drafter, sync) if config.jump_forward_first else drafter


def _drafter(config: EngineConfig, target: LoadedModel, sync: Sync, num_pages: int) -> Drafter:
    if config.num_drafts == 0:
        return NoDrafter()
    if config.drafter == "grammar":
        return NothingBehind()
    if config.drafter == "ngram":
        return NgramDrafter(config.ngram_max, config.ngram_min)
    net = _net(config, target, num_pages, token_major=False)
    return ModelDrafter(net, sync, masked=config.draft_masks == "on", forced=config.jump_forward_first)


def build_device_drafter(
    config: EngineConfig, target: LoadedModel, stream: Stream, sync: Sync, num_pages: int
) -> DeviceDrafter:
    """Return the drafter as launches; see `build_drafter`."""
    drafter = _device_drafter(config, target, stream, sync, num_pages)
    return JumpForwardLaunches(drafter, sync) if config.jump_forward_first else drafter


def _device_drafter(
    config: EngineConfig, target: LoadedModel, stream: Stream, sync: Sync, num_pages: int
) -> DeviceDrafter:
    if config.num_drafts == 0 or config.drafter == "grammar":
        return NoDrafts()
    forced = config.jump_forward_first
    if config.drafter == "ngram":
        return NgramKernel(stream, config.ngram_max, config.ngram_min, forced=forced)
    net = _net(config, target, num_pages, token_major=True)
    shape = {"num_lanes": config.max_batch_size, "num_links": config.num_drafts}
    return ModelChain(stream, net, sync, masked=config.draft_masks == "on", forced=forced, **shape)


def _net(config: EngineConfig, target: LoadedModel, num_pages: int, *, token_major: bool) -> DraftNet:
    if config.drafter == "eagle3":
        directory = SHIPPED_HEAD if config.drafts_with_shipped_head else Path(config.draft_model)
        head = load_head(directory, target.net.config.get_text_config(), target.dtype).to(target.device)
        head.requires_grad_(False)
        heads, width = head.config.num_key_value_heads, head.config.head_dim
        shape = (num_pages, heads, width, config.page_size)
        pages = KVPages.allocate(*shape, target.dtype, target.device, token_major)
        if target.device.type == "cpu" and not token_major:
            pack_linears(head)
        thin_linears(head)
        return Eagle3Net(head, target.net.get_input_embeddings(), pages)
    if config.drafter == "mtp":
        mtp = load_mtp(target.name, target.net, target.dtype)
        shape = (num_pages, target.num_kv_heads, target.head_dim, config.page_size)
        if target.device.type == "cpu" and not token_major:
            pack_linears(mtp)
        thin_linears(mtp)
        return MtpNet(mtp, target.num_layers, KVPages.allocate(*shape, target.dtype, target.device, token_major))
    model = _draft_model(config, target)
    own_pages = model.allocate_pages(num_pages, config.page_size, token_major=token_major)
    return ModelNet(model, own_pages, config.num_drafts)


def _draft_model(config: EngineConfig, target: LoadedModel) -> LoadedModel:
    """Load the draft model to where the target is."""
    own = {"model": config.draft_model, "drafter": "none", "draft_model": ""}
    if config.device != "cpu" and target.device.type == "cpu":
        own |= {"device": "cpu", "sync": "auto"}
    model = load_model(dataclasses.replace(config, **own), setting="draft_model")  # type: ignore[arg-type]
    if model.vocab_size != target.vocab_size or model.tokenizer.get_vocab() != target.tokenizer.get_vocab():
        raise ModelNotSupported(
            f"draft_model: its tokenizer is not that of {target.name}, so its drafts mean other tokens"
        )
    if model.max_model_len < target.max_model_len:
        raise ModelNotSupported(
            f"draft_model: made for {model.max_model_len} tokens, the target serves {target.max_model_len}"
        )
    return model
