"""The step program with real models: tokens are those of transformers, and an answer ends where it should.

Not responsible for: drafts and events that change no token (see tests/gpu_engine/test_lossless.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from gpu_engine.api.request import FinishReason
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import LoadedModel, ModelNotSupported, load_model
from tests.gpu_engine import tiny
from tests.gpu_engine.harness import (
    answer_all,
    answer_staggered,
    ask,
    config,
    tokens,
    unguided_engine,
    with_drafts,
)
from tests.gpu_engine.step.step_requests import made


def test_each_request_of_a_batch_gets_its_own_number_of_drafts(
    llama: LoadedModel, draft_models: dict[str, str]
) -> None:
    answers = [ask(tokens(20, drafts), max_tokens=25, ignore_eos=True, drafts=drafts) for drafts in range(4)]
    with unguided_engine(llama, with_drafts(3, draft_model=draft_models["same"])) as engine:
        answer_all(engine, answers)
    # The first step has no drafts. Every later draft is accepted, since the target is its own drafter.
    assert [[len(event.token_ids) for event in answer.events] for answer in answers] == [
        [1] * 25,
        [1] + [2] * 12,
        [1] + [3] * 8,
        [1] + [4] * 6,
    ]


@pytest.mark.parametrize("chunk", [16, 21, 256])
def test_tokens_do_not_depend_on_prefill_chunks(llama: LoadedModel, step_tokens: list[list[int]], chunk: int) -> None:
    with unguided_engine(llama, with_drafts(3, max_batched_tokens=chunk)) as engine:
        assert answer_all(engine, made()) == step_tokens
        assert engine.stats().prefill_tokens == sum(len(answer.request.prompt_ids) - 1 for answer in made())


def test_seeds_matter_above_temperature_zero_only(llama: LoadedModel) -> None:
    def answers(temperature: float) -> list[list[int]]:
        prompt = tokens(12, 1)
        return answer_all(engine, [ask(prompt, temperature=temperature, seed=seed) for seed in (1, 2, 1)])

    with unguided_engine(llama, config()) as engine:
        first, other, again = answers(1.0)
        assert first == again != other
        first, other, again = answers(0.0)
        assert first == other == again


QUICK = ("llama", "qwen2 sliding", "gemma2", "gpt2", "gpt_oss", "gemma4 small", "llama4", "deepseek_v3", "qwen3_moe")
"""Families of the fast tests: each kind of attention and of experts. The others differ in norms and activations, whose
logits tests/gpu_engine/model compares."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in QUICK else pytest.mark.slow)
        for family in (*tiny.FAMILIES, *tiny.OWN_FORWARD)
    ],
)
def test_greedy_answers_equal_those_of_transformers(saved: Callable[[str], Path], family: str) -> None:
    model = load_model(config(model=str(saved(family))))
    prompts = [tokens(70, 1, repeat=20), tokens(9, 2), tokens(33, 3)]
    expected = [tiny.generate(saved(family), prompt, 40) for prompt in prompts]
    assert all(len(set(answer)) > 5 for answer in expected)
    for num_drafts in (0, 7):
        with unguided_engine(model, with_drafts(num_drafts, max_batched_tokens=32)) as engine:
            assert answer_all(engine, [ask(prompt, ignore_eos=True) for prompt in prompts]) == expected
            assert engine.stats().cached_tokens == 0
            assert answer_staggered(engine, [ask(prompt, ignore_eos=True) for prompt in prompts]) == expected
            assert engine.stats().cached_tokens == 64 + 32


