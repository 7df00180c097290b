"""What differs between the claims of two receipts of one request and nonce, and why it may.

Invariant: pure. Two receipts without a difference name the same model, engine, request and tokens; when each was issued
is no difference.

Not responsible for: sending a request again (see receipts.py), signatures (see api/signed_statements.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpu_engine.api.receipts import first_difference

_NO_DIFFERENCE = frozenset({"issued", "sequence", "answer.links", "answer.end"})
_WHY = {
    "version": "the receipts have other rules",
    "nonce": "the nonce is another one, so no digest can be compared",
    "model.type": "it is another model",
    "model.weights": "it is another model, or the same one in other files",
    "model.tokenizer": "another tokenizer or chat template makes other tokens of the same text",
    "engine.name": "it is another engine",
    "engine.version": "another release may round or sample in another way; its CHANGELOG says so",
    "engine.numerics": "another device, unit, dtype, quantisation or kv_cache_dtype rounds in another way",
    "request": "the request is another one",
    "prompt": "other tokens of the prompt: another text, tokenizer or chat template",
    "grammar.digest": "the grammar is another one",
    "grammar.backend": "another library may allow other texts",
    "grammar.version": "another release of the library may allow other texts",
    "grammar.defaults": "settings of the grammar process hold where the request leaves them open",
    "sampling": "the request is another one, or the server has other defaults or another longest context",
    "backtracking": "the request is another one, or the server has other defaults",
    "adapters": "the request names another adapter",
    "answer.finish": "the answer ended in another way",
    "answer.tokens": "the answer has another length",
}
_CAUSES = ("model.", "engine.", "request", "prompt.", "grammar", "sampling.", "backtracking", "adapters")


@dataclass(frozen=True, slots=True)
class Difference:
    """A field of two receipts with different values."""

    field: str
    was: Any
    now: Any
    why: str

    def __str__(self) -> str:
        return f"{self.field}: was {self.was}, is {self.now} ({self.why})"


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Return what differs, in the order of the claims; the tokens come last."""
    before, after = dict(_flat(was)), dict(_flat(now))
    found = [
        Difference(name, before.get(name), after.get(name), _why(name))
        for name in dict.fromkeys((*before, *after))
        if name not in _NO_DIFFERENCE and before.get(name) != after.get(name)
    ]
    token = first_difference(str(before["answer.links"]), str(after["answer.links"]))
    if token is not None or before["answer.end"] != after["answer.end"]:
        causes = [each.field for each in found if each.field.startswith(_CAUSES)]
        why = f"{', '.join(causes)} may explain it" if causes else "nothing that the receipts name explains it"
        at = before["answer.tokens"] if token is None else token
        found.append(Difference("answer", f"equal for {at} tokens", f"another token at place {at}", why))
    return found


def _why(name: str) -> str:
    while name not in _WHY and "." in name:
        name = name.rpartition(".")[0]
    return _WHY.get(name, _WHY["request"] if name == "grammar" else "it is not known here")


def _flat(claims: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in claims.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
