"""The log lines of both processes: text for people, or JSON with one object per line, both with the request's id.

The invariant: a line about a request carries its id, from the task that logs it (`REQUEST_ID`) or from the record
itself (`extra={"request_id": ...}`). Lines of the other process were formatted there and are passed on unchanged.

Not responsible for: what is logged. Prompts, grammars and answers must not appear in a line of level INFO or above.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that the current task works for; a task inherits it from the task that starts it."""

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")


class RequestIdFilter(logging.Filter):
    """A filter for log handlers that adds the current task's request id to each record without one."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass."""
        if not hasattr(record, "request_id"):
            record.request_id = REQUEST_ID.get()
        return True


class TextFormatter(logging.Formatter):
    """Formats a record as the line `date time LEVEL logger: message key=value ... request_id=...`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line without a traceback."""
        fields = (f"{key}={_word(value)}" for key, value in _fields(record).items())
        return " ".join((super().formatMessage(record), *fields))


class JsonFormatter(logging.Formatter):
    """One JSON object: time (UTC), level, logger, message, the fields, request_id, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line. Nothing in the message can break it in two."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class ForwardedFormatter(logging.Formatter):
    """For lines of another process: a line that it formatted is passed on; any other output is formatted by `other`."""

    def __init__(self, other: logging.Formatter) -> None:
        super().__init__()
        self._other = other

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return record.getMessage() if getattr(record, "formatted", False) else self._other.format(record)


def configure(
    level: str, log_format: str, *, forwarded_loggers: Sequence[str] = (), stream: TextIO | None = None
) -> None:
    """Set up logging for this process.

    Args:
        level: one of LEVELS.
        log_format: one of FORMATS.
        forwarded_loggers: names of the loggers that take the lines of another process, with `extra={"formatted": ...}`.
        stream: where the lines go; None is stderr.
    """
    formatter: logging.Formatter = JsonFormatter() if log_format == "json" else TextFormatter()
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter)
    handler.addFilter(RequestIdFilter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for name in forwarded_loggers:
        forwarded = logging.StreamHandler(stream or sys.stderr)
        # Output that is no log line, such as a traceback, stays plain among text and becomes an object among objects.
        forwarded.setFormatter(ForwardedFormatter(formatter) if log_format == "json" else logging.Formatter())
        logger = logging.getLogger(name)
        logger.addHandler(forwarded)
        logger.propagate = False


def json_line(logger: str, level: int, message: str) -> str:
    """Return the JSON object of a line that is printed at any log level."""
    return JsonFormatter().format(logging.LogRecord(logger, level, "", 0, message, None, None))


def level_of(line: str) -> int | None:
    """Return the level of a line that one of the formatters here wrote; None for any other text."""
    if line.startswith("{"):
        try:
            name = json.loads(line).get("level", "")
        except (ValueError, AttributeError):
            return None
        return logging.getLevelNamesMapping().get(str(name).upper())
    return logging.getLevelNamesMapping().get((line.split(" ", 3) + [""] * 3)[2])


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of a line next to its message: those of `extra={"fields": ...}`, and the request's id."""
    fields: dict[str, Any] = dict(getattr(record, "fields", {}))
    if request_id := getattr(record, "request_id", ""):
        fields["request_id"] = request_id
    return fields


def _word(value: object) -> str:
    # A client chooses its request id: the id must not be able to begin a new line or field.
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)
