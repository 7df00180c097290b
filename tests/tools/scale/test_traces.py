"""Traces: rates, bursts, shares and files."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

import pytest

from tools.scale.traces import Lengths, Load, read_trace, write_trace


@pytest.mark.parametrize("burstiness", [0.0, 1.0, pytest.param(3.0, marks=pytest.mark.slow)])
def test_arrivals_have_the_rate_and_the_spread(burstiness: float) -> None:
    trace = Load(rate=20, burstiness=burstiness).trace(1000, 0)
    gaps = [after.at_s - before.at_s for before, after in pairwise(trace)]
    assert fmean(gaps) == pytest.approx(0.05, rel=0.1)
    assert stdev(gaps) / fmean(gaps) == pytest.approx(burstiness, rel=0.1, abs=1e-6)


def test_lengths_have_the_means() -> None:
    trace = Load(rate=20, lengths=Lengths(prompt_mean=300, answer_mean=80, spread=0.8)).trace(500, 0)
    assert fmean(a.prompt_tokens for a in trace) == pytest.approx(300, rel=0.05)
    assert fmean(a.answer_tokens for a in trace) == pytest.approx(80, rel=0.05)
    pairs = ((10, 3), (20, 5))
    assert Lengths(pairs).means == (15, 4)
    assert {(a.prompt_tokens, a.answer_tokens) for a in Load(rate=9, lengths=Lengths(pairs)).trace(20, 0)} == set(pairs)


def test_grammars_and_groups_are_asked_for_by_zipfs_law() -> None:
    trace = Load(rate=50, guided_share=0.4, grammars=4, groups=3, group_tokens=9999).trace(200, 0)
    assert fmean(a.grammar > 0 for a in trace) == pytest.approx(0.4, abs=0.02)
    guided = [a.grammar for a in trace if a.grammar]
    assert guided.count(1) / guided.count(4) == pytest.approx(4, rel=0.2)
    assert all(a.group_tokens == a.prompt_tokens for a in trace), "a group shares no more than a prompt has"


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    trace = Load(rate=5, guided_share=0.5, groups=2, group_tokens=8).trace(5, 0)
    write_trace(tmp_path / "trace.jsonl", trace)
    assert read_trace(tmp_path / "trace.jsonl") == trace
