"""The claims of a receipt: the model, the engine, the request as the engine ran it, and the tokens of the answer.

Invariant: nothing that a client sent or received can be read from the claims. Numbers of the request are plain; token
ids, texts and names are digests keyed with the client's nonce (see gpu_engine/api/receipts.py).

Not responsible for: the signature (api/signed_statements.py), the digests of the model (identity.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from gpu_engine.api.ports import GrammarLibrary
from gpu_engine.api.receipts import VERSION, TokenChain, keyed, prompt_digest
from gpu_engine.api.request import FinishReason, GrammarSpec, Request, SamplingParams, Telemetry, WantedReceipt
from gpu_engine.api.signed_statements import Signer

LibraryOf = Callable[[int], GrammarLibrary]
"""Returns what masks the answers of a value of the Backend enum."""

BACKENDS = {0: "", 1: "xgrammar", 2: "llguidance"}
"""Names of the values of the Backend enum that mask answers."""


@dataclass(frozen=True, slots=True)
class ServerClaims:
    """What every receipt of a server says."""

    model: dict[str, str]
    engine: dict[str, str]


class ReceiptWriter:
    """Writes the receipt of one sequence."""

    def __init__(
        self, request: Request, wanted: WantedReceipt, server: ServerClaims, library_of: LibraryOf, signer: Signer
    ) -> None:
        self._request, self._wanted, self._server = request, wanted, server
        self._library_of, self._signer = library_of, signer
        self._chain = TokenChain(wanted.nonce)
        self.push = self._chain.push

    def write(self, finish: FinishReason, telemetry: Telemetry) -> str:
        """See `Receipt`."""
        return self._signer.sign(self._claims(finish, telemetry))

    def _claims(self, finish: FinishReason, telemetry: Telemetry) -> dict[str, Any]:
        request, nonce = self._request, self._wanted.nonce
        names = [each.name for each in (request.lora, request.prompt_adapter) if each is not None]
        ids = request.text_prompt_ids
        return {
            "version": VERSION,
            "issued": int(time.time()),
            "nonce": keyed(nonce, "nonce", ""),
            "model": self._server.model,
            "engine": self._server.engine,
            "request": self._wanted.request_digest,
            "prompt": {"tokens": len(ids), "digest": prompt_digest(nonce, ids)},
            "grammar": None if request.grammar is None else self._grammar(request.grammar, telemetry),
            "sampling": sampling_claims(nonce, request.sampling),
            "backtracking": None if request.backtracking is None else asdict(request.backtracking),
            "adapters": [keyed(nonce, "adapter", name) for name in names],
            "sequence": request.index,
            "answer": {
                "finish": finish.name,
                "tokens": len(self._chain),
                "links": self._chain.links,
                "end": self._chain.end,
            },
        }

    def _grammar(self, spec: GrammarSpec, telemetry: Telemetry) -> dict[str, Any]:
        library = self._library_of(telemetry.backend)
        options = {
            "kind": spec.kind.name,
            "source": spec.source,
            "whitespace": spec.whitespace,
            "allow_unenforced": spec.allow_unenforced,
            "verify": spec.verify,
            "bounds": dict(spec.bounds),
            "closed_objects": spec.closed_objects,
        }
        return {
            "digest": keyed(self._wanted.nonce, "grammar", options),
            "backend": BACKENDS.get(telemetry.backend, str(telemetry.backend)),
            "version": library.version,
            "defaults": library.defaults,
        }

    def __repr__(self) -> str:
        return f"<ReceiptWriter {self._request.key} {self._chain!r}>"


def sampling_claims(nonce: bytes, sampling: SamplingParams) -> dict[str, Any]:
    """Return the parameters of sampling and stopping with every default applied: numbers are plain, and lists of tokens
    or texts are digests. The seed is a text, because many readers of JSON keep no number of 64 bits."""
    claims: dict[str, Any] = {}
    for name, value in asdict(sampling).items():
        claims[name] = keyed(nonce, name, value) if isinstance(value, tuple) else value
    return claims | {"seed": str(sampling.seed)}
