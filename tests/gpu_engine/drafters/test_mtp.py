"""The target's own multi-token-prediction layer: loaded from its checkpoint, with the drafts of transformers' code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from gpu_engine.drafters.mtp import MtpNet, load_mtp
from gpu_engine.drafters.nets import Hidden
from gpu_engine.model.loaded_model import ModelNotSupported
from gpu_engine.model.loader import LoadedModel, load_model
from gpu_engine.step.buffers import LaneBuffers, SlotBuffers, StepBatch
from gpu_engine.step.prompt_rows import Chunks
from kernels.paged_attention import KVPages
from shared_mem.layout import Stage
from tests.fakes import byte_tokenizer
from tests.gpu_engine.drafters.proposals import prophet
from tests.gpu_engine.harness import UNHURRIED_MS, Answer, answer_all, ask, config, tokens, unguided_engine
from tests.gpu_engine.toy_sidecar import guided_engine

cache_utils = pytest.importorskip("transformers.cache_utils")
modeling_layers = pytest.importorskip("transformers.modeling_layers")
if not hasattr(modeling_layers, "MtpModel"):
    pytest.skip("this transformers has no MtpModel", allow_module_level=True)

LAYERS, LAYERS_OF_DEEPSEEK = 46, 61
"""transformers identifies these families' MTP layers by their numbers, which are those of the published models."""
H, PAGE, LENGTH = 32, 16, 64
PATIENT = {"row_timeout_ms": UNHURRIED_MS, "draft_timeout_ms": UNHURRIED_MS}


def saved(family: type[PreTrainedConfig], layers: int, path: Path, **own: int | None) -> Path:
    """Write a tiny model of random weights whose checkpoint has the MTP layer after the last layer."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 300, "hidden_size": H, "intermediate_size": 48, "moe_intermediate_size": 16,
        "num_hidden_layers": layers, "num_attention_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "first_k_dense_replace": layers, "n_group": 1, "topk_group": 1,
        "max_position_embeddings": 256, "num_mtp_layers": 1, "bos_token_id": 257, "eos_token_id": 256,
        "pad_token_id": None,
    }  # fmt: skip
    net = AutoModelForCausalLM.from_config(family(**shape, **own), dtype=torch.float32)
    mtp = modeling_layers.MtpModel(net, 1)
    for part in (net, mtp):
        for weight in part.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=1.5 / weight.shape[-1] ** 0.5)
    net.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in mtp.state_dict().items():
        if name.startswith("layers.0."):
            published = name.removeprefix("layers.0.").removeprefix("mtp_block.")
            tensors[f"model.layers.{layers}.{published}"] = tensor.clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), eos_token="<|end|>", bos_token="<|start|>"
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GLM-4.5."""
    return saved(Glm4MoeConfig, LAYERS, tmp_path_factory.mktemp("glm"), num_key_value_heads=1, head_dim=16)


@pytest.fixture(scope="module")
def target(folder: Path) -> LoadedModel:
    return load_model(config(model=str(folder)))


@torch.inference_mode()
def test_mtp_logits_equal_those_of_transformers(folder: Path, target: LoadedModel) -> None:
    """The logits of the first two drafts are those of `MtpModel.forward_layer` over the whole sequence."""
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    mtp = modeling_layers.MtpModel.from_pretrained(plain)
    ids = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(1))
    last = plain(ids, output_hidden_states=True).hidden_states[-1]
    cache = cache_utils.MtpCache(config=mtp.config)
    places = torch.arange(1, 20)[None]
    states = mtp.forward_layer(0, last[:, :19], places, cache, input_ids=ids[:, 1:])
    draft = mtp._project_to_logits(states[:, -1]).argmax(-1)
    chained = mtp.forward_layer(0, states[:, -1:], torch.tensor([[20]]), cache, input_ids=draft[:, None])
    expected = [mtp._project_to_logits(states[:, -1]), mtp._project_to_logits(chained[:, -1])]

    pages = KVPages.allocate(16, 1, 16, PAGE, torch.float32, torch.device("cpu"))
    net = MtpNet(load_mtp(str(folder), target.net, torch.float32), LAYERS, pages)
    slot, lane = SlotBuffers.allocate(2, 4, LENGTH, PAGE), LaneBuffers.allocate(1, 4, 300)
    slot.history_SL[:, :20], slot.length_S[0], lane.result.num_emitted_B[0] = ids[0], 20, 3
    slot.page_table_SN.copy_(torch.arange(slot.page_table_SN.numel()).view(2, -1))

    def hidden(start: int, count: int) -> Hidden:
        rows = last[0, start : start + count]
        return {LAYERS: torch.cat([rows, torch.zeros(count - len(rows), H)])}

    # A second sequence is one chunk after the first, and its last chunk is only padding.
    for starts, ends in (([0, 0], [9, 4]), ([9, 4], [16, 4])):
        bounds = torch.tensor([starts, ends], dtype=torch.int32)
        (states,) = zip(*(hidden(start, 32).values() for start in starts), strict=True)
        net.prefill(Chunks.cut(slot, torch.tensor([0, 1]), *bounds, 32), {LAYERS: torch.cat(states)})
    batch = StepBatch(slot, lane, 1, 4, any_guided=False)
    going, table = torch.ones(1, dtype=torch.bool), slot.page_table_SN[:1]
    first = net.first(batch, torch.zeros(1, dtype=torch.long), going, going[:, None], table, hidden(16, 4))
    torch.testing.assert_close(first, expected[0], rtol=1e-3, atol=1e-3)
    second = net.next(draft[:, None], torch.tensor([[20]]), table)
    torch.testing.assert_close(second, expected[1], rtol=1e-3, atol=1e-3)


