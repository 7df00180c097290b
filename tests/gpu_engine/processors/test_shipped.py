"""The processors that ship with the engine: what they forbid, and that rows do not see each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_engine.api.processors import CapturedRows, ProcessorRequest, ProcessorSetup, SequenceRows
from gpu_engine.processors.client_tokens import ForbiddenForClient
from gpu_engine.processors.long_answers import LengthPenalty
from gpu_engine.processors.ngrams import NoRepeatedNgrams
from tests.fakes import FakeModel

V, EOS = 300, 256


def setup(options: Mapping[str, Any] | None = None) -> ProcessorSetup:
    return ProcessorSetup(V, (EOS,), FakeModel().tokenizer, torch.device("cpu"), options or {})


def ask(arguments: Mapping[str, Any], client: str = "") -> ProcessorRequest:
    return ProcessorRequest("r", client, arguments)


def rows(tokens: list[int], num_rows: int, arguments: Any, prompt: int = 1) -> SequenceRows:
    return SequenceRows("r", "", 0, arguments, prompt, torch.tensor(tokens, dtype=torch.int32), num_rows)


def repeated(prefix: list[int], size: int) -> set[int]:
    """Return the tokens that would make an n-gram of the prefix occur again."""
    grams = {tuple(prefix[i : i + size]) for i in range(len(prefix) - size + 1)}
    tail = tuple(prefix[len(prefix) - size + 1 :])
    return {gram[-1] for gram in grams if gram[:-1] == tail and gram[-1] < V} - {EOS}


def test_no_ngram_occurs_twice() -> None:
    generator = torch.Generator().manual_seed(1)
    prefixes = [torch.randint(3, (n,), generator=generator).tolist() for n in (1, 2, 5, 17, 30, 30)]
    prefixes += [[4, EOS, 4], [V + 7, V + 40, 4, 5]]  # virtual tokens are after the vocabulary
    for size in (1, 2, 3, 16):
        longest = max(map(len, prefixes))
        # After the length are tokens that would be forbidden if they counted.
        tokens_NL = torch.stack([torch.tensor((prefix + [2, 1, 0] * longest)[: longest + 3]) for prefix in prefixes])
        lengths = torch.tensor([len(prefix) for prefix in prefixes])
        ngrams = NoRepeatedNgrams(setup())
        numbers = torch.tensor([ngrams.prepare(ask({"size": size}))] * len(prefixes), dtype=torch.float64)
        on_N = torch.ones(len(prefixes), dtype=torch.bool)
        captured = CapturedRows(tokens_NL.int(), lengths, torch.ones_like(lengths), numbers, on_N)
        out_NV = ngrams.process_rows(captured, torch.zeros(len(prefixes), V))
        found = [set((row == -torch.inf).nonzero()[:, 0].tolist()) for row in out_NV]
        assert found == [repeated(prefix, size) for prefix in prefixes], size


def test_a_client_does_not_get_its_tokens(tmp_path: Path) -> None:
    path = tmp_path / "clients.json"
    path.write_text(json.dumps({"a": [5, 7], "": [9]}))
    for options in ({"clients": {"a": ["\x05", 7], "": [9]}}, {"file": str(path)}):
        forbidden = ForbiddenForClient(setup(options))
        for client, ids in (("a", {5, 7}), ("b", set()), ("", {9})):
            out_RV = forbidden.process(rows([1, 2], 2, forbidden.prepare(ask({}, client))), torch.zeros(2, V))
            assert [set((row == -torch.inf).nonzero()[:, 0].tolist()) for row in out_RV] == [ids, ids]
    with pytest.raises(ValueError, match="knows no argument 'a'"):
        forbidden.prepare(ask({"a": 1}))


def test_the_end_becomes_more_likely_after_the_start() -> None:
    penalty = LengthPenalty(setup())
    arguments = penalty.prepare(ask({"start": 2, "factor": 1.5}))
    sequences = [
        rows([9, 1, 1, 1, 1], 3, arguments),
        rows([9, 9], 1, arguments, prompt=2),
        rows([1] * 2000, 1, arguments),
    ]
    logits_NV = torch.full((5, V), -2.0)
    out_NV = penalty.process_batch(sequences, logits_NV.clone())
    expected = [-2.0, -2.0 + 2 * (1.5 - 1), -2.0 + 2 * (1.5**2 - 1), -2.0]
    assert out_NV[:4, EOS].tolist() == pytest.approx(expected)
    assert 1e8 < float(out_NV[4, EOS]) < 1e10
    assert torch.equal(out_NV[:, :EOS], logits_NV[:, :EOS])


def test_wrong_arguments_and_options_are_refused() -> None:
    for arguments in ({}, {"size": 0}, {"size": 17}, {"size": "2"}, {"size": True}, {"n": 2}):
        with pytest.raises(ValueError, match=r"needs one argument, size, an integer in \[1, 16\]"):
            NoRepeatedNgrams(setup()).prepare(ask(arguments))
    wrong_tokens: list[dict[str, Any]] = [{"clients": {"a": wrong}} for wrong in ("5", [V], ["ab"], [None])]
    for options in ({}, {"clients": []}, {"x": 1}, *wrong_tokens):
        with pytest.raises(ValueError, match="clients"):
            ForbiddenForClient(setup(options))
    for arguments in ({}, {"start": -1, "factor": 1.5}, {"start": 1, "factor": 3}, {"start": 1}):
        with pytest.raises(ValueError, match=r"start|factor"):
            LengthPenalty(setup()).prepare(ask(arguments))
