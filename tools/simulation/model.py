"""A toy model whose every logit depends on every token that its KV pages hold, and its tokenizer of single bytes.

It stores the tokens themselves as keys. A row reads all positions up to its own through the page table, so a page that
was lost, shared wrongly or overwritten changes the answer. Three rows of four depend only on the last two tokens, so
that answers repeat themselves, and prompt lookup has drafts to propose.

Invariant: a row's logits are the same for any batch, any chunk and any number of drafts next to it. Not responsible
for: attention, quantisation, devices.
"""

from __future__ import annotations

from functools import cache

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loaded_model import LoadedModel
from kernels.kv_pages import KVHeads

EOS = 256
VOCAB = 290
"""Columns of the logits; ids from 258 on have no token, as in a padded vocabulary."""
_TABLES = 499
_STRANGE = 4
"""One row of so many depends on the whole history."""


class ToyModel(LoadedModel):
    """The model. It has one layer with one head of one channel."""

    __slots__ = ()

    def logits(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> torch.Tensor:
        """See `LoadedModel`."""
        self._store(ids_BP, ctx)
        positions_BP = ctx.positions_BP.long()
        B, P = positions_BP.shape
        longest = int(positions_BP.max()) + 1
        context_BL = self._context(ctx, longest)
        weights_L = (torch.arange(longest) * 31 + 7) % 1009
        sums_BL = (context_BL * weights_L).cumsum(1)
        at_BP = positions_BP.clamp(min=0)
        sum_BP, last_BP = sums_BL.gather(1, at_BP), context_BL.gather(1, at_BP)
        before_BP = context_BL.gather(1, (at_BP - 1).clamp(min=0))
        table_BP = torch.where(sum_BP % _STRANGE == 0, sum_BP, last_BP * 37 + before_BP) % _TABLES
        return _tables()[table_BP.view(B * P)]

    def prefill(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> None:
        """See `LoadedModel`."""
        self._store(ids_BP, ctx)

    def _store(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> None:
        keys_NT = ctx.pages[0].k[:, 0, 0, :]
        size = keys_NT.shape[1]
        positions_BP = ctx.positions_BP.long()
        valid_BP = positions_BP >= 0
        lanes_BP = torch.arange(len(ids_BP))[:, None].expand_as(positions_BP)
        at_N, lane_N = positions_BP[valid_BP], lanes_BP[valid_BP]
        pages_N = ctx.page_table_BN[lane_N, at_N // size].long()
        keys_NT[pages_N, at_N % size] = ids_BP[valid_BP].to(keys_NT.dtype)

    def _context(self, ctx: AttentionContext, length: int) -> torch.Tensor:
        """Return the tokens at the positions before `length`, int64 [B, length]."""
        keys_NT = ctx.pages[0].k[:, 0, 0, :]
        size = keys_NT.shape[1]
        num_pages = -(-length // size)
        pages_BN = ctx.page_table_BN[:, :num_pages].long()
        return keys_NT[pages_BN].flatten(1)[:, :length].long()


@cache
def _tables() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(_TABLES, VOCAB, generator=generator) * 3


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer without merges: token b is byte b, 256 and 257 are special."""
    # The byte-level alphabet of GPT-2: printable bytes are themselves, the others characters from U+0100 on.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    vocab = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|start|>"])
    return tokenizer


@cache
def tokenizer_json() -> bytes:
    """Return the file of the tokenizer."""
    return str(byte_tokenizer().to_str()).encode()


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token="<|end|>")


def toy_model(max_model_len: int) -> ToyModel:
    """Return the model. It holds nothing that a run changes."""
    return ToyModel(
        name="toy",
        net=torch.nn.Identity(),
        tokenizer=_tokenizer(),
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        model_type="toy",
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_parameters=0,
        max_model_len=max_model_len,
        num_layers=1,
        kv_heads=(KVHeads(1, 1),),
    )
