"""Tensors that requests ask for: those of transformers, each row once.

Not responsible for: drafts and events that change no row (see tests/gpu_engine/test_lossless.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from gpu_engine.api.output_tensors import LOGITS, WantedOutput
from gpu_engine.api.request import FinishReason
from gpu_engine.core.build_executor import build_executor
from gpu_engine.core.engine import Engine
from gpu_engine.core.executor import Executor
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import LoadedModel, load_model
from gpu_engine.model.outputs import compute
from gpu_engine.step.outputs.tensors import TensorOutputs
from tests.gpu_engine import tiny
from tests.gpu_engine.harness import (
    Answer,
    Hold,
    answer_all,
    answer_each,
    ask,
    config,
    running,
    settle,
    tokens,
    unguided_engine,
    until_false,
    with_drafts,
)

LONG = tokens(150, 4, repeat=40)
MODULES = ("model.layers.1.mlp", "model.layers.0.self_attn", "model.norm", "model.embed_tokens", "lm_head")
Rows = dict[str, "np.ndarray[Any, Any]"]


def wanted(model: LoadedModel, source: str, *, context: bool = True, answer: bool = True) -> WantedOutput:
    return WantedOutput(source, source, model.outputs[source], context=context, answer=answer)


def with_outputs(answer: Answer, *outputs: WantedOutput) -> Answer:
    answer.change(tensors=outputs)
    return answer


def rows_of(answer: Answer) -> Rows:
    """Return the rows of an answer by name, by absolute position; asserts that each comes once and with its token."""
    found: dict[str, dict[int, Any]] = {}
    have, prompt = 0, len(answer.request.prompt_ids)
    for event in answer.events:
        have += len(event.token_ids)
        for rows in event.outputs:
            values = np.frombuffer(rows.data.tobytes(), "<u2" if rows.spec.dtype == "bfloat16" else "<f4").reshape(
                len(rows.data), *rows.spec.shape
            )
            if rows.spec.dtype == "bfloat16":
                values = (values.astype(np.uint32) << 16).view(np.float32)
            of_name = found.setdefault(rows.name, {})
            for at, row in enumerate(values, rows.start):
                assert at not in of_name, "a row was sent twice"
                assert at == max(of_name, default=rows.start - 1) + 1, "rows are sent in their order"
                of_name[at] = row
        for of_name in (
            found.get(each.name, {}) for each in answer.request.outputs.tensors if each.answer and event.error is None
        ):
            if have and answer.finish is not FinishReason.ABORTED:
                assert max(of_name) == prompt - 2 + have, "a token is sent with its row"
    return {name: np.stack([rows[at] for at in sorted(rows)]) for name, rows in found.items()}


def first_of(answer: Answer, name: str) -> int:
    return next(rows.start for event in answer.events for rows in event.outputs if rows.name == name)


def reference(model: LoadedModel, ids: list[int]) -> dict[str, torch.Tensor]:
    """Return what transformers has for these tokens in float32: logits, hidden states, and results of modules."""
    net = AutoModelForCausalLM.from_pretrained(model.name, dtype=torch.float32, attn_implementation="eager").eval()
    found: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: Any, args: Any, output: Any) -> None:
            found[name] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook

    for name in MODULES:
        net.get_submodule(name).register_forward_hook(keep(name))
    with torch.no_grad():
        out = net(torch.tensor([ids]), output_hidden_states=True)
    found |= {f"hidden_states.{layer}": states[0] for layer, states in enumerate(out.hidden_states)}
    return found | {"logits": out.logits[0]}


@pytest.mark.parametrize("drafts", [0, 7])
def test_they_are_those_of_transformers_at_every_token(llama: LoadedModel, drafts: int, overlap: bool) -> None:
    names = ("logits", *(f"hidden_states.{layer}" for layer in range(3)), *MODULES)
    with unguided_engine(llama, with_drafts(drafts, overlap=overlap)) as engine:
        plain = ask(LONG, max_tokens=40, ignore_eos=True)
        answer = with_outputs(
            ask(tokens(150, 4, repeat=41), max_tokens=40, ignore_eos=True), *(wanted(llama, name) for name in names)
        )
        answer_all(engine, [answer, plain])
    ids = [*answer.request.prompt_ids, *answer.tokens]
    expected, rows = reference(llama, ids[:-1]), rows_of(answer)
    assert set(rows) == set(names)
    for name in names:
        assert first_of(answer, name) == 0
        torch.testing.assert_close(torch.from_numpy(rows[name].copy()), expected[name], atol=2e-4, rtol=1e-4)
    greedy = rows["logits"][len(answer.request.prompt_ids) - 1 :].argmax(-1)
    assert greedy.tolist() == answer.tokens


def test_the_gate_of_a_shared_expert_has_the_result_of_transformers(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    folder = tiny.save(Qwen2MoeConfig(vocab_size=tiny.VOCAB, hidden_size=64, num_hidden_layers=1, **experts), tmp_path)
    model, name = load_model(config(model=str(folder))), "model.layers.0.mlp.shared_expert_gate"
    assert [each for each in model.outputs if each.startswith(name)] == [name]
    net, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), list[torch.Tensor]()
    net.get_submodule(name).register_forward_hook(lambda _, args, output: found.append(output))
    ids = torch.tensor([tokens(12, 1)])
    positions = torch.arange(12, dtype=torch.int32)[None]
    ctx = AttentionContext(model.allocate_pages(1, 16), torch.zeros(1, 1, dtype=torch.int32), positions)
    with torch.no_grad():
        net(ids)
        torch.testing.assert_close(compute(model, [name], ids, ctx)[name], found[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.8, "seed": 7, "logprobs": 2}])
def test_they_change_no_token(either_forward: LoadedModel, fields: dict[str, Any]) -> None:
    model = either_forward

    def made() -> list[Answer]:
        return [ask(tokens(20 * n, n, repeat=5 * n), max_tokens=40 + n, ignore_eos=True, **fields) for n in (1, 2, 7)]

    last = f"hidden_states.{model.num_layers}"
    with unguided_engine(model, with_drafts(3, overlap=not fields)) as engine:
        expected = made()
        answer_all(engine, expected)
        answers = made()
        with_outputs(answers[0], wanted(model, LOGITS, context=False))
        with_outputs(answers[1], wanted(model, LOGITS), wanted(model, last), wanted(model, "model.layers.0.mlp"))
        with_outputs(answers[2], wanted(model, last, answer=False))
        answer_all(engine, answers)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert [answer.logprobs for answer in answers] == [answer.logprobs for answer in expected]
    rows = [rows_of(answer) for answer in answers]
    assert len(rows[0][LOGITS]) == 41
    assert len(rows[2][last]) == 140 - answers[2].telemetry.cached_tokens
    if not fields:
        assert rows[0][LOGITS].argmax(-1).tolist() == answers[0].tokens


def test_rows_of_cached_tokens_are_missing_and_the_first_row_says_so(either_forward: LoadedModel) -> None:
    with unguided_engine(either_forward, with_drafts(3)) as engine:
        answers = [with_outputs(ask(LONG, max_tokens=20), wanted(either_forward, LOGITS)) for _ in range(2)]
        answer_each(engine, answers)
    cached = [answer.telemetry.cached_tokens for answer in answers]
    assert cached[0] == 0 < cached[1]
    assert [first_of(answer, LOGITS) for answer in answers] == cached
    first, second = (rows_of(answer)[LOGITS] for answer in answers)
    np.testing.assert_allclose(second, first[cached[1] :], atol=1e-4)


def test_a_request_that_ends_between_two_forwards_leaves_nothing(llama: LoadedModel, overlap: bool) -> None:
    with unguided_engine(llama, config(overlap=overlap, max_batch_size=2)) as engine:
        other = ask(tokens(5, 1), max_tokens=200, ignore_eos=True)
        other.submit(engine)
        for seed in range(4):
            one = with_outputs(ask(tokens(200, seed), max_tokens=50), wanted(llama, LOGITS))
            one.submit(engine)
            until_false(lambda one=one: not (one.events or one.over))  # type: ignore[misc]
            if seed % 2:
                engine.abort(one.request.request_id)
                one.wait()
            else:
                engine.drop(one.request)
        last = with_outputs(ask(LONG), wanted(llama, LOGITS))
        answer_all(engine, [last])
        rows_of(last)
        other.wait()
        settle(engine)
        until_false(lambda: not all(entry.free for entry in engine.executor.tensors._entries))


def test_an_aborted_sequence_keeps_the_tokens_that_waited_for_their_rows(llama: LoadedModel) -> None:
    with unguided_engine(llama, config()) as engine:
        endless = with_outputs(ask(tokens(9, 2), max_tokens=200, ignore_eos=True), wanted(llama, LOGITS, context=False))
        plain = ask(tokens(9, 2), max_tokens=200, ignore_eos=True)
        hold = Hold(engine, lambda: len(endless.tokens) >= 5)
        endless.submit(engine)
        with hold.reached():
            engine.abort(endless.request.request_id)
        assert endless.wait().finish is FinishReason.ABORTED
        answer_all(engine, [plain])
    assert endless.tokens == plain.tokens[: len(endless.tokens)]
    assert not endless.events[-1].outputs or len(rows_of(endless)[LOGITS]) <= len(endless.tokens)


def test_a_forward_that_holds_few_rows_computes_fewer_at_a_time(llama: LoadedModel) -> None:
    def build(*parts: Any) -> Executor:
        """Return the executor with room for the logits of three rows."""
        whole = build_executor(*parts)
        tensors = whole.tensors
        few = 3 * llama.outputs[LOGITS].row_bytes
        small = TensorOutputs(tensors._stream, llama, tensors._pages, tensors._slot, 16, max_bytes=few)
        return replace(whole, tensors=small)

    settings, answers = with_drafts(3), [with_outputs(ask(LONG, max_tokens=20), wanted(llama, LOGITS)) for _ in "12"]
    for answer, builds in zip(answers, (build_executor, build), strict=True):
        model = replace(llama, max_model_len=settings.max_model_len)
        with running(Engine(settings, model, build_executor=builds)) as engine:
            answer_all(engine, [answer])
            forwards = engine.executor.tensors.forwards
    assert forwards >= len(LONG) // 3
    np.testing.assert_allclose(rows_of(answers[1])[LOGITS], rows_of(answers[0])[LOGITS], atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe", "gemma2", "gemma4 small"])
def test_every_name_that_is_offered_gives_its_rows(saved: Callable[[str], Path], family: str) -> None:
    loaded = load_model(config(model=str(saved(family))))
    assert {LOGITS, "hidden_states.0", f"hidden_states.{loaded.num_layers}"} <= set(loaded.outputs)
    assert any(name.endswith((".0.mlp", ".0.attn", ".0.self_attn")) for name in loaded.outputs)
    with unguided_engine(loaded, config()) as engine:
        names = list(loaded.outputs)
        answers = [
            with_outputs(
                ask(tokens(20, 1), max_tokens=3, ignore_eos=True), *(wanted(loaded, n) for n in names[at : at + 8])
            )
            for at in range(0, len(names), 8)
        ]
        answer_each(engine, answers)
    for answer in answers:
        first = answer.telemetry.cached_tokens
        for name, rows in rows_of(answer).items():
            assert rows.shape == (20 + 3 - 1 - first, *loaded.outputs[name].shape)
            assert np.isfinite(rows).all()


def test_a_forward_writes_to_no_page_of_a_sequence(llama: LoadedModel) -> None:
    with unguided_engine(llama, with_drafts(0)) as engine:
        answer_all(engine, [ask(LONG, max_tokens=20, ignore_eos=True)])
        settle(engine)
        tensors = engine.executor.tensors  # the slot of the answer has its tokens and its pages still
        before = [(page.k.clone(), page.v.clone()) for page in tensors._pages]
        names = {LOGITS: llama.outputs[LOGITS].row_bytes, "model.norm": llama.outputs["model.norm"].row_bytes}
        piece = tensors.launch(0, 40, 90, names)
        assert piece is not None
        assert (piece.start, piece.end) == (40, 90)
        piece.take()
        scratch = engine.stats().num_pages
        for (k, v), after in zip(before, tensors._pages, strict=True):
            assert torch.equal(k[:scratch], after.k[:scratch])
            assert torch.equal(v[:scratch], after.v[:scratch])
            assert not torch.equal(v[scratch:], after.v[scratch:])
