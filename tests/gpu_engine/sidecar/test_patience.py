"""How long the grammar process may be silent: as long as this process is late itself."""

from __future__ import annotations

import pytest

from gpu_engine.sidecar.link import SILENT_S, TOLD_S, Patience


def test_late_checks_lengthen_the_silence_that_is_none_and_are_forgotten() -> None:
    patience = Patience()
    patience.checked(-0.001)
    assert patience.seconds == SILENT_S
    patience.checked(0.02)
    assert patience.seconds == pytest.approx(SILENT_S + 0.08)
    for _ in range(15):
        patience.checked(0.0)
    assert SILENT_S < patience.seconds < SILENT_S + 0.04
    patience.checked(60.0)
    assert patience.seconds == TOLD_S
