"""docs/configuration.md and the schema of the chart say what the settings are."""

from __future__ import annotations

from tools.configuration import CHART_SCHEMA, PAGE, chart_schema, page


def test_the_page_is_made_from_the_settings() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tools.configuration --write"


def test_the_schema_of_the_chart_has_the_names_of_the_settings() -> None:
    assert CHART_SCHEMA.read_text(encoding="utf-8") == chart_schema(), "run python -m tools.configuration --write"
