"""From the files of a model to a transformers model with its weights, and its tokenizer.

Weights are read tensor by tensor where `files/` can, else by transformers' own loader. Invariant: an error names the
setting and the file. Not responsible for: finding the files (hub.py), preparing the model for the engine (loader.py).
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.quantization_config import Mxfp4Config

from gpu_engine.api.config import EngineConfig
from gpu_engine.model import attention
from gpu_engine.model.cache_size import (
    CachedShape,
    CacheSize,
    decide,
    free_bytes,
    pool_tokens,
    refuse_wide_heads,
    snapshots_beside,
    states_of,
)
from gpu_engine.model.experts import split_experts
from gpu_engine.model.files.early import check_files, checked_config
from gpu_engine.model.files.filled import Weights, fill, refuse_misfits, sources_of, unfilled
from gpu_engine.model.files.gguf_splits import split_as_named
from gpu_engine.model.files.gpt_oss_weights import GptOssWeights
from gpu_engine.model.files.need import need_of, refuse_too_large, say_need
from gpu_engine.model.files.reading import (
    WRONG_VALUES,
    cast_computed,
    configuration_of,
    header_of,
    num_parameters,
    open_folder,
    open_gguf,
    text_part_of,
    tokenizer_class,
    why_not_read,
    wrong_value,
)
from gpu_engine.model.files.rope_factors import rope_tensors
from gpu_engine.model.files.safetensors_weights import SafetensorsWeights
from gpu_engine.model.hub import Progress, path_of
from gpu_engine.model.latent import latent_shapes
from gpu_engine.model.loaded_model import ModelNotSupported
from gpu_engine.model.names import one_line
from gpu_engine.model.probe import refuse_recurrent
from gpu_engine.model.quantised.checkpoint import QuantisedCheckpoint, has_mxfp4_experts, open_checkpoint
from gpu_engine.model.quantised.choice import OwnBlocks, ReadProducts, products_while_reading, why_floats
from gpu_engine.model.recurrent.replacement import planned_layers
from kernels.blocks import can_multiply_blocks

if TYPE_CHECKING:
    from gpu_engine.model.files.gguf_header import GGUFHeader
    from gpu_engine.model.files.gguf_weights import GGUFWeights

log = logging.getLogger(__name__)

_FEWEST_TOKENS = 16
"""No tokenizer of a model has fewer."""

_LOADING = threading.Lock()
"""transformers replaces methods of its classes while it loads a model, such as `tie_weights`. Of two threads that load
at once, one would leave the other's replacement in place, and no model loaded later would have tied weights."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's files, and how one load reads them."""

    path: Path
    """A folder, or a GGUF file."""
    header: GGUFHeader | None
    """Of the GGUF file; None: `path` is a folder."""
    setting: str
    """The setting that names the model."""
    dtype: torch.dtype
    """Of the weights that stay floats."""
    whole: bool
    """False: for one rank, which quantises its products after they are cut."""
    beside: bool
    """An engine of this process runs meanwhile, so nothing that its threads share may change: torch's default dtype."""

    @classmethod
    def open(
        cls, path: Path, setting: str, dtype: torch.dtype, *, whole: bool = True, beside: bool = False
    ) -> ModelFiles:
        """Read the header of a GGUF file, or look for a folder's configuration. Raises ModelNotSupported."""
        if beside:  # at a start, `find_model` has looked at all files
            check_files(path, setting)
        elif path.is_dir():
            checked_config(path, setting)
        try:
            header = header_of(path)
        except (OSError, ValueError) as error:
            raise ModelNotSupported(f"{setting}: {path} cannot be read; is the file complete? {error}") from error
        return cls(path, header, setting, dtype, whole, beside)

    @property
    def folder(self) -> Path:
        """The folder that holds them."""
        return self.path if self.header is None else self.path.parent

    @property
    def gguf_file(self) -> Path | None:
        """The GGUF file, or None."""
        return None if self.header is None else self.path

    @property
    def source(self) -> dict[str, Any]:
        """transformers' arguments next to `folder`: which file is read if the model is one file."""
        return {} if self.header is None else {"gguf_file": self.path.name}


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
    checkpoint: QuantisedCheckpoint | None = None
    """The quantised checkpoint that it comes from, or None."""


def read_network(
    config: EngineConfig,
    files: ModelFiles,
    progress: Progress,
    no_weights_yet: Callable[[Any], None] = lambda net: None,
) -> Network:
    """Return a model with its weights. Raises ModelNotSupported.

    `no_weights_yet`: called with the transformers model before it has weights, where they are read tensor by tensor.
    """
    setting, path = files.setting, files.path
    try:
        checkpoint = open_checkpoint(path) if files.header is None else None
        made: Network | None = None
        with _LOADING:
            if checkpoint is None and (_by_expert(config, files) or not _has_mxfp4(files)):
                made = _read(config, files, progress, no_weights_yet)
            if made is None:
                made = Network(_through_transformers(files, checkpoint), checkpoint=checkpoint)
                if files.beside:
                    cast_computed(made.net, files.dtype)
    except ModelNotSupported:  # says what it is about
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelNotSupported(f"{setting}: {path} cannot be loaded: {one_line(error)}") from error
    except KeyError as error:
        if error.args != (attention.NAME,):
            raise
        raise ModelNotSupported(
            f"{setting}: {path} cannot be loaded: the attention of its family in transformers takes no other function"
        ) from error
    return made


