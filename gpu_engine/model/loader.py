"""Loads a causal language model, or one rank's part of it: dtype, packed products, paged attention, rotary tables,
fused parts, tokenizer.

Invariant: a model that does not route every layer through our attention is rejected at load.
Not responsible for: joining several processes to one model (see parallel/division.py), running it (see step/).
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
from transformers.utils.quantization_config import Mxfp4Config

from gpu_engine.api.capabilities import OF_FILES, LoadedFiles, refuse
from gpu_engine.api.config import EngineConfig
from gpu_engine.api.engine_settings import EMBEDDED_MODEL
from gpu_engine.api.output_tensors import HIDDEN_STATES, LOGITS
from gpu_engine.api.sampling_defaults import FILE, Defaults, described, read_defaults
from gpu_engine.model import attention
from gpu_engine.model.adapters.device_pool import DeviceAdapterPool
from gpu_engine.model.adapters.peft_files import AdapterNotSupported
from gpu_engine.model.adapters.pool import AdapterPool
from gpu_engine.model.cache_size import (
    CachedShape,
    CacheSize,
    decide,
    device_bytes,
    file_bytes,
    free_bytes,
    pool_tokens,
    report,
)
from gpu_engine.model.embedded import Progress, weights_file
from gpu_engine.model.experts import refuse_grouped_products, replace_experts
from gpu_engine.model.files.filled import Weights, fill, refuse_misfits, sources_of, unfilled
from gpu_engine.model.files.need import need_of, refuse_too_large, say_need
from gpu_engine.model.files.reading import (
    cast_computed,
    configuration_of,
    header_of,
    num_parameters,
    open_gguf,
    tokenizer_class,
    why_not_read,
)
from gpu_engine.model.files.safetensors_weights import SafetensorsWeights
from gpu_engine.model.fused_forward import FusedForward
from gpu_engine.model.fused_layers import join_activations
from gpu_engine.model.fusion import Bounds, FusedModelDiffers, fuse_parts, verified
from gpu_engine.model.hub import Hub, Wanted, locate, read_token, refuse_what_runs_code
from gpu_engine.model.linear import pack_linears, replace_conv1d, replace_linears, sum_in_fp32
from gpu_engine.model.loaded_model import LoadedModel, ModelNotSupported
from gpu_engine.model.outputs import find_outputs
from gpu_engine.model.parallel.division import join_engines, load_divided
from gpu_engine.model.parallel.shards import SETTING, Shard, heads_of, name_heads, shard
from gpu_engine.model.probe import probe, refuse_recurrent
from gpu_engine.model.quantised.checkpoint import QuantisedCheckpoint, has_mxfp4_experts, open_checkpoint
from gpu_engine.model.quantised.choice import ReadProducts, forms_of, products_while_reading, quantise
from gpu_engine.model.quantised.native import NativeForward, with_native
from gpu_engine.model.rotary import install_tables
from kernels.blocks import BLOCK
from kernels.forward import LAYER_PRODUCTS
from service_runtime.cores import usable_cores

if TYPE_CHECKING:
    from gpu_engine.model.files.gguf_header import GGUFHeader
    from gpu_engine.model.files.gguf_weights import GGUFWeights

__all__ = ["LoadedModel", "ModelNotSupported", "find_model", "load_model", "path_of", "prepare", "resolve_dtype"]

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


def path_of(
    config: EngineConfig, progress: Progress | None = None, *, setting: str = "model", with_tokenizer: bool = True
) -> Path:
    """Return the directory or the GGUF file of `config.model`; raise as `load_model`."""
    if config.model == EMBEDDED_MODEL:
        return weights_file()
    wanted = Wanted(config.model, config.revision, setting, with_tokenizer)
    return locate(wanted, Hub(token=read_token(config.hf_token_file)), progress)


def find_model(config: EngineConfig, progress: Progress | None = None) -> None:
    """Raise ModelNotSupported or FileNotFoundError for a `config.model` that is not there; fetch one of the hub."""
    if config.model != EMBEDDED_MODEL:  # a package of its own, which `load_model` looks for
        path_of(config, progress)


_FEWEST_TOKENS = 16
"""No tokenizer of a model has fewer."""

_LOADING = threading.Lock()
"""transformers replaces methods of its classes while it loads a model, such as `tie_weights`. Of two threads that load
at once, one would leave the other's replacement in place, and no model loaded later would have tied weights."""


