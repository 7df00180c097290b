"""Loads a causal language model, or one rank's part of it: dtype, packed products, paged attention, rotary tables,
fused parts, tokenizer.

Invariant: a model that does not route every layer through our attention is rejected at load.
Not responsible for: joining several processes to one model (see parallel/division.py), running it (see step/).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from gpu_engine.api.capabilities import OF_FILES, LoadedFiles, refuse
from gpu_engine.api.config import EngineConfig
from gpu_engine.api.output_tensors import HIDDEN_STATES, LOGITS
from gpu_engine.api.sampling_defaults import FILE, Defaults, described, read_defaults
from gpu_engine.model import attention
from gpu_engine.model.adapters.device_pool import DeviceAdapterPool
from gpu_engine.model.adapters.peft_files import AdapterNotSupported
from gpu_engine.model.adapters.pool import AdapterPool
from gpu_engine.model.cache_size import (
    CachedShape,
    CacheSize,
    cache_places,
    device_bytes,
    file_bytes,
    free_bytes,
    refuse_wide_heads,
    report,
)
from gpu_engine.model.embedded import cache_dir
from gpu_engine.model.experts import refuse_grouped_products, replace_experts
from gpu_engine.model.files.reading import num_parameters
from gpu_engine.model.fused_forward import FusedForward
from gpu_engine.model.fused_layers import join_activations
from gpu_engine.model.fusion import Bounds, Fused, FusedModelDiffers, fuse_parts, verified
from gpu_engine.model.hub import Progress, path_of
from gpu_engine.model.latent import latent_shapes, quantise_expansions, replace_latent, take_expansions
from gpu_engine.model.linear import pack_linears, replace_conv1d, replace_linears, sum_in_fp32
from gpu_engine.model.loaded_model import KnownVocabulary, LoadedModel, ModelNotSupported
from gpu_engine.model.network import (
    ModelFiles,
    Network,
    cached_shape,
    decide_size,
    read_network,
    read_tokenizer,
    shape_of,
)
from gpu_engine.model.numerics import numerics_of
from gpu_engine.model.outputs import find_outputs
from gpu_engine.model.parallel.division import join_engines, load_divided
from gpu_engine.model.parallel.shards import SETTING, Shard, heads_of, name_heads, shard
from gpu_engine.model.probe import own_logits, probe, refuse_recurrent
from gpu_engine.model.quantised.checkpoint import QuantisedCheckpoint
from gpu_engine.model.quantised.choice import forms_of, quantise, rounded_kind
from gpu_engine.model.quantised.mixtures import mix_natively
from gpu_engine.model.quantised.native import NativeForward, with_native
from gpu_engine.model.recurrent.delta_nets import JoinedDeltaNet
from gpu_engine.model.recurrent.multipliers import fold_multipliers
from gpu_engine.model.recurrent.replacement import is_replaced, replace_recurrent
from gpu_engine.model.recurrent.rows import recurrent_layers
from gpu_engine.model.rotary import install_tables
from kernels.blocks import BLOCK
from kernels.forward_layers import LAYER_PRODUCTS
from kernels.matrix_unit import use_units
from service_runtime.cores import usable_cores
from service_runtime.memory import freed_at_once

__all__ = ["LoadedModel", "ModelNotSupported", "load_model", "prepare", "resolve_dtype"]

log = logging.getLogger(__name__)


def load_kernels_eagerly() -> None:
    """Make CUDA load a module's kernels at once. Call before CUDA is initialised.

    A lazily loaded kernel is loaded at its first launch, which may wait for the device. The device may be inside a wait
    of a step at that time, and that wait may end only after a later launch posts to the grammar process. Raises
    RuntimeError when CUDA is initialised already without the setting.
    """
    if os.environ.get("CUDA_MODULE_LOADING") != "EAGER":
        if torch.cuda.is_initialized():
            raise RuntimeError("CUDA_MODULE_LOADING=EAGER must be set before CUDA is initialised in this process")
        os.environ["CUDA_MODULE_LOADING"] = "EAGER"


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of "auto": bfloat16 where the device multiplies it natively, else float32."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return torch.float32
    return torch.bfloat16 if flags & {"avx512_bf16", "amx_bf16", "bf16"} else torch.float32


def load_model(
    config: EngineConfig,
    progress: Progress | None = None,
    *,
    setting: str = "model",
    beside: bool = False,
    known: Callable[[KnownVocabulary], None] = lambda vocabulary: None,
) -> LoadedModel:
    """Load `config.model`; raise ModelNotSupported, FileNotFoundError or EmbeddedModelMissing with a reason.

    `setting` is the setting that names the model: messages about its files begin with it. With `tensor_parallel_size`
    above 1 this starts the other ranks as well, and with `data_parallel_attention` it waits for the other engines;
    either may raise RankLost. `beside`: an engine of this process runs meanwhile, so nothing that its threads share may
    change; the weights then take memory in float32 first. `known`: called on this thread with the model's tokens before
    its weights are read, where they are read tensor by tensor.
    """
    if config.tensor_parallel_size > 1:
        return _load_over_ranks(config, progress)
    with freed_at_once():
        model = _load(config, progress, setting, beside=beside, known=known)
        if config.data_parallel_attention > 1:
            join_engines(config, model)
    return model


def _load_over_ranks(config: EngineConfig, progress: Progress | None) -> LoadedModel:
    """Start the other ranks, and load. All have the length that is decided here, from the memory of the whole cache."""
    path = path_of(config, progress)  # fetched once, before each rank reads it
    shape, dtype = shape_of(path, "model"), resolve_dtype(config.dtype, torch.device(config.device))
    refuse(OF_FILES, LoadedFiles(config, like_layers=shape.like_layers), ModelNotSupported)
    size = decide_size(config, shape, dtype, free_bytes(torch.device("cpu"), file_bytes(path, dtype)))
    report(config, shape, shape.token_bytes(config, dtype), size)
    # A length for which the cache is set needs no memory that is looked at again.
    sized = replace(config, max_model_len=size.max_model_len, kv_cache_tokens=size.max_model_len)
    model = load_divided(sized, lambda part: load_shard(sized, part, progress))
    model.room_tokens = size.room_tokens
    return model


def load_shard(config: EngineConfig, part: Shard, progress: Progress | None = None) -> tuple[LoadedModel, FusedForward]:
    """Load one rank's part of `config.model`; return it with its forward, which does not add over the ranks yet.

    Raises as `load_model`, and ModelNotSupported for a model that cannot be divided.
    """
    if config.quantization == "auto":
        config = replace(config, quantization="none")
    with freed_at_once():
        model = _load(config, progress, "model", part)
    if not isinstance(model.fused.forward, FusedForward):
        reasons = "; ".join(model.fused.left)
        raise ModelNotSupported(f"{SETTING}: the forward of {model.model_type} is no loop over fused layers: {reasons}")
    return model, model.fused.forward


def _load(
    config: EngineConfig,
    progress: Progress | None,
    setting: str,
    part: Shard | None = None,
    *,
    beside: bool = False,
    known: Callable[[KnownVocabulary], None] = lambda vocabulary: None,
) -> LoadedModel:
    report: Progress = progress or (lambda stage, done: None)
    device = torch.device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(config.num_threads or max(1, usable_cores() // config.tensor_parallel_size))
    else:
        load_kernels_eagerly()
        if (device.index or 0) >= torch.cuda.device_count():
            there = torch.cuda.device_count() if torch.backends.cuda.is_built() else "none: this torch is a CPU build"
            raise ModelNotSupported(f"device: {config.device} is not there; CUDA devices that torch sees: {there}")
        if device.index is not None:
            torch.cuda.set_device(device)  # Triton launches on this thread's current device, also at load
    dtype = resolve_dtype(config.dtype, device)
    path = path_of(config, progress, setting=setting)
    files = ModelFiles.open(path, setting, dtype, whole=part is None, beside=beside)
    attention.register()
    report("loading the tokenizer", 0.1)
    tokenizer = read_tokenizer(files)
    report("loading the weights", 0.2)
    units = use_units(_choices_file, matrix=config.matrix_unit) if device.type == "cpu" else None
    made = read_network(config, files, report, lambda net: known(KnownVocabulary.of(net, tokenizer)))
    report("preparing the weights", 0.8)
    model: LoadedModel | None = None
    try:
        says_size = part is None and setting == "model"
        model = _prepare(config, made, tokenizer, files.gguf_file, part, says_size=says_size)
    except FusedModelDiffers as why:
        if part is not None:
            raise ModelNotSupported(f"{SETTING}: the fused forward of {path} differs from its own: {why}") from why
        log.warning("loading %s again, unfused: %s", config.model, why)
    if model is None:
        del made  # with its weights, before the others are read
        return _load(replace(config, fuse_parts=False), progress, setting, beside=beside)
    if part is None or part.rank == 0:
        model.sampling_defaults = _sampling_defaults(config, path if files.header is None else None)
        model.path, model.numerics = path, numerics_of(model, config.kv_cache_dtype)
    if units is not None and model.quantised:
        log.info("products over blocks run on %s", units)
    report("loaded", 1.0)
    return model


_NATIVE_NAMES = {"in_proj": "qkv", "out_proj": "output"}
"""By the names of a recurrent layer's products: those that a native forward has in their place."""