@pytest.mark.parametrize("family", tiny.OWN_FORWARD)
@torch.inference_mode()
def test_a_row_of_a_forward_of_its_own_has_the_same_bits_for_any_number_of_rows(
    saved: Callable[[str], Path], family: str
) -> None:
    model = load_model(config(model=str(saved(family))))
    ids = torch.tensor([tokens(40, seed) for seed in range(5)])

    def logits(sequences: slice, last: int) -> torch.Tensor:
        """Return [B, last - 20, V] of the rows from 20 on; the rows before them were prefilled."""
        some, table = ids[sequences], torch.arange(15, dtype=torch.int32).view(5, 3)[sequences]
        pages, places = model.allocate_pages(15, 16), torch.arange(last, dtype=torch.int32).expand(len(some), last)
        model.prefill(some[:, :20], AttentionContext(pages, table, places[:, :20].contiguous()))
        out = model.logits(some[:, 20:last], AttentionContext(pages, table, places[:, 20:].contiguous()))
        return out.view(len(some), last - 20, -1)

    whole = logits(slice(0, 5), 40)
    assert torch.equal(logits(slice(3, 4), 40)[0], whole[3])
    for last in (21, 24):
        assert torch.equal(logits(slice(0, 1), last)[0], whole[0, : last - 20])


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_an_answer_may_reach_the_last_position_of_the_model(tmp_path: Path, family: str) -> None:
    shape = (tiny.FAMILIES | tiny.OWN_FORWARD)[family]()
    shape.max_position_embeddings = 48
    folder = tiny.save(shape, tmp_path)
    model = load_model(config(model=str(folder)))
    assert model.max_model_len == 48
    prompt = tokens(21, 1, repeat=7)
    expected = tiny.generate(folder, prompt, 27)
    for num_drafts in (0, 7):
        with unguided_engine(model, with_drafts(num_drafts, max_model_len=48)) as engine:
            assert answer_all(engine, [ask(prompt, ignore_eos=True, max_tokens=27)]) == [expected]
    _check_rows_behind_the_last_position(model)


@torch.inference_mode()
def _check_rows_behind_the_last_position(model: LoadedModel) -> None:
    """Drafts and padding after the last position run, and change no other row."""
    ids, table = torch.tensor([tokens(52, 3)]), torch.arange(4, dtype=torch.int32)[None]
    pages, places = model.allocate_pages(4, 16), torch.arange(52, dtype=torch.int32)[None]
    model.prefill(ids[:, :44], AttentionContext(pages, table, places[:, :44].contiguous()))
    within, beyond = (
        model.logits(ids[:, 44:last], AttentionContext(pages, table, places[:, 44:last].contiguous()))[:4].clone()
        for last in (48, 52)
    )
    assert torch.equal(within, beyond)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_the_error_of_a_missing_device_names_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")  # the loader sets it
    with pytest.raises(ModelNotSupported, match=r"^device: cuda:3 is not there; CUDA devices that torch sees: "):
        load_model(config(device="cuda:3"))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (tiny.bloom, "bloom sends 0 of 2 layers through our attention"),
        (tiny.diffllama, "diffllama has other logits when a sequence goes on in a second forward"),
        (lambda: tiny.gemma4(global_head_dim=592), "it has heads of 592 channels, and attention takes at most 576"),
        (tiny.gptj, ".* the attention of its family in transformers takes no other function"),
        (tiny.mamba, r"mamba has recurrent layers \(MambaBlock\)"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_model_with_unsupported_attention_is_rejected_by_name(
    tmp_path: Path, family: Callable[[], PreTrainedConfig], reason: str
) -> None:
    tiny.save(family(), tmp_path)
    with pytest.raises(ModelNotSupported, match=f"^model: {reason}"):
        load_model(config(model=str(tmp_path)))


def test_the_error_of_a_folder_without_a_model_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupported, match=r"^model: .* has no config\.json"):
        load_model(config(model=str(tmp_path)))
    tiny.save(tiny.FAMILIES["llama"](), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelNotSupported, match=r"^draft_model: .* cannot be loaded: "):
        load_model(config(model=str(tmp_path)), setting="draft_model")
    for path in tmp_path.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelNotSupported, match=r"^model: the tokenizer of .* cannot be loaded: "):
        load_model(config(model=str(tmp_path)))


def test_the_model_length_ends_where_longrope_factors_change(tmp_path: Path) -> None:
    shape = tiny.FAMILIES["llama"]()
    factors = [1.0] * 8
    shape.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": factors,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
    }
    tiny.save(shape, tmp_path)
    assert load_model(config(model=str(tmp_path))).max_model_len == 64


