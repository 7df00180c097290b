"""Calls as a model writes them, for the tests of formats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from gpu_engine.api.conversation import Tool
from gpu_engine.front.tools.formats import CALL_ID, ToolFormat
from gpu_engine.front.tools.literals import spelled_members


def spelled_call(form: ToolFormat, tool: Tool, given: str, *, number: int = 0) -> str:
    """Return the text of a call; `given` is the JSON of its arguments, or its raw input."""
    begin, end = form.begin_of(tool.name, raw=tool.raw), form.end_of(raw=tool.raw)
    if form.number_end:
        begin += f"{number}{form.number_end}"
    if form.literals is not None and not tool.raw:
        return begin + spelled_members(given, form.literals) + end
    if form.argument is None or tool.raw:
        return begin + given + end
    return begin + "".join(_argument(form, name, value) for name, value in json.loads(given).items()) + end


def _argument(form: ToolFormat, name: str, value: Any) -> str:
    assert form.argument is not None
    is_text = isinstance(value, str)
    return form.argument.begin_of(name, text=is_text) + (value if is_text else json.dumps(value)) + form.argument.end


def spelled_calls(form: ToolFormat, calls: Sequence[tuple[Tool, str]]) -> str:
    """Return the text of several calls, with what stands before, between and after them."""
    texts = [spelled_call(form, tool, given, number=number) for number, (tool, given) in enumerate(calls)]
    return form.first + form.separator.join(texts) + form.last


def call_id(form: ToolFormat, name: str, number: int, made: str) -> str:
    """Return the id that a call has: its own in a format with numbers, else the one that was made for it."""
    return f"{CALL_ID}{name}:{number}" if form.number_end else made


def cuts(text: str) -> Iterator[list[str]]:
    """Yield `text` as one piece, and in pieces of several sizes that begin at each offset."""
    yield [text]
    for size in (1, 2, 3, 5, 8, 13):
        for first in range(size):
            yield [text[:first], *(text[at : at + size] for at in range(first, len(text), size))]
