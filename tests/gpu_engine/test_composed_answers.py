"""Answers of reasoning, tool calls and content, over random walks of a toy model and the real grammar libraries.

Every answer that ended is read back into its parts: its reasoning stays within its limit, each call fits its function,
the content fits the request's grammar. Its tokens are those of an engine without drafts that serves one request alone.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jsonschema
import pytest

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.conversation import InputKind, Tool, ToolChoice, Tools
from gpu_engine.api.request import FinishReason, GrammarKind, GrammarSpec, TokenOrigin
from gpu_engine.front.text_output import SequenceOutput
from gpu_engine.front.tools.composition import ReasoningPhase, composed
from gpu_engine.front.tools.formats import (
    DEEPSEEK_V31,
    GEMMA_4,
    GLM_47,
    HERMES,
    JSON,
    LFM2,
    LLAMA3,
    MISTRAL,
    NAME,
    PYTHONIC,
    QWEN3_CODER,
    ArgumentMarkers,
    Markers,
    ToolFormat,
)
from gpu_engine.front.tools.parts import AnswerLayout, Part, PartKind
from gpu_engine.model.loader import LoadedModel
from grammar_service.backends.registry import NAMES
from tests.fakes import EOS, byte_tokenizer
from tests.gpu_engine.harness import Answer, ask, config, with_drafts
from tests.gpu_engine.library_sidecars import PATIENT, Sidecars, compare

THINK = Markers("<think>", "</think>")
LEAST_BUDGET = len(THINK.begin) + len(THINK.end)
"""Tokens of both markers; a reasoning without a thought has as many."""
ADD: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 99}, "to": {"enum": ["a", "b c"]}},
    "required": ["x"],
    "additionalProperties": False,
}
SAY: dict[str, Any] = {
    "type": "object",
    "properties": {"s": {"type": "string", "maxLength": 6}},
    "required": ["s"],
    "additionalProperties": False,
}
TOOLS = (
    Tool("add", source=json.dumps(ADD)),
    Tool("say", source=json.dumps(SAY)),
    Tool("run", input=InputKind.REGEX, source="[a-f]{1,3}"),
)
ANY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "n": {"type": ["integer", "null"]},
        "any": {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "boolean"}]},
        "items": {"type": "array", "items": {"enum": [1, "a"]}, "maxItems": 2},
    },
    "required": ["n"],
    "additionalProperties": False,
}
LISTED_TOOLS = (TOOLS[0], Tool("any", source=json.dumps(ANY)), TOOLS[2])
DEEP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "b": {"type": "boolean"},
        "at": {"type": "object", "properties": {"z": {"enum": ["x", None]}, "n": {"type": "integer"}}},
        "any": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "list": {"type": "array", "items": {"type": ["string", "integer"]}, "minItems": 1, "maxItems": 2},
        "map": {"type": "object", "additionalProperties": {"type": "boolean"}},
    },
    "required": ["b"],
    "additionalProperties": False,
}
LITERAL_TOOLS = (TOOLS[0], Tool("deep", source=json.dumps(DEEP)), TOOLS[2])
SCHEMAS = {"add": ADD, "say": SAY, "any": ANY, "deep": DEEP}
ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["nobody", "add"]},
        "all": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "all"],
    "additionalProperties": False,
}
GRAMMARS = [
    GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(ANSWER)),
    GrammarSpec(GrammarKind.CHOICE, '["yes", "yes, but", "no"]'),
    GrammarSpec(GrammarKind.REGEX, "[x-z]{2,4}[0-9]?"),
]
SOON = replace(HERMES, name="soon", trigger="<")
"""A format whose trigger is one token of the toy model, so that calls begin within free text."""
LISTED_SOON = replace(QWEN3_CODER, name="listed soon", trigger="<")
FORMS = [SOON, HERMES, JSON, LLAMA3, MISTRAL, DEEPSEEK_V31]
SAYS_TYPES = replace(GLM_47, name="says types", argument=ArgumentMarkers(f"<s {NAME}>", "</>", f"<j {NAME}>"))
"""DeepSeek V3.2's way, with markers of which the toy model's answers have room for several."""
LISTED = [LISTED_SOON, QWEN3_CODER, GLM_47, SAYS_TYPES]
"""Formats that write arguments one by one."""
LITERAL_SOON = [replace(form, name=f"{form.name} soon", trigger="<") for form in (LFM2, GEMMA_4)]
LITERAL = [*LITERAL_SOON, PYTHONIC, LFM2, GEMMA_4]
"""Formats whose values have a notation of their own."""
DECODER = byte_tokenizer()


@dataclass(frozen=True, slots=True)
class Case:
    """A request with reasoning, tools or a grammar, drawn from a seed."""

    seed: int
    tools: Tools | None
    form: ToolFormat
    grammar: GrammarSpec | None
    phase: ReasoningPhase | None
    temperature: float
    max_tokens: int

    @staticmethod
    def drawn(seed: int, forms: Sequence[ToolFormat] = FORMS, known: tuple[Tool, ...] = TOOLS) -> Case:
        """Return the case of a seed. Cases of three seeds in a row have reasoning, tools, and both.

        With other formats than FORMS every case has tools.
        """
        rng = random.Random(seed)
        thinks, calls = seed % 3 != 1, forms is not FORMS or seed % 3 != 0
        form = rng.choice(forms)
        tools = grammar = phase = None
        if calls:
            choice = rng.choice([ToolChoice.AUTO, ToolChoice.AUTO, ToolChoice.REQUIRED, ToolChoice.NAMED])
            name = known[1].name if choice is ToolChoice.NAMED else ""
            tools = Tools(known, choice, name, parallel=rng.random() < 0.7)
        if not calls or rng.random() < 0.5:
            grammar = rng.choice(GRAMMARS)
        if tools and tools.choice is ToolChoice.AUTO and grammar is None:
            form = next((one for one in (form, *forms) if one.trigger == "<" or one.starts_answer), form)
        if thinks:
            phase = ReasoningPhase(THINK, rng.random() < 0.7, rng.choice([None, LEAST_BUDGET, 24, 40]))
        temperature = rng.choice([0.0, 0.0, 0.7, 1.3])
        return Case(seed, tools, form, grammar, phase, temperature, rng.randrange(100, 180))

    @property
    def layout(self) -> AnswerLayout:
        free = self.tools is not None and self.tools.choice is ToolChoice.AUTO and self.grammar is None
        phase = self.phase
        return AnswerLayout(
            self.tools,
            self.form,
            triggered=free and not self.form.starts_answer,
            markers=phase.markers if phase else None,
            thinks_first=phase is not None and phase.is_open,
        )

    def ask(self) -> Answer:
        """Return the answer of the request; it is not submitted yet."""
        spec = composed(self.tools, self.form, self.grammar, self.phase)
        assert spec is not None
        # The prompt holds words of the answer, so that prompt lookup proposes drafts, right ones and wrong ones.
        prompt = list(f'{self.seed} {{"x": 1, "to": "a"}} </think> {self.form.trigger} nobody'.encode())
        # The model shall come to a call, to an end, and rarely to half a character.
        bias = tuple(sorted({ord("<"): 2.0, EOS: 2.0, **dict.fromkeys(range(128, 256), -3.0)}.items()))
        answer = ask(
            prompt,
            grammar=f"{spec.kind.name} BOUNDED {spec.source}",
            max_tokens=self.max_tokens,
            seed=self.seed,
            temperature=self.temperature,
            logit_bias=bias,
        )
        answer.change(token_origins=True)
        return answer

    def check(self, answer: Answer) -> Counter[str]:
        """Read an answer that has ended, and return what it holds."""
        assert answer.finish is not None, (self, answer.error)
        layout = self.layout
        out = SequenceOutput(
            answer.request,
            lambda ids: str(DECODER.decode(list(ids), skip_special_tokens=True)),
            parser=layout.parser(),
            reasoning=layout.reasoning_tokens(),
        )
        deltas = [out.take([event]) for event in answer.events]
        origins = Counter(origin for delta in deltas for origin in delta.origins)
        accepted = origins[TokenOrigin.DRAFT] + origins[TokenOrigin.FORCED]
        assert accepted == answer.telemetry.accepted_draft_tokens
        assert origins.total() == len(answer.tokens)
        found = Counter({answer.finish.name: 1, "drafts": accepted, "forced": origins[TokenOrigin.FORCED]})
        if answer.finish not in (FinishReason.STOP, FinishReason.GRAMMAR_CLOSED):
            assert answer.finish is FinishReason.GRAMMAR_INCOMPLETE, (self, answer.finish)
            return found
        parts = [part for delta in deltas for part in delta.parts]
        found["thoughts"] = self._check_reasoning(out, parts)
        names = self._check_calls(parts, "".join(delta.text for delta in deltas))
        found.update(names)
        content = "".join(part.text for part in parts if part.kind is PartKind.CONTENT)
        if self.grammar is None or names:
            assert not names or layout.triggered or not content.strip(), (self, content)
        else:
            self._check_content(content)
        found["content"] = bool(content)
        return found

    def _check_reasoning(self, out: SequenceOutput, parts: list[Part]) -> bool:
        thought = "".join(part.text for part in parts if part.kind is PartKind.REASONING)
        assert THINK.end not in thought
        if self.phase is None:
            assert (out.reasoning_tokens, thought) == (0, "")
            return False
        most = self.phase.max_tokens
        assert most is None or out.reasoning_tokens <= most, (self, out.reasoning_tokens)
        assert not thought or out.reasoning_tokens > len(THINK.end)
        assert not self.phase.is_open or out.reasoning_tokens
        return bool(thought)

    def _check_calls(self, parts: list[Part], answer: str) -> list[str]:
        names = [part.tool_name for part in parts if part.kind is PartKind.TOOL_CALL]
        texts = ["" for _ in names]
        for part in parts:
            if part.kind is PartKind.TOOL_ARGUMENTS:
                texts[part.tool_call_index] += part.text
        for name, text in zip(names, texts, strict=True):
            if name in SCHEMAS:
                jsonschema.validate(json.loads(text), SCHEMAS[name])
            else:
                assert re.fullmatch("[a-f]{1,3}", text), (self, text)
        if names and self.form.literals is not None and self.form.literals.is_python and "\\" not in answer:
            found = [
                (name, text if name == "run" else json.loads(text)) for name, text in zip(names, texts, strict=True)
            ]
            assert python_calls(self.form, answer) == found
        tools = self.tools
        assert bool(names) <= (tools is not None)
        if tools is not None:
            assert tools.choice is ToolChoice.AUTO or names, self
            assert tools.parallel or len(names) <= 1, self
            assert tools.choice is not ToolChoice.NAMED or set(names) == {tools.name}
        return names

    def _check_content(self, content: str) -> None:
        assert self.grammar is not None
        match self.grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                jsonschema.validate(json.loads(content), ANSWER)
            case GrammarKind.CHOICE:
                assert content in json.loads(self.grammar.source), self
            case _:
                assert re.fullmatch(self.grammar.source, content), (self, content)


def python_calls(form: ToolFormat, answer: str) -> list[tuple[str, Any]]:
    """Return the calls of an answer in Python's way, as Python itself reads them."""

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Name(name):  # within a list or an object, which are JSON
                return {"true": True, "false": False, "null": None}[name]
            case ast.List(items):
                return [value(item) for item in items]
            case ast.Dict(keys, values):
                return {ast.literal_eval(k): value(v) for k, v in zip(keys, values, strict=True) if k is not None}
            case _:
                return ast.literal_eval(node)

    found = []
    after = answer.partition(THINK.end)[2] if THINK.end in answer else answer
    for region in re.findall(re.escape(form.first) + "(.*?)" + re.escape(form.last), after, re.DOTALL):
        for call in ast.parse(f"[{region}]", mode="eval").body.elts:  # type: ignore[attr-defined]
            given = {keyword.arg: value(keyword.value) for keyword in call.keywords}
            found.append((call.func.id, given["input"] if call.func.id == "run" else given))
    return found


