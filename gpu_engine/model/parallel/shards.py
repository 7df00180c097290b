"""Cuts a loaded transformers model down to the part of one rank: some of its heads, MLP columns and output tokens.

The part is a smaller model of the same family, so it is probed and fused like any other. Its attention outputs and its
MLP outputs are summands of the whole model's (forward.py adds them), and its logits are some columns of the whole
model's. Norms and input embeddings are whole on every rank.

Invariant: the parts of all ranks together have every weight of a product exactly once. Not responsible for: loading
(see model/loader.py).

Source: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
arXiv:1909.08053, section 3.

Shapes: D channels of a head, V columns of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpu_engine.model.fused_layers import MixedBlock
from gpu_engine.model.loaded_model import ModelNotSupported

SETTING = "tensor_parallel_size"


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one rank."""

    rank: int
    """0 <= rank < size."""
    size: int
    """The number of ranks."""

    def of(self, count: int) -> range:
        """Return this rank's share of `count` things: neighbours, and one more on the first ranks where it does not
        divide."""
        share, more = divmod(count, self.size)
        start = self.rank * share + min(self.rank, more)
        return range(start, start + share + (self.rank < more))

    def of_groups(self, count: int, group: int) -> range:
        """Return this rank's share of `count` things in whole groups, of which `count` is a multiple."""
        return _times(self.of(count // group), group)

    def of_vocabulary(self, count: int) -> int:
        """Return the columns of the logits of each rank, zeros after the last one included: as many on every rank."""
        return -(-count // self.size)


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention heads of a whole model."""

    queries: int
    keys: int

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.queries // self.keys


def heads_of(net: Any) -> Heads:
    """Return the heads that the model's configuration names."""
    text = net.config.get_text_config()
    return Heads(text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads)


def shard(net: Any, part: Shard, group: int = 1) -> Heads:
    """Cut `net` down to `part`, in place; return the heads that are left.

    Inputs of products are divided in groups of so many neighbours: weights in blocks have the same blocks in a part as
    in the whole then. The configuration of the model then names the heads that are left as well: some families read
    them in each forward. Raises ModelNotSupported.
    """
    kind, heads = net.config.model_type, heads_of(net)
    if heads.keys < part.size or heads.queries % heads.keys:
        raise ModelNotSupported(
            f"{SETTING}: {part.size} ranks need a KV head each, and {kind} has {heads.queries} heads over {heads.keys} "
            f"KV heads; at most {heads.keys} ranks can share it"
        )
    attentions = blocks = 0
    for module in list(net.get_decoder().modules()):
        names = {name for name, _ in module.named_children()}
        if "o_proj" in names:
            _shard_attention(module, heads, part, kind, group)
            attentions += 1
        elif "down_proj" in names:
            _shard_block(module, part, kind, group)
            blocks += 1
    blocks += _shard_mixtures(net, part, kind, group)
    text = net.config.get_text_config()
    if not attentions == blocks == text.num_hidden_layers:
        raise ModelNotSupported(
            f"{SETTING}: {kind} has {attentions} attentions and {blocks} gated blocks in {text.num_hidden_layers} "
            "layers that could be divided; each layer needs one of both"
        )
    _shard_head(net, part)
    keys = len(part.of(heads.keys))
    left = Heads(keys * heads.group, keys)
    name_heads(net, left)
    return left


def name_heads(net: Any, heads: Heads) -> None:
    """Write the numbers of heads into the model's configuration."""
    text = net.config.get_text_config()
    text.num_attention_heads = heads.queries
    if getattr(text, "num_key_value_heads", None):
        text.num_key_value_heads = heads.keys


def _shard_attention(module: nn.Module, heads: Heads, part: Shard, kind: str, group: int) -> None:
    keys = part.of(heads.keys)
    queries = range(keys.start * heads.group, keys.stop * heads.group)
    linears = _linears(module, kind)
    output, D = linears["o_proj"], linears["o_proj"].in_features // heads.queries
    if heads.group * D % group:
        raise ModelNotSupported(
            f"{SETTING}: {heads.group} heads of {D} channels, which share a KV head of {kind}, are no whole blocks of "
            f"{group} weights"
        )
    whole = (heads.queries * D, heads.keys * D, heads.keys * D)
    rows_q, rows_k = _times(queries, D), _times(keys, D)
    if "qkv_proj" in linears and linears["qkv_proj"].out_features == sum(whole):
        rows_v = range(whole[0] + whole[1] + rows_k.start, whole[0] + whole[1] + rows_k.stop)
        ranges = [rows_q, range(whole[0] + rows_k.start, whole[0] + rows_k.stop), rows_v]
        setattr(module, "qkv_proj", _rows(linears["qkv_proj"], ranges))  # noqa: B010  # modules have no such attribute
    elif tuple(getattr(linears.get(name), "out_features", 0) for name in ("q_proj", "k_proj", "v_proj")) == whole:
        for name, rows in (("q_proj", rows_q), ("k_proj", rows_k), ("v_proj", rows_k)):
            setattr(module, name, _rows(linears[name], [rows]))
    else:
        shapes = {name: linear.out_features for name, linear in linears.items()}
        raise ModelNotSupported(
            f"{SETTING}: an attention of {kind} has products with the outputs {shapes}, which are not those of "
            f"{heads.queries} heads over {heads.keys} KV heads"
        )
    norms = {name: getattr(child, "weight", None) for name, child in module.named_children() if name not in linears}
    if wide := [name for name, weight in norms.items() if weight is not None and weight.numel() > D]:
        raise ModelNotSupported(f"{SETTING}: {wide[0]} of {kind} is a norm of all heads together, which is not divided")
    module.o_proj = _columns(output, rows_q, part)
    for name, count in (("num_heads", len(queries)), ("num_key_value_heads", len(keys))):
        if isinstance(getattr(module, name, None), int):
            setattr(module, name, count)


def _shard_block(module: nn.Module, part: Shard, kind: str, group: int) -> None:
    linears = _linears(module, kind)
    down, width = linears["down_proj"], linears["down_proj"].in_features
    columns = _columns_of(width, part, "a block", kind, group)
    if set(linears) - {"gate_proj"} == {"up_proj", "down_proj"}:
        for name in set(linears) - {"down_proj"}:
            setattr(module, name, _rows(linears[name], [columns]))
    elif set(linears) == {"gate_up_proj", "down_proj"}:
        both = [columns, range(width + columns.start, width + columns.stop)]
        module.gate_up_proj = _rows(linears["gate_up_proj"], both)
    else:
        raise ModelNotSupported(f"{SETTING}: a block of {kind} has the products {sorted(linears)}; it is not divided")
    module.down_proj = _columns(down, columns, part)


def _columns_of(width: int, part: Shard, of: str, kind: str, group: int) -> range:
    """Return this rank's share of a block's columns, whole groups of neighbours."""
    if width % group:
        raise ModelNotSupported(
            f"{SETTING}: the {width} columns of {of} of {kind} are no whole blocks of {group} weights"
        )
    return part.of_groups(width, group)


def _shard_mixtures(net: Any, part: Shard, kind: str, group: int) -> int:
    """Divide every expert by columns, make each mixture a `MixedBlock`, and return how many more blocks that are.

    Routers are whole on each rank. A block inside a mixture, which every row takes, is divided already: it is no block
    of a layer.
    """
    more = 0
    for parent in list(net.get_decoder().modules()):
        for name, child in list(parent.named_children()):
            experts = [
                each for each in child.children() if isinstance(getattr(each, "gate_up_proj", None), nn.Parameter)
            ]
            if not experts:
                continue
            for each in experts:
                _shard_experts(each, part, kind, group)
            setattr(parent, name, MixedBlock(child))
            more += 1 - sum("down_proj" in dict(module.named_children()) for module in child.modules())
    return more


def _shard_experts(module: Any, part: Shard, kind: str, group: int) -> None:
    transposed = getattr(module, "is_transposed", False)
    whole = getattr(module, "has_gate", True) and getattr(module, "is_concatenated", True)
    if module.gate_up_proj.dim() != 3 or getattr(module, "has_bias", False) or not whole:
        raise ModelNotSupported(f"{SETTING}: the experts {type(module).__name__} of {kind} are not divided")
    inputs = 1 if transposed else 2  # the dimension of `down_proj` that has the columns
    columns = _columns_of(module.down_proj.shape[inputs], part, "an expert", kind, group)
    gate, up = module.gate_up_proj.detach().chunk(2, dim=3 - inputs)
    halves = [half.narrow(3 - inputs, columns.start, len(columns)) for half in (gate, up)]
    module.gate_up_proj = nn.Parameter(torch.cat(halves, dim=3 - inputs), requires_grad=False)
    down = module.down_proj.detach().narrow(inputs, columns.start, len(columns)).contiguous().clone()
    module.down_proj = nn.Parameter(down, requires_grad=False)
    for name in ("intermediate_dim", "intermediate_size", "expert_dim"):
        if isinstance(getattr(module, name, None), int):
            setattr(module, name, len(columns))


def _shard_head(net: Any, part: Shard) -> None:
    head = net.get_output_embeddings()
    V, share = head.out_features, part.of_vocabulary(head.out_features)
    start = min(part.rank * share, V)
    own = _rows(head, [range(start, min(start + share, V))])
    missing = share - own.out_features
    weight = nn.functional.pad(own.weight, (0, 0, 0, missing)) if missing else own.weight
    bias = None if own.bias is None else nn.functional.pad(own.bias, (0, missing))
    net.set_output_embeddings(_linear(weight, bias))


def _linears(module: nn.Module, kind: str) -> dict[str, nn.Linear]:
    """Return the products of a module; raise ModelNotSupported where one is not in the model's dtype."""
    found = {}
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            found[name] = child
        elif name.endswith("_proj"):
            raise ModelNotSupported(f"{SETTING}: {name} of {kind} is {type(child).__name__}, which is not divided")
    return found


def _times(items: range, width: int) -> range:
    return range(items.start * width, items.stop * width)


def _rows(linear: nn.Linear, parts: Sequence[range]) -> nn.Linear:
    """Return the product with only these outputs. Copies, so that the whole weight is freed."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[part.start : part.stop] for part in parts])

    return _linear(cut(linear.weight.detach()), None if linear.bias is None else cut(linear.bias.detach()))


def _columns(linear: nn.Linear, part: range, of: Shard) -> nn.Linear:
    """Return the product with only these inputs. Rank 0 has the bias, so that the sum of all ranks has it once."""
    weight = linear.weight.detach()[:, part.start : part.stop].contiguous().clone()
    return _linear(weight, linear.bias.detach() if linear.bias is not None and of.rank == 0 else None)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made
