"""The tensors of families whose layers are all alike, with their shapes, without torch.

A model of torch says the same and more, and takes seconds to import. Invariant: a model whose files lack one of these
tensors, or have it in another shape, is refused by the loader as well. Not responsible for: hybrids and mixtures of
experts, tensors that only some models of a family have (see filled.py, which compares every tensor).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # the library of GGUF files is loaded for one
    from gpu_engine.model.files.gguf_header import GGUFHeader


class _Part(NamedTuple):
    """A tensor of a layer."""

    gguf: str
    """Its name in a GGUF file."""
    own: str
    """Its name in Hugging Face's format."""
    sizes: str
    """A letter for each dimension: H hidden size, I inner size, J two of it, D size of a head, Q all heads of queries,
    K all heads of keys, P queries, keys and values; V is the vocabulary."""


_HEADS = (
    _Part("attn_norm.weight", "input_layernorm.weight", "H"),
    _Part("attn_q.weight", "self_attn.q_proj.weight", "QH"),
    _Part("attn_k.weight", "self_attn.k_proj.weight", "KH"),
    _Part("attn_v.weight", "self_attn.v_proj.weight", "KH"),
    _Part("attn_output.weight", "self_attn.o_proj.weight", "HQ"),
)
_MLP = (
    _Part("ffn_gate.weight", "mlp.gate_proj.weight", "IH"),
    _Part("ffn_up.weight", "mlp.up_proj.weight", "IH"),
    _Part("ffn_down.weight", "mlp.down_proj.weight", "HI"),
)
_NORM = (_Part("ffn_norm.weight", "post_attention_layernorm.weight", "H"),)
_FOUR_NORMS = (
    _Part("post_attention_norm.weight", "post_attention_layernorm.weight", "H"),
    _Part("ffn_norm.weight", "pre_feedforward_layernorm.weight", "H"),
    _Part("post_ffw_norm.weight", "post_feedforward_layernorm.weight", "H"),
)
_BIASES = (
    _Part("attn_q.bias", "self_attn.q_proj.bias", "Q"),
    _Part("attn_k.bias", "self_attn.k_proj.bias", "K"),
    _Part("attn_v.bias", "self_attn.v_proj.bias", "K"),
)
_OF_HEADS = (
    _Part("attn_q_norm.weight", "self_attn.q_norm.weight", "D"),
    _Part("attn_k_norm.weight", "self_attn.k_norm.weight", "D"),
)
_JOINED = (
    _Part("attn_norm.weight", "input_layernorm.weight", "H"),
    _Part("attn_qkv.weight", "self_attn.qkv_proj.weight", "PH"),
    _Part("attn_output.weight", "self_attn.o_proj.weight", "HQ"),
    *_NORM,
    _Part("ffn_up.weight", "mlp.gate_up_proj.weight", "JH"),
    _Part("ffn_down.weight", "mlp.down_proj.weight", "HI"),
)
_LLAMA = (*_HEADS, *_NORM, *_MLP)
_LAYERS = {
    "gemma2": (*_HEADS, *_FOUR_NORMS, *_MLP),
    "gemma3": (*_HEADS, *_OF_HEADS, *_FOUR_NORMS, *_MLP),
    "gemma3_text": (*_HEADS, *_OF_HEADS, *_FOUR_NORMS, *_MLP),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "phi3": _JOINED,
    "qwen2": (*_HEADS, *_BIASES, *_NORM, *_MLP),
    "qwen3": (*_HEADS, *_OF_HEADS, *_NORM, *_MLP),
}
"""By the family's name in a GGUF file, and in Hugging Face's format."""
_HEAD_SIZE = {
    "gemma2": "attention.key_length",
    "gemma3": "attention.key_length",
    "llama": "rope.dimension_count",
    "phi3": "",
    "qwen2": "",
}
"""The key of a header that has the size of a head; "": the hidden size divided by the heads. Others: not known."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the files of a model must have.

    Args:
        layers: the parts of each layer.
        num_layers: how many there are.
        sizes: those that the configuration says, by letter. The first tensor says the others.
    """

    layers: tuple[_Part, ...]
    num_layers: int
    sizes: dict[str, int]

    def check_gguf(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ValueError with one line for the tensors of a GGUF file."""
        outside = [("token_embd.weight", "VH"), ("output_norm.weight", "H")]
        self._check(shapes, outside, "output.weight", lambda layer, part: f"blk.{layer}.{part.gguf}")

    def check_own(self, shapes: Mapping[str, tuple[int, ...]], *, tied: bool) -> None:
        """Raise the same for the tensors of safetensors files. `tied`: the output head may be the embedding."""
        embedding, head = "model.embed_tokens.weight", "lm_head.weight"
        outside = [("model.norm.weight", "H")]
        if not tied or head not in shapes:
            outside.append((embedding, "VH"))
        if not tied:
            outside.append((head, "VH"))
        self._check(shapes, outside, head, lambda layer, part: f"model.layers.{layer}.{part.own}")

    def _check(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        outside: list[tuple[str, str]],
        head: str,
        name_of: Callable[[int, _Part], str],
    ) -> None:
        if self.num_layers < 1:
            raise ValueError(f"it has {self.num_layers} layers by its configuration, and needs at least 1")
        sizes, some = dict(self.sizes), range(min(self.num_layers, len(shapes)))
        for name, letters in outside:
            _compare(shapes, name, letters, sizes)
        for layer in range(self.num_layers):  # a number that is wrong ends at the first layer that is missing
            for part in self.layers:
                name = name_of(layer, part)
                if name not in shapes and any(name_of(other, part) in shapes for other in some):
                    raise ValueError(f"it has no {name}, which other layers have")
                _compare(shapes, name, part.sizes, sizes)
        if head in shapes:
            _compare(shapes, head, "VH", sizes)


def _compare(shapes: Mapping[str, tuple[int, ...]], name: str, letters: str, sizes: dict[str, int]) -> None:
    """Raise ValueError for a tensor that is missing or has another shape; learn the sizes that are not known."""
    shape = shapes.get(name)
    if shape is None:
        raise ValueError(f"it has no {name}")
    wanted = [sizes.setdefault(letter, size) for letter, size in zip(letters, shape, strict=False)]
    if len(shape) != len(letters) or [*shape] != wanted:
        other = f"{wanted}" if len(shape) == len(letters) else f"one of {len(letters)} dimensions"
        raise ValueError(f"{name} is {[*shape]}, and the model's is {other}")


def of_header(header: GGUFHeader) -> Expected | None:
    """Return what a GGUF file must have; None: its family is not known here, or its header does not say enough."""
    layers, num_layers = _LAYERS.get(header.architecture), header.get("{arch}.block_count")
    if layers is None or not isinstance(num_layers, int):
        return None
    given = {
        "hidden": header.get("{arch}.embedding_length"),
        "inner": header.get("{arch}.feed_forward_length"),
        "heads": header.get("{arch}.attention.head_count"),
        "keys": header.get("{arch}.attention.head_count_kv"),
        "vocabulary": header.get("{arch}.vocab_size", header.get("tokenizer.ggml.tokens")),
    }
    if isinstance(given["vocabulary"], list):
        given["vocabulary"] = len(given["vocabulary"])
    key = _HEAD_SIZE.get(header.architecture)
    head = header.get(f"{{arch}}.{key}") if key else None
    return Expected(layers, num_layers, _sizes(given, head, divided=head is None and key in ("", _HEAD_SIZE["llama"])))


def of_config(config: Mapping[str, Any]) -> Expected | None:
    """Return what the safetensors files of a `config.json` must have; None: as in `of_header`."""
    layers, num_layers = _LAYERS.get(config.get("model_type", "")), config.get("num_hidden_layers")
    if layers is None or not isinstance(num_layers, int):
        return None
    given = {
        "hidden": config.get("hidden_size"),
        "inner": config.get("intermediate_size"),
        "heads": config.get("num_attention_heads"),
        "keys": config.get("num_key_value_heads"),
        "vocabulary": config.get("vocab_size"),
    }
    divided = config["model_type"] in ("llama", "mistral", "phi3", "qwen2")
    return Expected(layers, num_layers, _sizes(given, config.get("head_dim"), divided=divided))


def _sizes(given: Mapping[str, Any], head: Any, *, divided: bool) -> dict[str, int]:
    """Return the sizes that are known, by letter. `divided`: without a `head` it is the hidden size by the heads."""
    hidden, inner, heads, keys, vocabulary = (
        value if isinstance(value := given[name], int) and value > 0 else None
        for name in ("hidden", "inner", "heads", "keys", "vocabulary")
    )
    if head is None and divided and hidden and heads:
        head = hidden // heads
    sizes = {"H": hidden, "I": inner, "J": inner and 2 * inner, "V": vocabulary}
    if isinstance(head, int) and head > 0:
        queries, all_keys = heads and heads * head, keys and keys * head
        joined = queries + 2 * all_keys if queries and all_keys else None
        sizes |= {"D": head, "Q": queries, "K": all_keys, "P": joined}
    return {letter: size for letter, size in sizes.items() if size}
