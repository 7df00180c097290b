"""Text does not depend on how tokens are grouped into steps, characters stay whole, stop strings are never shown."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models

from gpu_engine.api.conversation import Tool, Tools
from gpu_engine.api.errors import GrammarUnavailable
from gpu_engine.api.request import FinishReason, Logprobs, TokenEvent, TokenOrigin
from gpu_engine.front.text_output import (
    MAX_HELD_TOKENS,
    Delta,
    Detokenizer,
    SequenceOutput,
    StopMatch,
    StopScanner,
)
from gpu_engine.front.tools.formats import MISTRAL, Markers
from gpu_engine.front.tools.parts import AnswerLayout, PartKind
from gpu_engine.front.tools.reasoning_tokens import ReasoningTokens
from tests.fakes import EOS, byte_tokenizer
from tests.gpu_engine.made_requests import made

TOKENIZER = byte_tokenizer()


STOPPED = TokenEvent(0, tuple(b"hix"), finish=FinishReason.STOP, matched_token_id=ord("x"))


def decode(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(ids), skip_special_tokens=True))


def output(**sampling: Any) -> SequenceOutput:
    return SequenceOutput(made(list(b"prompt"), **sampling), decode)


def steps_of(ids: Sequence[int], cuts: Sequence[int]) -> list[tuple[int, ...]]:
    edges = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    return [tuple(ids[a:b]) for a, b in itertools.pairwise(edges)]


def run(
    out: SequenceOutput, steps: Sequence[tuple[int, ...]], finish: FinishReason = FinishReason.LENGTH
) -> list[Delta]:
    events = [TokenEvent(0, step) for step in steps] + [TokenEvent(0, finish=finish)]
    return [out.take([event]) for event in events]


token_ids = st.lists(st.sampled_from([*b"ab c", *"\u00e9\u20ac\U0001f600".encode(), 0xFF, 0xC3, EOS]), max_size=40)


@given(token_ids)
@example([*"\u00e9".encode()])
@example([0xF0, 0x9F, 0x98])
@example([EOS, 0xC3, EOS, 0xA9])
def test_deltas_make_the_whole_text_and_no_character_is_split(ids: list[int]) -> None:
    detokenizer = Detokenizer(decode)
    deltas = [detokenizer.push(token) for token in ids]
    assert "".join(deltas) + detokenizer.flush() == decode(ids)


@given(st.text(max_size=20))
def test_valid_text_never_shows_a_replacement_character(text: str) -> None:
    detokenizer = Detokenizer(decode)
    shown = ""
    for token in text.encode("utf-8", "ignore"):
        shown += detokenizer.push(token)
        assert text.encode("utf-8", "ignore").decode().startswith(shown)


SPACE = "\u2581"
PIECES = [SPACE, "a", "b", f"{SPACE}a", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]


def sentencepiece_tokenizer() -> tokenizers.Tokenizer:
    """Return one as Llama 2 and Mistral have it: a space is a character, unknown characters are bytes."""
    vocab = {piece: i for i, piece in enumerate(PIECES)}
    model = models.BPE(vocab=vocab, merges=[], byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


SENTENCEPIECE = sentencepiece_tokenizer()


def as_bytes(character: str) -> list[int]:
    return [5 + byte for byte in character.encode()]


@given(st.lists(st.sampled_from([[0], [1], [2], [3], as_bytes("\u00e9"), as_bytes("\u20ac")]), max_size=30))
@example([[3], [0], [0], [1]])
@example([[0], [0], as_bytes("\u00e9"), [3]])
def test_spaces_survive_where_a_space_is_part_of_a_token(characters: list[list[int]]) -> None:
    ids = [token for character in characters for token in character]

    def decode_pieces(window: Sequence[int]) -> str:
        return str(SENTENCEPIECE.decode(list(window), skip_special_tokens=True))

    prompt = [1, 2]
    detokenizer = Detokenizer(decode_pieces, prompt)
    shown = "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()
    assert decode_pieces(prompt) + shown == decode_pieces(prompt + ids)


@given(
    token_ids, st.lists(st.integers(0, 100), max_size=8), st.lists(st.text("ab c", min_size=1, max_size=4), max_size=3)
)
def test_the_result_does_not_depend_on_the_steps(ids: list[int], cuts: list[int], stops: list[str]) -> None:
    def result(steps: Sequence[tuple[int, ...]]) -> tuple[object, ...]:
        out = output(stop=tuple(stops))
        deltas = run(out, steps)
        text = "".join(delta.text for delta in deltas)
        tokens = [token for delta in deltas for token in delta.token_ids]
        ends = [(delta.finish, delta.matched_stop) for delta in deltas if delta.finish]
        assert len(ends) == 1
        assert out.completion_tokens == len(tokens)
        if ends[0][1] is None:
            assert text == decode(ids)
        assert not any(stop in text for stop in stops)
        return text, tokens, ends

    assert result(steps_of(ids, cuts)) == result([(token,) for token in ids])


def test_the_token_that_completes_a_stop_string_is_the_last() -> None:
    out = output(stop=("lo w",), logprobs=0)
    delta = out.take([TokenEvent(0, tuple(b"hello world"), tuple(Logprobs(0.0, ()) for _ in b"hello world"))])
    assert (delta.text, delta.finish, delta.matched_stop) == ("hel", FinishReason.STOP, "lo w")
    assert bytes(delta.token_ids) == b"hello w"
    assert len(delta.logprobs) == 7
    assert out.completion_tokens == 7
    assert out.take([TokenEvent(0, tuple(b"more"), finish=FinishReason.STOP)]).token_ids == []


def test_an_error_comes_after_the_tokens_before_it() -> None:
    error = GrammarUnavailable("gone")
    delta = output().take([TokenEvent(0, tuple(b"ab")), TokenEvent(0, error=error)])
    assert (delta.text, delta.error, delta.finish, delta.ended) == ("ab", error, None, True)


@pytest.mark.parametrize("size", [1, 100])
def test_parts_are_read_from_text_with_special_tokens(size: int) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    call = [tokenizer.token_to_id("[TOOL_CALLS]"), *b'[{"name": "f", "arguments": {"a": 1}}]']
    layout = AnswerLayout(Tools((Tool("f"),)), MISTRAL, triggered=True, special_text=True)
    for stop, wanted in (((), '{"a": 1}'), (("1}",), '{"a": ')):
        out = SequenceOutput(
            made(list(b"prompt"), stop=stop),
            lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
            parser=layout.parser(),
            decode_special=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
        )
        ids = [*b"Hi ", *call]
        deltas = run(out, [tuple(ids[at : at + size]) for at in range(0, len(ids), size)])
        parts = [part for delta in deltas for part in delta.parts]
        text = "".join(delta.text for delta in deltas)
        assert text.startswith('Hi [{"name": "f"')
        joined = {kind: "".join(part.text for part in parts if part.kind is kind) for kind in PartKind}
        assert (joined[PartKind.CONTENT], joined[PartKind.TOOL_ARGUMENTS]) == ("Hi", wanted)
        assert [part.tool_name for part in parts if part.kind is PartKind.TOOL_CALL] == ["f"]


THINK = Markers("<think>", "</think>")
TOKENS = ["<", "<think>", "think>", "</", "</think>", "</think>\n", "think></think>x", "a", " ", "\n", "\u20ac", ""]


@given(st.lists(st.sampled_from(TOKENS), max_size=12), st.booleans())
@example(["<", "think>", "a", "</think>", "b"], False)
@example([" ", "\n", "<think>", "</", "</", "think>", "x"], False)
def test_reasoning_is_counted_up_to_the_token_that_ends_it(texts: list[str], is_open: bool) -> None:
    counter = ReasoningTokens(THINK, is_open=is_open)
    counts = []
    for text in texts:
        counter.push(text)
        counts.append(counter.count)
    for number, count in enumerate(counts, 1):
        said = "".join(texts[:number]).lstrip()
        begun = is_open or said.startswith(THINK.begin)
        ends = [i for i in range(1, number + 1) if THINK.end in _thought(texts[:i], is_open=is_open)]
        assert count == (0 if not begun else ends[0] if ends else number)


def _thought(texts: list[str], *, is_open: bool) -> str:
    said = "".join(texts)
    if is_open:
        return said
    return said.lstrip().removeprefix(THINK.begin) if said.lstrip().startswith(THINK.begin) else ""


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize("with_text", [True, False])
def test_tokens_of_the_reasoning_and_their_origins(size: int, with_text: bool) -> None:
    ids = [*b"<think>hm</think>\n\nyes", EOS]
    layout = AnswerLayout(markers=THINK)
    out = SequenceOutput(
        made(list(b"prompt"), token_origins=True, omit_text=not with_text),
        decode,
        parser=layout.parser(),
        reasoning=layout.reasoning_tokens(),
    )
    origins = [*TokenOrigin] * len(ids)
    steps = [slice(at, at + size) for at in range(0, len(ids), size)]
    events = [TokenEvent(0, tuple(ids[step]), origins=tuple(origins[: len(ids)][step])) for step in steps]
    events[-1] = replace(events[-1], finish=FinishReason.STOP, matched_token_id=EOS)
    deltas = [out.take([event]) for event in events]
    assert out.reasoning_tokens == len(b"<think>hm</think>")
    assert "".join(part.text for delta in deltas for part in delta.parts) == ("hmyes" if with_text else "")
    assert [origin for delta in deltas for origin in delta.origins] == origins[: len(ids)]


def test_a_character_may_begin_in_the_prompt_and_bytes_without_text_are_held_in_bounds() -> None:
    detokenizer = Detokenizer(decode, [*b"x", 0xC3])
    assert detokenizer.push(0xA9) == "\u00e9"
    shown = "".join(detokenizer.push(0xC3) for _ in range(10 * MAX_HELD_TOKENS))
    assert len(shown) >= 8 * MAX_HELD_TOKENS


def test_of_two_matches_the_earlier_wins_then_the_longer() -> None:
    assert StopScanner(("bc", "abc"), keep_match=False).push("xabc") == StopMatch("x", "abc")
    assert StopScanner(("ab", "abc"), keep_match=False).push("abc") == StopMatch("", "abc")


@pytest.mark.parametrize(
    ("fields", "event", "shown", "matched", "count"),
    [
        ({"stop": ("lo",), "include_stop_str_in_output": True}, TokenEvent(0, tuple(b"hello")), "hello", "lo", 5),
        ({"stop": ("a",), "min_tokens": 3}, TokenEvent(0, tuple(b"aabba")), "aabb", "a", 5),
        ({"stop": ("b",), "omit_text": True}, TokenEvent(0, tuple(b"abc")), "", "b", 2),
        ({}, STOPPED, "hi", None, 3),
        ({"include_stop_str_in_output": True}, STOPPED, "hix", None, 3),
    ],
)
def test_options_of_the_end(fields: dict[str, Any], event: TokenEvent, shown: str, matched: str, count: int) -> None:
    delta = output(**fields).take([event])
    assert (delta.text, delta.matched_stop, len(delta.token_ids)) == (shown, matched, count)
    assert delta.matched_token_id == event.matched_token_id
