"""How the engine's log lines look: text for people, or JSON with one object a line, in both with the request's id.

The invariant: a line that concerns a request carries its id, from the task it was logged in (`REQUEST_ID`) or from the
record itself; prompts and grammars never stand in a line of level INFO or above. Lines of the grammar process were
formatted over there and are passed on as they are. Not here: what is logged.
"""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Of the request that the current task works for; tasks inherit it from the one that starts them."""

FORMATS = ("text", "json")


def about(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of a line beside its message: those of `extra={"fields": ...}`, and the request's id."""
    fields: dict[str, Any] = dict(getattr(record, "fields", {}))
    if request_id := getattr(record, "request_id", ""):
        fields["request_id"] = request_id
    return fields


class RequestIdFilter(logging.Filter):
    """Of a handler: notes the request's id in a record, where the record does not say one itself."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let everything pass."""
        if not hasattr(record, "request_id"):
            record.request_id = REQUEST_ID.get()
        return True


class TextFormatter(logging.Formatter):
    """ "date time LEVEL logger: message key=value ... request_id=..."."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line without a traceback."""
        fields = (f"{key}={_word(value)}" for key, value in about(record).items())
        return " ".join((super().formatMessage(record), *fields))


class JsonFormatter(logging.Formatter):
    """One JSON object: time (UTC), level, logger, message, the fields, request_id, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; what a message quotes cannot break it."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **about(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def json_line(logger: str, level: int, message: str) -> str:
    """Return the object of a line that is printed whatever the level is."""
    return JsonFormatter().format(logging.LogRecord(logger, level, "", 0, message, None, None))


class ForwardedFormatter(logging.Formatter):
    """For lines of the grammar process: what it formatted stays as it is; other output becomes a line in `format`."""

    def __init__(self, other: logging.Formatter) -> None:
        super().__init__()
        self._other = other

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return record.getMessage() if getattr(record, "formatted", False) else self._other.format(record)


def configure(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Log to `stream` (stderr) from now on: our own lines, and those that the grammar process sends."""
    formatter: logging.Formatter = JsonFormatter() if log_format == "json" else TextFormatter()
    ours, forwarded = logging.StreamHandler(stream or sys.stderr), logging.StreamHandler(stream or sys.stderr)
    ours.setFormatter(formatter)
    ours.addFilter(RequestIdFilter())
    logging.basicConfig(level=level.upper(), handlers=[ours])
    # Text that is no log line, a traceback say, stays as it is among text, and becomes an object among objects.
    forwarded.setFormatter(ForwardedFormatter(formatter) if log_format == "json" else logging.Formatter())
    grammar_log = logging.getLogger("grammar_service")
    grammar_log.addHandler(forwarded)
    grammar_log.propagate = False


def level_of(line: str) -> int | None:
    """Return the level of a line that the grammar process formatted, as text or as JSON; None for any other text."""
    if line.startswith("{"):
        try:
            name = json.loads(line).get("level", "")
        except (ValueError, AttributeError):
            return None
        return logging.getLevelNamesMapping().get(str(name).upper())
    return logging.getLevelNamesMapping().get((line.split(" ", 3) + [""] * 3)[2])


def _word(value: object) -> str:
    # A client chooses its request id: it must not be able to begin a line of its own.
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)
