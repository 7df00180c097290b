"""GGUF files of mixtures of experts: configurations that the header gives, and experts over the file's own blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_engine.model.experts import Experts
from gpu_engine.model.files.gguf_configs import own_configuration
from gpu_engine.model.files.gguf_header import GGUFError, GGUFHeader
from gpu_engine.model.files.need import Need
from gpu_engine.model.files.reading import open_gguf
from gpu_engine.model.loader import ModelNotSupported, load_model
from gpu_engine.model.recording import distance, typical_distance
from kernels.blocks import can_multiply_blocks
from tests.gpu_engine.gguf_files import EOS
from tests.gpu_engine.harness import config
from tests.gpu_engine.model.file_need import need_of_file
from tests.gpu_engine.model.mixture_gguf_files import CONFIGS, tiny, write
from tests.gpu_engine.model.model_logits import logits, some_ids

needs_blocks = pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")


@pytest.mark.parametrize("family", CONFIGS)
def test_a_file_has_the_logits_of_its_model(tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str) -> None:
    own = tiny(family)
    file = write(own, family, tmp_path / "model.gguf")
    with caplog.at_level("INFO"):
        model = load_model(config(model=str(file), dtype="float32", quantization="none"))
    assert not [line for line in caplog.messages if "through transformers" in line]
    unread = [line for line in caplog.messages if "does not read" in line]
    assert bool(unread) == (family != "glm4moe")  # whose file has the layer after the last as one that drafts
    assert all("nextn.eh_proj" in line and "blk" not in line.replace("blk.2.nextn", "") for line in unread)
    ids_BP = some_ids(1, 40)
    with torch.inference_mode():
        assert distance(logits(model, ids_BP)[0], own(ids_BP, use_cache=False).logits[0]) < 1e-4


@needs_blocks
@pytest.mark.parametrize("family", CONFIGS)
def test_experts_of_a_file_run_over_its_own_blocks(tmp_path: Path, family: str) -> None:
    own = tiny(family)
    model = load_model(config(model=str(write(own, family, tmp_path / "model.gguf", "Q8_0")), dtype="auto"))
    experts = [module for module in model.net.modules() if type(module) is Experts]
    assert model.quantised
    assert experts
    assert model.fused.mixtures or all(each.native is not None for each in experts)
    ids_BP = some_ids(1, 40)
    with torch.inference_mode():
        assert typical_distance(logits(model, ids_BP)[0].float(), own(ids_BP, use_cache=False).logits[0]) < 0.1


def test_what_a_family_keeps_in_float32_stays_so(tmp_path: Path) -> None:
    """A rounded bias would choose other experts."""
    own = tiny("glm4moe")
    model = load_model(config(model=str(write(own, "glm4moe", tmp_path / "model.gguf")), dtype="bfloat16"))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(dict(model.net.named_buffers())[name], dict(own.named_buffers())[name])


@pytest.mark.parametrize("width", ["key", "tensor"])
def test_older_files_of_qwen_2_lack_the_widths_of_experts(tmp_path: Path, width: str) -> None:
    own = tiny("qwen2moe")
    keys: dict[str, Any] = {"expert_feed_forward_length": None, "feed_forward_length": 64}
    if width == "tensor":
        keys["expert_shared_feed_forward_length"] = None
    file = write(own, "qwen2moe", tmp_path / "model.gguf", **keys)
    made = load_model(config(model=str(file), dtype="float32", quantization="none")).net.config
    assert (made.moe_intermediate_size, made.shared_expert_intermediate_size) == (32, 64)


HEADS_IN_ONE_TENSOR: dict[str, Any] = {
    "attention__key_length": 48,
    "attention__value_length": 48,
    "attention__key_length_mla": None,
    "attention__value_length_mla": None,
}
"""Of older files with latent attention."""


def test_older_files_have_the_heads_of_latent_attention_in_one_tensor(tmp_path: Path) -> None:
    own = tiny("deepseek2")
    file = write(own, "deepseek2", tmp_path / "model.gguf", **HEADS_IN_ONE_TENSOR)
    model = load_model(config(model=str(file), dtype="float32", quantization="none"))
    assert {heads.values for heads in model.kv_heads} == {64}, "the cache has latent vectors"
    ids_BP = some_ids(1, 40)
    with torch.inference_mode():
        assert distance(logits(model, ids_BP)[0], own(ids_BP, use_cache=False).logits[0]) < 1e-4


@needs_blocks
def test_the_need_of_latent_attention_counts_blocks_of_eight_bits_in_files_of_four(tmp_path: Path) -> None:
    def need(name: str, **keys: Any) -> Need:
        file = write(tiny("deepseek2"), "deepseek2", tmp_path / name, "Q4_0", **keys)
        return need_of_file(config(model=str(file), dtype="auto"))[1]

    assert need("one.gguf", **HEADS_IN_ONE_TENSOR) == need("apart.gguf")


@needs_blocks
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_file_may_have_both_parts_of_a_first_product_in_one_tensor(tmp_path: Path, kind: str) -> None:
    def joined(tensors: list[Any]) -> list[Any]:
        names = [name for name, _ in tensors]
        if not names[0].endswith("gate_exps.weight"):
            return tensors
        both = np.concatenate([values for _, values in tensors], axis=1)
        return [(names[0].replace("gate_exps", "gate_up_exps"), both)]

    own, ids_BP = tiny("qwen2moe"), some_ids(1, 40)
    settings: dict[str, Any] = {"dtype": "float32", "quantization": "none" if kind == "F32" else "q4"}
    apart, together = (
        load_model(config(model=str(write(own, "qwen2moe", tmp_path / name, kind, changed=changed)), **settings))
        for name, changed in (("apart.gguf", lambda tensors: tensors), ("together.gguf", joined))
    )
    with torch.inference_mode():
        assert torch.equal(logits(apart, ids_BP), logits(together, ids_BP))


def cut(tensors: list[Any], end: str) -> list[Any]:
    """Return the tensors, of which the one whose name ends so has half of its columns."""
    return [(name, each[..., : each.shape[-1] // 2] if name.endswith(end) else each) for name, each in tensors]


@pytest.mark.parametrize(
    ("family", "end", "message"),
    [
        (
            "granitemoe shared",
            "ffn_up_shexp.weight",
            r"ffn_up_shexp\.weight \(F32 \[64, 32\]\), whose rows differ in length$",
        ),
        ("deepseek2", "attn_v_b.weight", r"attn_v_b\.weight \(F32 \[4, 48, 32\]\) are not of the same heads$"),
        (
            "qwen2moe",
            "ffn_up_exps.weight",
            r"gate_up of layer 0 is made of \[5, 32, 64\] and \[5, 32, 32\], which have not one shape of 3 numbers$",
        ),
    ],
)
def test_tensors_that_do_not_fit_together_are_named(tmp_path: Path, family: str, end: str, message: str) -> None:
    file = write(tiny(family), family, tmp_path / "model.gguf", changed=lambda tensors: cut(tensors, end))
    with pytest.raises(ModelNotSupported, match=message):
        load_model(config(model=str(file)))


def test_a_rank_and_a_gpu_get_only_files_that_transformers_reads(tmp_path: Path) -> None:
    """They have no product for each expert."""
    header = GGUFHeader(write(tiny("qwen2moe"), "qwen2moe", tmp_path / "qwen.gguf"))
    assert open_gguf(header, by_expert=False)[0] is None
    for family, named in (("llama", "llama with experts"), ("glm4moe", "glm4moe")):
        header = GGUFHeader(write(tiny(family), family, tmp_path / f"{family}.gguf"))
        with pytest.raises(ValueError, match=f"architecture {named} are read by one process, on a CPU$"):
            open_gguf(header, by_expert=False)


def test_every_token_that_ends_a_turn_of_a_mixture_ends_an_answer(tmp_path: Path) -> None:
    ends = {"tokenizer__ggml__eot_token_id": EOS + 2, "tokenizer__ggml__eom_token_id": EOS + 3}
    file = write(tiny("glm4moe"), "glm4moe", tmp_path / "model.gguf", **ends)
    assert load_model(config(model=str(file))).eos_token_ids == (EOS, EOS + 2, EOS + 3)


def test_older_files_of_deepseek_do_not_say_that_it_chooses_by_groups(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"expert_group_count": None, "expert_group_used_count": None}
    for family, count, groups in (
        ("deepseek2 v3", 256, (8, 4)),
        ("deepseek2 v3", 64, (1, 1)),
        ("deepseek2", 64, (1, 1)),
    ):
        file = write(tiny(family), family, tmp_path / "model.gguf", **keys, expert_count=count)
        made: Any = own_configuration(GGUFHeader(file))
        assert (made.n_group, made.topk_group) == groups
    file = write(tiny("deepseek2"), "deepseek2", tmp_path / "model.gguf", **keys, expert_count=160)
    with pytest.raises(GGUFError, match="160 experts, which DeepSeek V2 chooses by groups"):
        own_configuration(GGUFHeader(file))


def test_a_shared_expert_without_a_key_has_the_width_of_its_tensor(tmp_path: Path) -> None:
    own = tiny("granitemoe shared")
    file = write(own, "granitemoe shared", tmp_path / "model.gguf", expert_shared_feed_forward_length=None)
    made = load_model(config(model=str(file), dtype="float32", quantization="none")).net.config
    assert made.shared_intermediate_size == own.config.shared_intermediate_size


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"expert_used_count": 6}, r"llama\.expert_used_count is 6, and must be a number from 1 to .* 5$"),
    ("glm4moe", {"expert_used_count": 0}, r"glm4moe\.expert_used_count is 0, and must be a number from 1 to .* 8$"),
    ("olmoe", {"expert_count": 0}, r"olmoe\.expert_count is 0, and a olmoe has experts$"),
    ("qwen2moe", {"expert_count": 4}, r"qwen2moe\.expert_count is 4, and .*ffn_gate_inp\.weight has 5$"),
    ("glm4moe", {"expert_gating_func": 1}, r"glm4moe\.expert_gating_func is 1, and must be 2$"),
    ("glm4moe", {"nextn_predict_layers": 3}, r"nextn_predict_layers is 3, and must be .* below its block_count, 3$"),
    ("glm4moe", {"rope__dimension_count": 7}, r"rope\.dimension_count is 7, and must be an even .* up to 32$"),
    (
        "deepseek2",
        {"rope__dimension_count": 2**32 - 2},
        r"count is 4294967294, and must be an even .* up to 48$",
    ),
    ("llama", {"attention__key_length": 2**32 - 1}, r"key_length is 4294967295, and must be from 1 to 65536$"),
    ("deepseek2", {"expert_gating_func": 2}, r"deepseek2\.expert_gating_func is 2, and must be 1$"),
    ("deepseek2 v3", {"expert_gating_func": 1}, r"deepseek2\.expert_gating_func is 1, and must be 2$"),
    ("deepseek2", {"expert_group_count": 4}, r"deepseek2\.expert_group_count is 4, and must be 0 or 1$"),
    ("deepseek2", {"attention__temperature_scale": 0.5}, r"temperature_scale is 0\.5, and must be 0$"),
    ("deepseek2", {"expert_weights_norm": True}, r"deepseek2\.expert_weights_norm is True, and must be False$"),
    (
        "deepseek2",
        {"attention__kv_lora_rank": 32},
        r"kv_a_proj_with_mqa\.weight is \[80, 64\], and the model's is \[48, 64\]$",
    ),
    ("granitemoe", {"rope__scaling__type": "su", "rope__scaling__factor": 2.0}, r"type is 'su'; none, linear and yarn"),
    (
        "granitemoe",
        {"logit_scale": None},
        r"does not describe a model of granitemoe: KeyError\('granitemoe\.logit_scale",
    ),
    ("ernie4_5-moe", {"expert_feed_forward_length": [32, 32]}, r"wrong value: .*moe_intermediate_size"),
]


@pytest.mark.parametrize(("family", "keys", "message"), REFUSED)
def test_a_header_of_another_model_is_refused_by_the_key(
    tmp_path: Path, family: str, keys: dict[str, Any], message: str
) -> None:
    file = write(tiny(family), family, tmp_path / "model.gguf", **keys)
    with pytest.raises(ModelNotSupported, match=message):
        load_model(config(model=str(file)))


@pytest.mark.parametrize(("kind", "wanted"), [("linear", {}), ("yarn", {"beta_fast": 16.0, "beta_slow": 2.0})])
def test_scaled_rotations_are_read(tmp_path: Path, kind: str, wanted: dict[str, float]) -> None:
    keys: dict[str, Any] = {"rope__scaling__type": kind, "rope__scaling__factor": 4.0}
    if kind == "yarn":
        keys |= {"rope__scaling__original_context_length": 128, "rope__scaling__yarn_beta_fast": 16.0}
        keys |= {"rope__scaling__yarn_beta_slow": 2.0}
    file = write(tiny("llama"), "llama", tmp_path / "model.gguf", **keys)
    made = load_model(config(model=str(file), dtype="float32", quantization="none")).net.config.rope_parameters
    assert {**made, "rope_type": kind, "factor": 4.0, "rope_theta": 30_000.0, **wanted} == made
