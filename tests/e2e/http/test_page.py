"""The page at `/` in a real browser: a chat, a schema next to it, tools, Markdown, a phone, and a wrong field.

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
        opened.wait_for_selector(
            "#model option", state="attached"
        )  # a function would be evaluated, which the page forbids
        yield opened
        assert errors == []
        browser.close()


def test_a_chat_streams_and_shows_its_figures(page: Any, model: str) -> None:
    assert page.input_value("#model") == model
    page.fill("#max_tokens", "12")
    page.fill("#temperature", "0")
    page.fill("#prompt", "Tell me a long story.")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".figures[data-done]", timeout=60_000)
    assert page.inner_text(".turn.user") == "Tell me a long story."
    assert page.inner_text(".turn.assistant").strip()
    assert "12 tokens" in page.inner_text(".figures[data-done]")


def test_an_answer_fits_the_schema_beside_it(page: Any) -> None:
    page.select_option("#kind", "json")
    page.fill("#schema", json.dumps({"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}))
    page.fill("#prompt", "A number.")
    page.click("#send")
    page.wait_for_selector(".figures[data-done]", timeout=60_000)
    assert json.loads(page.inner_text(".turn.assistant"))["n"] in (1, 2)


def test_a_form_is_filled_with_the_values_of_the_answer(page: Any) -> None:
    page.select_option("#kind", "json")
    page.select_option("#shown", "form")
    schema = {"type": "object", "properties": {"a/b": {"enum": [["x", 1]]}, "c": {"enum": ['\u00e9"<']}}}
    page.fill("#schema", json.dumps(schema | {"required": ["a/b", "c"], "additionalProperties": False}))
    page.fill("#prompt", "Fill it.")
    page.click("#send")
    page.wait_for_selector(".figures[data-done]", timeout=60_000)
    fields = page.eval_on_selector_all(
        ".turn.filled label", "all => all.map(one => [one.firstChild.textContent, one.lastChild.value])"
    )
    assert fields == [["a/b \u203a 0", "x"], ["a/b \u203a 1", "1"], ["c", '\u00e9"<']]


def test_a_value_of_a_form_is_there_when_it_begins_and_filled_when_it_is_final(page: Any) -> None:
    values = page.evaluate("""() => {
      const form = new Form(document.createElement("div")), seen = [];
      const now = () => seen.push([...form.fields].map(([pointer, field]) => [pointer, field.value]));
      form.take([{kind: "started", pointer: "", type: "object"}, {kind: "started", pointer: "/a", type: "number"}]);
      now();
      form.take([{kind: "finished", pointer: "/a", type: "number", value_json: "1.50"},
                 {kind: "started", pointer: "/b", type: "array"},
                 {kind: "finished", pointer: "/b", type: "array", value_json: "[]"},
                 {kind: "finished", pointer: "", type: "object"}]);
      now();
      return seen;
    }""")
    assert values == [[["/a", ""]], [["/a", "1.50"], ["/b", "[]"]]]


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
      painter.draw(true);
      return [...box.children].map(one => [one.className.trim(), one.textContent]);
    }""")
    assert painted == [
        ["draft thought", "H"], ["draft thought", "m"], ["sampled", "caf"], ["draft", "\u00e9"], ["forced", "!"],
    ]  # fmt: skip


