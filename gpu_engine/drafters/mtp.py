"""The target's own multi-token-prediction layer as a draft net (Gloeckle et al. 2024; DeepSeek-V3, 2024).

For model families whose transformers code has the layer (`MtpModel`): DeepSeek-like checkpoints have it after the
last decoder layer. The first MTP layer runs recurrently, on the target's final hidden state and then on its own output,
as in vLLM and TensorRT-LLM ("MTP Eagle"). Invariant: embedding, rotary embedding and output head are the target's.
Not responsible for: the storage of pairs (see pairs.py), the chain (see chain.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from gpu_engine.drafters.pairs import PairNet
from gpu_engine.model import attention
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loaded_model import ModelNotSupported
from gpu_engine.model.quantised.checkpoint import open_checkpoint
from gpu_engine.step.prompt_rows import Hidden
from kernels.paged_attention import KVPages


class MtpNet(PairNet):
    """One MTP layer of one target. Owns its cache of one layer.

    Args:
        mtp: transformers' `MtpModel`, tied to the target, in its dtype, on its device, with our attention.
        num_layers: decoder layers of the target.
        pages: the layer's cache.
    """

    def __init__(self, mtp: Any, num_layers: int, pages: KVPages) -> None:
        super().__init__()
        self._mtp, self._pages = mtp, [pages]
        self.layers = (num_layers,)

    def _pair_part(self, hidden: Hidden) -> torch.Tensor:
        states_NH = hidden[self.layers[0]]
        assert states_NH is not None, "the target's forward fills it"
        return states_NH

    def logits(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        """Return [B, Vd]."""
        out: torch.Tensor = self._mtp._project_to_logits(hidden_BH)
        return out

    def _run(
        self, ids_BP: torch.Tensor, hidden_NH: torch.Tensor, positions_BP: torch.Tensor, page_table_BN: torch.Tensor
    ) -> torch.Tensor:
        mtp, (B, P) = self._mtp, positions_BP.shape
        embeds_BPH = mtp.embed_tokens(ids_BP.long())
        # Rotated by the token's own position, one after the pair's; only differences of angles matter.
        places_BP = positions_BP.clamp(min=0).long() + 1
        with attention.attending(AttentionContext(self._pages, page_table_BN, positions_BP)):
            out_BPH: torch.Tensor = mtp.layers[0](
                embeds_BPH,
                hidden_NH.view(B, P, -1),
                position_embeddings=mtp.rotary_emb(embeds_BPH, places_BP),
                attention_mask=None,
                position_ids=places_BP,
                past_key_values=None,
            )
        if mtp.use_shared_post_norm:
            out_BPH = mtp.shared_post_norm(out_BPH)
        return out_BPH.reshape(B * P, -1)

    def __repr__(self) -> str:
        return f"<MtpNet {type(self._mtp.layers[0].mtp_block).__name__}>"


def load_mtp(path: str, net: Any, dtype: torch.dtype) -> Any:
    """Return the MTP layers of the checkpoint at `path`, tied to the target `net`. Raises ModelNotSupported."""
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError:
        raise ModelNotSupported("drafter: mtp needs a newer transformers, one that has MtpModel") from None
    config = net.config.get_text_config()
    if not getattr(config, "num_mtp_layers", None):
        raise ModelNotSupported(
            f"drafter: mtp: {config.model_type} has no multi-token-prediction layers in transformers"
        )
    if (Path(path) / "config.json").is_file() and open_checkpoint(Path(path)) is not None:
        raise ModelNotSupported(f"drafter: mtp: {path} is quantised, and its multi-token-prediction layer is not read")
    # The layer's classes and shape, without weights: the target's own modules may have been replaced by fused ones.
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
    shape.config.name_or_path = path
    try:
        mtp = MtpModel.from_pretrained(shape, device_map={"": net.device})
    except (ValueError, RuntimeError, OSError, TypeError) as error:
        raise ModelNotSupported(
            f"drafter: mtp: {path} has no usable multi-token-prediction weights: {error}"
        ) from error
    mtp.tie_with_main_model(net)
    if mtp.rotary_emb is None or mtp.has_per_layer_rope:
        raise ModelNotSupported(f"drafter: mtp: {config.model_type} rotates its layers in a way that is not supported")
    return mtp.eval().requires_grad_(False)
