"""The page at `/` in a real browser: a chat, a schema beside it, and a wrong field.

Needs the extra `clients` and a Chromium on PATH; skipped, with the reason, where one is missing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture
def page(gateway: str) -> Iterator[Any]:
    """The page, open in a browser; an error of its script fails the test."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra `clients`")
    browser_path = shutil.which("chromium")
    if browser_path is None:
        pytest.skip("needs chromium on PATH")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        opened = browser.new_page()
        errors: list[str] = []
        opened.on("pageerror", lambda error: errors.append(str(error)))
        opened.goto(f"http://{gateway}/")
        opened.wait_for_function("document.querySelectorAll('#model option').length > 0")
        yield opened
        assert errors == []
        browser.close()


def test_a_chat_streams_and_shows_its_figures(page: Any, model: str) -> None:
    assert page.input_value("#model") == model
    page.fill("#max_tokens", "12")
    page.fill("#prompt", "Say hello.")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".figures[data-done]", timeout=60_000)
    assert page.inner_text(".turn.user") == "Say hello."
    assert page.inner_text(".turn.assistant").strip()
    assert "12 tokens" in page.inner_text(".figures[data-done]")


def test_an_answer_fits_the_schema_beside_it(page: Any) -> None:
    page.select_option("#kind", "json")
    page.fill("#schema", json.dumps({"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}))
    page.fill("#prompt", "A number.")
    page.click("#send")
    page.wait_for_selector(".figures[data-done]", timeout=60_000)
    assert json.loads(page.inner_text(".turn.assistant"))["n"] in (1, 2)


def test_what_the_server_refuses_is_shown(page: Any) -> None:
    page.select_option("#kind", "regex")
    page.fill("#schema", "(")
    page.fill("#prompt", "Anything.")
    page.click("#send")
    page.wait_for_selector(".turn.error", timeout=60_000)
    assert "grammar" in page.inner_text(".turn.error")
    assert page.inner_text("#send") == "Send"
