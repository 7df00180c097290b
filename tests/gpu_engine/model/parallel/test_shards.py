"""A model over ranks gives the logits of the whole model, and refuses what it cannot divide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from gpu_engine.api.config import EngineConfig
from gpu_engine.model.loader import LoadedModel, ModelNotSupported, load_model, load_shard
from gpu_engine.model.parallel.shards import Shard
from kernels.blocks import can_multiply_blocks
from tests.gpu_engine import tiny
from tests.gpu_engine.harness import config
from tests.gpu_engine.model.parallel.shard_logits import logits
from tests.gpu_engine.model.parallel.threads import ThreadRanks

WHOLE = ("olmo2", "gemma4", "gemma4 small", "gemma4 moe")
"""Families that ranks do not divide: norms of all heads together, and layers whose heads differ or are shared."""

ODD = {**tiny._SHAPE, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 97}
"""Three KV heads, and numbers of MLP columns and of tokens that two ranks do not divide."""


def divided(folder: Path, size: int, quantization: str = "none") -> EngineConfig:
    return config(model=str(folder), tensor_parallel_size=size, quantization=quantization)


IDS = torch.arange(2 * 9).view(2, 9) * 13 % 250


@pytest.fixture
def ranks_of(tmp_path: Path) -> Iterator[Callable[..., ThreadRanks]]:
    made: list[ThreadRanks] = []

    def start(folder: Path, size: int, quantization: str = "none") -> ThreadRanks:
        made.append(ThreadRanks(divided(folder, size, quantization), tmp_path / f"store{len(made)}"))
        return made[-1]

    yield start
    for ranks in made:
        ranks.end()


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(LlamaConfig(**{**ODD, "vocab_size": 301}), tmp_path_factory.mktemp("odd"))


@pytest.mark.parametrize(
    "family", [*(family for family in tiny.FAMILIES if family not in WHOLE), "mixtral", "qwen3_moe"]
)
def test_two_ranks_have_the_logits_of_the_whole_model(
    saved: Callable[[str], Path], ranks_of: Callable[[Path, int], ThreadRanks], family: str
) -> None:
    ranks, whole = ranks_of(saved(family), 2), load_model(config(model=str(saved(family))))
    torch.testing.assert_close(logits(ranks.model, IDS, ranks), logits(whole, IDS), rtol=1e-4, atol=1e-4)
    assert (ranks.model.vocab_size, ranks.model.eos_token_ids) == (whole.vocab_size, whole.eos_token_ids)
    assert ranks.model.num_parameters == whole.num_parameters


@pytest.mark.parametrize("size", [2, 3])
def test_heads_columns_and_tokens_may_be_divided_unevenly_and_a_row_keeps_its_bits(
    odd: Path, ranks_of: Callable[[Path, int], ThreadRanks], size: int
) -> None:
    ranks, whole = ranks_of(odd, size), load_model(config(model=str(odd)))
    assert {heads.number for heads in ranks.model.kv_heads} == {{2: 2, 3: 1}[size]}
    ids_BP = torch.arange(16 * 5).view(16, 5) * 29 % 250
    together = logits(ranks.model, ids_BP, ranks)
    torch.testing.assert_close(together, logits(whole, ids_BP), rtol=1e-4, atol=1e-4)
    for B in (1, 2, 3, 7):
        assert torch.equal(logits(ranks.model, ids_BP[:B].contiguous(), ranks), together[: B * 5]), B
    single = logits(ranks.model, ids_BP[:1, :1].contiguous(), ranks)
    pair = logits(ranks.model, ids_BP[:2, :1].contiguous(), ranks)
    assert torch.equal(single, pair[:1])


@pytest.mark.parametrize("family", ["llama", "mixtral", pytest.param("phi3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("quantization", ["int8", "q4"])
def test_two_ranks_have_the_blocks_of_the_whole_model(
    saved: Callable[[str], Path], ranks_of: Callable[..., ThreadRanks], family: str, quantization: str
) -> None:
    if not can_multiply_blocks():
        pytest.skip("products over blocks need AVX2")
    folder = str(saved(family))
    ranks, whole = ranks_of(saved(family), 2, quantization), load_model(config(model=folder, quantization=quantization))
    found, expected = logits(ranks.model, IDS, ranks), logits(whole, IDS)
    # A sum in another order may round an input of 8 bits to its neighbour.
    assert float((found - expected).abs().max()) < 0.05 * float(expected.abs().max())
    ids_BP = torch.arange(8 * 5).view(8, 5) * 29 % 250
    together = logits(ranks.model, ids_BP, ranks)
    assert torch.equal(logits(ranks.model, ids_BP[:1].contiguous(), ranks), together[:5])


def test_columns_that_are_no_whole_blocks_are_refused(odd: Path) -> None:
    with pytest.raises(ModelNotSupported, match=r"^tensor_parallel_size: the 97 columns of a block of llama"):
        load_shard(divided(odd, 2, "int8"), Shard(0, 2))


def test_every_weight_of_a_product_is_on_one_rank(odd: Path) -> None:
    whole = load_model(config(model=str(odd)))
    parts = [load_shard(divided(odd, 2), Shard(rank, 2))[0] for rank in range(2)]
    sizes = [[product.in_features * product.out_features for _, product in products(part)] for part in parts]
    assert [sum(pair) for pair in zip(*sizes, strict=True)] == [
        p.in_features * p.out_features for _, p in products(whole)
    ]


def products(model: LoadedModel) -> list[tuple[str, torch.nn.Linear]]:
    forward = model.fused.forward
    assert forward is not None
    return [item for layer in forward.layers for part in (layer.attention, layer.gated) for item in part.products()]


@pytest.mark.parametrize(
    ("family", "size", "problem"),
    [
        ("llama", 3, "llama has 4 heads over 2 KV heads; at most 2 ranks"),
        ("gpt2", 2, "gpt2 has 0 attentions and 0 gated blocks in 2 layers"),
        ("stablelm", 2, "the forward of stablelm is no loop over fused layers"),
        ("olmo2", 2, "q_norm of olmo2 is a norm of all heads together, which is not divided"),
        ("gpt_oss", 2, "the experts GptOssExperts of gpt_oss"),
        ("deepseek_v3", 2, "an attention of deepseek_v3"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(
    saved: Callable[[str], Path], family: str, size: int, problem: str
) -> None:
    with pytest.raises(ModelNotSupported, match=f"^tensor_parallel_size: .*{problem}"):
        load_shard(divided(saved(family), size), Shard(0, size))