@pytest.fixture(scope="module", params=NAMES)
def sidecars(request: pytest.FixtureRequest, llama: LoadedModel) -> Sidecars:
    return Sidecars(request.param, llama)


def found_in(sidecars: Sidecars, cases: list[Case], *others: EngineConfig) -> Counter[str]:
    """Check every answer of every engine; return what the answers hold, and the drafts that others accepted."""
    plain, *drafted = compare(sidecars, cases, *others)
    found = sum((case.check(answer) for case, answer in zip(cases, plain, strict=True)), Counter[str]())
    assert not found["drafts"]
    for answers in drafted:
        for case, answer in zip(cases, answers, strict=True):
            checked = case.check(answer)
            found["drafts"] += checked["drafts"]
            found["forced"] += checked["forced"]
    return found


def test_answers_fit_and_do_not_depend_on_drafts(sidecars: Sidecars) -> None:
    found = found_in(
        sidecars,
        [Case.drawn(seed) for seed in range(12)],
        config(drafter="ngram", num_draft_tokens=3, **PATIENT),
        config(drafter="ngram", num_draft_tokens=7, jump_forward_tokens=7, overlap=True, **PATIENT),
    )
    assert {"add", "say", "run", "thoughts", "content", "STOP", "GRAMMAR_CLOSED"} <= set(found), found
    assert found["GRAMMAR_INCOMPLETE"] <= 1, found
    assert found["drafts"] > found["forced"] > 50


