"""Files with receipts and the request that they are of: written by `generate --receipt`, read by the other commands.

Not responsible for: signatures, and what a receipt says (see receipts.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from gpu_engine.api.receipts import MIN_NONCE_BYTES
from gpu_engine.cli.inputs import json_of, read_text
from lockstep_client.wire import engine_pb2 as pb


@dataclass(slots=True)
class Receipted:
    """Receipts with the request that they are of."""

    receipts: list[str] = field(default_factory=list)
    request: pb.GenerateRequest | None = None
    body: dict[str, Any] | None = None
    """The request as a body of the HTTP API, in place of `request`."""

    @classmethod
    def read(cls, receipt: str, request: str | None, *, is_body: bool = False) -> Receipted:
        """Return what the arguments RECEIPT and --request name; `is_body`: that is a body of the HTTP API. Raises
        ValueError that names the argument."""
        found = cls()
        content = read_text("RECEIPT", receipt).strip()
        if content.startswith("{"):
            whole = json_of("RECEIPT", content)
            found.receipts = [str(each) for each in whole.get("receipts", ())]
            found.request = _request_of("RECEIPT", whole.get("request"))
        else:
            found.receipts = content.split()
        if not found.receipts:
            raise ValueError(f"RECEIPT: {receipt} has no receipt")
        if request is not None:
            value = json_of("--request", read_text("--request", request))
            if is_body and not isinstance(value, dict):
                raise ValueError(f"--request: {request} is no JSON object")
            found.body = value if is_body else None
            found.request = None if is_body else _request_of("--request", value)
        return found

    def write(self, path: str) -> None:
        """Write the file. Raises ValueError."""
        assert self.request is not None
        content = {"request": json_format.MessageToDict(self.request), "receipts": self.receipts}
        try:
            Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--receipt: cannot write {path}: {error.strerror}") from error

    @property
    def nonce(self) -> bytes:
        """The request's nonce. Raises ValueError where there is none."""
        nonce = b"" if self.request is None else self.request.response.receipt_nonce
        if self.body is not None:
            nonce = bytes.fromhex(str(self.body.get("receipt_nonce", "")))
        if len(nonce) < MIN_NONCE_BYTES:
            raise ValueError("--request: the request is required, with its nonce")
        return nonce


def _request_of(flag: str, value: Any) -> pb.GenerateRequest | None:
    if value is None:
        return None
    try:
        return json_format.ParseDict(value, pb.GenerateRequest())
    except json_format.ParseError as error:
        raise ValueError(f"{flag}: is no GenerateRequest: {error}") from None