def _choices_file() -> Path:
    return cache_dir() / "units.json"


def _sampling_defaults(config: EngineConfig, folder: Path | None) -> Defaults:
    """Return the defaults that `generation_config` names, and log them. `folder`: None for a GGUF file, which has none.

    Raises ModelNotSupported."""
    named = Path(config.generation_config)
    if config.generation_config == "none" or (config.generation_config == "auto" and folder is None):
        return {}
    if config.generation_config != "auto" and not (named / FILE).is_file():
        raise ModelNotSupported(f"generation_config: {named} is not auto, none or a directory with {FILE}")
    try:
        defaults = read_defaults(folder if config.generation_config == "auto" and folder is not None else named)
    except ValueError as error:
        raise ModelNotSupported(f"generation_config: {error}") from error
    if defaults:
        log.info("requests that leave them out have %s (%s of the model)", described(defaults), FILE)
    return defaults


def prepare(
    config: EngineConfig, net: Any, tokenizer: PreTrainedTokenizerFast, gguf_file: Path | None = None
) -> LoadedModel:
    """Prepare a transformers model that was loaded with the attention of `attention.NAME`, from `gguf_file` if it came
    from one.

    Raises ModelNotSupported, or FusedModelDiffers when it must be loaded again with `fuse_parts` off.
    """
    return _prepare(config, Network(net), tokenizer, gguf_file, None, says_size=False)