def test_arguments_that_are_written_one_by_one_fit_their_function(sidecars: Sidecars) -> None:
    found = found_in(
        sidecars,
        [Case.drawn(seed, LISTED, LISTED_TOOLS) for seed in range(10)],
        config(drafter="ngram", num_draft_tokens=7, jump_forward_tokens=7, overlap=True, **PATIENT),
    )
    assert {"add", "any", "run", "thoughts"} <= set(found), found
    assert found["GRAMMAR_INCOMPLETE"] <= 2, found
    assert found["drafts"] > found["forced"] > 50


def test_arguments_with_a_notation_of_their_own_fit_their_function(sidecars: Sidecars) -> None:
    found = found_in(
        sidecars,
        [Case.drawn(seed, LITERAL, LITERAL_TOOLS) for seed in range(10)],
        config(drafter="ngram", num_draft_tokens=7, jump_forward_tokens=7, overlap=True, **PATIENT),
    )
    assert {"add", "deep", "run", "thoughts"} <= set(found), found
    assert found["GRAMMAR_INCOMPLETE"] <= 2, found
    assert found["drafts"] > found["forced"] > 50


@pytest.mark.slow
def test_more_answers_fit_with_any_drafter_and_after_preemption(
    sidecars: Sidecars, draft_models: dict[str, str]
) -> None:
    cases = [Case.drawn(seed) for seed in range(100, 160)]
    found = found_in(
        sidecars,
        cases,
        config(drafter="grammar", num_draft_tokens=7, jump_forward_tokens=15, **PATIENT),
        config(drafter="ngram", num_draft_tokens=7, jump_forward_tokens=3, kv_cache_tokens=480, **PATIENT),
        with_drafts(3, draft_model=draft_models["other"], jump_forward_tokens=4, **PATIENT),
        with_drafts(7, draft_model=draft_models["circle eagle3"], max_batch_size=8, overlap=True, **PATIENT),
    )
    assert found["GRAMMAR_INCOMPLETE"] <= len(cases) // 20, found
    assert found["drafts"] > 1000
