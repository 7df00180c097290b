"""No grammar of any kind makes a special token legal. Its name as text is spelled with other tokens."""

from __future__ import annotations

import json

import pytest

from grammar_service.errors import InvalidGrammar, NotSupported
from grammar_service.grammar.value import Kind, Whitespace, parse
from grammar_service.grammar.vocabulary import Vocabulary
from tests.grammar_service.conftest import Library
from tests.grammar_service.toy import SPECIAL, STOPS, spell, tokenizer_json

NAME = "<|start|>"
"""The text of token 2. Tokens 0 and 1 are stop tokens."""


def _schema(schema: object) -> tuple[Kind, str]:
    return Kind.JSON_SCHEMA, json.dumps(schema)


def _tag(begin: str, schema: object, end: str, trigger: str) -> tuple[Kind, str]:
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": begin, "content": content, "end": end}
    form = {"type": "triggered_tags", "triggers": [trigger], "tags": [tag]}
    return Kind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": form})


def _texts() -> dict[int, bytes]:
    """Return token -> bytes, without special tokens."""
    vocab = json.loads(tokenizer_json())["model"]["vocab"]
    bytes_of = {text: i - len(SPECIAL) for text, i in vocab.items() if len(SPECIAL) <= i < len(SPECIAL) + 256}
    return {i: bytes(bytes_of[c] for c in text) for text, i in vocab.items() if i >= len(SPECIAL)}


AS_TEXT = [
    (*_schema({"const": NAME}), json.dumps(NAME)),
    (*_schema({"enum": [NAME, "<|end|>"]}), '"<|end|>"'),
    (*_schema({"type": "object", "properties": {NAME: {"const": 1}}, "required": [NAME]}), f'{{"{NAME}":1}}'),
    (*_schema({"type": "string", "pattern": "^<\\|start[|]>$"}), json.dumps(NAME)),
    (*_schema({"type": "string"}), json.dumps(NAME)),
    (*_schema({}), json.dumps({NAME: NAME}, separators=(",", ":"))),
    (Kind.CHOICE, json.dumps([NAME, "other"]), NAME),
    (Kind.REGEX, r"<\|start\|>", NAME),
    (Kind.REGEX, r"\x3c[|]start\|>", NAME),
    (Kind.REGEX, ".*", NAME),
    (Kind.EBNF, 'root ::= "<|sta" "rt|>"', NAME),
    (Kind.EBNF, r'root ::= "\x3c|start|>"', NAME),
    (Kind.EBNF, 'root ::= a "start|>"\na ::= [<] "|"', NAME),
    (Kind.EBNF, "root ::= [^x]*", NAME),
    (Kind.LARK, 'start: "<|sta" "rt|>"', NAME),
    (Kind.LARK, r"start: /<\|start\|>/", NAME),
    (Kind.LARK, 'start: "<|STArt|>"i', NAME),
    (Kind.LARK, r'start: %json {"const": "<\u007cstart|>"}', json.dumps(NAME)),
    (*_tag(NAME, {"const": 1}, "<|end|>", "<|st"), f"x{NAME}1<|end|>y"),
    (*_tag("<f>", {"const": NAME}, "</f>", "<f"), f'x<f>"{NAME}"</f>y'),
]


@pytest.mark.parametrize(("kind", "source", "text"), AS_TEXT, ids=lambda value: str(value)[:40])
def test_the_name_of_a_special_token_is_spelled_with_other_tokens(
    library: Library, kind: Kind, source: str, text: str
) -> None:
    if kind is Kind.LARK and library.name == "xgrammar":
        pytest.skip("xgrammar has no Lark")
    matcher = library.compiled(kind, source, Whitespace.COMPACT).matcher()
    texts, rest = _texts(), text.encode()
    while rest:
        legal = library.legal(matcher)
        assert 2 not in legal
        # Jump-forward text is legal in canonical tokens only, so the longest token that fits is chosen.
        fitting = [token for token in legal if token in texts and rest.startswith(texts[token])]
        assert fitting, rest
        token = max(fitting, key=lambda each: len(texts[each]))
        assert matcher.accept(token)
        rest = rest[len(texts[token]) :]
    assert library.legal(matcher) & set(SPECIAL_IDS) == set(STOPS)
    assert not matcher.accept(2)
    assert matcher.accept(STOPS[0])


SPECIAL_IDS = range(len(SPECIAL))


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (Kind.LARK, "start: <|start|>"),
        (Kind.LARK, "start: <[2]>"),
        (Kind.LARK, "start: <[0-5]>"),
        (Kind.LARK, "start: <[^5]>"),
        (Kind.LARK, "start: <any_token>"),
        (Kind.LARK, 'start: %lark {\nstart: "a" <[2]>\n}'),
        (Kind.LARK, f'start: "{NAME}"'),
        (Kind.LARK, 'start: %json {"x-guidance": {"lenient": true}, "not": {}}'),
        (Kind.EBNF, "root ::= Token(2)"),
        (Kind.EBNF, 'root ::= "a" # x\n  ExcludeToken\n(2)'),
        (Kind.EBNF, 'root ::= ["] AnyTokens(2) ["]'),
        (Kind.EBNF, "root ::= TokenTagDispatch((2, root))"),
        (Kind.EBNF, f'root ::= "{NAME}"'),
        (Kind.STRUCTURAL_TAG, '{"format":{"type":"token","token":2}}'),
        (Kind.STRUCTURAL_TAG, '{"format":{"type":"exclude_token","token":2}}'),
        (Kind.STRUCTURAL_TAG, '{"format":{"type":"token_triggered_tags","trigger_tokens":[2],"tags":[]}}'),
        (Kind.STRUCTURAL_TAG, '{"format":{"type":"sequence","elements":[{"type":"token","token":"<|start|>"}]}}'),
        (Kind.STRUCTURAL_TAG, '{"format":{"type":"grammar","grammar":"root ::= Token(2)"}}'),
    ],
)
def test_a_grammar_that_names_a_token_is_refused(
    library: Library, vocabulary: Vocabulary, kind: Kind, source: str
) -> None:
    if kind is Kind.LARK and library.name == "xgrammar":
        pytest.skip("xgrammar has no Lark")

    def compile_as_the_sidecar_does() -> None:
        vocabulary.refuse_special(parse(kind, source, Whitespace.COMPACT))
        library.compiled(kind, source)

    with pytest.raises((InvalidGrammar, NotSupported)):
        compile_as_the_sidecar_does()


def test_a_token_name_in_a_description_is_harmless(library: Library) -> None:
    compiled = library.compiled(*_schema({"type": "integer", "description": NAME, "x": {"x-guidance": NAME}}))
    assert compiled.matcher().accept(spell("1")[0])