def _prepare(
    config: EngineConfig,
    made: Network,
    tokenizer: PreTrainedTokenizerFast,
    gguf_file: Path | None,
    part: Shard | None,
    *,
    says_size: bool,
) -> LoadedModel:
    """Prepare a network, from `gguf_file` if it came from one; with `part`, cut it down to one rank's. `says_size`: log
    the length of sequences and the size of the KV cache. Raises as `prepare`."""
    net = made.net
    device = torch.device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    net.eval().requires_grad_(False)
    refuse_recurrent(config, net)
    replace_conv1d(net)
    count = made.num_parameters or num_parameters(net)
    shape = cached_shape(config, net)
    refuse_wide_heads(shape.heads, device.type)
    weights = device_bytes(config, net, dtype, of_8_bits=made.checkpoint is not None) if device.type == "cuda" else 0
    size = made.size or decide_size(config, shape, dtype, free_bytes(device, weights))  # the weights are not there yet
    model = _describe(config, net, tokenizer, dtype, device, count, shape, size)
    if says_size:
        report(config, shape, shape.token_bytes(config, dtype), size)
    if part is not None:
        _refuse_blocks_of_files(config, gguf_file, made.checkpoint)
        return _prepare_part(config, model, part)
    return _prepare_net(config, model, made.quantised, gguf_file, made.checkpoint)


