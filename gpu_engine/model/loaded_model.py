"""A model that is ready to run: the transformers model, its fused forward, and the numbers that the engine needs.

Invariant: every layer of it goes through our attention. Not responsible for: loading (see loader.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerFast

from gpu_engine.api.output_tensors import OutputSpec
from gpu_engine.api.sampling_defaults import Defaults
from gpu_engine.model.adapters.device_pool import DeviceAdapterPool
from gpu_engine.model.adapters.pool import AdapterPool
from gpu_engine.model.attention import AttentionContext, attending
from gpu_engine.model.fused_forward import DeferringForward, FusedForward
from gpu_engine.model.fusion import Fused
from gpu_engine.model.names import ModelNotSupported as ModelNotSupported
from gpu_engine.model.parallel.ranks import RankSet
from gpu_engine.model.recurrent.rows import RecurrentLayer
from kernels.kv_pages import KVHeads, KVPages
from kernels.step_tensors import StepTensors

_TURN_ENDS = {
    "gemma4_text": ("<turn|>", "<|tool_response>"),
    "glm4": ("<|user|>", "<|observation|>"),
    "glm4_moe": ("<|user|>", "<|observation|>"),
    "gpt_oss": ("<|return|>", "<|call|>"),
}
"""Tokens that end a model's turn next to the end of a text: a GGUF file names only one of them."""


def _id_of(tokenizer: PreTrainedTokenizerFast, text: str) -> int | None:
    """Return the id of a token; None: the vocabulary has none of this text."""
    found = tokenizer.convert_tokens_to_ids(text)
    return found if isinstance(found, int) and tokenizer.convert_ids_to_tokens(found) == text else None