def load_model(
    config: EngineConfig, progress: Progress | None = None, *, setting: str = "model", beside: bool = False
) -> LoadedModel:
    """Load `config.model`; raise ModelNotSupported, FileNotFoundError or EmbeddedModelMissing with a reason.

    `setting` is the setting that names the model: messages about its files begin with it. With `tensor_parallel_size`
    above 1 this starts the other ranks as well, and with `data_parallel_attention` it waits for the other engines;
    either may raise RankLost. `beside`: an engine of this process runs meanwhile, so nothing that its threads share may
    change; the weights then take memory in float32 first.
    """
    if config.tensor_parallel_size > 1:
        return _load_over_ranks(config, progress)
    with _freed_at_once():
        model = _load(config, progress, setting, beside=beside)
        if config.data_parallel_attention > 1:
            join_engines(config, model)
    return model


def _load_over_ranks(config: EngineConfig, progress: Progress | None) -> LoadedModel:
    """Start the other ranks, and load. All have the length that is decided here, from the memory of the whole cache."""
    path = path_of(config, progress)  # fetched once, before each rank reads it
    shape, dtype = _shape_of(path, "model"), resolve_dtype(config.dtype, torch.device(config.device))
    size = _decide(config, shape, dtype, free_bytes(torch.device("cpu"), file_bytes(path, dtype)))
    report(config, shape, shape.token_bytes(dtype), size)
    # A length for which the cache is set needs no memory that is looked at again.
    sized = replace(config, max_model_len=size.max_model_len, kv_cache_tokens=size.max_model_len)
    model = load_divided(sized, lambda part: load_shard(sized, part, progress))
    model.room_tokens = size.room_tokens
    return model


def _shape_of(path: Path, setting: str) -> CachedShape:
    """Read the shape of the keys and values from a model's configuration. Raises ModelNotSupported."""
    try:
        config = configuration_of(path, header_of(path))
        return CachedShape.of(config.get_text_config())
    except (OSError, ValueError, AttributeError, IndexError, struct.error) as error:
        raise ModelNotSupported(f"{setting}: the configuration of {path} cannot be read: {error}") from error


def _decide(config: EngineConfig, shape: CachedShape, dtype: torch.dtype, free: int | None) -> CacheSize:
    """Decide the sizes, with the draft model's positions as a bound where no length is set. Engines that share their
    attention divide one machine's memory."""
    if free is not None and config.on_cpu:
        free //= config.data_parallel_attention
    if not config.max_model_len and config.drafter in ("model", "decoupled") and config.num_drafts:
        draft = path_of(replace(config, model=config.draft_model, revision=""), setting="draft_model")
        shape = shape.bounded_by(_shape_of(draft, "draft_model"))
    return decide(config, shape, shape.token_bytes(dtype), free)


def load_shard(config: EngineConfig, part: Shard, progress: Progress | None = None) -> tuple[LoadedModel, FusedForward]:
    """Load one rank's part of `config.model`; return it with its forward, which does not add over the ranks yet.

    Raises as `load_model`, and ModelNotSupported for a model that cannot be divided.
    """
    if config.quantization == "auto":
        config = replace(config, quantization="none")
    with _freed_at_once():
        model = _load(config, progress, "model", part)
    if not isinstance(model.fused.forward, FusedForward):
        reasons = "; ".join(model.fused.left)
        raise ModelNotSupported(f"{SETTING}: the forward of {model.model_type} is no loop over fused layers: {reasons}")
    return model, model.fused.forward


