"""Composed grammars near `max_tokens`: out of reasoning, out of a half call and out of content, answers end in time."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from gpu_engine.api.conversation import Tool, ToolChoice, Tools
from gpu_engine.api.request import GrammarKind, GrammarSpec
from gpu_engine.front.tools.composition import ReasoningPhase, composed
from gpu_engine.front.tools.formats import HERMES, LLAMA3, MISTRAL, Markers, ToolFormat
from gpu_engine.front.tools.parts import AnswerLayout, PartKind
from grammar_service.backends.backend import Matcher, Rows
from grammar_service.backends.reasoning import ReasoningCompiled
from grammar_service.completion.budget import CompletionBudget
from grammar_service.completion.plan import CompletionPlan
from grammar_service.completion.texts import TokenTexts
from grammar_service.fill.matchers import SlotMatcher
from grammar_service.grammar.mask_rows import Classifier
from grammar_service.grammar.token_bytes import TokenBytes
from grammar_service.grammar.value import Kind
from tests.grammar_service.conftest import Library
from tests.grammar_service.toy import STOPS, tokens_in

PARAMETERS = {
    "type": "object",
    "properties": {"to": {"type": "string"}, "n": {"type": "array", "items": {"enum": [1, 22]}}},
    "required": ["to", "n"],
    "additionalProperties": False,
}
TOOLS = (Tool("mail", source=json.dumps(PARAMETERS)),)
GRAMMAR = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(PARAMETERS))
THINK = Markers("<think>", "</think>")


def answer(library: Library, spec: GrammarSpec, beyond: int, rng: random.Random) -> tuple[bytes, bool]:
    """Return a random answer of at most the known way and `beyond` tokens, and whether it ended."""
    compiled = library.compiled(Kind(spec.kind.value), spec.source)
    inner = compiled.answer if isinstance(compiled, ReasoningCompiled) else compiled
    texts = TokenTexts.of(library.vocabulary)
    plan = CompletionPlan.of(inner.matcher(), spec.source, texts)
    assert plan.path
    limit = len(plan.path) + beyond
    start: Callable[[], Matcher] = compiled.matcher
    if isinstance(compiled, ReasoningCompiled):
        limit += 2 * len(THINK.end)
        start = partial(compiled.matcher, plan.closing_at(limit))
    slot = SlotMatcher.bind(0, start, [], partial(CompletionBudget, plan, limit))
    rows = Rows(np.zeros((1, library.num_words), dtype=np.int32))
    classifier = Classifier(library.vocabulary.size)
    token_bytes = TokenBytes.of(library.vocabulary)
    while not slot.matcher.terminated and len(slot.tokens) < limit:
        slot.fill(rows, 0, classifier)
        legal = sorted(tokens_in(rows.words[0]))
        ends = [token for token in legal if token in STOPS]
        others = [token for token in legal if token not in STOPS]
        assert slot.accept(rng.choice(others) if others and rng.random() < 0.95 else (ends or others)[0])
    return token_bytes.text([token for token in slot.tokens if token not in STOPS]), slot.matcher.terminated


@pytest.mark.parametrize("form", [HERMES, LLAMA3, MISTRAL], ids=lambda form: form.name)
@pytest.mark.parametrize("beyond", [0, 9, 60])
@pytest.mark.parametrize("thinks", [False, True], ids=["", "reasoning"])
def test_calls_end_in_time(library: Library, form: ToolFormat, beyond: int, thinks: bool) -> None:
    tools = Tools(TOOLS, ToolChoice.REQUIRED)
    phase = ReasoningPhase(THINK, True, None) if thinks else None
    spec = composed(tools, form, None, phase)
    assert spec is not None
    text, ended = answer(library, spec, beyond, random.Random(beyond))
    assert ended, text
    parser = AnswerLayout(tools, form, markers=THINK if thinks else None, thinks_first=thinks).parser()
    decoded = text.decode(errors="replace")
    parts = parser.push(decoded) + parser.finish()
    calls = [part for part in parts if part.kind is PartKind.TOOL_CALL]
    assert calls, decoded
    for call in calls:
        given = "".join(
            part.text
            for part in parts
            if part.kind is PartKind.TOOL_ARGUMENTS and part.tool_call_index == call.tool_call_index
        )
        assert set(json.loads(given)) == {"to", "n"}


OTHERS = {
    "calls or content after reasoning": (GRAMMAR, ReasoningPhase(THINK, True, None)),
    "reasoning, calls or content": (GRAMMAR, ReasoningPhase(THINK, False, None)),
    "free text with calls": (None, None),
}


@pytest.mark.parametrize("beyond", [0, 12, 70])
@pytest.mark.parametrize("name", OTHERS)
def test_calls_content_and_free_text_end_in_time(library: Library, beyond: int, name: str) -> None:
    spec = composed(Tools(TOOLS), HERMES, *OTHERS[name])
    assert spec is not None
    for seed in range(3):
        text, ended = answer(library, spec, beyond, random.Random(seed))
        assert ended, text