@dataclass(frozen=True, slots=True)
class KnownVocabulary:
    """The tokens of a model that has no weights yet; `ports.Vocabulary`."""

    tokenizer: PreTrainedTokenizerFast
    vocab_size: int
    """Columns of the logits."""
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, net: Any, tokenizer: PreTrainedTokenizerFast) -> KnownVocabulary:
        """Return the tokens of a transformers model, with or without its weights."""
        eos = net.generation_config.eos_token_id if net.generation_config else None
        ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        ids += [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        ends = _TURN_ENDS.get(net.config.get_text_config().model_type, ())
        ids += [found for text in ends if (found := _id_of(tokenizer, text)) is not None]
        vocab_size = net.get_output_embeddings().out_features
        return cls(tokenizer, vocab_size, tuple(dict.fromkeys(i for i in ids if i < vocab_size)))


@dataclass(slots=True, eq=False)
class LoadedModel:
    """A model ready to run. Owned by the engine thread once that runs; any thread may read the tokenizer."""

    name: str
    net: Any
    """The transformers model, in eval mode."""
    tokenizer: PreTrainedTokenizerFast
    vocab_size: int
    """Columns of the logits, padding included."""
    eos_token_ids: tuple[int, ...]
    model_type: str
    dtype: torch.dtype
    device: torch.device
    num_parameters: int
    max_model_len: int
    """The smaller of the configured length and the length that the model was made for."""
    num_layers: int
    """Layers with attention."""
    kv_heads: tuple[KVHeads, ...]
    """The heads of the keys and values in the cache, one entry a layer; layers that share theirs have one entry."""
    room_tokens: int = 0
    """Tokens that the KV cache may have in the memory that was free at load; 0: unknown."""
    quantised: bool = False
    """The products are over blocks of 4 to 8 bits, or on a GPU over rows of 8 bits."""
    path: Path | None = None
    """The directory or GGUF file that it was loaded from; None: it was made in memory."""
    numerics: str = ""
    """What decides the bits of its logits (see numerics.py); empty: it was made in memory."""
    forms: str = ""
    """The forms of its quantised products with their number, "4-bit blocks: 210"; empty: it has none."""
    sampling_defaults: Defaults = field(default_factory=dict)
    """Values of the sampling parameters that a request leaves out, from the model's generation_config.json."""
    fused: Fused = field(default_factory=Fused)
    """The parts of it that are fused kernels."""
    outputs: dict[str, OutputSpec] = field(default_factory=dict)
    """The tensors that requests may ask for, by name (see outputs.py)."""
    adapters: AdapterPool | DeviceAdapterPool | None = None
    """None: the model takes none, and no forward looks for one."""
    ranks: RankSet | None = None
    """The other ranks; None: the model is whole in this process."""
    recurrent: dict[int, RecurrentLayer] = field(default_factory=dict)
    """The layers with a state from token to token, by number; empty: the model has attention only."""

    @property
    def dtype_name(self) -> str:
        """ "bfloat16" or "float32"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def weights(self) -> str:
        """What the products multiply: the dtype, or the forms of quantised weights with their number."""
        return self.forms or self.dtype_name

    @property
    def skips_padding(self) -> bool:
        """True: the forward computes no row of padding."""
        return self.fused.forward is not None and self.fused.forward.skips_padding

    @property
    def takes_prompts(self) -> bool:
        """True: a forward may have rows of prompts next to those of its batch (`AttentionContext.prompts`)."""
        return self.fused.forward is not None and self.fused.forward.takes_prompts and not self.recurrent

    @property
    def can_defer_head(self) -> bool:
        """True: with `ctx.defers_head` the logits have no content before `masked_head`."""
        return isinstance(self.fused.forward, DeferringForward)

    def masked_head(self, step: StepTensors, num_rows: int) -> None:
        """Fill those of the last logits that `accept` may read with these arguments, and leave the others."""
        # `can_defer_head` said so at the start: a check of the protocol takes as long as twenty other calls.
        cast(DeferringForward, self.fused.forward).masked_head(step, num_rows)

    def allocate_pages(
        self, num_pages: int, page_size: int, *, token_major: bool | None = None, dtype: torch.dtype | None = None
    ) -> list[KVPages]:
        """Return the KV cache, one entry for each of `kv_heads`; in the layout of the device and in the model's dtype
        unless they are named."""
        made = dtype or self.dtype
        return KVPages.allocate_layers(self.kv_heads, num_pages, page_size, made, self.device, token_major)

    def logits(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> torch.Tensor:
        """Run the target over B sequences of P positions; return logits [B * P, V]. Padding rows are garbage."""
        adapted = self.adapters is not None and self.adapters.begin(ctx)
        try:
            if self.fused.forward:
                return self.fused.forward.logits(ids_BP, ctx)
            logits: torch.Tensor = self._forward(self.net, ids_BP, ctx).logits
            return logits.view(-1, logits.shape[-1])
        finally:
            if adapted and self.adapters is not None:
                self.adapters.end()

    def logits_of(self, ids_BP: torch.Tensor, ctx: AttentionContext, rows_N: torch.Tensor) -> torch.Tensor:
        """Run the model as `logits` does, without adapters; return the logits [N, V] of some of the B * P rows."""
        if isinstance(self.fused.forward, FusedForward):
            return self.fused.forward.logits_of(ids_BP, ctx, rows_N)
        return self.logits(ids_BP, ctx)[rows_N]

    def prefill(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> None:
        """Fill the cache; no logits are computed."""
        adapted = self.adapters is not None and self.adapters.begin(ctx)
        try:
            if self.fused.forward:
                self.fused.forward.fill(ids_BP, ctx)
            else:
                self._forward(self.net.get_decoder(), ids_BP, ctx)
        finally:
            if adapted and self.adapters is not None:
                self.adapters.end()

    def own_forward(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> None:
        """Run the model's own modules, over the fused parts, for the hooks on them."""
        adapts = self.adapters is not None and self.adapters.begin(ctx)
        try:
            self._forward(self.net, ids_BP, ctx)
        finally:
            if adapts and self.adapters is not None:
                self.adapters.end()

    def _forward(self, net: Any, ids_BP: torch.Tensor, ctx: AttentionContext) -> Any:
        """Run transformers' own forward; store the states that `ctx.hidden` wants."""
        # Drafts and padding reach positions after the last, for which a learned embedding has no row.
        positions_BP = ctx.positions_BP.clamp(min=0, max=self.max_model_len - 1).long()
        wanted = {"output_hidden_states": True} if ctx.hidden else {}
        with attending(ctx):
            out = net(input_ids=ids_BP, position_ids=positions_BP, use_cache=False, **wanted)
        for layer in ctx.hidden or {}:
            states_BPH = out.hidden_states[layer]
            cast(dict[int, torch.Tensor | None], ctx.hidden)[layer] = states_BPH.reshape(-1, states_BPH.shape[-1])
        return out

    def __repr__(self) -> str:
        return f"<LoadedModel {self.name} {self.model_type} {self.dtype_name} {self.device} V={self.vocab_size}>"
