"""Patterns in portable notation match the strings that ECMA-262 says; Python's engine checks both."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace

import pytest

from grammar_service.backends.json_schema.strings.ecma_pattern import Dialect, NotPortable, portable

STRINGS_OF_JSON = Dialect(unwritable=((0, 7), (11, 11), (14, 31)))
STRINGS = ["", "a", "b", "A", "Z", "1", "_", "-", "]", "[", "^", "&", "~", ".", "\\", '"', "/", "{", "}", "$", "|"]
STRINGS += ["\n", "\r", "\t", "\x08", "\x0c", " ", "\u00a0", "\u0085", "\u2028", "\ufeff", "\u00e9", "\u0663"]
STRINGS += ["ab", "aa", "aaa", "abab", "a]", "a-b", "\U0001f600", "a{", "a\nb"]


@pytest.mark.parametrize(
    ("pattern", "same"),
    [
        ("^.$", r"^[^\n\r\u2028\u2029\x00-\x07\x0b\x0e-\x1f]\Z"),
        (r"^\d$", r"^[0-9]\Z"),
        (r"^\D$", r"^[^0-9]\Z"),
        (r"^\w+$", r"^[A-Za-z0-9_]+\Z"),
        (r"^\W$", r"^[^A-Za-z0-9_]\Z"),
        (r"^\s$", "^[\t\n\x0b\x0c\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]\\Z"),
        (r"^[\s\S]$", r"^[^\x00-\x07\x0b\x0e-\x1f]\Z"),
        (r"^[^\s]$", "^[^\t\n\x0b\x0c\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]\\Z"),
        ("^[^a]$", r"^[^a]\Z"),
        ("^[a&&[^b]$", r"^[a&\[\^b]\Z"),
        ("^[a-]$", r"^[a\-]\Z"),
        ("^[^]$", r"^(?s:.)\Z"),
        ("^[]a]$", None),
        ("^[A-Z~]$", r"^[A-Z~]\Z"),
        (r"^[\]\-\^]$", r"^[\]\-\^]\Z"),
        (r"^[\b]$", r"^\x08\Z"),
        ("^a{2,3}?$", r"^a{2,3}\Z"),
        ("^a{$", r"^a\{\Z"),
        ("^}$", r"^\}\Z"),
        ("^]$", r"^\]\Z"),
        ("^(?<name>ab){2}$", r"^(?:ab){2}\Z"),
        ("^(a|b)$", r"^(?:a|b)\Z"),
        (r"^\u0061\x62$", r"^ab\Z"),
        (r"^\u{1F600}$", "^\U0001f600\\Z"),
        (r"^\ud83d\ude00$", "^\U0001f600\\Z"),
        (r"^\/\.\$\|$", r"^/\.\$\|\Z"),
        (r"^\cJ$", r"^\n\Z"),
        ("^[/]$", r"^/\Z"),
        ("(?i)^A$", r"(?i)^a\Z"),
        ("^(?!ab$).*$", r"^(?!ab\Z)[^\n\r\u2028\u2029\x00-\x07\x0b\x0e-\x1f]*\Z"),
        ("^(?!a)", "^(?!a)"),
        ("^(?!a|b$).*", r"^(?!a|b\Z)"),
        (r"^(?!a)(?!\])[^-]+$", r"^(?![a\]])[^-]+\Z"),
        (r"^(?!(?:a|ab)$)\w*$", r"^(?!(?:a|ab)\Z)[A-Za-z0-9_]*\Z"),
        ("^(?!(a|b)b)[ab]+$", r"^(?![ab]b)[ab]+\Z"),
        ("^(?!$).*$", r"^[^\n\r\u2028\u2029\x00-\x07\x0b\x0e-\x1f]+\Z"),
        ("^(?!a$)[a]+$", r"^a{2,}\Z"),
    ],
)
def test_the_portable_pattern_matches_the_same_strings(pattern: str, same: str | None) -> None:
    if same is None:
        with pytest.raises(NotPortable, match="no character"):
            portable(pattern, STRINGS_OF_JSON)
        return
    portable_pattern = re.compile(portable(pattern, STRINGS_OF_JSON).replace("$", r"\Z"))
    assert [s for s in STRINGS if portable_pattern.search(s)] == [s for s in STRINGS if re.search(same, s)]


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("(?=a)", "look-around"),
        ("a(?<!b)", "look-around"),
        ("(?!a)", "look-around"),
        ("^(?!a+$).*$", "look-around"),
        ("^(?!.*b).*$", "look-around"),
        ("^(?!a)b*$c", "look-around"),
        ("^(?!a)(b|c)$", "look-around"),
        ("^(?!a", "look-around"),
        (r"^(?!a)[\p{L}]+$", "look-around"),
        ("^(?!).*$", "nothing matches"),
        ("^(?!a)[a]+$", "nothing matches"),
        (r"\ba", "word boundary"),
        (r"(a)\1", r"\\1"),
        (r"(?<n>a)\k<n>", r"\\k"),
        ("(?P<n>a)", "not ECMA-262"),
        ("(?s:.)", "not ECMA-262"),
        ("a++", "after a quantifier"),
        ("a{2}{3}", "after a quantifier"),
        (r"\Aa\z", r"\\A"),
        (r"\pL", r"\\p"),
        (r"\p{Greek}", r"\\p"),
        (r"\x6", r"\\x"),
        (r"\ud800", "lone surrogate"),
        (r"\u{110000}", "beyond Unicode"),
        ("[b-a]", "range"),
        (r"[\d-z]", None),
        ("[a", "without its end"),
        ("[]", "no character"),
        (r"\x01", r"U\+0001"),
        ("\\", "escape"),
    ],
)
def test_an_error_names_the_construct_that_is_not_portable(pattern: str, named: str | None) -> None:
    if named is None:
        assert portable(pattern, STRINGS_OF_JSON) == r"[\u002d0-9z]"
        return
    with pytest.raises(NotPortable, match=named):
        portable(pattern, STRINGS_OF_JSON)


def test_categories_lose_the_characters_that_cannot_be_written() -> None:
    assert portable(r"\p{Lu}", STRINGS_OF_JSON) == r"[[\p{Lu}]&&[^\u0000-\u0007\u000b\u000e-\u001f]]"
    assert portable(r"[^\P{gc=L}a]", STRINGS_OF_JSON) == r"[[^\P{L}a]&&[^\u0000-\u0007\u000b\u000e-\u001f]]"


def test_classes_lose_the_characters_that_cannot_be_written() -> None:
    assert portable("[!-#]", Dialect(unwritable=((34, 34),))) == r"[\u0021\u0023]"
    with pytest.raises(NotPortable, match=r"U\+0022"):
        portable('a"', Dialect(unwritable=((34, 34),)))


_WORDS = ["", "a", "b", "ab", "ba", "aab", "c", "b]"]
_TAILS = ["", ".*", ".*$", "[a-c]*$", "[^b]+$", r"\w+$", r"\D*$"]
_TEXTS = ["".join(chars) for length in range(5) for chars in itertools.product("abc]", repeat=length)]


@pytest.mark.parametrize("seed", range(60))
def test_random_look_aheads_over_words_are_written_out(seed: int) -> None:
    draw = random.Random(seed)
    words = [re.escape(word) + draw.choice(["", "$"]) for word in draw.sample(_WORDS[1:], draw.randint(1, 4))]
    ahead = draw.choice([f"(?!{'|'.join(words)})", "".join(f"(?!{word})" for word in words)])
    pattern = f"^{ahead}{draw.choice(_TAILS)}"
    written = portable(pattern, STRINGS_OF_JSON)
    assert "(?!" not in written
    ours = re.compile(written.replace("$", r"\Z"))
    theirs = re.compile(pattern.replace("$", r"\Z"))
    assert [text for text in _TEXTS if ours.search(text)] == [text for text in _TEXTS if theirs.search(text)]
    whole = re.compile(portable(pattern.removesuffix("$"), replace(STRINGS_OF_JSON, whole=True)))
    if pattern.endswith("$"):
        assert [text for text in _TEXTS if whole.fullmatch(text)] == [text for text in _TEXTS if theirs.search(text)]
