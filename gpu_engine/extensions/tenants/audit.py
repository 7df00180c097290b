"""The audit log: a line of JSON for each request and each other call of a server with tenants.

Invariant: a line says who called, when, which method, how many tokens, and how it ended. No line has a prompt, an
answer, a grammar, an error's text, which may quote one, or a token. A line that cannot be written is lost and costs no
request; the server's log says so once, until lines can be written again.

Not responsible for: the access log, which is about the server's own work (see ops/access.py).
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from gpu_engine.ops.access import CallRecord

log = logging.getLogger(__name__)


class AuditLog:
    """Appends to one file, which may be moved away (by logrotate, for example). Used on the event loop."""

    def __init__(self, path: Path) -> None:
        """Open the file, which, where it is new, only its user can read. Raises OSError."""
        self._file = _AuditFile(path)

    def called(self, tenant: str, method: str, status: str, seconds: float) -> None:
        """Write the line of a call. Args: `tenant` is "" for a stranger, `method` as gRPC names it."""
        self._write(tenant, method, status, seconds, {})

    def requested(self, record: CallRecord) -> None:
        """Write the line of a request, which has ended."""
        fields: dict[str, Any] = {}
        if record.request_id:
            fields["request_id"] = record.request_id
        if record.ended:
            fields["prompt_tokens"] = record.prompt_tokens
            fields["completion_tokens"] = record.completion_tokens
            fields["finish"] = [each.finish.name for each in record.ended]
        if record.params is not None and record.params.grammar is not None:
            fields["grammar"] = record.params.grammar.kind.name.lower()
        self._write(record.tenant, record.method, record.status, record.ended_s - record.arrived_s, fields)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, tenant: str, method: str, status: str, seconds: float, fields: dict[str, Any]) -> None:
        when = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"time": when, "tenant": tenant, "method": method, "status": status, "ms": round(seconds * 1e3, 3)}
        self._file.write(json.dumps(line | fields))

    def __repr__(self) -> str:
        return f"<AuditLog {self._file.baseFilename} lost={self._file.lost}>"


class _AuditFile(logging.handlers.WatchedFileHandler):
    """Appends lines, and opens the file again when another one has its place."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        self.lost = 0
        self._failing = False

    def _open(self) -> TextIOWrapper:
        def for_user(path: str, flags: int) -> int:
            return os.open(path, flags, 0o600)

        return open(self.baseFilename, "a", encoding="utf-8", opener=for_user)

    def write(self, line: str) -> None:
        """Append a line. Does not raise OSError."""
        before = self.lost
        self.handle(logging.LogRecord("audit", logging.INFO, "", 0, line, None, None))
        if self.lost == before and self._failing:
            self._failing = False
            log.info("audit_log: lines are written again; %d were lost", self.lost)

    def handleError(self, record: logging.LogRecord) -> None:
        """Count a line that was lost."""
        self.lost += 1
        if not self._failing:
            self._failing = True
            log.error("audit_log: a line could not be written", exc_info=True)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line of the record."""
        try:
            super().emit(record)
        except OSError:  # of the look at whether the file was moved, which logging does not guard
            self.handleError(record)
