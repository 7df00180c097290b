"""The grammars of docs/grammars.md compile, and answers that the page describes are accepted or rejected."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from grammar_service.grammar.value import Kind, Whitespace
from tests.grammar_service.conftest import Library

ANSWERS = {
    Kind.JSON_SCHEMA: (['{"name":"Ada","born":"2024-02-29","tags":["a"]}'], ['{"name":"Ada","born":"2023-02-29"}']),
    Kind.REGEX: (["2024-02-29", "2024-02-29 noon"], ["24-02-29", "2024-02-29 "]),
    Kind.CHOICE: (["yes", "I do not know"], ["maybe", ""]),
    Kind.EBNF: (['[1,"a",[22]]'], ["[]", "1"]),
    Kind.LARK: (["answer: 12", 'answer: {"a":1}'], ["answer: x", "12"]),
    Kind.STRUCTURAL_TAG: (['so <call=add>{"x":1}</call>.', "no call"], ["<call=sub>", '<call=add>{"x":"1"}</call>']),
}


@pytest.mark.parametrize("kind", ANSWERS, ids=lambda kind: kind.name)
def test_the_documented_grammar_compiles_and_means_what_the_page_says(library: Library, root: Path, kind: Kind) -> None:
    if kind is Kind.LARK and library.name == "xgrammar":
        pytest.skip("xgrammar has no Lark")
    page = (root / "docs/grammars.md").read_text(encoding="utf-8")
    sources = re.findall(rf"^```{kind.name.lower()}\n(.*?)\n```$", page, re.MULTILINE | re.DOTALL)
    assert len(sources) == 1
    compiled = library.compiled(kind, sources[0], Whitespace.BOUNDED)
    accepted, rejected = ANSWERS[kind]
    assert [text for text in accepted if not library.accepts(compiled, text)] == []
    assert [text for text in rejected if library.accepts(compiled, text)] == []
