"""The text of an answer in parts: reasoning, content, tool calls.

Invariant: the parts, joined, depend only on the text and never on the pieces in which it arrives. Text that may still
become a marker, or white space that may precede one, is held back until it is decided, or until `finish`.

    begin -> reasoning -> content -> head -> number -> arguments -> tail -> content or head

Text is compared with the beginning and the end of a call without the white space outside quotation marks, because a
grammar may leave it free; where arguments are written one by one, a grammar fixes all of it.
Not responsible for: holding an answer to its grammar; text that is no call is content.
"""

from __future__ import annotations

import enum
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass

from gpu_engine.api.conversation import Tool, ToolChoice, Tools
from gpu_engine.front.tools.argument_reader import ArgumentReader
from gpu_engine.front.tools.formats import CALL_ID, Markers, ToolFormat
from gpu_engine.front.tools.literal_reader import LiteralReader
from gpu_engine.front.tools.markers import SPACE, JsonScan, beginning_of, match_exactly, match_squeezed, squeezed
from gpu_engine.front.tools.parameters import parameters_of
from gpu_engine.front.tools.reasoning_tokens import ReasoningTokens


class PartKind(enum.Enum):
    """What the text of a part is; the values equal the proto enum's."""

    REASONING = 1
    CONTENT = 2
    TOOL_CALL = 3
    TOOL_ARGUMENTS = 4


@dataclass(frozen=True, slots=True)
class Part:
    """A delta of one part of an answer."""

    kind: PartKind
    text: str = ""
    tool_call_index: int = 0
    tool_call_id: str = ""
    tool_name: str = ""


@dataclass(frozen=True, slots=True)
class AnswerLayout:
    """What an answer may hold, so that its text can be read."""

    tools: Tools | None = None
    form: ToolFormat | None = None
    """The format of the tool calls; needed with callable tools."""
    triggered: bool = False
    """Calls begin at the trigger, anywhere in free text. False: the answer is calls or content, from its start."""
    markers: Markers | None = None
    """The markers around the reasoning; None: the answer has no reasoning."""
    thinks_first: bool = False
    """The prompt has ended with the marker that begins the reasoning."""
    special_text: bool = False
    """Markers are special tokens, so the parser reads the text with special tokens in it."""

    def parser(self, new_id: Callable[[], str] | None = None) -> PartsParser:
        """Return a parser of one answer. `new_id` returns the id of a tool call."""
        short = self.form is not None and self.form.short_ids
        return PartsParser(self, new_id or (short_call_id if short else new_call_id))

    def reasoning_tokens(self) -> ReasoningTokens | None:
        """Return a counter of the tokens of one answer's reasoning; None: the answer has none."""
        return ReasoningTokens(self.markers, is_open=self.thinks_first) if self.markers else None


