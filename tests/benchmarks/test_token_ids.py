"""The record of token ids: it is compared answer by answer, and what depends on timing is printed and not counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.harness.server import ServerOptions
from benchmarks.quality import token_ids
from protos.engine.v1 import engine_pb2 as pb
from tests.benchmarks.conftest import Serve
from tests.benchmarks.fake_engine import Script, stable_tokens

ARGUMENTS = ["--dtypes", "float32", "--count", "4", "--max-tokens", "8", "--drafts", "0,3", "--batch", "2"]


def build(serve_fake: Serve, script: Script) -> token_ids.Start:
    @contextmanager
    def start(options: ServerOptions) -> Iterator[str]:
        yield serve_fake(script)[0]

    return start


def entry(*ids: int, finish: str = "stop") -> dict[str, object]:
    return {"ids": list(ids), "finish": finish}


def other_last_token(request: pb.GenerateRequest) -> list[int]:
    tokens = stable_tokens(request)
    return [*tokens[:-1], 999] if request.speculation.num_draft_tokens == 3 else tokens


def test_each_answer_that_differs_has_one_line() -> None:
    recorded = {"same": entry(1), "moved": entry(1, 2), "gone": entry(1), "ended": entry(1)}
    now = {"same": entry(1), "moved": entry(1, 3), "new": entry(1), "ended": entry(1, finish="length")}
    assert token_ids.differences(recorded, now) == [
        "ended: finish was stop, is length",
        "gone: only in the record",
        "moved: token 1 was 2, is 3",
        "new: only in this run",
    ]


def test_a_bfloat16_batch_counts(capsys: pytest.CaptureFixture[str]) -> None:
    recorded: token_ids.Ids = {"bfloat16, 3 drafts, batch of 8": {"a": entry(1)}, "bfloat16, 3 drafts, alone": {}}
    now: token_ids.Ids = {"bfloat16, 3 drafts, batch of 8": {"a": entry(2)}, "bfloat16, 3 drafts, alone": {}}
    assert token_ids.report(recorded, now) == 1
    assert "0 of 1 equal" in capsys.readouterr().out


def test_a_variant_that_this_run_left_out_is_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    recorded: token_ids.Ids = {"float32, 0 drafts, alone": {"a": entry(1)}, "float32, 3 drafts, alone": {"a": entry(1)}}
    now = {"float32, 0 drafts, alone": {"a": entry(1)}}
    assert token_ids.report(recorded, now) == 0
    assert "not run: float32, 3 drafts, alone" in capsys.readouterr().out


def test_sampled_calls_have_a_seed_and_a_name_each() -> None:
    calls = token_ids.sampled_calls(60, 16, 7)
    assert len({call.name for call in calls}) == 60
    assert len({call.request.sampling.seed for call in calls}) == 60
    assert all(call.request.sampling.temperature == 1.0 for call in calls)
    assert all(call.request.grammar.json_schema for call in calls)


def test_a_build_equals_its_own_record(serve_fake: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "ids.json"
    start = build(serve_fake, Script())
    assert token_ids.main(["--record", str(record), *ARGUMENTS], start) == 0
    answers = json.loads(record.read_text())["answers"]
    assert {len(variant) for variant in answers.values()} == {4}
    assert len(answers) == 2 * 2 + 1
    assert token_ids.main(["--compare", str(record), *ARGUMENTS], start) == 0
    assert "0 differences" in capsys.readouterr().out


def test_a_build_with_another_token_differs_from_the_record(
    serve_fake: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "ids.json"
    assert token_ids.main(["--record", str(record), *ARGUMENTS], build(serve_fake, Script())) == 0
    changed = build(serve_fake, Script(tokens=other_last_token))
    assert token_ids.main(["--compare", str(record), *ARGUMENTS], changed) == 1
    printed = capsys.readouterr().out
    assert "float32, 0 drafts, alone: 4 of 4 equal" in printed
    assert "float32, 3 drafts, batch of 2: 0 of 4 equal" in printed
    assert "is 999" in printed
