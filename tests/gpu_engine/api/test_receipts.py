"""The digests of receipts are computed in one way, cover what changes a token, and say nothing without the nonce."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from gpu_engine.api.receipts import (
    CHANGE_NO_TOKEN,
    TokenChain,
    canonical,
    first_difference,
    keyed,
    prompt_digest,
    request_digest,
)
from lockstep_client.wire import engine_pb2 as client_pb
from protos.engine.v1 import engine_pb2 as pb

NONCE = b"0123456789abcdef"


def test_a_digest_is_the_hmac_of_label_and_canonical_json() -> None:
    text = b"prompt\0[1,2,300]"
    expected = hmac.new(NONCE, text, hashlib.sha256).hexdigest()
    assert prompt_digest(NONCE, [1, 2, 300]) == keyed(NONCE, "prompt", [1, 2, 300]) == expected
    assert len({prompt_digest(NONCE, [1]), prompt_digest(NONCE[::-1], [1]), keyed(NONCE, "other", [1])}) == 3


def test_the_canonical_form_of_a_request_does_not_change() -> None:
    request = pb.GenerateRequest(
        request_id="r",
        text="hé",
        priority=3,
        sampling=pb.SamplingParams(temperature=0.1, seed=2, n=3, logit_bias={7: 1.5, 5: -2}, stop=["a"]),
        grammar=pb.Grammar(choice=pb.Choice(choices=["x", "y"]), backend=pb.BACKEND_AUTO),
        response=pb.ResponseOptions(whole=True, receipt_nonce=NONCE),
    )
    assert canonical(request) == {
        "text": "hé",
        "sampling": {
            "temperature": "0x1.99999a0000000p-4",
            "stop": ["a"],
            "logit_bias": {"5": "-0x1.0000000000000p+1", "7": "0x1.8000000000000p+0"},
        },
        "grammar": {"choice": {"choices": ["x", "y"]}, "backend": 3},
    }
    of_client = client_pb.GenerateRequest.FromString(request.SerializeToString())
    assert request_digest(NONCE, of_client) == request_digest(NONCE, request)


def test_every_field_of_a_request_is_in_its_digest_or_is_named_as_changing_no_token() -> None:
    every = dict(_requests_of_one_field())
    assert len(every) > 90
    left_out = {path for path in every if path in CHANGE_NO_TOKEN or path.partition(".")[0] in CHANGE_NO_TOKEN}
    assert {path for path, request in every.items() if canonical(request) == {}} == left_out
    assert all(any(path == name or path.startswith(f"{name}.") for path in every) for name in CHANGE_NO_TOKEN)


def _requests_of_one_field() -> Iterator[tuple[str, pb.GenerateRequest]]:
    """Yield a request with a value in one scalar field, for each of them, and its path."""
    for path in _paths(pb.GenerateRequest.DESCRIPTOR):
        request = pb.GenerateRequest()
        message: Any = request
        *outer, name = path.split(".")
        for part in outer:
            message = getattr(message, part)
            message = message.add() if hasattr(message, "add") else message
        field = message.DESCRIPTOR.fields_by_name[name]
        value = _VALUES.get(field.cpp_type, b"b" if field.type == FieldDescriptor.TYPE_BYTES else "s")
        if name == "logit_bias":
            message.logit_bias[7] = 1.0
        elif field.is_repeated:
            getattr(message, name).append(value)
        else:
            setattr(message, name, value)
        yield path, request


def _paths(descriptor: Any, prefix: str = "") -> Iterator[str]:
    for field in descriptor.fields:
        path = f"{prefix}{field.name}"
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            yield path
        else:
            yield from _paths(field.message_type, f"{path}.")


_KIND = FieldDescriptor
_VALUES: dict[int, Any] = {
    **dict.fromkeys((_KIND.CPPTYPE_INT32, _KIND.CPPTYPE_UINT32, _KIND.CPPTYPE_UINT64, _KIND.CPPTYPE_ENUM), 1),
    _KIND.CPPTYPE_FLOAT: 0.5,
    _KIND.CPPTYPE_BOOL: True,
}


def test_a_chain_tells_the_first_token_that_differs() -> None:
    tokens = [5, 1 << 31, 0, 0, 9]
    chain, again = TokenChain(NONCE), TokenChain(NONCE)
    chain.push(tokens)
    for token in tokens:  # in other pieces
        again.push([token])
    assert (again.links, again.end, len(again)) == (chain.links, chain.end, 5)
    assert first_difference(chain.links, again.links) is None
    for at in range(5):
        other = TokenChain(NONCE)
        other.push([*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]])
        assert first_difference(chain.links, other.links) == at
        assert other.links[: 8 * at] == chain.links[: 8 * at]
        assert other.end != chain.end
    shorter = TokenChain(NONCE)
    shorter.push(tokens[:3])
    assert first_difference(chain.links, shorter.links) == 3
    assert first_difference(shorter.links, chain.links) == 3


@pytest.mark.parametrize("token", [0, 7])
def test_equal_tokens_have_other_links_at_other_places_and_with_another_nonce(token: int) -> None:
    chain, other = TokenChain(NONCE), TokenChain(NONCE[::-1])
    chain.push([token] * 8)
    other.push([token] * 8)
    links = [text[at : at + 8] for text in (chain.links, other.links) for at in range(0, 64, 8)]
    assert len(set(links)) == 16
