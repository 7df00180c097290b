"""The sampling parameters of a model's generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_engine.api.sampling_defaults import described, read_defaults


def test_only_what_the_file_says_is_a_default(tmp_path: Path) -> None:
    assert read_defaults(tmp_path) == {}
    given = {"do_sample": True, "eos_token_id": [1, 2], "temperature": 0.6, "top_k": 20, "top_p": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    defaults = read_defaults(tmp_path)
    assert defaults == {"temperature": 0.6, "top_k": 20}
    assert described(defaults) == "temperature 0.6, top_k 20"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([1], "is no JSON object"),
        ({"temperature": -1}, "temperature is -1, which no request may have"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"min_p": True}, "min_p is True"),
        ({"repetition_penalty": "high"}, "repetition_penalty is 'high'"),
        ({"repetition_penalty": 10.5}, "repetition_penalty is 10.5"),
    ],
)
def test_a_value_that_no_request_may_have_is_refused(tmp_path: Path, given: Any, says: str) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    with pytest.raises(ValueError, match=rf"generation_config\.json:? {says}"):
        read_defaults(tmp_path)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json cannot be read: "):
        read_defaults(tmp_path)
