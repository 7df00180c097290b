"""Grammars that the engine composes from tools and a grammar: every answer is read back, and fits its schemas."""

from __future__ import annotations

import json
import random
import re
from typing import Any, NamedTuple

import jsonschema
import pytest

from gpu_engine.api.conversation import InputKind, Tool, ToolChoice, Tools
from gpu_engine.api.request import GrammarKind, GrammarSpec
from gpu_engine.front.tools.composition import composed, moved
from gpu_engine.front.tools.formats import FORMATS, HARMONY, HERMES, JSON, MISTRAL, ToolFormat
from gpu_engine.front.tools.parts import AnswerLayout, PartKind
from grammar_service.backends.backend import Compiled, Matcher
from grammar_service.backends.registry import load_backend
from grammar_service.errors import InvalidGrammar, NotSupported
from grammar_service.grammar.token_bytes import TokenBytes
from grammar_service.grammar.value import Kind
from grammar_service.grammar.vocabulary import Vocabulary
from tests.grammar_service.conftest import Library
from tests.grammar_service.toy import STOPS, spell

ITEM = {"enum": ["a", "b c"]}
ADD = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 99}, "to": {"$ref": "#/$defs/item"}},
    "required": ["x", "to"],
    "additionalProperties": False,
    "$defs": {"item": ITEM},
}
SAY = {"type": "object", "properties": {"s": {"type": "string", "maxLength": 3}}, "additionalProperties": False}
TOOLS = (
    Tool("add", "Adds.", source=json.dumps(ADD)),
    Tool("add.2", source=json.dumps(SAY)),
    Tool("run", input=InputKind.REGEX, source="[a-f]{1,3}"),
)
SCHEMAS = {"add": ADD, "add.2": SAY}
ANSWER = {
    "type": "object",
    "properties": {"name": {"enum": ["nobody", "add"]}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
GRAMMARS: list[GrammarSpec | None] = [
    None,
    GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(ANSWER)),
    GrammarSpec(GrammarKind.CHOICE, '["yes", "no"]'),
    GrammarSpec(GrammarKind.REGEX, "[x-z]{2,4}"),
    GrammarSpec(GrammarKind.EBNF, 'root ::= "(" [0-9] ")"'),
]


def compiled(library: Library, tools: Tools, form: ToolFormat, grammar: GrammarSpec | None) -> Compiled:
    spec = composed(tools, form, grammar)
    assert spec is not None
    return library.compiled(Kind(spec.kind.value), spec.source)


def walk(library: Library, matcher: Matcher, trigger: str, rng: random.Random) -> str:
    """Return a random answer. Free text soon comes to the trigger, or ends."""
    out = bytearray()
    wanted: list[int] = []
    texts = TokenBytes.of(library.vocabulary).texts
    for _ in range(2000):
        legal = library.legal(matcher)
        assert legal, bytes(out)
        stops = legal & set(STOPS)
        if stops and (legal == stops or (not wanted and rng.random() < 0.2)):
            assert matcher.accept(min(stops))
            return out.decode()
        if len(legal) > 100 and not wanted:
            wanted = spell(rng.choice([trigger, "x ", "<", "\n"]))
        plain = [token for token in legal if texts[token].isascii() and token not in STOPS]
        token = wanted.pop(0) if wanted and wanted[0] in legal else rng.choice(sorted(plain or legal - stops))
        assert matcher.accept(token), (bytes(out), token)
        out += texts[token]
    raise AssertionError(f"no end: {bytes(out)!r}")


def check(text: str, tools: Tools, form: ToolFormat, grammar: GrammarSpec | None) -> list[str]:
    """Read an answer, check its parts, and return the names of the called functions."""
    triggered = tools.choice is ToolChoice.AUTO and grammar is None and not form.content_begin
    parser = AnswerLayout(tools, form, triggered=triggered).parser()
    found = parser.push(text) + parser.finish()
    names = [part.tool_name for part in found if part.kind is PartKind.TOOL_CALL]
    texts = ["" for _ in names]
    for part in found:
        if part.kind is PartKind.TOOL_ARGUMENTS:
            texts[part.tool_call_index] += part.text
    for name, given in zip(names, texts, strict=True):
        if name in SCHEMAS:
            jsonschema.validate(json.loads(given), SCHEMAS[name])
        else:
            assert 1 <= len(given) <= 3
            assert set(given) <= set("abcdef")
    content = "".join(part.text for part in found if part.kind is PartKind.CONTENT)
    if names and not triggered:
        assert not content.strip(), text
    if not names and grammar and grammar.kind is GrammarKind.JSON_SCHEMA:
        jsonschema.validate(json.loads(content), ANSWER)
    elif not names and grammar:
        assert content == text.removeprefix(form.content_begin)
    return names


CASES = [
    *((form, ToolChoice.AUTO, grammar) for form in FORMATS for grammar in GRAMMARS[:2]),
    *((form, choice, None) for form in FORMATS for choice in (ToolChoice.REQUIRED, ToolChoice.NAMED)),
    *((HERMES, ToolChoice.AUTO, grammar) for grammar in GRAMMARS[2:]),
]


@pytest.mark.parametrize(
    ("form", "choice", "grammar"),
    CASES,
    ids=[f"{form.name} {choice.name} {grammar.kind.name if grammar else 'free'}" for form, choice, grammar in CASES],
)
def test_every_answer_is_read_back_and_fits(
    library: Library, form: ToolFormat, choice: ToolChoice, grammar: GrammarSpec | None
) -> None:
    tools = Tools(TOOLS, choice, "add" if choice is ToolChoice.NAMED else "")
    ready = compiled(library, tools, form, grammar)
    counts: list[int] = []
    for seed in range(12):
        text = walk(library, ready.matcher(), form.trigger, random.Random(seed))
        names = check(text, tools, form, grammar)
        counts.append(len(names))
        assert choice is not ToolChoice.NAMED or set(names) == {"add"}
    assert choice is ToolChoice.AUTO or min(counts) >= 1
    assert max(counts) >= 1
    assert choice is not ToolChoice.AUTO or min(counts) == 0


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_without_parallel_calls_one_is_the_last(library: Library, form: ToolFormat) -> None:
    for choice in (ToolChoice.AUTO, ToolChoice.REQUIRED):
        tools = Tools(TOOLS, choice, parallel=False)
        ready = compiled(library, tools, form, None)
        for seed in range(8):
            text = walk(library, ready.matcher(), form.trigger, random.Random(seed))
            assert len(check(text, tools, form, None)) <= 1
    call = form.begin_of("add", raw=False) + '{"x": 1, "to": "a"}' + form.end
    assert library.accepts(ready, form.first + call + form.last)
    assert not library.accepts(ready, form.first + call + form.separator + call + form.last)


def test_arguments_are_any_object_where_they_are_not_strict(library: Library) -> None:
    call = HERMES.begin_of("add", raw=False) + '{"y": [1]}' + HERMES.end
    loose = (Tool("add", source=json.dumps(ADD), strict=False),)
    for tools, legal in (
        (Tools(loose), True),
        (Tools(TOOLS), False),
        (Tools(loose, ToolChoice.REQUIRED), False),
    ):
        assert library.accepts(compiled(library, tools, HERMES, None), call) is legal


def test_no_call_without_a_grammar_is_free_text() -> None:
    assert composed(Tools(TOOLS, ToolChoice.NONE), HERMES, None) is None
    assert composed(Tools(TOOLS, ToolChoice.NONE), HERMES, GRAMMARS[1]) is GRAMMARS[1]


@pytest.mark.parametrize("form", [HERMES, JSON], ids=lambda form: form.name)
@pytest.mark.parametrize("schema", [{"type": "strin"}, {"uniqueItems": True}])
def test_an_error_of_a_schema_names_its_field(library: Library, form: ToolFormat, schema: Any) -> None:
    bad = Tool("bad", source=json.dumps({"properties": {"a": schema}}))
    with pytest.raises(InvalidGrammar, match=r"tools\.tools\[1\]\.parameters") as failed:
        compiled(library, Tools((TOOLS[0], bad), ToolChoice.REQUIRED), form, None)
    assert "add" not in str(failed.value)


def test_a_lark_tool(library: Library) -> None:
    tools = Tools((Tool("sql", input=InputKind.LARK, source='start: "select " /[a-z]+/'),), ToolChoice.REQUIRED)
    if library.name == "xgrammar":
        with pytest.raises(NotSupported, match="Lark"):
            compiled(library, tools, HERMES, None)
        return
    ready = compiled(library, tools, HERMES, None)
    assert library.accepts(ready, '<tool_call>\n{"name": "sql"}\nselect ab\n</tool_call>')
    assert not library.accepts(ready, '<tool_call>\n{"name": "sql"}\ndrop ab\n</tool_call>')


def test_references_of_a_schema_that_moved_lead_to_the_same_places() -> None:
    schema: dict[str, Any] = {"$defs": {"a": {"$ref": "#"}}, "properties": {"b": {"$ref": "#/$defs/a"}}}
    assert moved(schema, "#/properties/x") == {
        "$defs": {"a": {"$ref": "#/properties/x"}},
        "properties": {"b": {"$ref": "#/properties/x/$defs/a"}},
    }


class SpecialTokens(NamedTuple):
    """A library whose tokenizer has the markers of a format as special tokens."""

    library: Library
    opened: list[int]


def with_special(library: Library, texts: list[str], *, special: bool = True) -> SpecialTokens:
    document = json.loads(library.vocabulary.tokenizer_json)
    number = len(document["model"]["vocab"])
    opened = list(range(number, number + len(texts)))
    for token, text in zip(opened, texts, strict=True):
        document["added_tokens"].append(
            {**document["added_tokens"][0], "id": token, "content": text, "special": special}
        )
    vocabulary = Vocabulary.load(json.dumps(document).encode(), library.vocabulary.size, library.vocabulary.stop_ids)
    return SpecialTokens(Library(load_backend(library.name, vocabulary), vocabulary), opened)


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        (MISTRAL, ["[TOOL_CALLS]"]),
        (HARMONY, ["<|channel|>", "<|constrain|>", "<|message|>"]),
    ],
    ids=["mistral", "harmony"],
)
def test_markers_that_are_special_tokens(library: Library, form: ToolFormat, texts: list[str]) -> None:
    special, opened = with_special(library, texts)
    tools = Tools(TOOLS, ToolChoice.REQUIRED)
    spec = composed(tools, form, None, None, opened)
    assert spec is not None
    ready = special.compiled(Kind.COMPOSED, spec.source)
    matcher = ready.matcher()
    assert opened[0] in special.legal(matcher)
    assert matcher.accept(opened[0])
    rest = (form.first + form.begin_of("add", raw=False)).removeprefix(texts[0])
    pieces = re.split(f"({'|'.join(map(re.escape, texts))})", rest)
    tokens = [token for piece in pieces for token in numbers(piece, texts, opened)]
    assert all(matcher.accept(token) for token in tokens)
    assert all(matcher.accept(token) for token in spell('{"x":1,"to":"a"}' + form.end + form.last))
    assert matcher.accept(STOPS[0])
    # Any other grammar of the same backend refuses them as before.
    plain = special.compiled(Kind.STRUCTURAL_TAG, '{"format": {"type": "any_text"}}').matcher()
    assert not special.legal(plain) & set(opened)
    assert not any(plain.accept(token) for token in opened)


