"""docs/configuration.md says what the settings are."""

from __future__ import annotations

from tools.configuration import PAGE, page


def test_the_page_is_made_from_the_settings() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tools.configuration --write"