def new_call_id() -> str:
    """Return a new id of a tool call."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Return a new id of 9 letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class _State(enum.Enum):
    BEGIN = enum.auto()
    """Before the reasoning, if there is any."""
    REASONING = enum.auto()
    GAP = enum.auto()
    """White space after the reasoning."""
    START = enum.auto()
    """The start of an answer that is calls or content."""
    CONTENT = enum.auto()
    HEAD = enum.auto()
    """A trigger was read; the head of a call may follow."""
    NUMBER = enum.auto()
    """The number of a call, and the text after it."""
    SPACE = enum.auto()
    """White space before the arguments."""
    JSON = enum.auto()
    LISTED = enum.auto()
    """Arguments that are not one JSON object."""
    RAW = enum.auto()
    TAIL = enum.auto()
    AFTER = enum.auto()
    """After a call: another call, the end of the calls, or content."""
    ENDED = enum.auto()


class PartsParser:
    """Reads one answer. Used by one task at a time."""

    def __init__(self, layout: AnswerLayout, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._form = layout.form
        self._markers = layout.markers
        called = [tool for _, tool in layout.tools.callable] if layout.tools and layout.form else []
        self._triggered = layout.triggered and bool(called)
        self._always_strict = layout.tools is not None and layout.tools.choice is not ToolChoice.AUTO
        self._ids: set[str] = set()
        is_listed = self._form is not None and (self._form.argument or self._form.literals) is not None
        self._match = match_exactly if is_listed else match_squeezed
        self._plain = str.lstrip if is_listed else squeezed
        self._heads: dict[str, Tool] = {}
        """The text before the first arguments, as `_match` reads it, and the function."""
        self._next: dict[str, Tool] = {}
        """The same for a call that follows another one."""
        for tool in called:
            if self._form:
                begin = self._form.begin_of(tool.name, raw=tool.raw)
                self._heads[self._plain(self._form.first + begin)] = tool
                if self._form.parallel:
                    self._next[self._plain(self._form.separator + begin)] = tool
        self._content_begin = squeezed(self._form.content_begin) if self._form else ""
        framed = (called and not self._triggered) or self._content_begin
        self._after_reasoning = _State.START if framed else _State.CONTENT
        self._state = self._after_reasoning
        if layout.markers:
            self._state = _State.REASONING if layout.thinks_first else _State.BEGIN
        self._held = ""
        self._calls = 0
        self._tool = Tool("")
        """The function of the last call."""
        self._raw_begins = False
        self._scan = JsonScan()
        self._reader: ArgumentReader | LiteralReader | None = None
        self._out: list[Part] = []
        self._reasoned = False

    def push(self, text: str) -> list[Part]:
        """Add text; return the parts that are certain now."""
        self._held += text
        while self._step():
            pass
        return self._taken()

    def finish(self) -> list[Part]:
        """Return the parts of the text that is held back: no more text comes."""
        held, self._held = self._held, ""
        match self._state:
            case _State.REASONING:
                self._emit(PartKind.REASONING, held.rstrip("\n"))
            case _State.JSON | _State.RAW:
                self._emit(PartKind.TOOL_ARGUMENTS, held)
            case _State.LISTED:
                assert self._reader is not None
                self._emit(PartKind.TOOL_ARGUMENTS, self._reader.finish(held))
            case _State.TAIL | _State.AFTER | _State.SPACE | _State.GAP | _State.NUMBER:
                if held.strip() and self._state is _State.AFTER:
                    self._emit(PartKind.CONTENT, held.lstrip(SPACE))
            case _:
                self._emit(PartKind.CONTENT, held)
        self._state = _State.ENDED
        return self._taken()

    def _taken(self) -> list[Part]:
        out, self._out = self._out, []
        return out

    def _emit(self, kind: PartKind, text: str) -> None:
        if text:
            index = self._calls - 1 if kind is PartKind.TOOL_ARGUMENTS else 0
            self._out.append(Part(kind, text, index))

    def _step(self) -> bool:
        """Consume some of the held text. False: more text is needed."""
        if not self._held:
            return False
        match self._state:
            case _State.BEGIN:
                return self._begin()
            case _State.REASONING:
                return self._reasoning()
            case _State.GAP | _State.SPACE:
                self._held = self._held.lstrip(SPACE)
                if not self._held:
                    return False
                self._state = self._after_reasoning if self._state is _State.GAP else _State.JSON
                return True
            case _State.START | _State.HEAD:
                return self._head(self._heads, _State.CONTENT)
            case _State.CONTENT:
                return self._content()
            case _State.NUMBER:
                return self._number()
            case _State.JSON:
                return self._json()
            case _State.LISTED:
                return self._listed()
            case _State.RAW:
                return self._raw_input()
            case _State.TAIL:
                return self._tail()
            case _State.AFTER:
                return self._after()
            case _State.ENDED:
                raise AssertionError("text after the end")

    def _begin(self) -> bool:
        assert self._markers is not None
        text = self._held.lstrip(SPACE)
        if text.startswith(self._markers.begin):
            self._held = text[len(self._markers.begin) :]
            self._state = _State.REASONING
            return True
        if self._markers.begin.startswith(text):
            return False
        self._state = self._after_reasoning
        return True

    def _reasoning(self) -> bool:
        assert self._markers is not None
        if not self._reasoned:
            self._held = self._held.lstrip("\n")
            if not self._held:
                return False
            self._reasoned = True
        at = self._held.find(self._markers.end)
        if at >= 0:
            self._emit(PartKind.REASONING, self._held[:at].rstrip("\n"))
            self._held = self._held[at + len(self._markers.end) :]
            self._state = _State.GAP
            return True
        keep = beginning_of(self._held, (self._markers.end,))
        keep = len(self._held[:keep].rstrip("\n"))
        self._emit(PartKind.REASONING, self._held[:keep])
        self._held = self._held[keep:]
        return False

    def _content(self) -> bool:
        if not self._triggered or self._form is None:
            self._emit(PartKind.CONTENT, self._held)
            self._held = ""
            return False
        at = self._held.find(self._form.trigger)
        if at >= 0:
            # Where the text is no call after all, HEAD gives the white space back.
            at = len(self._held[:at].rstrip(SPACE))
            self._emit(PartKind.CONTENT, self._held[:at])
            self._held = self._held[at:]
            self._state = _State.HEAD
            return True
        keep = beginning_of(self._held, (self._form.trigger,))
        keep = len(self._held[:keep].rstrip(SPACE))
        self._emit(PartKind.CONTENT, self._held[:keep])
        self._held = self._held[keep:]
        return False

    def _head(self, heads: dict[str, Tool], otherwise: _State) -> bool:
        """Read the beginning of a call, or take the text as content."""
        begin = [self._content_begin] if self._content_begin else []
        found, end, undecided = self._match(self._held, [*heads, *begin])
        if found is not None and found not in heads:
            self._held = self._held[end:]
            self._state = _State.CONTENT
            return True
        if found is not None:
            self._tool = heads[found]
            self._held = self._held[end:]
            if self._form is not None and self._form.number_end:
                self._state = _State.NUMBER
            else:
                self._begin_call(self._new_id())
            return True
        if undecided:
            return False
        if self._state is _State.HEAD:
            # The trigger is text; the search goes on after its first character.
            at = len(self._held) - len(self._held.lstrip(SPACE)) + 1
            self._emit(PartKind.CONTENT, self._held[:at])
            self._held = self._held[at:]
        self._state = otherwise
        return True

    def _begin_call(self, call_id: str) -> None:
        self._out.append(Part(PartKind.TOOL_CALL, "", self._calls, call_id, self._tool.name))
        self._calls += 1
        self._scan, self._raw_begins = JsonScan(), True
        if self._tool.raw:
            self._state = _State.RAW
        elif self._form is not None and self._form.literals is not None:
            self._reader = LiteralReader(self._form)
            self._state = _State.LISTED
        elif self._form is not None and self._form.argument is not None:
            end, strict = self._form.argument.end, self._tool.strict or self._always_strict
            self._reader = ArgumentReader(self._form, parameters_of(self._tool, "tools", end, strict=strict))
            self._state = _State.LISTED
        else:
            self._state = _State.SPACE

    def _number(self) -> bool:
        assert self._form is not None
        at = self._held.find(self._form.number_end)
        if at >= 0:
            number, self._held = self._held[:at].strip(), self._held[at + len(self._form.number_end) :]
            # A model may give two calls one number, and a result names its call by the id.
            numbers = (f"{CALL_ID}{self._tool.name}:{one}" for one in (number, *range(10**5)))
            call_id = next(one for one in numbers if one not in self._ids)
            self._ids.add(call_id)
            self._begin_call(call_id)
        return at >= 0

    def _listed(self) -> bool:
        assert self._reader is not None
        text, self._held, over = self._reader.read(self._held)
        self._emit(PartKind.TOOL_ARGUMENTS, text)
        if over:
            self._state = _State.AFTER
        return over

    def _json(self) -> bool:
        end = self._scan.end_of(self._held)
        self._emit(PartKind.TOOL_ARGUMENTS, self._held if end is None else self._held[:end])
        self._held = "" if end is None else self._held[end:]
        if end is not None:
            self._state = _State.TAIL
        return end is not None

    def _raw_input(self) -> bool:
        assert self._form is not None
        if self._raw_begins and self._match is match_squeezed and self._form.raw_begin.endswith("\n"):
            self._held = self._held.removeprefix("\n")
        self._raw_begins = False
        end = self._form.raw_end
        at = self._held.find(end)
        keep = at if at >= 0 else beginning_of(self._held, (end,))
        self._emit(PartKind.TOOL_ARGUMENTS, self._held[:keep])
        self._held = self._held[keep:]
        if at >= 0:
            self._held = self._held[len(end) :]
            self._state = _State.AFTER
        return at >= 0

    def _tail(self) -> bool:
        assert self._form is not None
        if not self._form.end:
            self._state = _State.AFTER
            return True
        found, end, undecided = match_squeezed(self._held, [squeezed(self._form.end)])
        if found is None and undecided:
            return False
        self._held = self._held[end:]
        self._state = _State.AFTER
        return True

    def _after(self) -> bool:
        assert self._form is not None
        heads = self._next
        last = self._plain(self._form.last)
        found, end, undecided = self._match(self._held, [*heads, *([last] if last else [])])
        if found is None and undecided:
            return False
        if found is None:
            self._held = self._held.lstrip(SPACE)
            if not self._held:
                return False  # more white space may come, and it is no content either
            self._state = _State.CONTENT
            return True
        if found == last and last:
            self._held = self._held[end:]
            self._state = _State.GAP
            self._after_reasoning = _State.CONTENT
            return True
        return self._head(heads, _State.CONTENT)
