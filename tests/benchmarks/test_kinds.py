"""The benchmark of kinds: its distances, its flags."""

from __future__ import annotations

import pytest
import torch

from benchmarks.quality.kinds import Distance, main


def test_distances_are_of_differences_and_relative_to_logits_without_their_mean() -> None:
    reference_PV, found = torch.tensor([[1.0, 2.0, 3.0], [5.0, 5.0, 8.0]]), Distance()
    found.add(reference_PV, reference_PV)
    assert found.cells() == ["0.000", "0.0000", "0.0e+00", "2 of 2"]
    found.add(reference_PV + torch.tensor([[0.0, 0.0, -2.0], [0.0, 0.0, 0.0]]), reference_PV)
    # A square of 4 over twice 2 + 6.
    assert found.cells() == ["2.000", "0.1667", "5.0e-01", "3 of 4"]


def test_an_unknown_kind_and_too_few_positions_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in ((["--kinds", "q9_9"], "q9_9"), (["--positions", "1"], "--positions")):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err