def _by_expert(config: EngineConfig, files: ModelFiles) -> bool:
    """Return whether the model gets a product for each expert, and its products while its files are read."""
    return config.on_cpu and files.whole


def _has_mxfp4(files: ModelFiles) -> bool:
    return files.header is None and has_mxfp4_experts(files.folder)


def _read(
    config: EngineConfig,
    files: ModelFiles,
    progress: Progress,
    no_weights_yet: Callable[[Any], None],
) -> Network | None:
    """Return a model that is read tensor by tensor; None: transformers' loader has to read it. Raises as
    `_through_transformers`."""
    path, dtype, setting, decided = files.path, files.dtype, files.setting, _by_expert(config, files)
    gguf: GGUFWeights | None = None
    weights: GGUFWeights | SafetensorsWeights
    whole = configuration_of(path, files.header)  # before any file is open, since it may raise
    if files.header is not None:
        gguf, why = open_gguf(files.header, by_expert=decided)
        if gguf is None:
            log.info("loading %s through transformers, in full: %s", path, why)
            return None
        weights = gguf
    configuration = whole if gguf is not None else text_part_of(whole)
    own: OwnBlocks | None = gguf
    if gguf is None:
        weights = open_folder(path, configuration, of_text=configuration is not whole, by_expert=decided)
        own = weights if isinstance(weights, GptOssWeights) and weights.quantised else None
    with weights:
        if configuration is not whole:
            log.info("reading the language model of %s, which takes no images or audio here", path)
            configuration.tie_word_embeddings = weights.shape("lm_head.weight") is None
        if isinstance(weights, GptOssWeights) and hasattr(configuration, "quantization_config"):
            del configuration.quantization_config  # of its experts, which are read here
        # The dtype of a new model is torch's default for every thread while it is made.
        net = _unfilled(configuration, torch.float32 if files.beside else dtype)
        if files.beside:
            cast_computed(net, dtype)
        products: ReadProducts | None = None
        if decided:
            split_experts(net)
            products = products_while_reading(config, net, weights, own, dtype, of_gguf=gguf is not None)
        if gguf is None and own is not None and products is None:
            why = str(why_floats(config, possible=can_multiply_blocks()))
            log.info("dequantised the experts to %s: %s", str(dtype).removeprefix("torch."), why)
        refuse_recurrent(config, net)
        refuse_wide_heads(cached_shape(config, net, setting).heads, "cpu" if config.on_cpu else "cuda")
        if isinstance(weights, SafetensorsWeights):
            reason = why_not_read(net, weights, rounds=products is not None)
            if reason is not None:
                log.info("loading %s through transformers: %s", path, reason)
                return None
            if (path / "generation_config.json").is_file():
                net.generation_config = GenerationConfig.from_pretrained(path)
        refuse_misfits(net, weights)
        unread = gguf.unread(sources_of(net, gguf).values()) if gguf is not None else []
        if unread := [name for name in unread if name not in rope_tensors(net.config)]:
            log.warning(
                "%s has tensors that the model does not read, so its answers may differ from another server's: %s",
                *(path, ", ".join(unread)),
            )
        count = num_parameters(net)
        size = _memory(config, files, net, weights, products) if decided else None
        no_weights_yet(net)
        replaced = fill(
            net,
            weights,
            dtype,
            (lambda name, parent, linear: None) if products is None else products.of,
            lambda share: progress("loading the weights", 0.2 + 0.6 * share),
        )
    if products is not None:
        log.info("quantised %d products: %s", replaced, products)
    return Network(net, count, products is not None if decided else None, size)