def test_markdown_becomes_elements_and_html_stays_text(page: Any) -> None:
    """Each element keeps the colours of its tokens, and nothing that the model writes is markup of the page."""
    page.evaluate("""() => {
      const painter = new Painter(add("assistant"));
      const tokens = ["# Ti", "tle\\n\\n**bo", "ld** <img src=x onerror=alert(1)> ", "[a](https://a.example/b) ",
        "[b](javascript:alert(1))\\n- one\\n- `<i>`\\n\\n|x|y|\\n|-|-|\\n|1|2|\\n```\\n<script>\\n```\\n",
        "```json 1```\\nend"];
      painter.add(tokens.map((token, i) => ({token, origin: ["sampled", "draft", "forced"][i % 3]})));
      for (const token of tokens) painter.show(token, "");
      painter.draw(false);
    }""")
    answer = page.locator(".turn.assistant")
    assert answer.locator("p.head").inner_text() == "Title"
    assert answer.locator("strong span").evaluate_all(
        "all => all.map(one => [one.className.trim(), one.textContent])"
    ) == [
        ["draft", "bo"],
        ["forced", "ld"],
    ]
    assert answer.locator("a").evaluate_all("all => all.map(one => one.href)") == ["https://a.example/b"]
    assert answer.locator("li").all_inner_texts() == ["one", "<i>"]
    assert answer.locator("th, td").all_inner_texts() == ["x", "y", "1", "2"]
    assert [text.strip() for text in answer.locator("pre").all_inner_texts()] == ["<script>"]
    assert answer.locator("p").last.inner_text().split() == ["json", "1", "end"]
    assert "<img src=x onerror=alert(1)>" in answer.inner_text()
    assert answer.locator("img, script, i").count() == 0


def test_a_phone_shows_the_end_of_a_cut_answer_and_its_whole_seed(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 600})
    page.click("#settings")
    page.fill("#system", "Answer at length.")
    page.fill("#seed", "18446744073709551615")
    page.fill("#max_tokens", "150")
    page.select_option("#kind", "regex")
    page.fill("#schema", "([a-z]{1,9}\\n){200}")
    page.click("#settings")
    page.fill("#prompt", "Words.")
    page.click("#send")
    page.wait_for_selector(".figures[data-done]", timeout=60_000)
    assert "Cut" in page.inner_text(".turn.cut")
    assert page.inner_text(".figures[data-done]").endswith("seed 18446744073709551615")
    top, height, whole, width = page.evaluate(
        "[turns_.scrollTop, turns_.clientHeight, turns_.scrollHeight, document.documentElement.scrollWidth]".replace(
            "turns_", "document.getElementById('turns')"
        )
    )
    assert whole > height, "the answer is longer than the screen"
    assert top + height >= whole - 1
    assert width <= 390


def test_a_tool_is_called_and_its_result_answered(page: Any) -> None:
    page.fill("#max_tokens", "60")
    page.fill("#temperature", "0")
    page.click("summary")
    tool = {"name": "add", "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}}
    page.fill("#tools", json.dumps([{"type": "function", "function": tool}]))
    asked = page.evaluate("""async () => {
      const calls = [];
      take(calls, [{index: 0, id: "call_1", function: {name: "add", arguments: '{"n"'}}]);
      take(calls, [{index: 0, function: {arguments: ': 1}'}}]);
      turns.push({role: "user", content: "Add 1."}, {role: "assistant", content: "", tool_calls: calls});
      askResults(calls);
      return JSON.parse(body()).tools[0].function.name;
    }""")
    assert asked == "add"
    assert page.inner_text(".turn.call code") == 'add({"n": 1})'
    page.fill(".turn.call textarea", "2")
    page.click(".turn.call button")
    page.wait_for_selector(".figures[data-done]", timeout=60_000)
    assert page.evaluate("turns.map(turn => turn.role)")[:3] == ["user", "assistant", "tool"]
    assert page.locator(".turn.error").count() == 0


def test_what_the_server_refuses_is_shown(page: Any) -> None:
    page.select_option("#kind", "regex")
    page.fill("#schema", "(")
    page.fill("#prompt", "Anything.")
    page.click("#send")
    page.wait_for_selector(".turn.error", timeout=60_000)
    assert "structured_outputs.regex: " in page.inner_text(".turn.error")
    assert page.inner_text("#send") == "Send"
    left = page.evaluate("""async () => {
      const stopped = [];
      window.fetch = (_, {signal}) => new Promise(
        (_, end) => signal.addEventListener("abort", () => end(signal.reason)));
      for (const stop of ["send", "clear"]) {
        $("prompt").value = "Anything.";
        const sent = send();
        $(stop).click();
        await sent;
        stopped.push([turns.length, $("turns").innerText.includes("Stopped.")]);
      }
      return stopped;
    }""")
    assert left == [[0, True], [0, False]], "a question without an answer is no turn; a new chat is empty"