def made() -> list[Answer]:
    """Return free and guided requests, greedy and sampled."""
    return [
        ask(tokens(9, 1), max_tokens=12, ignore_eos=True),
        ask(tokens(9, 2), max_tokens=12, temperature=0.5, seed=1, ignore_eos=True),
        ask(tokens(9, 1), grammar="14", max_tokens=30),
        ask(tokens(12, 2), grammar="20", max_tokens=30, temperature=0.7, seed=2),
    ]


@pytest.fixture(scope="module")
def expected(target: LoadedModel) -> list[list[int]]:
    with guided_engine(target, config(model=target.name, drafter="none", **PATIENT)) as (engine, _):
        return answer_all(engine, made())


@pytest.mark.parametrize(
    ("num_drafts", "most", "masks", "overlap"),
    [(3, 0, "on", False), (3, 1, "off", True), (1, 7, "on", True), (3, 7, "off", False)],
)
def test_tokens_do_not_depend_on_mtp_drafts(
    target: LoadedModel, expected: list[list[int]], num_drafts: int, most: int, masks: str, overlap: bool
) -> None:
    """Masked and not; with no jump-forward tokens before the drafts, as many as the chain has, and more."""
    drafts = {"num_draft_tokens": num_drafts, "jump_forward_tokens": most, "draft_masks": masks, "overlap": overlap}
    with guided_engine(target, config(model=target.name, drafter="mtp", **drafts, **PATIENT)) as (engine, grammar):
        if most > num_drafts:
            # At two of three positions the proposal is five right tokens and a wrong one; elsewhere it is empty.
            knows = prophet(expected)
            grammar.sidecar.proposes = lambda automaton, emitted: (
                [*knows(automaton, emitted)[:5], 66] if len(emitted) % 3 else []
            )
        assert answer_all(engine, made()) == expected
        stats, records = engine.stats(), grammar.sidecar.records
    assert stats.draft_tokens > 20
    assert (stats.jump_forward_tokens > 0) == (most > 0)
    if most > num_drafts:
        assert max(len(record.drafts) for record in records if record.stage == Stage.VERIFY) == 6
        assert stats.jump_forward_tokens > stats.accepted_jump_forward_tokens > 10
    else:
        assert stats.accepted_jump_forward_tokens == stats.jump_forward_tokens
    drawn = {record.stage for record in records} - {Stage.VERIFY, Stage.PROPOSE}
    assert bool(drawn) == (masks != "off")


def test_a_model_without_mtp_layers_is_rejected(target: LoadedModel, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupported, match="has no usable multi-token-prediction weights"):
        load_mtp(str(tmp_path), target.net, torch.float32)
    count = target.net.config.num_mtp_layers
    target.net.config.num_mtp_layers = 0
    try:
        with pytest.raises(ModelNotSupported, match="glm4_moe has no multi-token-prediction layers"):
            load_mtp(str(folder), target.net, torch.float32)
    finally:
        target.net.config.num_mtp_layers = count


def test_the_mtp_layer_of_a_quantised_checkpoint_is_refused(target: LoadedModel, tmp_path: Path) -> None:
    """Its weights alone, without their scales, would draft nonsense."""
    folder = tmp_path / "quantised"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    save_file(
        {"a.weight": torch.zeros(1, 1).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(1)},
        folder / "model.safetensors",
    )
    with pytest.raises(ModelNotSupported, match=r"drafter: mtp: .* is quantised"):
        load_mtp(str(folder), target.net, torch.float32)


def test_the_mtp_layer_of_a_model_with_latent_attention_has_keys_in_expanded_form(tmp_path: Path) -> None:
    latent = {"q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 16}
    heads = {"num_key_value_heads": 2, "qk_nope_head_dim": 16, "v_head_dim": 16}
    fields = {"model": str(saved(DeepseekV3Config, LAYERS_OF_DEEPSEEK, tmp_path, **latent, **heads))}
    model, found = load_model(config(**fields)), []
    assert {heads.values for heads in model.kv_heads} == {32}
    for drafts in ({"drafter": "none"}, {"drafter": "mtp", "num_draft_tokens": 2}):
        with unguided_engine(model, config(**fields, **drafts)) as engine:
            asked = [ask(tokens(9, seed), max_tokens=12, ignore_eos=True) for seed in (1, 2)]
            found.append(answer_all(engine, asked))
            drafted = engine.stats().draft_tokens
    assert found[0] == found[1]
    assert drafted > 10
