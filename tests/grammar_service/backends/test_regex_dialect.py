"""Regular expressions of whole answers mean the same in every backend: ECMA-262 with the flag `u`."""

from __future__ import annotations

import json

import pytest

from grammar_service.errors import InvalidGrammar
from grammar_service.grammar.value import Kind
from tests.grammar_service.conftest import Library

ARABIC_DIGIT, E_ACUTE, NEXT_LINE, NO_BREAK_SPACE, LINE_SEPARATOR = "\u0663", "\u00e9", "\u0085", "\u00a0", "\u2028"


@pytest.mark.parametrize(
    ("regex", "accepted", "rejected"),
    [
        (r"\d+", ["1", "12"], [ARABIC_DIGIT, "1" + ARABIC_DIGIT, ""]),
        (r"\D", [ARABIC_DIGIT, "a"], ["1"]),
        (r"[\d]", ["1"], [ARABIC_DIGIT]),
        (r"\w+", ["aZ_9"], [E_ACUTE, ARABIC_DIGIT, "-"]),
        (r"\W", [E_ACUTE, "-"], ["a", "_"]),
        (r"\s", [" ", "\t", NO_BREAK_SPACE, LINE_SEPARATOR, "\ufeff"], [NEXT_LINE, "a"]),
        (r"\S", [NEXT_LINE, "a"], [" ", NO_BREAK_SPACE]),
        (".", ["a", E_ACUTE, "\x01"], ["\n", "\r", LINE_SEPARATOR, "ab"]),
        ("[^a]", ["\n", "b", "\0"], ["a"]),
        ("[^]", ["\n", "\r", "a", "\U0001f600"], ["", "ab"]),
        (r"a\x2db", ["a-b"], ["a\u02db"]),
        (r"a\u002db", ["a-b"], ["a\u02db"]),
        (r"a\0b", ["a\0b"], ["ab"]),
        (r"\cA", ["\x01"], ["A"]),
        (r"\u{1F600}", ["\U0001f600"], []),
        (r"[\^]", ["^"], ["a", "\\"]),
        (r"[\^-`]", ["^", "_", "`"], ["]", "a"]),
        ("[a&&[^b]", ["a", "&", "[", "b"], ["c"]),
        ("(?<year>[0-9]{4})", ["2024"], ["24"]),
        ("a{2,3}?", ["aa", "aaa"], ["a", "aaaa"]),
        ("^ab$", ["ab"], ["abc"]),
        ("(^a$|^b)", ["a", "b"], ["ab"]),
        ("a|b$", ["a", "b"], ["ab"]),
        ("^$", [""], ["a"]),
    ],
)
def test_a_regex_means_what_ecma_262_says(
    library: Library, regex: str, accepted: list[str], rejected: list[str]
) -> None:
    compiled = library.compiled(Kind.REGEX, regex)
    assert [text for text in accepted if not library.accepts(compiled, text)] == []
    assert [text for text in rejected if library.accepts(compiled, text)] == []


@pytest.mark.parametrize(
    ("regex", "problem"),
    [
        ("a(?=b)", r"character 2: look-around '\(\?=b'"),
        (r"(a)\1", r"character 4: the escape '\\\\1'"),
        (r"a\b", "character 2: a word boundary"),
        ("a^b", "character 2: an anchor inside the expression"),
        ("(a$)b", "character 3: an anchor inside the expression"),
        ("(^a)+", "character 2: an anchor inside the expression"),
        ("(?P<n>a)", r"character 1: the group '\(\?P<' is not ECMA-262"),
        (r"a\pL", r"character 2: the escape '\\\\p'"),
        ("ab)", r"character 3: a '\)' without its group"),
        ("a(b", "character 2: a group without its end"),
        ("a[b", "character 2: a class without its end"),
        ("a|*", "character 3: a quantifier with nothing to repeat"),
        ("a{3,2}", r"character 2: the bounds of \{3,2\} are out of order"),
    ],
)
def test_a_regex_that_is_not_portable_is_refused_with_its_place(library: Library, regex: str, problem: str) -> None:
    with pytest.raises(InvalidGrammar, match="^regex: " + problem):
        library.compiled(Kind.REGEX, regex)


@pytest.mark.parametrize(
    ("regex", "text", "problem"),
    [(r"a\p{L}", f"a{E_ACUTE}", r"character 2: the category '\\\\p{L}'"), ("(?i)ab", "aB", r"character 1: the flag")],
)
def test_xgrammar_refuses_categories_and_flags_by_name(library: Library, regex: str, text: str, problem: str) -> None:
    if library.name == "xgrammar":
        with pytest.raises(InvalidGrammar, match=problem):
            library.compiled(Kind.REGEX, regex)
    else:
        assert library.accepts(library.compiled(Kind.REGEX, regex), text)


def test_a_regex_of_a_structural_tag_has_the_same_dialect(library: Library) -> None:
    def tag(regex: str) -> str:
        return json.dumps({"type": "structural_tag", "format": {"type": "regex", "pattern": regex}})

    compiled = library.compiled(Kind.STRUCTURAL_TAG, tag(r"\s\x2db"))
    assert library.accepts(compiled, f"{LINE_SEPARATOR}-b")
    assert not library.accepts(compiled, f"{NEXT_LINE}-b")
    with pytest.raises(InvalidGrammar, match=r"^regex: character 2: a word boundary"):
        library.compiled(Kind.STRUCTURAL_TAG, tag(r"a\b"))


@pytest.mark.parametrize("source", [r'root ::= "a\x2db"', r"root ::= [a] [\x2d] [b]"])
def test_a_hexadecimal_escape_in_gbnf_has_two_digits(library: Library, source: str) -> None:
    compiled = library.compiled(Kind.EBNF, source)
    assert library.accepts(compiled, "a-b")
    assert not library.accepts(compiled, "a\u02db")
