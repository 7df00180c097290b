"""DFlash heads: files of the public format, refused files, and blocks over paged memory compared with plain ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.transfer_config import TransferConfig
from gpu_engine.core.executor import lookahead
from gpu_engine.drafters.heads.dflash import DFlashNet
from gpu_engine.drafters.heads.dflash_files import load_dflash
from gpu_engine.drafters.heads.eagle3_files import load_head
from gpu_engine.drafters.heads.formats import HeadNotUsable, format_of
from gpu_engine.step.buffers import LaneBuffers, SlotBuffers, StepBatch
from gpu_engine.step.prompt_rows import Chunks, Hidden
from kernels.paged_attention import KVPages
from tests.gpu_engine.dflash import MASK, PlainDFlash, public_config, random_tensors, save, save_random
from tests.gpu_engine.harness import config
from tests.gpu_engine.tiny import VOCAB

H, PAGE, LENGTH, ROWS = 64, 16, 64, 5


def target_config(**changed: Any) -> LlamaConfig:
    shape: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": H, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    }  # fmt: skip
    return LlamaConfig(**(shape | changed))


# ---- files ---------------------------------------------------------------------------------------------------------


def test_a_head_in_the_public_format_is_loaded(tmp_path: Path) -> None:
    save_random(tmp_path)
    head = load_dflash(tmp_path, target_config(), torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    assert head.state_dict().keys() == tensors.keys()
    for name, tensor in head.state_dict().items():
        torch.testing.assert_close(tensor, tensors[name], rtol=0, atol=0)
    assert (head.config.block_size, head.config.mask_token_id) == (8, MASK)
    assert head.config.target_layer_ids == (0, 1)


def test_fields_of_older_and_of_newer_heads_are_read(tmp_path: Path) -> None:
    older = public_config(rope_theta=5e5, rope_scaling=None)
    del older["rope_parameters"], older["layer_types"]
    newer = public_config(dflash_config=public_config()["dflash_config"] | {"block_size": 4})
    del newer["block_size"]
    of_older, of_newer = (
        load_dflash(save(tmp_path / name, said, random_tensors(said)), target_config(), torch.float32).config
        for name, said in (("older", older), ("newer", newer))
    )
    assert (of_older.rope_theta, of_older.block_size) == (5e5, 8)
    assert (of_newer.rope_theta, of_newer.block_size) == (1e4, 4)
    assert of_older.kinds == of_newer.kinds


def test_copies_of_the_target_s_own_matrices_are_not_needed(tmp_path: Path) -> None:
    said = public_config()
    own = {name: torch.zeros(VOCAB, H) for name in ("embed_tokens.weight", "lm_head.weight")}
    tensors = {f"model.{name}": tensor for name, tensor in (random_tensors(said) | own).items()}
    head = load_dflash(save(tmp_path, said, tensors), target_config(), torch.float32)
    assert not own.keys() & head.state_dict().keys()


@pytest.mark.parametrize(
    ("said", "drafter"),
    [
        (public_config(), "dflash"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        (public_config(architectures=["DFlash2DraftModel"]), ""),
        (public_config(speculators_model_type="dflash"), ""),
        ({"architectures": ["LlamaForCausalLM"]}, ""),
        ({"architectures": None}, ""),
    ],
)
def test_the_format_is_known_by_the_config(said: dict[str, Any], drafter: str) -> None:
    assert format_of(said) == drafter


def test_a_head_of_another_format_is_refused_with_the_drafter_that_reads_it(tmp_path: Path) -> None:
    save_random(tmp_path)
    with pytest.raises(HeadNotUsable, match=r"architectures is \['DFlashDraftModel'\], which drafter=dflash reads"):
        load_head(tmp_path, target_config(), torch.float32)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    with pytest.raises(HeadNotUsable, match="which drafter=eagle3 reads"):
        load_dflash(tmp_path, target_config(), torch.float32)


def inner(**changed: Any) -> dict[str, Any]:
    return {"dflash_config": public_config()["dflash_config"] | changed}


REFUSALS: dict[str, dict[str, Any]] = {
    "architectures is ['DFlash2DraftModel'], and DFlashDraftModel": {"architectures": ["DFlash2DraftModel"]},
    "architectures is None, and DFlashDraftModel": {"architectures": None},
    "speculators_model_type is there": {"speculators_model_type": "dflash"},
    "dflash_config is None, not an object": {"dflash_config": None},
    "dflash_config.selector_rank is not known": inner(selector_rank=256),
    "projector_type is 'domino', not 'dflash'": inner(projector_type="domino"),
    "attention_mode is 'mla', not 'gqa' or 'mha'": inner(attention_mode="mla"),
    "model_type is 'llama', not 'qwen3'": {"model_type": "llama"},
    "hidden_act is 'gelu', not 'silu'": {"hidden_act": "gelu"},
    "dflash_config.target_layer_ids is [0, 2], not a list of the target's layers, 0 to 1": inner(
        target_layer_ids=[0, 2]
    ),
    "dflash_config.target_layer_ids is None": inner(target_layer_ids=None),
    "num_target_layers is 36, not 2, the target's": {"num_target_layers": 36},
    "mask_token_id is None, not an integer of at least 0": inner(mask_token_id=None),
    "dflash_config.mask_token_id is 300, not a row of the target's embedding, below 300": inner(mask_token_id=300),
    "block_size is 1, not an integer of at least 2": {"block_size": 1},
    "block_size is 'b16', not an integer": {"block_size": "b16"},
    "vocab_size is 301, not 300, the target's": {"vocab_size": 301},
    "hidden_size is 32, not 64, the target's": {"hidden_size": 32},
    "hidden_size is None, not an integer of at least 1": {"hidden_size": None},
    "head_dim is 24, not a multiple of 16": {"head_dim": 24},
    "num_key_value_heads is 3, not a divisor of 4 heads": {"num_key_value_heads": 3},
    "layer_types is ['full_attention'], not 2 of": {"layer_types": ["full_attention"]},
    "is_causal is False, not true or absent": {
        "layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "is_causal": False,
    },
    "is_causal is 'no', not true or false": {"is_causal": "no"},
    "sliding_window is None, not an integer": {"layer_types": ["sliding_attention"] * 2},
    "rope_parameters is {'rope_type': 'dynamic'}, not one of the kinds": {
        "rope_parameters": {"rope_type": "dynamic"}
    },
    "rope_parameters is {'partial_rotary_factor': 0.5}, not one of": {
        "rope_parameters": {"partial_rotary_factor": 0.5}
    },
    "rope_theta is 'x', not a positive number": {"rope_parameters": {"rope_theta": "x"}},
    "output_multiplier is -1, not a positive number": inner(output_multiplier=-1),
    "layers.0.self_attn.q_proj.weight is [64, 64], not [128, 64]": {"num_attention_heads": 8},
    "layers.0.self_attn.q_proj.bias is missing": {"attention_bias": True},
    "layers.1.input_layernorm.weight is no tensor of a DFlash head": {
        "num_hidden_layers": 1, "layer_types": ["full_attention"],
    },
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSALS)
def test_the_error_of_an_unsuitable_head_names_the_field(tmp_path: Path, words: str) -> None:
    save(tmp_path, public_config(**REFUSALS[words]), random_tensors(public_config()))
    with pytest.raises(HeadNotUsable) as refusal:
        load_dflash(tmp_path, target_config(), torch.float32)
    assert str(refusal.value).startswith("draft_model: ")
    assert words in str(refusal.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    def problem() -> str:
        with pytest.raises(HeadNotUsable) as refusal:
            load_dflash(tmp_path, target_config(), torch.float32)
        return str(refusal.value)

    config_json = tmp_path / "config.json"
    assert "config.json: No such file" in problem()
    for text, words in (("{", "config.json: not JSON"), ("[]", "config.json: not a JSON object")):
        config_json.write_text(text)
        assert words in problem()
    config_json.write_text(json.dumps(public_config()))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin is a pickle" in problem()
    tensors = random_tensors(public_config())
    del tensors["hidden_norm.weight"]
    save(tmp_path, public_config(), tensors)
    assert "hidden_norm.weight is missing" in problem()


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("drafter", {"device": "cuda"}),
        ("tensor_parallel_size", {"tensor_parallel_size": 2}),
        ("role", {"transfer": TransferConfig(role="decode")}),
        ("draft_quantization", {"draft_quantization": "q4"}),
        ("draft_model", {"draft_model": ""}),
    ],
)
def test_settings_that_do_not_go_together_are_refused_by_name(field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        EngineConfig(**{"drafter": "dflash", "draft_model": "m", **settings})


def test_a_block_reaches_one_position_further_than_a_chain() -> None:
    chain, block = (lookahead(config(drafter=name, draft_model="m"), 1) for name in ("eagle3", "dflash"))
    assert block == chain + 1
    assert not config(drafter="dflash", draft_model="m").caches_prefixes


# ---- blocks over paged memory --------------------------------------------------------------------------------------


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7},
    "biased": {"attention_bias": True},
    "scaled": inner(input_embedding_scale=3.0, output_multiplier=0.25, final_logit_softcapping=2.0),
    "one state twice": inner(target_layer_ids=[1, 1]),
}


class Lanes:
    """Sequences of random tokens and target states, prefilled as the engine does it."""

    def __init__(self, folder: Path, said: dict[str, Any], befores: list[int]) -> None:
        draw = torch.Generator().manual_seed(7)
        save(folder, said, random_tensors(said))
        self.plain, B = PlainDFlash.read(folder), len(befores)
        self.head = load_dflash(folder, target_config(), torch.float32)
        self.embedding_VH, self.head_VH = torch.randn(2, VOCAB, H, generator=draw)
        self.pages = [
            KVPages.allocate(B * LENGTH // PAGE + B, 2, 16, PAGE, torch.float32, torch.device("cpu")) for _ in "12"
        ]
        for each in self.pages:  # what a page had before must not be read
            each.k.fill_(torch.nan)
            each.v.fill_(torch.nan)
        self.net = DFlashNet(self.head, self.embedding_VH, lambda x_NH: x_NH @ self.head_VH.T, self.pages)
        slot, lane = SlotBuffers.allocate(B, ROWS, LENGTH, PAGE), LaneBuffers.allocate(B, ROWS, VOCAB)
        slot.history_SL.copy_(torch.randint(0, VOCAB, slot.history_SL.shape, generator=draw))
        slot.page_table_SN.copy_(torch.arange(slot.page_table_SN.numel()).view(B, -1) % len(self.pages[0].v))
        lane.slots_B.copy_(torch.arange(B))
        self.states_BLTH = torch.randn(B, LENGTH, 2, H, generator=draw)
        self.batch = StepBatch(slot, lane, B, ROWS, any_guided=False)
        self.lengths = [before + 1 for before in befores]
        # Chunks with padding after the last token; the shorter lanes end before the longest one does.
        for start in range(0, max(befores), 5):
            starts, ends = ([min(at, before) for before in befores] for at in (start, start + 5))
            bounds = torch.tensor([starts, ends], dtype=torch.int32)
            rows = self.hidden([(b, at, 7) for b, at in enumerate(starts)])
            self.net.prefill(Chunks.cut(slot, torch.arange(B), *bounds, 7), rows)

    def hidden(self, rows: list[tuple[int, int, int]]) -> Hidden:
        """Return the target's states of the rows (lane, first position, count), by layer."""
        states = torch.cat([self.states_BLTH[b, at : at + count] for b, at, count in rows])
        return {layer + 1: states[:, layer] for layer in (0, 1)}

    def step(self, emitted: list[int], wanted: list[int], going: list[bool]) -> torch.Tensor:
        """Advance by `emitted` tokens, as a step that rejected what was drafted after them; return [links, B, V]."""
        rows = self.hidden([(b, length - 1, ROWS) for b, length in enumerate(self.lengths)])
        self.lengths = [length + count for length, count in zip(self.lengths, emitted, strict=True)]
        slot, lane = self.batch.slot, self.batch.lane
        slot.length_S.copy_(torch.tensor(self.lengths))
        lane.result.num_emitted_B.copy_(torch.tensor(emitted))
        wants_BL = torch.arange(max(wanted)) < torch.tensor(wanted)[:, None]
        table, B = slot.page_table_SN, len(emitted)
        first = self.net.first(self.batch, torch.arange(B), torch.tensor(going), wants_BL, table, rows)
        nothing = torch.zeros(B, 1, dtype=torch.int64)
        return torch.stack([first, *(self.net.next(nothing, nothing, table) for _ in range(max(wanted) - 1))])

    def expected(self, b: int, count: int) -> torch.Tensor:
        """Return the plain logits [count, V] of lane `b`."""
        layers, last = self.head.config.target_layer_ids, self.lengths[b] - 1
        states_SF = self.states_BLTH[b, :last][:, list(layers)].flatten(1)
        token = int(self.batch.slot.history_SL[b, last])
        return self.plain.logits(states_SF, token, count, self.embedding_VH, self.head_VH)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_blocks_equal_plain_ones_in_every_step(tmp_path: Path, kind: str) -> None:
    """After full, partial and no acceptance; a lane's block does not depend on the width of the others'."""
    lanes = Lanes(tmp_path, public_config(**KINDS[kind]), befores=[18, 4, 28, 1])
    calls: list[int] = []
    lanes.head.register_forward_hook(lambda *call: calls.append(len(call[1][0])))
    steps = [([1, 4, 2, 1], [4, 2, 0, 1]), ([5, 1, 1, 2], [1, 3, 4, 4]), ([2, 3, 1, 5], [4, 4, 4, 2])]
    for emitted, wanted in steps:
        logits = lanes.step(emitted, wanted, [True] * 4)
        for b, count in enumerate(wanted):
            if count:
                torch.testing.assert_close(logits[:count, b], lanes.expected(b, count), rtol=1e-4, atol=1e-4)
    assert calls == [4 * 5] * 3, "a block is one forward of the head"


@torch.inference_mode()
def test_a_lane_that_does_not_draft_writes_no_keys(tmp_path: Path) -> None:
    lanes = Lanes(tmp_path, public_config(), befores=[18, 4])
    before = [(each.k.clone(), each.v.clone()) for each in lanes.pages]
    lanes.net.first(
        lanes.batch, torch.arange(2), torch.zeros(2, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.bool),
        lanes.batch.slot.page_table_SN, lanes.hidden([(0, 18, ROWS), (1, 4, ROWS)]),
    )  # fmt: skip
    for (k, v), each in zip(before, lanes.pages, strict=True):
        torch.testing.assert_close(each.k, k, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(each.v, v, rtol=0, atol=0, equal_nan=True)
