"""The comparison finds what differs, and `lossless` ends with the right exit code."""

from __future__ import annotations

import pytest

from benchmarks.harness.comparison import compare, first_difference
from benchmarks.harness.measure import Answer
from benchmarks.quality import lossless
from protos.engine.v1 import engine_pb2 as pb
from tests.benchmarks.conftest import Serve
from tests.benchmarks.fake_engine import Script, stable_tokens


def answer(*tokens: int, finish: str = "stop") -> Answer:
    return Answer("a", "", tokens, finish, 0.0, 0.0, 0.0, 1)


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == (1, 2, 9)
    assert first_difference([1, 2], [1]) == (1, 2, None)
    assert first_difference([], [5]) == (0, None, 5)


def test_compare_reports_each_answer_once_and_missing_ones() -> None:
    reference = {"same": answer(1, 2), "moved": answer(1, 2), "gone": answer(1), "ended": answer(1)}
    others = {"same": answer(1, 2), "moved": answer(1, 3), "new": answer(1), "ended": answer(1, finish="length")}
    found = {difference.name: str(difference) for difference in compare(reference, others)}
    assert set(found) == {"moved", "gone", "ended", "new"}
    assert found["moved"] == "moved: at token 1 expected 2, got 3"
    assert "only on one side" in found["gone"]
    assert "finish stop became length" in found["ended"]


def test_cases_are_distinct_deterministic_and_cover_every_profile_guided_and_free() -> None:
    cases = lossless.make_cases(40, 16)
    assert cases == lossless.make_cases(40, 16)
    assert len({case.name for case in cases}) == 40
    kinds = {(case.profile, case.item.schema is not None) for case in cases}
    assert kinds == {(profile, guided) for profile in lossless.PROFILES for guided in (True, False)}
    assert all(case.item.max_tokens <= 16 for case in cases)


def test_a_case_carries_its_profile_seed_and_drafts() -> None:
    case = next(case for case in lossless.make_cases(40, 16) if case.profile == "T=1 top_p=0.9")
    request = case.call(3).request
    assert request.sampling.temperature == 1.0
    assert request.sampling.top_p == pytest.approx(0.9)
    assert request.sampling.seed == case.seed
    assert request.speculation.num_draft_tokens == 3


def test_no_drafts_is_said_and_not_left_to_the_default() -> None:
    request = lossless.make_cases(1, 16)[0].call(0).request
    assert request.speculation.HasField("num_draft_tokens")


ARGUMENTS = ["--count", "6", "--max-tokens", "8", "--batch", "3"]


def test_an_engine_that_is_lossless_passes(serve_fake: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    address, engine = serve_fake(Script())
    assert lossless.main([*ARGUMENTS, "--address", address]) == 0
    assert "differs" not in capsys.readouterr().out
    assert len(engine.requests) == 6 * 6
    assert 1 < engine.most_running <= 3


def lossy(request: pb.GenerateRequest) -> list[int]:
    tokens = stable_tokens(request)
    return [*tokens[:-1], 999] if request.speculation.num_draft_tokens == 7 else tokens


def test_an_engine_that_is_not_lossless_fails_except_in_float32_on_a_gpu(
    serve_fake: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    address, _ = serve_fake(Script(tokens=lossy))
    assert lossless.main([*ARGUMENTS, "--address", address]) == 1
    printed = capsys.readouterr().out
    assert "differs: 7 drafts, alone: person-0 [guided, greedy]: at token 5" in printed
    assert "0 of 6" in printed
    assert lossless.main([*ARGUMENTS, "--address", address, "--dtype", "bfloat16"]) == 1
    assert lossless.main([*ARGUMENTS, "--address", address, "--device", "cuda"]) == 0
    assert lossless.main([*ARGUMENTS, "--address", address, "--device", "cuda", "--dtype", "bfloat16"]) == 1


def test_the_first_draft_count_must_be_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        lossless.main(["--drafts", "3,7"])
    assert "the first must be 0" in capsys.readouterr().err
