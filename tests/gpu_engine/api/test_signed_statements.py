"""Statements are JSON Web Signatures as RFC 8037 has them, and a statement has one text."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gpu_engine.api.signed_statements import (
    Signer,
    StatementRefused,
    _base64,
    _bytes,
    checked_claims,
    jwk_of,
    read_key,
    unchecked_claims,
)
from tests.receipt_keys import new_key

CLAIMS = {"answer": {"tokens": 3, "links": "00ff"}, "model": "é"}
RFC_KEY = "nWGxne_9WmC6hEr0kuwsxERJxWl7MmkZcDusAxyuf2A"
"""The private key of RFC 8037, appendix A.1, with the public key, the thumbprint and the signature of A.2 to A.4."""
RFC_PUBLIC = "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"
RFC_THUMBPRINT = "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"
RFC_SIGNED = "eyJhbGciOiJFZERTQSJ9.RXhhbXBsZSBvZiBFZDI1NTE5IHNpZ25pbmc"
RFC_SIGNATURE = "hgyY0il_MGCjP0JzlnLWG1PPOt7-09PGcvMg3AIbQR6dWbhijcNR4ki4iylGjg5BhVsPt9g7sVvpAr_MuM0KAg"


@pytest.fixture
def signer() -> Signer:
    return Signer(Ed25519PrivateKey.generate())


def test_key_thumbprint_and_signature_are_the_rfcs() -> None:
    key = Ed25519PrivateKey.from_private_bytes(_bytes(RFC_KEY))
    jwk = jwk_of(key.public_key())
    assert (jwk["x"], jwk["kid"], jwk["kty"], jwk["crv"]) == (RFC_PUBLIC, RFC_THUMBPRINT, "OKP", "Ed25519")
    signer = Signer(key)
    head, body, signature = signer.sign({"a": 1}).split(".")
    assert _base64(key.sign(RFC_SIGNED.encode())) == RFC_SIGNATURE
    assert _base64(key.sign(f"{head}.{body}".encode())) == signature
    assert json.loads(_bytes(head)) == {"alg": "EdDSA", "kid": RFC_THUMBPRINT, "typ": "lockstep-receipt+jws"}
    assert json.loads(_bytes(body)) == {"a": 1}


def test_a_statement_with_any_other_character_is_refused(signer: Signer) -> None:
    """Also in the last character of the signature, of which base64 leaves four bits unused."""
    statement, key = signer.sign(CLAIMS), read_key(json.dumps(signer.jwk))
    assert checked_claims(statement, key) == unchecked_claims(statement) == CLAIMS
    accepted = []
    for at, character in enumerate(statement):
        for other in {*string.ascii_letters, *string.digits, *"-_.=+/ \n"} - {character}:
            changed = statement[:at] + other + statement[at + 1 :]
            try:
                checked_claims(changed, key)
            except StatementRefused:
                continue
            accepted.append((at, other))
    for changed in (statement + "=", statement + "\n", " " + statement, statement[:-1], statement + "A", "", "a.b"):
        with pytest.raises(StatementRefused):
            checked_claims(changed, key)
    assert accepted == []


def test_a_statement_of_another_key_or_kind_is_refused_with_the_reason(signer: Signer) -> None:
    other = Signer(Ed25519PrivateKey.generate())
    key = read_key(json.dumps(signer.jwk))
    with pytest.raises(StatementRefused, match=f"was signed with the key {other.jwk['kid']}"):
        checked_claims(other.sign(CLAIMS), key)
    _, body, signature = signer.sign(CLAIMS).split(".")
    for header in ({"alg": "none"}, {"alg": "EdDSA", "typ": "JWT", "kid": signer.jwk["kid"]}):
        with pytest.raises(StatementRefused, match="another kind"):
            checked_claims(f"{_base64(json.dumps(header).encode())}.{body}.{signature}", key)
    with pytest.raises(StatementRefused, match="no JSON objects"):
        checked_claims(f"{_base64(b'1')}.{body}.{signature}", key)


def test_a_key_is_read_from_every_form(tmp_path: Path, signer: Signer) -> None:
    path = new_key(tmp_path / "key.pem")
    own = Signer.of_file(path)
    public = read_key(path.read_text())
    pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo).decode()
    assert jwk_of(read_key(pem)) == jwk_of(read_key(json.dumps(own.jwk))) == jwk_of(public) == own.jwk != signer.jwk
    for text in ("", "{}", '{"kty": "RSA", "crv": "Ed25519", "x": "AAAA"}', pem.replace("MC", "XX")):
        with pytest.raises(ValueError, match=r"is neither|is no JSON Web Key"):
            read_key(text)


def test_a_file_without_such_a_key_is_refused_by_its_name(tmp_path: Path) -> None:
    other = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = tmp_path / "key.pem"
    with pytest.raises(ValueError, match=r"cannot read .*key\.pem: No such file"):
        Signer.of_file(path)
    for content, problem in ((b"x", "holds no private key in PEM"), (other, "another kind of key than Ed25519")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"key\.pem {problem}|key\.pem holds {problem}"):
            Signer.of_file(path)
    with pytest.raises(ValueError, match="another kind of key"):
        read_key(other.decode())