def _refuse_blocks_of_files(
    config: EngineConfig, gguf_file: Path | None, checkpoint: QuantisedCheckpoint | None
) -> None:
    """Raise ModelNotSupported where one process would take a file's own integers."""
    file = gguf_file.name if gguf_file is not None else str(checkpoint or "")
    given = LoadedFiles(config, file=file, exact_file=checkpoint is not None)
    refuse(OF_FILES, given, ModelNotSupported)


def _prepare_part(config: EngineConfig, model: LoadedModel, part: Shard) -> LoadedModel:
    """Prepare a part as the smaller model that it is; the result has the vocabulary and the outputs of the whole."""
    vocab_size, heads = model.vocab_size, heads_of(model.net)
    keys = shard(model.net, part, 1 if config.quantization == "none" else BLOCK).keys
    model.kv_heads = tuple(each._replace(number=keys) for each in model.kv_heads)
    model.vocab_size = part.of_vocabulary(vocab_size)
    _prepare_net(config, model, None, None, None, whole=False)
    name_heads(model.net, heads)
    model.vocab_size = vocab_size
    # Other outputs are those of modules, which compute the part of one rank.
    states = {name: spec for name, spec in model.outputs.items() if name.startswith(HIDDEN_STATES)}
    model.outputs = {LOGITS: replace(model.outputs[LOGITS], shape=(vocab_size,)), **states}
    return model


