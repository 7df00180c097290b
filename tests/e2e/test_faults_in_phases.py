"""Death of the grammar process in each phase of an answer: reasoning, tool call, content. No token changes."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from protos.engine.v1 import engine_pb2 as pb
from tests.e2e.asking import ANSWER_TIMEOUT_S, idle_stats
from tests.e2e.conftest import RunningServer
from tests.rpc_client import Client

pytestmark = [pytest.mark.model, pytest.mark.slow]

NOTE: dict[str, Any] = {
    "type": "object",
    "properties": {"title": {"type": "string", "minLength": 20, "maxLength": 40}, "n": {"enum": [1, 2]}},
    "required": ["title", "n"],
    "additionalProperties": False,
}


def request(backend: pb.Backend, choice: pb.ToolChoice, drafts: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        messages=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Note the weather.\n<think>")]),
        tools=pb.Tools(tools=[pb.Tool(name="note", parameters=json.dumps(NOTE))], choice=choice, parallel=False),
        grammar=pb.Grammar(backend=backend),
        reasoning=pb.Reasoning(begin="<think>", end="</think>", max_tokens=16),
        sampling=pb.SamplingParams(max_tokens=90, seed=4, temperature=0.8),
        speculation=pb.Speculation(num_draft_tokens=drafts),
    )


async def run(
    client: Client, message: pb.GenerateRequest, server: RunningServer | None, kill_in: int
) -> tuple[list[int], set[int]]:
    """Return the tokens and the kinds of parts; the grammar process dies when the first part of a kind is there."""
    tokens: list[int] = []
    kinds: set[int] = set()
    async for response in client.generate(message, timeout_s=ANSWER_TIMEOUT_S):
        tokens += response.token_ids
        new = {part.kind for part in response.parts} - kinds
        kinds |= new
        if server and kill_in in new and not response.finish_reason:
            os.kill(server.grammar_process().pid, signal.SIGKILL)
            server = None
    assert server is None
    return tokens, kinds


@pytest.mark.parametrize("backend", [pb.BACKEND_LLGUIDANCE, pb.BACKEND_XGRAMMAR], ids=["llguidance", "xgrammar"])
@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        (pb.TOOL_CHOICE_REQUIRED, pb.AnswerPart.KIND_TOOL_CALL),
        (pb.TOOL_CHOICE_REQUIRED, pb.AnswerPart.KIND_TOOL_ARGUMENTS),
        (pb.TOOL_CHOICE_AUTO, pb.AnswerPart.KIND_CONTENT),
    ],
    ids=["call", "arguments", "content"],
)
async def test_a_killed_grammar_process_changes_no_token(
    server: RunningServer, backend: pb.Backend, choice: pb.ToolChoice, kind: int
) -> None:
    async with Client(server.address) as client:
        plain, _ = await run(client, request(backend, choice, 0), None, 0)
        got, kinds = await run(client, request(backend, choice, 3), server, kind)
        assert got == plain
        assert kind in kinds
        await idle_stats(client)


@pytest.mark.parametrize("backend", [pb.BACKEND_LLGUIDANCE, pb.BACKEND_XGRAMMAR], ids=["llguidance", "xgrammar"])
@pytest.mark.parametrize("kind", [pb.AnswerPart.KIND_REASONING, pb.AnswerPart.KIND_CONTENT], ids=["in", "behind"])
async def test_a_grammar_process_killed_in_a_reasoning_or_in_the_content_behind_it(
    server: RunningServer, backend: pb.Backend, kind: int
) -> None:
    """The prompt has begun the phase, so the first part is reasoning."""
    message = request(backend, pb.TOOL_CHOICE_REQUIRED, 3)
    message.text = "Note the weather.\n<think>"
    message.ClearField("tools")
    message.grammar.json_schema = json.dumps(NOTE)
    async with Client(server.address) as client:
        plain, kinds = await run(client, message, None, 0)
        assert kinds == {pb.AnswerPart.KIND_REASONING, pb.AnswerPart.KIND_CONTENT}
        got, _ = await run(client, message, server, kind)
        assert got == plain
        await idle_stats(client)


WORDS: dict[str, Any] = {
    "type": "array",
    "items": {"type": "string", "minLength": 1, "maxLength": 12},
    "uniqueItems": True,
    "minItems": 6,
    "maxItems": 8,
}


@pytest.mark.parametrize("backend", [pb.BACKEND_LLGUIDANCE, pb.BACKEND_XGRAMMAR], ids=["llguidance", "xgrammar"])
@pytest.mark.parametrize("drafts", [3, 7])
async def test_a_grammar_process_killed_while_an_answer_is_verified(
    server: RunningServer, backend: pb.Backend, drafts: int
) -> None:
    grammar = pb.Grammar(json_schema=json.dumps(WORDS), unenforced=pb.UNENFORCED_VERIFY, backend=backend, hold_tokens=4)
    message = pb.GenerateRequest(text="Six names of rivers:\n", grammar=grammar)
    message.sampling.CopyFrom(pb.SamplingParams(max_tokens=120, seed=3, temperature=0.9))
    async with Client(server.address) as client:

        async def answer(num_drafts: int, kill_at: int) -> tuple[list[int], str, int, int]:
            message.speculation.num_draft_tokens = num_drafts
            tokens: list[int] = []
            text, finish, kills = "", 0, 0
            async for response in client.generate(message, timeout_s=ANSWER_TIMEOUT_S):
                tokens += response.token_ids
                text, finish = text + response.text, response.finish_reason or finish
                if kill_at and not kills and len(tokens) >= kill_at and not response.finish_reason:
                    os.kill(server.grammar_process().pid, signal.SIGKILL)
                    kills += 1
            return tokens, text, finish, kills

        plain = await answer(0, 0)
        assert plain[2] in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_GRAMMAR_CLOSED), plain
        words = json.loads(plain[1])
        assert len(set(words)) == len(words) >= 6
        assert await answer(drafts, 8) == (*plain[:3], 1)
        await idle_stats(client)


@pytest.mark.parametrize(
    ("backend", "drafts"),
    [(pb.BACKEND_LLGUIDANCE, 0), (pb.BACKEND_XGRAMMAR, 3), (pb.BACKEND_LLGUIDANCE, 7)],
    ids=["llguidance-0", "xgrammar-3", "llguidance-7"],
)
async def test_a_grammar_process_killed_while_an_answer_repeats_itself(
    server: RunningServer, backend: pb.Backend, drafts: int
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    }
    message = pb.GenerateRequest(
        text="Monday, Tuesday, Wednesday,", sampling=pb.SamplingParams(max_tokens=1, temperature=0)
    )
    async with Client(server.address) as client:
        (word,) = [token async for response in client.generate(message) for token in response.token_ids]
        message.grammar.CopyFrom(pb.Grammar(json_schema=json.dumps(schema), backend=backend))
        limits = {"repetition_max_pattern_size": 3, "repetition_min_count": 6}
        message.sampling.CopyFrom(
            pb.SamplingParams(max_tokens=90, seed=3, temperature=0.7, logit_bias={word: 60.0}, **limits)  # type: ignore[arg-type]
        )

        async def answer(num_drafts: int, kill_at: int) -> tuple[list[int], str, int, int]:
            message.speculation.num_draft_tokens = num_drafts
            tokens: list[int] = []
            text, finish, kills = "", 0, 0
            async for response in client.generate(message, timeout_s=ANSWER_TIMEOUT_S):
                tokens += response.token_ids
                text, finish = text + response.text, response.finish_reason or finish
                if kill_at and not kills and len(tokens) >= kill_at and not response.finish_reason:
                    os.kill(server.grammar_process().pid, signal.SIGKILL)
                    kills += 1
            return tokens, text, finish, kills

        plain = await answer(0, 0)
        assert plain[2] == pb.FINISH_REASON_REPETITION, plain
        assert set(json.loads(plain[1])) >= {"a", "b"}
        assert len(plain[0]) < 40
        assert await answer(drafts, 4) == (*plain[:3], 1)
        await idle_stats(client)


@pytest.mark.parametrize(
    ("backend", "drafts"),
    [(pb.BACKEND_LLGUIDANCE, 0), (pb.BACKEND_XGRAMMAR, 3), (pb.BACKEND_LLGUIDANCE, 7)],
    ids=["llguidance-0", "xgrammar-3", "llguidance-7"],
)
async def test_a_grammar_process_killed_while_answers_go_back(
    server: RunningServer, backend: pb.Backend, drafts: int
) -> None:
    """Wherever the kill meets an answer, it goes back to the same places as without one."""
    digits = {"type": "integer", "minimum": 1, "maximum": 6}
    schema = {"type": "array", "items": digits, "uniqueItems": True, "minItems": 6, "maxItems": 6}
    grammar = pb.Grammar(json_schema=json.dumps(schema), unenforced=pb.UNENFORCED_VERIFY, backend=backend)
    grammar.max_backtracks, grammar.hold_tokens = 32, 6
    message = pb.GenerateRequest(text="1, 1, 2, 2, 1, 1, 1, 2,", grammar=grammar)

    async with Client(server.address) as client:

        async def answer(seed: int, num_drafts: int, kill: bool) -> tuple[list[int], str, int, int]:
            message.sampling.CopyFrom(pb.SamplingParams(max_tokens=80, seed=seed, temperature=0.8))
            message.speculation.num_draft_tokens = num_drafts
            tokens: list[int] = []
            text, finish, backtracks, kills = "", 0, 0, 0
            async for response in client.generate(message, timeout_s=ANSWER_TIMEOUT_S):
                tokens += response.token_ids
                text, finish = text + response.text, response.finish_reason or finish
                backtracks = response.telemetry.backtracks
                if response.finish_reason:
                    assert response.held_tokens == 0
                else:
                    assert response.held_tokens == 6
                if kill and not kills and not response.finish_reason:
                    os.kill(server.grammar_process().pid, signal.SIGKILL)
                    kills += 1
            assert kills == kill
            return tokens, text, finish, backtracks

        went_back = 0
        for seed in (1, 2):
            plain = await answer(seed, 0, False)
            assert plain[2] in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_GRAMMAR_CLOSED), plain
            assert sorted(json.loads(plain[1])) == [1, 2, 3, 4, 5, 6]
            assert await answer(seed, drafts, True) == plain
            went_back += plain[3]
        assert went_back
        await idle_stats(client)
