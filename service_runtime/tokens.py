"""Bearer tokens from a file: how the file reads, and how a token that a client sent is looked up.

Invariant: tokens are stored as digests and compared in constant time; a token of a file that is malformed is an error
that names the setting, the file and the line, never the token.

Not responsible for: the headers that carry a token (see gpu_engine/front/port/auth.py and http_gateway/http/keys.py),
and tokens that belong to tenants (see tenants.py).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from service_runtime.from_files import FromFiles, read_bytes

MIN_TOKEN_CHARS = 16
"""Shorter tokens can be guessed."""

Digests = tuple[bytes, ...]


def token_file(path: Path, setting: str = "auth_token_file") -> FromFiles[Digests]:
    """Return the tokens of the file, read again when it changes. Raises ValueError with the line and the reason."""
    return FromFiles([path], lambda: parse_tokens(read_bytes(setting, path), path, setting))


def parse_tokens(content: bytes, path: Path, setting: str = "auth_token_file") -> Digests:
    """Return the digests of the tokens, one per line; empty lines and lines that begin with # are skipped."""
    return tuple(hashlib.sha256(token).digest() for token in _tokens(content, path, setting))


def first_token(path: Path, setting: str) -> str:
    """Return the first token of the file, to be sent. Raises ValueError with the line and the reason."""
    return _tokens(read_bytes(setting, path), path, setting)[0].decode("ascii")


def known(token: bytes, digests: Iterable[bytes]) -> bool:
    """Return whether `digests` has the digest of the token; takes equally long for right and wrong tokens."""
    digest, found = hashlib.sha256(token).digest(), False
    for candidate in digests:
        found |= hmac.compare_digest(candidate, digest)
    return found


def check_token(token: bytes) -> str | None:
    """Return what is wrong with a token of a file; None: nothing."""
    if len(token) >= MIN_TOKEN_CHARS and token.isascii() and token.decode("ascii").isprintable() and b" " not in token:
        return None
    return (
        f"a token has at least {MIN_TOKEN_CHARS} printable ASCII characters and no space; `openssl rand -hex 32` makes "
        "one"
    )


def _tokens(content: bytes, path: Path, setting: str) -> list[bytes]:
    tokens = []
    for number, line in enumerate(content.splitlines(), 1):
        token = line.strip()
        if not token or token.startswith(b"#"):
            continue
        if (problem := check_token(token)) is not None:
            raise ValueError(f"{setting}: {path}, line {number}: {problem}")
        tokens.append(token)
    if not tokens:
        raise ValueError(f"{setting}: {path} holds no token; `openssl rand -hex 32 >{path}` makes one")
    return tokens
