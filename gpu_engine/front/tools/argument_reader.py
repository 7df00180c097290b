"""Reads the arguments of one call that are written one by one, as the text of a JSON object.

Invariant: the text of the object depends only on the text of the arguments and never on the pieces in which it arrives.
Strings and JSON are passed on as they come; a value whose type its whole text decides is held back until it ends.
Not responsible for: where the arguments begin (see parts.py), which values they may have (see parameters.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from gpu_engine.front.tools.formats import ToolFormat
from gpu_engine.front.tools.markers import SPACE, JsonScan, beginning_of
from gpu_engine.front.tools.parameters import Form, Parameter


class ArgumentReader:
    """Reads one call. Used by one task at a time."""

    def __init__(self, form: ToolFormat, parameters: Sequence[Parameter]) -> None:
        assert form.argument is not None
        self._end, self._last = form.argument.end, form.end
        self._begins: dict[str, tuple[Parameter, bool]] = {}
        """The text before a value -> (its parameter, it is JSON because this text says so)."""
        for parameter in parameters:
            # A format that says which values are JSON leaves every other one a string.
            says = bool(form.argument.json_begin)
            text = replace(parameter, form=Form.TEXT) if says else parameter
            self._begins[form.argument.begin_of(parameter.name, text=True)] = text, False
            if says:
                self._begins[form.argument.begin_of(parameter.name, text=False)] = parameter, True
        self._open: Parameter | None = None
        self._is_json = False
        self._scan: JsonScan | None = None
        """Of a value that is JSON and has not ended: a string in it may have the text that ends an argument."""
        self._begun = self._written = False
        """The object, and the value that is open, have some text."""

    def read(self, held: str) -> tuple[str, str, bool]:
        """Return the new text of the object, what of `held` may still become a marker, and whether the call is over."""
        out: list[str] = []
        while True:
            if self._open is not None:
                text, held, over = self._json(held) if self._is_json else self._text(self._open, held)
                out.append(text)
                if not over:
                    return "".join(out), held, False
                self._open = None
            elif held.startswith(self._last):
                out.append("}" if self._begun else "{}")
                return "".join(out), held[len(self._last) :], True
            else:
                begin = next((one for one in self._begins if held.startswith(one)), None)
                if begin is None:
                    return "".join(out), held, False
                self._open, says_json = self._begins[begin]
                self._is_json = says_json or self._open.form is Form.JSON
                self._scan = JsonScan() if self._is_json else None
                self._written, held = False, held[len(begin) :]
                out.append((", " if self._begun else "{") + json.dumps(self._open.name, ensure_ascii=False) + ": ")
                self._begun = True

    def finish(self, held: str) -> str:
        """Return the rest of the object's text: no more text comes, and the call is not over."""
        if self._open is None or self._is_json:
            return ""
        return self._piece(held) if self._open.form is Form.TEXT else self._open.value(held)

    def _json(self, held: str) -> tuple[str, str, bool]:
        """Read a value that is JSON, and the end of its argument; return as `read` does."""
        text = ""
        if self._scan is not None:
            held = held if self._written else held.lstrip(SPACE)
            self._written = bool(held)
            ended = self._scan.end_of(held)
            if ended is None:
                return held, "", False
            text, held, self._scan = held[:ended], held[ended:], None
        at = held.find(self._end)
        return (text, held, False) if at < 0 else (text, held[at + len(self._end) :], True)

    def _text(self, parameter: Parameter, held: str) -> tuple[str, str, bool]:
        """Read a value that is written without quotation marks, and the end of its argument; return as `read` does."""
        at, streams = held.find(self._end), parameter.form is Form.TEXT
        if at >= 0:
            value, rest = held[:at], held[at + len(self._end) :]
            if not streams:
                return parameter.value(value), rest, True
            text = self._piece(value)
            return text + ('"' if self._written else '""'), rest, True
        if not streams:
            return "", held, False
        keep = beginning_of(held, (self._end,))
        return self._piece(held[:keep]), held[keep:], False

    def _piece(self, text: str) -> str:
        """Return a piece of a string, which is passed on as it comes."""
        if not text:
            return ""
        begin = "" if self._written else '"'
        self._written = True
        return begin + json.dumps(text, ensure_ascii=False)[1:-1]