def _load(
    config: EngineConfig, progress: Progress | None, setting: str, part: Shard | None = None, *, beside: bool = False
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
    path = path_of(config, progress, setting=setting)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotSupported(f"{setting}: {path} has no config.json, so it is no model in Hugging Face's format")
        refuse_what_runs_code(path, setting)
    header = _header(path, setting)
    folder = path.parent if path.is_file() else path
    attention.register()
    report("loading the tokenizer", 0.1)
    tokenizer = _tokenizer(folder, _source(path, header), path, setting, header)
    report("loading the weights", 0.2)
    dtype = resolve_dtype(config.dtype, device)
    made, checkpoint = _with_weights(config, path, header, dtype, setting, report, whole=part is None, beside=beside)
    report("preparing the weights", 0.8)
    gguf_file = path if path.is_file() else None
    model: LoadedModel | None = None
    try:
        says_size = part is None and setting == "model"
        model = _prepare(config, made, tokenizer, gguf_file, checkpoint, part, says_size=says_size)
    except FusedModelDiffers as why:
        if part is not None:
            raise ModelNotSupported(f"{SETTING}: the fused forward of {path} differs from its own: {why}") from why
        log.warning("loading %s again, unfused: %s", config.model, why)
    if model is None:
        del made  # with its weights, before the others are read
        return _load(replace(config, fuse_parts=False), progress, setting, beside=beside)
    if part is None or part.rank == 0:
        model.sampling_defaults = _sampling_defaults(config, folder if path.is_dir() else None)
    report("loaded", 1.0)
    return model


def _with_weights(
    config: EngineConfig,
    path: Path,
    header: GGUFHeader | None,
    dtype: torch.dtype,
    setting: str,
    report: Progress,
    *,
    whole: bool,
    beside: bool,
) -> tuple[Network, QuantisedCheckpoint | None]:
    """Return a model with its weights, and the quantised checkpoint that it comes from or None.

    Raises ModelNotSupported.
    """
    folder = path if header is None else path.parent
    try:
        checkpoint = None if header is not None else open_checkpoint(folder)
        made: Network | None = None
        with _LOADING:
            if checkpoint is None and (header is not None or not has_mxfp4_experts(folder)):
                made = _read(config, path, header, dtype, setting, report, whole=whole, beside=beside)
            if made is None:
                # transformers makes the dtype of the weights torch's default for every thread while it loads them.
                source = _source(path, header)
                made = Network(_network(folder, torch.float32 if beside else dtype, source, checkpoint))
                if beside:
                    cast_computed(made.net, dtype)
    except ModelNotSupported:  # says what it is about
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelNotSupported(f"{setting}: {path} cannot be loaded: {error}") from error
    except KeyError as error:
        if error.args != (attention.NAME,):
            raise
        raise ModelNotSupported(
            f"{setting}: {path} cannot be loaded: the attention of its family in transformers takes no other function"
        ) from error
    return made, checkpoint


def _source(path: Path, header: GGUFHeader | None) -> dict[str, Any]:
    """Return transformers' arguments for the folder of a model: which of its files is read if the model is one file."""
    return {} if header is None else {"gguf_file": path.name}


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


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """A transformers model with its weights."""

    net: Any
    num_parameters: int = 0
    """0: those that `net` has."""
    quantised: bool | None = None
    """Whether its linear layers were read as products over blocks; None: that is not decided yet."""
    size: CacheSize | None = None
    """Of its cache; None: that is not decided yet."""


def _header(path: Path, setting: str) -> GGUFHeader | None:
    try:
        return header_of(path)
    except (OSError, ValueError) as error:
        raise ModelNotSupported(f"{setting}: {path} cannot be read; is the file complete? {error}") from error


def _read(
    config: EngineConfig,
    path: Path,
    header: GGUFHeader | None,
    dtype: torch.dtype,
    setting: str,
    report: Progress,
    *,
    whole: bool,
    beside: bool,
) -> Network | None:
    """Return the model of a file or a folder, read tensor by tensor; None: transformers' loader has to read it.

    `whole`: not one rank's part, whose products are quantised after it is cut. Raises as `_network`.
    """
    own: GGUFWeights | None = None
    weights: GGUFWeights | SafetensorsWeights
    if header is not None:
        own, why = open_gguf(header)
        if own is None:
            log.info("loading %s through transformers, in full: %s", path, why)
            return None
        weights = own
    else:
        weights = SafetensorsWeights(path)
    with weights:
        products = products_while_reading(config, weights, own, dtype) if config.on_cpu and whole else None
        # The dtype of a new model is torch's default for every thread while it is made.
        net = unfilled(configuration_of(path, header), torch.float32 if beside else dtype, attention.NAME)
        if beside:
            cast_computed(net, dtype)
        refuse_recurrent(net, net.config.model_type)
        if isinstance(weights, SafetensorsWeights):
            reason = why_not_read(net, weights, rounds=products is not None)
            if reason is not None:
                log.info("loading %s through transformers: %s", path, reason)
                return None
            if (path / "generation_config.json").is_file():
                net.generation_config = GenerationConfig.from_pretrained(path)
        refuse_misfits(net, weights)
        if own is not None and (unread := own.unread(sources_of(net, own).values())):
            log.warning(
                "%s has tensors that the model does not read, so its answers may differ from another server's: %s",
                *(path, ", ".join(unread)),
            )
        count = num_parameters(net)
        size = _memory(config, net, weights, products, dtype, setting) if config.on_cpu and whole else None
        replaced = fill(
            net,
            weights,
            dtype,
            (lambda name, linear: None) if products is None else products.of,
            lambda share: report("loading the weights", 0.2 + 0.6 * share),
        )
    if products is not None:
        log.info("quantised %d products: %s", replaced, products)
    return Network(net, count, products is not None if config.on_cpu and whole else None, size)


def _memory(
    config: EngineConfig,
    net: Any,
    weights: Weights,
    products: ReadProducts | None,
    dtype: torch.dtype,
    setting: str,
) -> CacheSize:
    """Return the sizes of the cache of a model that is still to be filled, and log what the start takes.

    Raises ModelNotSupported where the free memory has no room for it.
    """
    need, free = need_of(net, weights, products, dtype), free_bytes(torch.device("cpu"))
    refuse_too_large(need, free, setting, rounds=products is not None)
    shape = _cached_shape(net)
    size = _decide(config, shape, dtype, None if free is None else max(0, free - need.total))
    tokens = pool_tokens(config, size.max_model_len, size.room_tokens)
    if setting == "model":  # a draft model's cache has the target's tokens
        say_need(need, tokens, tokens * shape.token_bytes(dtype), free)
    return size


def _cached_shape(net: Any) -> CachedShape:
    """Return the shape of a model's keys and values. Raises ModelNotSupported."""
    try:
        return CachedShape.of(net.config.get_text_config())
    except AttributeError as error:
        raise ModelNotSupported(f"model: {net.config.model_type} is no transformer with attention: {error}") from error
    except RuntimeError as error:  # of a configuration whose layers have their own
        raise ModelNotSupported(f"model: layers of {net.config.model_type} differ in shape: {error}") from error


def _network(folder: Path, dtype: torch.dtype, source: dict[str, Any], checkpoint: QuantisedCheckpoint | None) -> Any:
    """Return the transformers model with our attention. Raises OSError, ValueError or SafetensorError."""
    if checkpoint is not None:
        return checkpoint.load(dtype, attention.NAME)
    if not source:
        source = {"use_safetensors": True}
        if has_mxfp4_experts(folder):
            source["quantization_config"] = Mxfp4Config(dequantize=True)
            log.info("dequantised the experts to %s: MXFP4 has no product here", str(dtype).removeprefix("torch."))
    options = {"dtype": dtype, "attn_implementation": attention.NAME, "output_loading_info": True, **source}
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **options)
    net, info = loaded
    # transformers fills in random numbers.
    if missing := sorted(info["missing_keys"]):
        rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"it has no weights for {missing[0]}{rest}")
    return net


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's numbers of these settings (mallopt)."""
_LARGE, _LARGEST = 1 << 20, 32 << 20
"""Sizes of blocks that have memory of their own: while a model is loaded, and else, where it is glibc's own bound."""


