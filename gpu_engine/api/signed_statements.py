"""Signed statements: JSON claims as a JSON Web Signature in compact form (RFC 7515), with Ed25519 (RFC 8037).

Invariant: a statement has one text. A text that differs in any character, also where base64 would decode to the same
bytes, is refused. Signing and checking need the package `cryptography` (the extra `receipts`); it is imported when it
is used.

Not responsible for: what the claims mean (see receipts.py).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

ALGORITHM = "EdDSA"
TYPE = "lockstep-receipt+jws"
NEEDS = "needs the package cryptography: pip install 'lockstep-engine[receipts]'"


class MissingExtra(ImportError):
    """The package that signs and checks is not installed; the message says how to install it."""


class StatementRefused(ValueError):
    """A text is no statement of the expected key. The message says why."""


class Signer:
    """Signs claims with one private key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.jwk = jwk_of(key.public_key())
        """The public key, as a JSON Web Key."""
        self._header = _segment({"alg": ALGORITHM, "kid": self.jwk["kid"], "typ": TYPE})

    @classmethod
    def of_file(cls, path: Path) -> Signer:
        """Return the signer of a PEM file with an Ed25519 private key. Raises MissingExtra, or ValueError with what is
        wrong with the file."""
        serialization, ed25519 = _cryptography()
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from error
        try:
            key = serialization.load_pem_private_key(content, None)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} holds no private key in PEM without a password") from error
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise ValueError(
                f"{path} holds another kind of key than Ed25519; openssl genpkey -algorithm ed25519 makes one"
            )
        return cls(key)

    def sign(self, claims: dict[str, Any]) -> str:
        """Return the statement of these claims."""
        signed = f"{self._header}.{_segment(claims)}"
        return f"{signed}.{_base64(self._key.sign(signed.encode()))}"

    def __repr__(self) -> str:
        return f"<Signer {self.jwk['kid']}>"


def jwk_of(key: Ed25519PublicKey) -> dict[str, str]:
    """Return a public key as a JSON Web Key; its `kid` is its thumbprint (RFC 7638)."""
    parts = {"crv": "Ed25519", "kty": "OKP", "x": _base64(key.public_bytes_raw())}
    thumbprint = hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).digest()
    return {**parts, "alg": ALGORITHM, "kid": _base64(thumbprint), "use": "sig"}


def read_key(content: str) -> Ed25519PublicKey:
    """Return the public key of a JSON Web Key, or of a PEM text with a public or private key. Raises ValueError."""
    serialization, ed25519 = _cryptography()
    key: Any
    if content.lstrip().startswith("{"):
        try:
            jwk = json.loads(content)
            raw = _bytes(str(jwk["x"]))
            if (jwk["kty"], jwk["crv"]) != ("OKP", "Ed25519"):
                raise ValueError("its kty and crv are not OKP and Ed25519")
            return ed25519.Ed25519PublicKey.from_public_bytes(raw)  # type: ignore[no-any-return]
        except (KeyError, ValueError) as error:
            raise ValueError(f"is no JSON Web Key of an Ed25519 key: {error}") from error
    private = "PRIVATE KEY" in content
    try:
        load = serialization.load_pem_private_key if private else serialization.load_pem_public_key
        key = load(content.encode(), *([None] if private else []))
    except (ValueError, TypeError) as error:
        raise ValueError("is neither a JSON Web Key nor a key in PEM") from error
    key = key.public_key() if private else key
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise ValueError("holds another kind of key than Ed25519")
    return key  # type: ignore[no-any-return]


def checked_claims(statement: str, key: Ed25519PublicKey) -> dict[str, Any]:
    """Return the claims of a statement that `key` has signed. Raises StatementRefused."""
    from cryptography.exceptions import InvalidSignature

    header, claims, signature, signed = _parts(statement)
    kid = jwk_of(key)["kid"]
    if header.get("alg") != ALGORITHM or header.get("typ") != TYPE:
        raise StatementRefused(f"is a statement of another kind: {header.get('typ')!r}, {header.get('alg')!r}")
    if header.get("kid") != kid:
        raise StatementRefused(f"was signed with the key {header.get('kid')}; the given one is {kid}")
    try:
        key.verify(signature, signed)
    except InvalidSignature:
        raise StatementRefused("was changed after it was signed") from None
    return claims


def unchecked_claims(statement: str) -> dict[str, Any]:
    """Return the claims of a statement without a check of its signature. Raises StatementRefused."""
    return _parts(statement)[1]


def _parts(statement: str) -> tuple[dict[str, Any], dict[str, Any], bytes, bytes]:
    """Return header, claims, signature, and the bytes that were signed."""
    segments = statement.split(".")
    if len(segments) != 3:
        raise StatementRefused(f"has {len(segments)} parts between points, not three")
    try:
        header, claims, signature = (_bytes(segment) for segment in segments)
        values = json.loads(header), json.loads(claims)
    except ValueError as error:
        raise StatementRefused(f"is no signed statement: {error}") from None
    if not all(isinstance(value, dict) for value in values):
        raise StatementRefused("is no signed statement: its parts are no JSON objects")
    return (*values, signature, f"{segments[0]}.{segments[1]}".encode())


def _segment(value: dict[str, Any]) -> str:
    return _base64(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def _base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _bytes(segment: str) -> bytes:
    """Return what `_base64` makes this text of. Raises ValueError for any other text."""
    try:
        content = base64.b64decode(segment + "=" * (-len(segment) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("a part is not base64url") from None
    if _base64(content) != segment:
        raise ValueError("a part is not the base64url of its bytes")
    return content


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise MissingExtra(NEEDS) from error
    return serialization, ed25519
