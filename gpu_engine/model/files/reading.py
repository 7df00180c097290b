"""Opens a model's files for reading tensor by tensor, or says why transformers' own loader reads them.

Invariant: what is read here has the weights that transformers' loader gives; what that loader would rename, convert or
compute is left to it. Not responsible for: filling the model (see filled.py).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast, Qwen3Config
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)
from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING
from transformers.pytorch_utils import Conv1D

from gpu_engine.model.files.architectures import (
    ARCHITECTURES,
    WITH_EXPERTS,
    architecture_of,
    check_experts,
    has_experts,
    width_of_experts,
)
from gpu_engine.model.files.filled import tied_names
from gpu_engine.model.files.gpt_oss_weights import GptOssWeights
from gpu_engine.model.files.pieces import EXPERT
from gpu_engine.model.files.rope_factors import apply_rope_factors
from gpu_engine.model.files.safetensors_weights import SafetensorsWeights
from gpu_engine.model.names import one_line, part_names

if TYPE_CHECKING:  # the library of GGUF files is loaded for one
    from gpu_engine.model.files.gguf_header import GGUFHeader
    from gpu_engine.model.files.gguf_weights import GGUFWeights


WRONG_VALUES = (StrictDataclassError, ZeroDivisionError)
"""What transformers raises, next to ValueError, for values of a configuration that no model has."""

_READ_BY_LIBRARY = ("qwen2moe",)
"""Architectures with a configuration made here whose files transformers reads as well, where it knows the widths."""


def wrong_value(error: Exception) -> str:
    """Return the message of one of WRONG_VALUES in one line."""
    return f"its configuration has a wrong value: {one_line(error)}"


def header_of(path: Path) -> GGUFHeader | None:
    """Return the header of a GGUF file, the first part if it has several; None: `path` is a folder. Raises OSError or
    GGUFError."""
    if not path.is_file():
        return None
    from gpu_engine.model.files.gguf_header import GGUFHeader

    return GGUFHeader(path, [path.with_name(name) for name in part_names(path.name)[1:]])


def configuration_of(path: Path, header: GGUFHeader | None) -> PreTrainedConfig:
    """Return a model's configuration as transformers reads it. Raises OSError, ValueError and others of the library.

    `header`: of the GGUF file `path`; None: `path` is a folder.
    """
    config: PreTrainedConfig
    if header is None or header.architecture not in ARCHITECTURES | WITH_EXPERTS:
        source: dict[str, Any] = {} if header is None else {"gguf_file": path.name}
        return _automatic(path.parent if source else path, **source)
    from gpu_engine.model.files.gguf_configs import own_configuration  # the gguf library is not there always

    check_experts(header)
    try:
        own = own_configuration(header)
    except WRONG_VALUES as error:
        raise ValueError(wrong_value(error)) from error
    if own is not None:
        own.name_or_path = str(path.parent)
        apply_rope_factors(own, header)
        return own
    # The library turns every string of a vocabulary into an array of its own before it looks at anything else.
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        counted = header.architecture in GGUF_CONFIG_ARCHS
        Path(folder, "header.gguf").write_bytes(header.without_vocabulary(counted=counted))
        config = _automatic(Path(folder), gguf_file="header.gguf")
    config.name_or_path = str(path.parent)
    apply_rope_factors(config, header)
    if header.architecture == "qwen3moe":  # the library leaves it as its class has it
        config.moe_intermediate_size = width_of_experts(header)
    return config


def _automatic(folder: Path, **source: Any) -> PreTrainedConfig:
    """Return the configuration that transformers reads. Raises OSError, and ValueError with one line."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False, **source)
    except WRONG_VALUES as error:
        raise ValueError(wrong_value(error)) from error
    return config


def text_part_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of a checkpoint's language model: the same, if there is no other model or no class."""
    text: Any = config.get_text_config()
    if text is config or type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return cast(PreTrainedConfig, text)
    if text.model_type != "qwen3_vl_text":
        return config
    # Without images it is Qwen 3: the positions of text are equal in time, height and width.
    own = {name: value for name, value in text.to_dict().items() if name in vars(Qwen3Config())}
    rope = {"rope_type": "default", "rope_theta": text.rope_parameters["rope_theta"]}
    return Qwen3Config(**{**own, "model_type": "qwen3", "rope_parameters": rope})