@contextmanager
def _freed_at_once() -> Iterator[None]:
    """Have glibc return each weight's memory to the system when it is freed, while the context is open.

    It would keep the pieces, and others would not fit into them: a third of the weights of a model of 1B at its peak.
    """
    library = ctypes.CDLL(None)
    option, trim = getattr(library, "mallopt", None), getattr(library, "malloc_trim", None)
    if option is None or trim is None:  # another C library
        yield
        return
    option(_M_MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        option(_M_MMAP_THRESHOLD, _LARGEST)
        option(_M_TRIM_THRESHOLD, 2 * _LARGEST)
        trim(0)


def prepare(
    config: EngineConfig,
    net: Any,
    tokenizer: PreTrainedTokenizerFast,
    gguf_file: Path | None = None,
    checkpoint: QuantisedCheckpoint | None = None,
    part: Shard | None = None,
    *,
    says_size: bool = False,
) -> LoadedModel:
    """Prepare a transformers model that was loaded with the attention of `attention.NAME`, from `gguf_file` or
    `checkpoint` if it came from one of them; with `part`, cut it down to one rank's. `says_size`: log the length of
    sequences and the size of the KV cache.

    Raises ModelNotSupported, or FusedModelDiffers when it must be loaded again with `fuse_parts` off.
    """
    return _prepare(config, Network(net), tokenizer, gguf_file, checkpoint, part, says_size=says_size)


def _prepare(
    config: EngineConfig,
    made: Network,
    tokenizer: PreTrainedTokenizerFast,
    gguf_file: Path | None,
    checkpoint: QuantisedCheckpoint | None,
    part: Shard | None,
    *,
    says_size: bool,
) -> LoadedModel:
    net = made.net
    device = torch.device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    net.eval().requires_grad_(False)
    refuse_recurrent(net, net.config.model_type)
    replace_conv1d(net)
    count = made.num_parameters or num_parameters(net)
    shape = _cached_shape(net)
    weights = device_bytes(config, net, dtype, of_8_bits=checkpoint is not None) if device.type == "cuda" else 0
    size = made.size or _decide(config, shape, dtype, free_bytes(device, weights))  # the weights are not there yet
    model = _describe(config, net, tokenizer, dtype, device, count, shape, size)
    if says_size:
        report(config, shape, shape.token_bytes(dtype), size)
    if part is not None:
        _refuse_blocks_of_files(config, gguf_file, checkpoint)
        return _prepare_part(config, model, part)
    return _prepare_net(config, model, made.quantised, gguf_file, checkpoint)


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
    model.num_kv_heads = shard(model.net, part, 1 if config.quantization == "none" else BLOCK).keys
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
    # The memory of a GPU then never holds the weights that are replaced.
    model.quantised = quantise(config, net, gguf_file, checkpoint) if quantised is None else quantised
    model.forms = forms_of(net)
    net.to(device)
    if device.type == "cpu":
        replace_experts(net)
    install_tables(net.get_decoder(), model.max_model_len, captured=device.type == "cuda")
    by_row = model.quantised and device.type == "cuda"
    seen = probe(model, rough=by_row)
    # Activations of 8 bits hide a float32's rounding: another order of a sum may give another integer.
    bounds = Bounds.of(torch.bfloat16 if model.quantised else dtype, rough=by_row)
    if config.fuse_parts:
        with attention.attending(seen.ctx):
            model.fused = fuse_parts(net, seen.record, seen.ctx.layers_seen, bounds)
    if device.type == "cpu":
        seen.record.forget(nn.Linear)  # it would keep each weight next to its packed copy
        pack_linears(net)
    else:
        sum_in_fp32()
        replace_linears(net)
        join_activations(net)
    if config.fuse_parts:
        model.fused = verified(net, model.fused, seen.record, seen.logits_NV, seen.again(model), bounds, seen.noise)
    if model.quantised and not by_row and model.fused.forward and whole:
        model.fused = with_native(model.fused, seen.logits_NV, seen.again(model))
    if config.takes_adapters:
        model.adapters = _adapter_pool(config, model)
        if isinstance(model.adapters, AdapterPool) and isinstance(model.fused.forward, NativeForward):
            in_order = [name for _, _, name in model.adapters.places.owners]
            assert in_order == list(LAYER_PRODUCTS) * model.num_layers, in_order
    model.outputs = find_outputs(model)
    return model


def _adapter_pool(config: EngineConfig, model: LoadedModel) -> AdapterPool | DeviceAdapterPool:
    """Return the place of the adapters' weights on the model's device. Raises ModelNotSupported."""
    by_net = f"drafter={config.drafter} reads the tokens of the prompt" if config.drafts_by_net else ""
    if model.device.type == "cpu":
        return AdapterPool(model.net, model.vocab_size, no_prompts=by_net)
    from kernels.cuda.low_rank import add_low_rank  # a CPU install has no Triton

    try:
        limits = config.adapter_limits
        return DeviceAdapterPool(model.net, model.vocab_size, limits, add_low_rank, no_prompts=by_net)
    except AdapterNotSupported as error:
        raise ModelNotSupported(str(error)) from error


def _tokenizer(
    folder: Path, source: dict[str, Any], path: Path, setting: str, header: GGUFHeader | None
) -> PreTrainedTokenizerFast:
    """Return the tokenizer in a folder, or in the GGUF file `path` of it. Raises ModelNotSupported with the path."""
    try:
        if header is not None and (kind := tokenizer_class(path, header)) is not None:
            tokenizer = kind.from_pretrained(folder, **source)
        else:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **source)
    except (OSError, ValueError, IndexError, struct.error) as error:
        if source:  # the first that is read of a GGUF file, with the places of all its tensors
            raise ModelNotSupported(f"{setting}: {path} cannot be read; is the file complete? {error}") from error
        raise ModelNotSupported(f"{setting}: the tokenizer of {path} cannot be loaded: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelNotSupported(
            f"{setting}: {type(tokenizer).__name__} has no tokenizer.json, which the grammar process needs"
        )
    if len(tokenizer) < _FEWEST_TOKENS:
        # Without files of a tokenizer, transformers makes one of a few special tokens, and every prompt is empty.
        raise ModelNotSupported(
            f"{setting}: {path} has no tokenizer: its files make one of {len(tokenizer)} tokens; add its tokenizer.json"
        )
    return tokenizer


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
    eos = net.generation_config.eos_token_id if net.generation_config else None
    ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    ids += [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    vocab_size = net.get_output_embeddings().out_features
    return LoadedModel(
        name=config.model,
        net=net,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        eos_token_ids=tuple(dict.fromkeys(i for i in ids if i < vocab_size)),
        model_type=net.config.get_text_config().model_type,
        dtype=dtype,
        device=device,
        num_parameters=num_parameters,
        max_model_len=size.max_model_len,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        room_tokens=size.room_tokens,
    )