def test_logprobs_are_computed_before_sampling_rules(llama: LoadedModel) -> None:
    prompt = tokens(20, 3, repeat=8)
    rules: dict[str, Any] = {"temperature": 0.8, "top_k": 3, "repetition_penalty": 1.2, "bad_token_ids": (70,)}
    for num_drafts in (0, 7):
        with unguided_engine(llama, with_drafts(num_drafts)) as engine:
            answer, plain = ask(prompt, logprobs=4, **rules), ask(prompt, **rules)
            answer_all(engine, [answer, plain])
        assert answer.tokens == plain.tokens
        assert plain.logprobs == []
        want_PV = _all_logits(llama, prompt + answer.tokens)[len(prompt) - 1 : -1].log_softmax(-1)
        assert len(answer.logprobs) == len(answer.tokens)
        for j, (token, got) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
            assert got.logprob == pytest.approx(want_PV[j, token].item(), abs=1e-3)
            values, ids = want_PV[j].topk(4)
            assert [i for i, _ in got.top] == ids.tolist()
            assert [value for _, value in got.top] == pytest.approx(values.tolist(), abs=1e-3)


@torch.inference_mode()
def _all_logits(model: LoadedModel, ids: list[int]) -> torch.Tensor:
    context = AttentionContext(
        model.allocate_pages(16, 16),
        torch.arange(16, dtype=torch.int32)[None],
        torch.arange(len(ids), dtype=torch.int32)[None],
    )
    return model.logits(torch.tensor([ids]), context)


def _looped(model: LoadedModel) -> tuple[list[int], list[int]]:
    """Return a prompt that holds its own greedy answer, so that nearly every draft is accepted, and the answer."""
    with unguided_engine(model, with_drafts(0)) as engine:
        start = tokens(10, 11)
        (first,) = answer_all(engine, [ask(start, max_tokens=60, ignore_eos=True)])
        prompt = start + first + start
        (answer,) = answer_all(engine, [ask(prompt, max_tokens=60, ignore_eos=True)])
    return prompt, answer


def test_stop_tokens_and_lengths_end_an_answer_inside_a_block_of_drafts(llama: LoadedModel, overlap: bool) -> None:
    prompt, answer = _looped(llama)
    places = sorted({answer.index(token) for token in answer})
    with unguided_engine(llama, with_drafts(7, overlap=overlap)) as engine:
        stopped = [ask(prompt, max_tokens=60, ignore_eos=True, stop_token_ids=(299, answer[at])) for at in places]
        cut = [ask(prompt, max_tokens=length, ignore_eos=True) for length in range(1, 30)]
        answer_all(engine, stopped + cut)
    for at, got in zip(places, stopped, strict=True):
        assert got.tokens == answer[: at + 1]
        assert got.finish is FinishReason.STOP
        assert got.events[-1].matched_token_id == answer[at]
    for length, got in enumerate(cut, 1):
        assert got.tokens == answer[:length]
        assert got.finish is FinishReason.LENGTH
    # The last token was not the first of its step: it was a draft, or it followed one.
    assert any(len(got.events[-1].token_ids) > 1 for got in stopped)
    assert any(len(got.events[-1].token_ids) > 1 for got in cut)


def test_stop_tokens_are_not_drawn_before_min_tokens(llama: LoadedModel) -> None:
    prompt, answer = _looped(llama)
    stop = (answer[3],)
    runs = []
    for num_drafts in (0, 7):
        with unguided_engine(llama, with_drafts(num_drafts)) as engine:
            early, late = ask(prompt, stop_token_ids=stop), ask(prompt, stop_token_ids=stop, min_tokens=12)
            runs.append(answer_all(engine, [early, late]))
        assert early.tokens == answer[: answer.index(stop[0]) + 1]
        assert stop[0] not in late.tokens[:12]
    assert runs[0] == runs[1]


def test_the_model_length_ends_an_answer(llama: LoadedModel, overlap: bool) -> None:
    with unguided_engine(llama, with_drafts(7, overlap=overlap, max_model_len=64)) as engine:
        answer = ask(tokens(50, 1), max_tokens=1000, ignore_eos=True)
        last = ask(tokens(63, 2), max_tokens=1000, ignore_eos=True)
        answer_all(engine, [answer, last])
    assert [len(answer.tokens), len(last.tokens)] == [14, 1]
    assert answer.finish is last.finish is FinishReason.LENGTH