def tokenizer_class(path: Path, header: GGUFHeader) -> Any:
    """Return the class that transformers' automatic one chooses for the tokenizer in a GGUF file; None: ask that.

    To choose, it reads the configuration with the vocabulary once more, which takes longer than all weights.
    """
    if header.architecture not in ARCHITECTURES | WITH_EXPERTS or (path.parent / "tokenizer_config.json").exists():
        return None
    config = configuration_of(path, header)
    if getattr(config, "tokenizer_class", None):
        return None
    chosen: Any = TOKENIZER_MAPPING.get(type(config), PreTrainedTokenizerFast)
    # Mistral's own library reads no GGUF file.
    return PreTrainedTokenizerFast if chosen.__name__ == "MistralCommonBackend" else chosen


def open_gguf(header: GGUFHeader, *, by_expert: bool) -> tuple[GGUFWeights | None, str]:
    """Return the weights of a GGUF file, or None and why transformers' loader has to read it. Raises ValueError.

    `by_expert`: the model has a product for each expert (see model/experts.py).
    """
    if architecture_of(header) is not None and (by_expert or not has_experts(header)):
        from gpu_engine.model.files.gguf_weights import GGUFWeights

        return GGUFWeights(header), ""
    from gpu_engine.model.files.gguf_configs import own_configuration  # the gguf library is not there always

    if header.num_parts > 1:
        known = ", ".join(dict.fromkeys([*ARCHITECTURES, *(WITH_EXPERTS if by_expert else ())]))
        raise ValueError(f"of the architecture {header.architecture} only whole files are read, and parts of {known}")
    by_library = header.architecture in _READ_BY_LIBRARY or own_configuration(header) is None
    if architecture_of(header) is not None and not by_library:
        some = f"{header.architecture}{' with experts' if header.architecture in ARCHITECTURES else ''}"
        raise ValueError(f"files of the architecture {some} are read by one process, on a CPU")
    return None, f"files of the architecture {header.architecture} are not read tensor by tensor"


def open_folder(path: Path, config: PreTrainedConfig, *, of_text: bool, by_expert: bool) -> SafetensorsWeights:
    """Return the weights of a model in Hugging Face's format. Raises OSError or SafetensorsError.

    `of_text`: see SafetensorsWeights; `by_expert`: as in `open_gguf`.
    """
    kind = GptOssWeights if by_expert and config.model_type == "gpt_oss" else SafetensorsWeights
    return kind(path, of_text=of_text)


def why_not_read(net: Any, weights: SafetensorsWeights, *, rounds: bool) -> str | None:
    """Return why a model in Hugging Face's format must go through transformers' loader; None: it can be read here.

    `net`: the model without memory. `rounds`: its linear layers are to become products over blocks. Raises ValueError
    where the files have some experts and lack others.
    """
    if not weights.plain:
        return "it has tensors of other types than floats"
    experts = [names[0] for names in tied_names(net) if EXPERT.fullmatch(names[0])]
    lost = [name for name in experts if weights.shape(name) is None]
    if lost and len(lost) < len(experts):
        raise ValueError(f"it has no weights for {lost[0]}")
    for names in tied_names(net):
        stored = [name for name in names if weights.shape(name) is not None]
        if not stored:
            return f"its files have no {names[0]}"
        if len(stored) > 1:
            return f"its files have both {stored[0]} and {stored[1]}, which are one weight of the model"
    if any(not _is_needless(transform) for transform in get_model_conversion_mapping(net)):
        return "the library converts weights of its family"
    if getattr(net, "_keep_in_fp32_modules_strict", None):
        return "parts of it stay in float32"
    if rounds and any(type(module) is Conv1D for module in net.modules()):
        return "its linear layers are transposed"
    return None


def _is_needless(transform: WeightTransform) -> bool:
    """Return whether the weights are found without a conversion of the library: names are compared, and matrices that
    it stacks for experts stay apart here (see model/experts.py)."""
    if not isinstance(transform, WeightConverter):
        return isinstance(transform, WeightRenaming)
    stacks = all(isinstance(each, MergeModulelist | Concatenate) for each in transform.operations)
    return stacks and all(".experts." in name for name in transform.target_patterns)


def num_parameters(net: nn.Module) -> int:
    """Return the number of a model's weights, tied ones once."""
    return sum(parameter.numel() for parameter in net.parameters())


def cast_computed(net: nn.Module, dtype: torch.dtype) -> None:
    """Convert the weights of `net` to another dtype, as if they had been loaded with it.

    Tables that a module computes keep their dtype, because bfloat16 would change the rotary frequencies. A computed
    scalar, such as the scale of Gemma's embeddings, is converted: transformers gives it the dtype of the weights.
    """
    computed = {id(b) for module in net.modules() for b in map(module._buffers.get, module._non_persistent_buffers_set)}
    for tensor in (*net.parameters(), *net.buffers()):
        if tensor.is_floating_point() and (id(tensor) not in computed or tensor.dim() == 0):
            tensor.data = tensor.data.to(dtype)
