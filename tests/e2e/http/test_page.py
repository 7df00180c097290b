"""The page at `/` in a real browser: a chat, a schema next to it, and a wrong field.

Needs the extra `clients` and a Chromium on PATH; skipped, with the reason, where one is missing.
"""

from __future__ import annotations

import json
import re
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


def test_accepted_drafts_and_forced_tokens_are_coloured(page: Any) -> None:
    """Each token is its own span: the colours are those that the engine counts as accepted drafts."""
    page.select_option("#kind", "json")
    schema = {"type": "object", "properties": {"the_name_of_it": {"enum": ["a \u00e9t\u00e9 b", "x"]}}}
    page.fill("#schema", json.dumps(schema | {"required": ["the_name_of_it"], "additionalProperties": False}))
    page.fill("#temperature", "0")
    page.fill("#prompt", "The name?")
    page.click("#send")
    page.wait_for_selector(".figures[data-done]", timeout=60_000)
    spans = page.eval_on_selector_all(
        ".turn.assistant span", "all => all.map(one => [one.classList[0], one.innerText])"
    )
    assert set(json.loads("".join(text for _, text in spans))) == {"the_name_of_it"}
    assert {kind for kind, _ in spans} <= {"sampled", "draft", "forced"}
    assert any(kind == "forced" and "name" in text for kind, text in spans)
    accepted = int(re.findall(r"(\d+) of \d+ drafts accepted", page.inner_text(".figures[data-done]"))[0])
    assert 1 <= sum(kind != "sampled" for kind, _ in spans) <= accepted
    plain = page.eval_on_selector(".turn.user", "one => getComputedStyle(one).backgroundColor")
    forced = page.eval_on_selector(".turn.assistant .forced", "one => getComputedStyle(one).backgroundColor")
    assert forced not in (plain, "rgba(0, 0, 0, 0)")


def test_a_text_is_painted_by_its_tokens_whatever_lags(page: Any) -> None:
    """Markers without visible text, a part of a character, and text that comes after its token."""
    painted = page.evaluate("""() => {
      const box = document.createElement("div"), painter = new Painter(box);
      painter.add([{token: "<think>", origin: "sampled"}, {token: "Hm", origin: "draft"}]);
      painter.show("H", "thought");
      painter.show("m", "thought");
      painter.add([{token: "</think>", origin: "forced"}, {token: "caf", origin: "sampled"},
                   {token: "\ufffd", origin: "draft"}, {token: "\ufffd", origin: "draft"},
                   {token: "!", origin: "forced"}]);
      painter.show("caf", "");
      painter.show("\u00e9!", "");
      return [...box.children].map(one => [one.className.trim(), one.textContent]);
    }""")
    assert painted == [
        ["draft thought", "H"], ["draft thought", "m"], ["sampled", "caf"], ["draft", "\u00e9"], ["forced", "!"],
    ]  # fmt: skip


def test_what_the_server_refuses_is_shown(page: Any) -> None:
    page.select_option("#kind", "regex")
    page.fill("#schema", "(")
    page.fill("#prompt", "Anything.")
    page.click("#send")
    page.wait_for_selector(".turn.error", timeout=60_000)
    assert "grammar" in page.inner_text(".turn.error")
    assert page.inner_text("#send") == "Send"
