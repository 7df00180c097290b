"""Death of the grammar process in each phase of an answer, and in answers that are verified, repeat themselves or go
back: tokens, text and end are those of an undisturbed run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from protos.engine.v1 import engine_pb2 as pb
from tests.e2e.asking import Answer, answer, idle_stats
from tests.e2e.conftest import RunningServer
from tests.rpc_client import Client

pytestmark = [pytest.mark.model, pytest.mark.slow]

NOTE: dict[str, Any] = {
    "type": "object",
    "properties": {"title": {"type": "string", "minLength": 20, "maxLength": 40}, "n": {"enum": [1, 2]}},
    "required": ["title", "n"],
    "additionalProperties": False,
}
WORDS: dict[str, Any] = {
    "type": "array",
    "items": {"type": "string", "minLength": 1, "maxLength": 12},
    "uniqueItems": True,
    "minItems": 6,
    "maxItems": 8,
}
DIGITS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 1, "maximum": 6},
    "uniqueItems": True,
    "minItems": 6,
    "maxItems": 6,
}
OPEN = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
ENDS = (pb.FINISH_REASON_STOP, pb.FINISH_REASON_GRAMMAR_CLOSED)
Part = pb.AnswerPart


@dataclass(frozen=True)
class Case:
    """A request, the moment of the kill, and what makes the undisturbed answer a witness."""

    request: pb.GenerateRequest
    when: Callable[[Answer], bool]
    fits: Callable[[Answer], bool]


def of_phases(kind: int, choice: int = 0) -> Case:
    """Return a reasoning with a call or an answer after it, killed when the first part of `kind` comes."""
    message = pb.GenerateRequest(
        grammar=pb.Grammar(),
        reasoning=pb.Reasoning(begin="<think>", end="</think>", max_tokens=16),
        sampling=pb.SamplingParams(max_tokens=90, seed=4, temperature=0.8),
    )
    if choice:
        message.messages.messages.add(role="user", content="Note the weather.\n<think>")
        message.tools.CopyFrom(pb.Tools(choice=pb.ToolChoice.ValueType(choice), parallel=False))
        message.tools.tools.add(name="note", parameters=json.dumps(NOTE))
        return Case(message, lambda answer: kind in answer.parts, lambda answer: kind in answer.parts)
    # The prompt has begun the phase, so the first part is reasoning.
    message.text, message.grammar.json_schema = "Note the weather.\n<think>", json.dumps(NOTE)
    both = {Part.KIND_REASONING, Part.KIND_CONTENT}
    return Case(message, lambda answer: kind in answer.parts, lambda answer: set(answer.parts) == both)


def verified() -> Case:
    grammar = pb.Grammar(json_schema=json.dumps(WORDS), unenforced=pb.UNENFORCED_VERIFY, hold_tokens=4)
    message = pb.GenerateRequest(text="Six names of rivers:\n", grammar=grammar)
    message.sampling.CopyFrom(pb.SamplingParams(max_tokens=120, seed=3, temperature=0.9))

    def fits(answer: Answer) -> bool:
        words = json.loads(answer.text)
        return answer.last.finish_reason in ENDS and len(set(words)) == len(words) >= 6

    return Case(message, lambda answer: len(answer.token_ids) >= 8, fits)


def goes_back(seed: int) -> Case:
    """Wherever the kill meets an answer, it goes back to the same places as without one."""
    grammar = pb.Grammar(json_schema=json.dumps(DIGITS), unenforced=pb.UNENFORCED_VERIFY)
    grammar.max_backtracks, grammar.hold_tokens = 32, 6
    message = pb.GenerateRequest(text="1, 1, 2, 2, 1, 1, 1, 2,", grammar=grammar)
    message.sampling.CopyFrom(pb.SamplingParams(max_tokens=80, seed=seed, temperature=0.8))

    def fits(answer: Answer) -> bool:
        return answer.last.finish_reason in ENDS and sorted(json.loads(answer.text)) == [1, 2, 3, 4, 5, 6]

    return Case(message, lambda answer: True, fits)


CASES = {
    "call": of_phases(Part.KIND_TOOL_CALL, pb.TOOL_CHOICE_REQUIRED),
    "arguments": of_phases(Part.KIND_TOOL_ARGUMENTS, pb.TOOL_CHOICE_REQUIRED),
    "content under auto": of_phases(Part.KIND_CONTENT, pb.TOOL_CHOICE_AUTO),
    "reasoning": of_phases(Part.KIND_REASONING),
    "content after reasoning": of_phases(Part.KIND_CONTENT),
    "verified": verified(),
}
LIBRARIES = pytest.mark.parametrize(
    ("backend", "drafts"), [(pb.BACKEND_LLGUIDANCE, 7), (pb.BACKEND_XGRAMMAR, 3)], ids=["llguidance", "xgrammar"]
)


async def disturbed(server: RunningServer, case: Case, backend: pb.Backend, drafts: int) -> Answer:
    """Check that a kill changes nothing; return the undisturbed answer."""
    case.request.grammar.backend = backend
    holds = case.request.grammar.hold_tokens if case.request.grammar.max_backtracks else None
    kills = 0

    def seen(answer: Answer) -> None:
        nonlocal kills
        if holds is not None:
            assert answer.last.held_tokens == (0 if answer.last.finish_reason else holds)
        if not kills and not answer.last.finish_reason and case.when(answer):
            server.kill_grammar_process()
            kills += 1

    async with Client(server.address) as client:
        case.request.speculation.num_draft_tokens = 0
        plain = await answer(client, case.request)
        assert case.fits(plain), plain
        case.request.speculation.num_draft_tokens = drafts
        killed = await answer(client, case.request, seen)
        assert kills == 1
        assert killed.whole == plain.whole
        assert (killed.parts, len(killed.calls)) == (plain.parts, len(plain.calls))
        await idle_stats(client)
    return plain


@pytest.mark.parametrize(
    ("name", "backend", "drafts"),
    [(name, pb.BACKEND_LLGUIDANCE, 7) for name in CASES]
    + [(name, pb.BACKEND_XGRAMMAR, 3) for name in ("arguments", "content after reasoning", "verified")],
)
async def test_a_kill_in_a_phase_changes_no_token(
    server: RunningServer, name: str, backend: pb.Backend, drafts: int
) -> None:
    await disturbed(server, CASES[name], backend, drafts)


@LIBRARIES
async def test_a_kill_changes_no_token_of_answers_that_go_back(
    server: RunningServer, backend: pb.Backend, drafts: int
) -> None:
    assert sum(
        [(await disturbed(server, goes_back(seed), backend, drafts)).last.telemetry.backtracks for seed in (1, 2)]
    )


@LIBRARIES
async def test_a_kill_changes_no_token_of_an_answer_that_repeats_itself(
    server: RunningServer, backend: pb.Backend, drafts: int
) -> None:
    message = pb.GenerateRequest(
        text="Monday, Tuesday, Wednesday,", sampling=pb.SamplingParams(max_tokens=1, temperature=0)
    )
    async with Client(server.address) as client:
        (word,) = (await answer(client, message)).token_ids
    message.grammar.json_schema = json.dumps(OPEN)
    message.sampling.CopyFrom(pb.SamplingParams(max_tokens=90, seed=3, temperature=0.7, logit_bias={word: 60.0}))
    message.sampling.repetition_max_pattern_size, message.sampling.repetition_min_count = 3, 6

    def fits(answer: Answer) -> bool:
        ended = answer.last.finish_reason == pb.FINISH_REASON_REPETITION
        return ended and len(answer.token_ids) < 40 and set(json.loads(answer.text)) >= {"a", "b"}

    await disturbed(server, Case(message, lambda answer: len(answer.token_ids) >= 4, fits), backend, drafts)