def numbers(text: str, texts: list[str], opened: list[int]) -> list[int]:
    return [opened[texts.index(text)]] if text in texts else spell(text)


def test_only_special_tokens_can_be_opened(library: Library) -> None:
    source = json.dumps({"format": {"type": "any_text"}, "open_tokens": [5]})
    with pytest.raises(InvalidGrammar, match="open_tokens: 5 is not a special token"):
        library.compiled(Kind.COMPOSED, source)


def test_markers_that_are_added_tokens(library: Library) -> None:
    """Qwen's `<tool_call>` is an added token that is not special: models write it as one token."""
    texts = ["<tool_call>", "</tool_call>"]
    markers, ids = with_special(library, texts, special=False)
    spec = composed(Tools(TOOLS, ToolChoice.REQUIRED), HERMES, None)
    assert spec is not None
    ready = markers.compiled(Kind.COMPOSED, spec.source)
    call = HERMES.begin_of("add", raw=False) + '{"x":1,"to":"a"}' + HERMES.end
    pieces = re.split("(</?tool_call>)", call)
    native = [token for piece in pieces for token in numbers(piece, texts, ids)]
    for tokens in (native, spell(call)):
        matcher = ready.matcher()
        assert all(matcher.accept(token) for token in tokens)
        assert matcher.accept(STOPS[0])
    matcher = ready.matcher()
    assert ids[0] in markers.legal(matcher)
    assert matcher.jump_forward_tokens(1) in ((ids[0],), ())
    free = composed(Tools(TOOLS), HERMES, None)
    assert free is not None
    matcher = markers.compiled(Kind.COMPOSED, free.source).matcher()
    assert ids[0] in markers.legal(matcher)
    assert all(matcher.accept(token) for token in native)


def test_a_text_with_a_marker_in_it_is_no_dead_end(library: Library) -> None:
    markers, _ = with_special(library, ["<tool_call>", "</tool_call>"], special=False)
    compiled = markers.compiled(Kind.CHOICE, '["<tool_call>x"]')
    matcher = compiled.matcher()
    while not matcher.terminated:
        legal = markers.legal(matcher)
        assert matcher.accept(max(legal - set(STOPS), default=STOPS[0]))