def _prepare_net(
    config: EngineConfig,
    model: LoadedModel,
    quantised: bool | None,
    gguf_file: Path | None,
    checkpoint: QuantisedCheckpoint | None,
    *,
    whole: bool = True,
) -> LoadedModel:
    """Quantise, move, check and fuse; raises as `prepare`. A part of a model has sums between its products: it is no
    single native call. `quantised`: what was decided while the model was read, or None."""
    net, device, dtype = model.net, model.device, model.dtype
    if device.type == "cuda" and not config.enforce_eager:
        refuse_grouped_products(net, partial(torch.cuda.get_device_capability, device))
    if device.type == "cpu":
        replace_experts(net)  # their products are quantised like others
    latent = latent_shapes(config, net)
    take_expansions(net, latent)
    # The memory of a GPU then never holds the weights that are replaced.
    model.quantised = quantise(config, net, gguf_file, checkpoint) if quantised is None else quantised
    if model.quantised:
        quantise_expansions(net, rounded_kind(config, of_gguf=gguf_file is not None))
    model.forms = forms_of(net)
    if model.quantised and device.type == "cpu":
        mix_natively(net, dtype)
    net.to(device)
    by_row = model.quantised and device.type == "cuda"
    own, folded = None, dict[str, torch.Tensor]()
    if latent or any(map(is_replaced, net.modules())):
        own = own_logits(model)
        folded = fold_multipliers(net) if config.fuse_parts else {}
        model.recurrent = replace_recurrent(net)
        replace_latent(net, latent)
    install_tables(net.get_decoder(), model.max_model_len, captured=device.type == "cuda")
    attention.number_layers(net.get_decoder(), cache_places(net.config.get_text_config()))
    seen = probe(model, rough=by_row, own=own)
    # Activations of 8 bits hide a float32's rounding: another order of a sum may give another integer.
    bounds = Bounds.of(torch.bfloat16 if model.quantised else dtype, rough=by_row)
    if config.fuse_parts:
        with attention.attending(seen.ctx):
            model.fused = fuse_parts(net, seen.record, seen.ctx.layers_seen, bounds, model.max_model_len)
    if model.recurrent:
        model.recurrent = recurrent_layers(net)  # some are others by now
    if config.data_parallel_attention > 1:  # every forward enters every mixture, and a loop that fills skips the last
        model.fused = replace(model.fused, mixtures={})
    if device.type == "cpu":
        seen.record.forget(nn.Linear)  # it would keep each weight next to its packed copy
        pack_linears(net)
    else:
        sum_in_fp32()
        replace_linears(net)
        join_activations(net)
    if config.fuse_parts:
        model.fused = verified(
            net, model.fused, seen.record, seen.logits_NV, seen.again(model), bounds, seen.noise, seen.compare
        )
    if model.quantised and not by_row and model.fused.forward and whole and not _adapts_by_part(config, model.fused):
        checks = (seen.logits_NV, seen.again(model), seen.compare, seen.moves(model), seen.goes_on(model))
        model.fused = with_native(model.fused, *checks)
    if config.takes_adapters:
        model.adapters = _adapter_pool(config, model, folded)
        if isinstance(model.adapters, AdapterPool) and isinstance(model.fused.forward, NativeForward):
            in_order = [_NATIVE_NAMES.get(name, name) for _, _, name in model.adapters.places.owners]
            assert in_order == list(LAYER_PRODUCTS) * (len(in_order) // len(LAYER_PRODUCTS)), in_order
    if not model.recurrent:  # else it has no states at the tokens whose outputs are wanted
        model.outputs = find_outputs(model)
    return model


def _adapts_by_part(config: EngineConfig, fused: Fused) -> bool:
    """Return whether adapters need the loop in Python.

    They have no numbers for the products of experts, of inputs by layer, or for the further product of a delta net, and
    a layer has the numbers of four products. The native forward also has memory for the low-rank half of one product at
    a time, and a block next to the attention has the attention's products between its own and its input.
    """
    forward = fused.forward
    layers = forward.layers if isinstance(forward, FusedForward) else ()
    has_more = any(
        layer.is_parallel
        or layer.input is not None
        or len(layer.parts) != 2
        or isinstance(layer.recurrent, JoinedDeltaNet)
        for layer in layers
    )
    return config.takes_adapters and (bool(fused.mixtures) or has_more)


def _adapter_pool(
    config: EngineConfig, model: LoadedModel, folded: Mapping[str, torch.Tensor]
) -> AdapterPool | DeviceAdapterPool:
    """Return the place of the adapters' weights on the model's device. `folded`: see `Places`. Raises
    ModelNotSupported."""
    why = f"drafter={config.drafter} reads the tokens of the prompt" if config.drafts_by_net else ""
    if model.model_type == "gemma4_text" and model.net.config.get_text_config().hidden_size_per_layer_input:
        why = f"{model.model_type} also embeds tokens by layer, and virtual tokens have no such embeddings"
    if model.device.type == "cpu":
        first = model.fused.forward.parts if isinstance(model.fused.forward, NativeForward) else ()
        return AdapterPool(model.net, model.vocab_size, no_prompts=why, first=first, folded=folded)
    from kernels.cuda.low_rank import add_low_rank  # a CPU install has no Triton

    try:
        limits = config.adapter_limits
        return DeviceAdapterPool(model.net, model.vocab_size, limits, add_low_rank, no_prompts=why, folded=folded)
    except AdapterNotSupported as error:
        raise ModelNotSupported(str(error)) from error


def _describe(
    config: EngineConfig,
    net: Any,
    tokenizer: PreTrainedTokenizerFast,
    dtype: torch.dtype,
    device: torch.device,
    num_parameters: int,
    shape: CachedShape,
    size: CacheSize,
) -> LoadedModel:
    vocabulary = KnownVocabulary.of(net, tokenizer)
    return LoadedModel(
        name=config.model,
        net=net,
        tokenizer=tokenizer,
        vocab_size=vocabulary.vocab_size,
        eos_token_ids=vocabulary.eos_token_ids,
        model_type=net.config.get_text_config().model_type,
        dtype=dtype,
        device=device,
        num_parameters=num_parameters,
        max_model_len=size.max_model_len,
        num_layers=shape.num_layers,
        kv_heads=shape.heads,
        room_tokens=size.room_tokens,
    )
