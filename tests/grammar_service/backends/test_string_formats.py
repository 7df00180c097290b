"""The patterns of formats, judged by an independent validator of formats and by the examples of the RFCs."""

from __future__ import annotations

import re
from functools import lru_cache

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grammar_service.backends.json_schema.strings.string_formats import KNOWN, exact_pattern, take_out_annotations

VALID: dict[str, list[str]] = {
    "duration": ["P4DT12H30M5S", "P4Y", "PT0S", "P0D", "P1M", "PT1M", "PT36H", "P1DT12H", "P2W"],
    "email": ["joe.bloggs@example.com", "te~st@example.com", "~test@example.com", "a" * 64 + "@x.org"],
    "idn-email": ["\uc2e4\ub840@example.com", "joe.bloggs@example.com"],
    "hostname": ["www.example.com", "xn1.x", "1host", "a-b", "a--b", "a" * 63, "a.b.c.d.e.f.g", "hostnam3"],
    "idn-hostname": ["b\u00fccher.example", "\u4f8b\u3048.jp", "hostname"],
    "ipv4": ["192.168.0.1", "0.0.0.0", "255.255.255.255"],
    "ipv6": [
        *("::", "::1", "1::", "::42:ff:1", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8", "1::8"),
        *("::ffff:192.168.0.1", "1:2::192.168.0.1", "1000:1000:1000:1000:1000:1000:255.255.255.255", "d6::1:2"),
    ],
    "uri": [
        *("http://foo.bar/?baz=qux#quux", "http://foo.com/blah_(wikipedia)_blah#cite-1", "urn:oasis:names:x"),
        *("http://[2001:db8::7]/c=GB?a", "mailto:John.Doe@example.com", "tel:+1-816-555-1212"),
        "http://-.~_!$&'()*+,;=:%40:80@x",
    ],
    "uri-reference": ["/abc", "abc", "#fragment", "//foo.bar/?baz", "", "?q", "a/b:c"],
    "iri": ["http://\u0192\u00f8\u00f8.\u00df\u00e5r/?\u2202\u00e9\u0153=\u03c0\u00eex#\u03c0\u00ee\u00fcx"],
    "iri-reference": ["/\u00e2\u03c0\u03c0", "\u00e2\u03c0\u03c0", "#\u0192r\u00e4gm\u00eant"],
    "uri-template": ["http://example.com/dictionary/{term:1}/{term}", "map?{x,y}", "{/list*}", "{?x,y}", "x"],
    "json-pointer": ["/foo/bar~0/baz~1/%a", "/", "//a/b", "", "/a|b"],
    "relative-json-pointer": ["1", "0/foo/bar", "2/0/baz/1/zip", "0#", "120/foo"],
    "uuid": ["2EB8AA08-aa98-11ea-b4aa-73b441d16380", "98d80576-482e-427f-8434-7f86890ab222"],
}
INVALID: dict[str, list[str]] = {
    "duration": ["PT1D", "4DT12H", "P", "P1YT", "PT", "P2D1Y", "P1D2H", "P2S", "P1Y2W", "P1", "P1Y2D", "PT1H2S"],
    "email": ["2962", ".test@example.com", "test.@example.com", "te..st@example.com", "a@-b", "a@b c", "a" * 65 + "@x"],
    "idn-email": ["2962", "@\uc2e4", "a b@x"],
    "hostname": ["-a-host", "a-", "a_b", "a.", ".a", "a..b", "a" * 64, "xn--x", "", "a.-b", "na\u00efve"],
    "idn-hostname": ["-x", "\u302ea", "a_b", "\uff0e", ""],
    "ipv4": [
        *("127.0.0.0.1", "256.256.256.256", "127.0", "0x7f000001", "087.10.0.1", "1.1.1.1/24", " 1.1.1.1"),
        "\u09e71.1.1.1",
    ],
    "ipv6": [
        *("12345::", "::abef1", "1:1:1:1:1:1:1:1:1", "::laptop", "2001::1::1", "1::1.256.1.1", ":2:3:4:5:6:7:8"),
        *("1:2:3:4:5:6:7", "1:2::3:4::5:6", "1.2.3.4", "::1/64", "fe80::a%eth1", "1:2:3:4:5:6:7:8:", "1:", ":"),
        "1:2:3:4:5:6:7:1.2.3.4",
    ],
    "uri": [
        *("//foo.bar/?baz", "/abc", "\\\\x", "abc", "http:// x", ":// x", "bar,\uff0f:x", "1a:b", "http://[::1"),
        *("http://x:a", "https://[@example.org/t", 'https://example.org/"', "http://a%2", "http://a#b#c"),
    ],
    "uri-reference": ["\\\\WINDOWS\\x", "#frag\\ment", "a b", "//[", "%", ":a"],
    "iri": ["/abc", "\u00e2\u03c0\u03c0", "http://2001:0db8:x", ":// \u0192"],
    "iri-reference": ["\\\\WINDOWS\\fil\u00eb", "#\u0192r\u00e4g\\m\u00eant"],
    "uri-template": ["http://example.com/dictionary/{term:1}/{term", "{}", "a}", "a b", "{a,}", "{a:0}"],
    "json-pointer": ["/foo/bar~", "#", "a", "/~2", "/~0~", "#/"],
    "relative-json-pointer": ["/foo/bar", "-1/foo", "0##", "01/a", "", "1#/a"],
    "uuid": [
        "2eb8aa08-aa98-11ea-b4aa-73b441d1638",
        "2eb8aa08aa9811eab4aa73b441d16380",
        "2eb8aa08-aa98-11ea-b4aa-73b441d1638g",
    ],
}
LENIENT = ("idn-hostname", "uri-template", "iri", "iri-reference", "idn-email")
"""Formats of which the judge lets more by than their RFC."""
EDITS = 'aZ09-_.:/@%#?[]{}~ \\"'


@lru_cache
def pattern_of(name: str) -> re.Pattern[str]:
    return re.compile(exact_pattern(name, lower_case=True)[:-1] + r"\Z")


@lru_cache
def judge_of(name: str) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator({"format": name}, validate_formats=True)


@pytest.mark.parametrize("name", sorted(VALID))
def test_the_examples_of_the_documents_are_told_apart(name: str) -> None:
    assert [text for text in VALID[name] if not pattern_of(name).search(text)] == []
    assert [text for text in INVALID[name] if pattern_of(name).search(text)] == []
    assert [text for text in VALID[name] if not judge_of(name).is_valid(text)] == []


def check_matching(name: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(text=st.from_regex(pattern_of(name)))
    def has_the_format(text: str) -> None:
        assert judge_of(name).is_valid(text), text

    has_the_format()


def check_edited(name: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(text=st.sampled_from(VALID[name]), at=st.integers(0), new=st.sampled_from(EDITS), cut=st.integers(0, 2))
    def is_rejected_if_the_judge_rejects_it(text: str, at: int, new: str, cut: int) -> None:
        at %= len(text) + 1
        edited = text[:at] + new + text[at + cut :]
        if not judge_of(name).is_valid(edited):
            assert not pattern_of(name).search(edited), edited

    is_rejected_if_the_judge_rejects_it()


@pytest.mark.parametrize("name", ["email", "hostname", "ipv6"])
def test_texts_of_a_pattern_have_the_format(name: str) -> None:
    check_matching(name, 10)


@pytest.mark.parametrize("name", sorted(set(VALID) - set(LENIENT)))
def test_an_edited_text_that_the_judge_rejects_is_rejected(name: str) -> None:
    check_edited(name, 20)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(KNOWN))
def test_many_texts_of_a_pattern_have_the_format(name: str) -> None:
    check_matching(name, 40)
    if name in VALID and name not in LENIENT:
        check_edited(name, 150)


def test_only_formats_that_are_not_known_are_taken_out_unless_the_server_is_strict() -> None:
    schema = {
        "properties": {"a": {"type": "string", "format": "zork"}, "b": {"format": "date"}},
        "items": {"type": "integer", "format": "int32"},
    }
    assert take_out_annotations({"type": "string", "format": "zork"}, "", strict=True) == []
    assert [str(each) for each in take_out_annotations(schema, "/x", strict=False)] == [
        "/x/properties/a/format: 'zork' is not a format that is enforced; it has no effect"
    ]
    assert schema == {"properties": {"a": {"type": "string"}, "b": {"format": "date"}}, "items": {"type": "integer"}}
