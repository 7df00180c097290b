"""How the sidecar's log lines look: text for people, or JSON with one object a line.

Invariant: a line about a request carries its id, from the record's `request_id` (`extra={"request_id": ...}`); prompts
and grammars never stand in a line of level INFO or above. Not here: what is logged.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

FORMATS = ("text", "json")


class TextFormatter(logging.Formatter):
    """ "date time LEVEL logger: message", then the request id when there is one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line without a traceback."""
        line = super().formatMessage(record)
        request_id = getattr(record, "request_id", "")
        return f"{line} request_id={request_id}" if request_id else line


class JsonFormatter(logging.Formatter):
    """One JSON object: time (UTC), level, logger, message, request_id and exception where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; what a message quotes cannot break it."""
        fields: dict[str, str] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", ""):
            fields["request_id"] = request_id
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def configure(level: str, log_format: str) -> None:
    """Log to stderr from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
