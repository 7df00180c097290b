"""A request of our own proto up to the engine, conversations in chat templates, and the parts of an answer's text.

Invariant: an error names a field of the request, and what passes fits into the model.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from google.protobuf.message import DecodeError

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.conversation import InputKind, Tool, Tools
from gpu_engine.api.errors import InternalError, LockstepError
from gpu_engine.front.prompt import build_requests
from gpu_engine.front.suffix_scopes import literals
from gpu_engine.front.tools.chat import render
from gpu_engine.front.tools.composition import planned
from gpu_engine.front.tools.fields import check_chat, check_reasoning, check_tools
from gpu_engine.front.tools.formats import FORMATS, Markers
from gpu_engine.front.tools.parts import AnswerLayout, Part, PartKind
from gpu_engine.front.validation import check
from protos.engine.v1 import engine_pb2 as pb
from tools.fuzz.engine import MAX_MODEL_LEN, TEMPLATES, FuzzModel, NoAdapters, limits, tokenizer
from tools.fuzz.mutations import mutate_message, mutate_text
from tools.fuzz.target import Target, require
from tools.fuzz.words import JSON_SCHEMA, REQUEST, TAGS


def request() -> Target:
    """Return the target: a GenerateRequest up to the engine's requests."""
    model = FuzzModel()
    config = EngineConfig(max_model_len=MAX_MODEL_LEN, max_beam_width=4, device="cpu")
    bounds, adapters = limits(config, model), NoAdapters()

    def run(data: bytes) -> None:
        try:
            message = pb.GenerateRequest.FromString(data)
        except DecodeError:
            return
        try:
            valid, layout = planned(check(message, bounds, (), None, adapters.find), model.tokenizer)
            built = build_requests(valid, model.tokenizer, bounds, lambda event: None, 0.0)
        except InternalError:
            raise
        except LockstepError as error:
            require(str(error).strip(), "an error without a message")
            return
        if valid.params.grammar is not None:
            require(all(isinstance(text, str) for text in literals(valid.params.grammar)), "a literal that is no text")
        if layout is not None:
            layout.parser().finish()
        for each in built:
            require(0 < len(each.prompt_ids) < MAX_MODEL_LEN, "a prompt that does not fit")
            require(len(each.prompt_ids) + each.sampling.max_tokens <= MAX_MODEL_LEN, "more tokens than fit")
            require(all(0 <= token < model.vocab_size for token in each.prompt_ids), "a token that does not exist")

    words = (*REQUEST, *JSON_SCHEMA, *TAGS)
    return Target(run, lambda data, random: mutate_message(data, random, pb.GenerateRequest, words), REQUEST)


def chat() -> Target:
    """Return the target: a conversation with tools, in each of several chat templates."""
    tokenizers = [tokenizer(template) for template in TEMPLATES]

    def run(data: bytes) -> None:
        if not data:
            return
        try:
            message = pb.GenerateRequest.FromString(data[1:])
        except DecodeError:
            return
        chosen = tokenizers[data[0] % len(tokenizers)]
        try:
            conversation = check_chat(message.messages)
            tools, reasoning = check_tools(message), check_reasoning(message)
            text = render(replace(conversation, tools=tools, reasoning=reasoning), chosen)
        except InternalError:
            raise
        except LockstepError:
            return
        require(isinstance(text, str), "a conversation that is no text")
        text.encode()

    def mutate(data: bytes, random: Random) -> bytes:
        head = data[:1] if data and random.random() < 0.9 else bytes([random.randrange(len(tokenizers))])
        return head + mutate_message(data[1:], random, pb.GenerateRequest, (*REQUEST, *JSON_SCHEMA))

    return Target(run, mutate, REQUEST)


_SOURCE = '{"properties": {"a": {"type": "string"}, "b": {}, "c": {"enum": [1, "x", null]}, "d": {"type": "array"}}}'
_TOOLS = Tools((Tool("get"), Tool("get_x", source=_SOURCE), Tool("run", input=InputKind.TEXT)))
_PARTS = (
    *(
        "get",
        "get_x",
        "run",
        '{"a": "}\\""}',
        "{}",
        "[",
        "]",
        '"',
        "\\",
        "<think>",
        "</think>",
        "\n",
        " ",
        "</tool_call>",
    ),
    *(text for form in FORMATS for text in (form.trigger, form.first, form.last, form.separator, form.raw_end)),
    *(form.begin_of(name, raw=False) for form in FORMATS for name in ("get", "get_x")),
    *(form.number_end for form in FORMATS),
    *(
        text
        for markers in (form.argument for form in FORMATS if form.argument)
        for text in (*(markers.begin_of(name, text=name < "c") for name in "abcd"), markers.end)
    ),
    *(text for form in FORMATS if form.literals for text in (form.literals.quote, f"a{form.literals.assign}", "'")),
    *(form.end_of(raw=False) for form in FORMATS),
    *(form.begin_of("run", raw=True) for form in FORMATS),
)


def answer_parts() -> Target:
    """Return the target: the text of an answer, as one piece and in pieces, in each format of tool calls.

    The first byte chooses the format, the second one the reasoning and the size of the pieces.
    """

    def run(data: bytes) -> None:
        if len(data) < 2:
            return
        form, options, text = FORMATS[data[0] % len(FORMATS)], data[1], data[2:].decode("utf-8", "replace")
        layout = AnswerLayout(
            _TOOLS if options & 1 else None,
            form,
            triggered=bool(options & 2),
            markers=Markers("<think>", "</think>") if options & 4 else None,
            thinks_first=bool(options & 8),
        )
        size = 1 + (options >> 4)
        whole = _parts(layout, [text])
        pieces = _parts(layout, [text[i : i + size] for i in range(0, len(text), size)])
        require(whole == pieces, f"pieces of {size} characters give {pieces}, one piece gives {whole}")

    def mutate(data: bytes, random: Random) -> bytes:
        head = (
            bytes([random.randrange(256), random.randrange(256)])
            if len(data) < 2 or random.random() < 0.2
            else data[:2]
        )
        return head + mutate_text(data[2:], random, _PARTS)

    return Target(run, mutate, tuple(dict.fromkeys(text for text in _PARTS if text)), max_bytes=512)


def _parts(layout: AnswerLayout, pieces: list[str]) -> list[tuple[str, str]]:
    """Return the kind and text of each part, equal neighbours joined."""
    parser = layout.parser(lambda: "id")
    found: list[Part] = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    out: list[tuple[str, str]] = []
    for part in found:
        name = f"{part.kind.name} {part.tool_name} {part.tool_call_index}"
        if out and out[-1][0] == name and part.kind is not PartKind.TOOL_CALL:
            out[-1] = (name, out[-1][1] + part.text)
        else:
            out.append((name, part.text))
    return out
