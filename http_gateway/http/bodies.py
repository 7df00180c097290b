"""Request bodies: limited in size, and parsed into their pydantic model.

Invariant: at most `limit` bytes of a body are kept in memory, whatever its header says. A longer body is answered with
413.

Not responsible for: the fields (see wire/).
"""

from __future__ import annotations

import json
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from http_gateway.http.stream import ClientGone
from http_gateway.wire.errors import ApiError
from http_gateway.wire.fields import Fields, problem

MAX_DISCARDED_BYTES = 64 << 20
"""A client reads no answer before it has sent its body, so the rest of one that is too long is read, and dropped."""
_MAX_LENGTH_DIGITS = 18

Body = TypeVar("Body", bound=Fields)


async def read_body(request: Request, model: type[Body], limit: int) -> Body:
    """Return the body as `model`. Raises ApiError that names the field, or 413."""
    data = await _read(request, limit)
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise problem(error, _parsed(data)) from error


async def _read(request: Request, limit: int) -> bytes:
    length = request.headers.get("content-length", "0")
    # Python refuses to read a number of thousands of digits.
    if length.isdecimal() and (len(length) > _MAX_LENGTH_DIGITS or int(length) > limit + MAX_DISCARDED_BYTES):
        raise _too_large(limit)
    data, seen = bytearray(), 0
    try:
        async for chunk in request.stream():
            seen += len(chunk)
            if seen <= limit:
                data += chunk
            elif seen > limit + MAX_DISCARDED_BYTES:
                raise _too_large(limit)
    except ClientDisconnect as error:
        raise ClientGone from error
    if seen > limit:
        raise _too_large(limit)
    return bytes(data)


def _too_large(limit: int) -> ApiError:
    return ApiError(
        f"the body is longer than {limit} bytes (max_body_bytes)",
        status=413,
        code="body_too_large",
        headers={"Connection": "close"},
    )


def _parsed(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
