"""The quality of a quantisation: sums over known distributions, shares of known answers, and a run on a tiny model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.harness.measure import Answer
from benchmarks.harness.server import ServerOptions
from benchmarks.harness.validity import Judge
from benchmarks.harness.workloads import Item, workload
from benchmarks.quality import quantisation
from benchmarks.quality.divergence import Divergence, WindowLogits, divergence, windows
from gpu_engine.model.loader import load_model
from gpu_engine.ops.memory import weight_bytes
from kernels.blocks import can_multiply_blocks
from protos.engine.v1 import engine_pb2 as pb
from tests.benchmarks.conftest import Serve
from tests.benchmarks.fake_engine import Script, stable_tokens
from tests.gpu_engine import tiny
from tests.gpu_engine.harness import config

needs_blocks = pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.FAMILIES["llama"](), tmp_path_factory.mktemp("tiny"))


def logits_of(probabilities: list[list[float]]) -> torch.Tensor:
    """Logits whose softmax is `probabilities`; each row is shifted, which changes no probability."""
    return torch.tensor(probabilities).log() + torch.arange(len(probabilities))[:, None]


def test_the_sums_of_two_known_distributions() -> None:
    reference_PV = logits_of([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6], [0.9, 0.05, 0.05]])
    logits_PV = logits_of([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8], [0.05, 0.05, 0.9]])
    found = Divergence()
    found.add(torch.tensor([0, 1, 2]), logits_PV, reference_PV)
    assert found.tokens == 2, "the last row predicts a token outside the window"
    assert found.perplexity == pytest.approx(1 / math.sqrt(0.5 * 0.8), rel=1e-6)
    first = 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5)
    second = 2 * 0.2 * math.log(0.2 / 0.1) + 0.6 * math.log(0.6 / 0.8)
    assert found.mean_kl == pytest.approx((first + second) / 2, rel=1e-5)
    assert found.same_best_share == 0.5


def test_uniform_logits_have_the_perplexity_of_the_vocabulary() -> None:
    found = Divergence()
    found.add(torch.arange(150) % 7, torch.zeros(150, 7), torch.zeros(150, 7))
    assert (found.tokens, found.mean_kl, found.same_best_share) == (149, 0.0, 1.0)
    assert found.perplexity == pytest.approx(7.0)


def test_windows_add_up_by_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    ids_P = torch.randint(0, 9, (100,), generator=generator)
    logits_PV, reference_PV = torch.randn(2, 100, 9, generator=generator)
    apart = Divergence()
    for rows in (slice(0, 80), slice(80, 100)):
        apart.add(ids_P[rows], logits_PV[rows], reference_PV[rows])
    whole = Divergence()
    whole.add(ids_P, logits_PV, reference_PV)
    assert apart.tokens == whole.tokens - 1 == 98
    logs_PV, reference_logs_PV = logits_PV.double().log_softmax(-1), reference_PV.double().log_softmax(-1)
    scored = [at for at in range(99) if at != 79]
    assert apart.nll == pytest.approx(-sum(float(logs_PV[at, ids_P[at + 1]]) for at in scored))
    kl = torch.nn.functional.kl_div(logs_PV[scored], reference_logs_PV[scored], log_target=True, reduction="sum")
    assert apart.kl == pytest.approx(float(kl))
    assert apart.same_best == sum(int(logits_PV[at].argmax() == reference_PV[at].argmax()) for at in scored)


def test_a_token_that_the_reference_excludes_adds_nothing() -> None:
    excluded = torch.tensor([[0.0, 0.0, -math.inf], [0.0, 0.0, 0.0]])
    found = Divergence()
    found.add(torch.tensor([0, 1]), excluded, excluded)
    assert found.mean_kl == 0.0
    found = Divergence()
    found.add(torch.tensor([0, 1]), torch.zeros(2, 3), excluded)
    assert found.mean_kl == pytest.approx(math.log(3 / 2))


def test_logits_of_a_window_are_those_of_the_transformers_model(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = load_model(config(model=str(folder), dtype="float32", quantization="none"))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    run = WindowLogits(model, 40)
    for length in (40, 17):  # the pages of the first window are used again
        ids_P = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length))
        with torch.inference_mode():
            want_PV = plain(ids_P[None]).logits[0]
        torch.testing.assert_close(run(ids_P).float(), want_PV, rtol=1e-3, atol=1e-3)


@needs_blocks
def test_a_quantised_model_diverges_and_a_model_from_itself_does_not(folder: Path) -> None:
    reference, other = (load_model(config(model=str(folder), quantization=kind)) for kind in ("none", "q4"))
    texts = windows([3 * at % 251 for at in range(90)], 40)
    calls: list[int] = []
    itself = divergence(reference, reference, texts, lambda: calls.append(1))
    assert len(calls) == len(texts) == 3
    assert (itself.tokens, itself.kl, itself.same_best) == (87, 0.0, 87)
    apart = divergence(other, reference, texts)
    back = divergence(reference, other, texts)
    assert apart.tokens == 87
    assert 0 < apart.mean_kl < 0.5
    assert apart.same_best == back.same_best < 87
    assert back.nll == itself.nll
    assert apart.nll != itself.nll


@needs_blocks
@pytest.mark.parametrize("fuse", [False, True])
def test_weights_of_4_bits_take_less_than_those_of_8(folder: Path, fuse: bool) -> None:
    q4, int8, none = (
        weight_bytes(load_model(config(model=str(folder), quantization=kind, fuse_parts=fuse)))
        for kind in ("q4", "int8", "none")
    )
    assert q4 < int8 < none
    # float32: each parameter once, packed and joined or not, and the cosines and sines of 256 positions.
    parameters = load_model(config(model=str(folder))).num_parameters
    assert 4 * parameters <= none < 4 * (parameters + 3 * 256 * 16)


def answer(text: str = "", tokens: tuple[int, ...] = ()) -> Answer:
    return Answer("", text, tokens, "stop", 0.0, 0.0, 0.0, 1)


def test_tokens_behind_the_first_difference_are_not_equal() -> None:
    reference = {"a": answer(tokens=(1, 2, 3, 4)), "b": answer(tokens=(5, 6)), "c": answer(tokens=(7, 8))}
    answers = {"a": answer(tokens=(1, 9, 3, 4)), "b": answer(tokens=(5, 6)), "c": answer(tokens=(7, 8, 9, 9))}
    assert quantisation.same_tokens(reference, answers) == (pytest.approx((1 + 2 + 2) / (4 + 2 + 4)), 1 / 3)
    assert quantisation.same_tokens(reference, reference) == (1.0, 1.0)


def test_valid_answers_are_right_when_every_fact_is() -> None:
    schema = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    items = [Item(name, (), schema, 8, '{"n": 3, "m": ["x", {"k": "y"}]}') for name in "abcd"]
    answers = {
        "a": answer('{"m": ["x", {"k": "y"}], "n": 3}'),
        "b": answer('{"n": 4, "m": ["z", {"k": "y"}, "x"]}'),
        "c": answer('{"n": 3}'),
        "d": answer('{"n": 3, "m": ["x", {"k": "y"}]'),
    }
    found = quantisation.extracted(items, answers, Judge())
    assert found == quantisation.Extraction(valid=0.75, right=0.25, facts=(3 + 1 + 1 + 0) / 12)
    with pytest.raises(ValueError, match="a: has no schema or no facts"):
        quantisation.extracted([replace(items[0], facts=None)], answers, Judge())


def row(quantization: str, over_none: float) -> quantisation.Quality:
    return quantisation.Quality(quantization, "bfloat16", 1, 1.0, 10, 20.0, over_none, 0.0, 1.0)


@pytest.mark.parametrize(("over_none", "fails"), [(0.0099, False), (0.011, True), (math.nan, True), (-0.5, False)])
def test_the_bound_is_on_auto_alone(over_none: float, fails: bool) -> None:
    rows = [row("none", 0.0), row("auto", over_none), row("int8", 0.9)]
    assert bool(quantisation.too_high(rows, 1.0)) is fails
    assert quantisation.too_high(rows, None) == ""


@needs_blocks
def test_a_run_compares_logits_and_answers_with_those_of_none(
    folder: Path, serve_fake: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("Two swans flew over the lake, and one of them came back. " * 3)
    facts = {item.messages[-1][1]: item.facts for item in workload("extraction")}
    started: list[ServerOptions] = []

    def text(request: pb.GenerateRequest) -> str:
        right = facts.get(request.messages.messages[-1].content)
        return right if right is not None and len(started) == 1 else "{}"

    def tokens(request: pb.GenerateRequest) -> list[int]:
        return [*stable_tokens(request)[:3], len(started)]

    @contextmanager
    def start(options: ServerOptions) -> Iterator[str]:
        started.append(options)
        yield serve_fake(Script(text=text, tokens=tokens))[0]

    flags = ["--model", str(folder), "--text", str(tmp_path / "text.txt"), "--window", "64", "--threads", "1"]
    flags += ["--dtype", "float32", "--quantizations", "int8", "--count", "2", "--json", str(tmp_path / "out.json")]
    assert quantisation.main(flags, start) == 0
    assert "| int8" in capsys.readouterr().out
    assert [(options.quantization, options.dtype) for options in started] == [("none", "float32"), ("int8", "float32")]
    none, int8 = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (none["quantization"], none["arithmetic"], none["over_none"], none["kl"]) == ("none", "float32", 0.0, 0.0)
    assert (int8["quantization"], int8["arithmetic"]) == ("int8", "float32, blocks")
    assert int8["tokens"] == none["tokens"] == 171 - 3
    assert 0 < int8["kl"] < 0.1
    assert int8["over_none"] == pytest.approx(int8["perplexity"] / none["perplexity"] - 1)
    shares = ("same_tokens", "equal_answers", "valid", "right", "facts")
    assert [none[name] for name in shares] == [1.0, 1.0, 1.0, 1.0, 1.0]
    assert [int8[name] for name in shares] == [0.75, 0.0, 0.0, 0.0, 0.0]