def _unfilled(configuration: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """Return `unfilled` with our attention. Raises ValueError for a configuration that describes no model."""
    if type(configuration) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"transformers has no model that continues a text in the family {configuration.model_type}")
    try:
        return unfilled(configuration, dtype, attention.NAME)
    except (KeyError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        if error.args == (attention.NAME,):
            raise
        raise ValueError(f"its configuration describes no model: {type(error).__name__}: {error}") from error


def _through_transformers(files: ModelFiles, checkpoint: QuantisedCheckpoint | None) -> Any:
    """Return the model as transformers loads it, with our attention. Raises OSError, ValueError or SafetensorError."""
    # transformers makes the dtype of the weights torch's default for every thread while it loads them.
    dtype = torch.float32 if files.beside else files.dtype
    if checkpoint is not None:
        return checkpoint.load(dtype, attention.NAME)
    source: dict[str, Any] = files.source or {"use_safetensors": True}
    if files.header is None and has_mxfp4_experts(files.folder):
        source["quantization_config"] = Mxfp4Config(dequantize=True)
        log.info(
            "dequantised the experts to %s: only one process on a CPU multiplies MXFP4",
            str(dtype).removeprefix("torch."),
        )
    options = {"dtype": dtype, "attn_implementation": attention.NAME, "output_loading_info": True, **source}
    loaded: Any = AutoModelForCausalLM.from_pretrained(files.folder, trust_remote_code=False, **options)
    net, info = loaded
    # transformers fills in random numbers.
    if missing := sorted(info["missing_keys"]):
        rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"it has no weights for {missing[0]}{rest}")
    return net


def read_tokenizer(files: ModelFiles) -> PreTrainedTokenizerFast:
    """Return the tokenizer next to a model, or in its GGUF file. Raises ModelNotSupported with the path."""
    path, setting, source = files.path, files.setting, files.source
    try:
        if files.header is not None and (kind := tokenizer_class(path, files.header)) is not None:
            tokenizer = kind.from_pretrained(files.folder, **source)
            split_as_named(tokenizer, files.header)
        else:
            tokenizer = AutoTokenizer.from_pretrained(files.folder, trust_remote_code=False, **source)
    except WRONG_VALUES as error:  # of the model's configuration, which names the class
        raise ModelNotSupported(f"{setting}: {path} cannot be loaded: {wrong_value(error)}") from error
    except Exception as error:  # the libraries raise all kinds for a damaged vocabulary
        why = one_line(error if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}")
        if source:  # the first that is read of a GGUF file, with the places of all its tensors
            raise ModelNotSupported(f"{setting}: {path} cannot be read; is the file complete? {why}") from error
        raise ModelNotSupported(f"{setting}: the tokenizer of {path} cannot be loaded: {why}") from error
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


def shape_of(path: Path, setting: str) -> CachedShape:
    """Read the shape of the keys and values from a model's configuration. Raises ModelNotSupported."""
    try:
        config = configuration_of(path, header_of(path))
        return CachedShape.of(config.get_text_config())
    except (OSError, ValueError, AttributeError, IndexError, struct.error) as error:
        raise ModelNotSupported(f"{setting}: the configuration of {path} cannot be read: {error}") from error


def cached_shape(config: EngineConfig, net: Any, setting: str = "model") -> CachedShape:
    """Return the shape of a model's keys and values as they are served, and the size of its states. Raises
    ModelNotSupported, with the setting that names the model."""
    try:
        latent = {net.get_submodule(path).layer_idx: of.kv_heads for path, of in latent_shapes(config, net).items()}
        shape = CachedShape.of(net.config.get_text_config(), latent)
        shape = replace(shape, states=states_of(planned_layers(net)))
    except AttributeError as error:
        kind = net.config.model_type
        raise ModelNotSupported(f"{setting}: {kind} is no transformer with attention: {error}") from error
    if shape.num_layers < 1:
        raise ModelNotSupported(f"{setting}: it has no layer with attention by its configuration")
    return shape


def decide_size(config: EngineConfig, shape: CachedShape, dtype: torch.dtype, free: int | None) -> CacheSize:
    """Decide the sizes of the cache, with the draft model's positions as a bound where no length is set. Engines that
    share their attention divide one machine's memory. `free`: bytes; None: unknown. Raises ModelNotSupported."""
    if free is not None and config.on_cpu:
        free //= config.data_parallel_attention
    if not config.max_model_len and config.drafter in ("model", "decoupled") and config.num_drafts:
        draft = path_of(replace(config, model=config.draft_model, revision=""), setting="draft_model")
        shape = shape.bounded_by(shape_of(draft, "draft_model"))
    return decide(config, shape, shape.token_bytes(config, dtype), free)


def _memory(
    config: EngineConfig, files: ModelFiles, net: Any, weights: Weights, products: ReadProducts | None
) -> CacheSize:
    """Return the sizes of the cache of a model that is still to be filled, and log what the start takes.

    Raises ModelNotSupported where the free memory has no room for it.
    """
    need, free = need_of(net, weights, products, files.dtype), free_bytes(torch.device("cpu"))
    refuse_too_large(need, free, files.setting, rounds=products is not None)
    shape = cached_shape(config, net, files.setting)
    size = decide_size(config, shape, files.dtype, None if free is None else max(0, free - need.total))
    tokens = pool_tokens(config, size.max_model_len, size.room_tokens)
    if files.setting == "model":  # a draft model's cache has the target's tokens
        cache, states = tokens * shape.token_bytes(config, files.dtype), shape.states
        snapshots = snapshots_beside(config, states.state, cache) * states.state
        say_need(need, tokens, cache, free, states.of_slots(config) + snapshots)
    return size
