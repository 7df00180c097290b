"""Grammars that clients compiled ahead of time and may name by id.

Invariant: an id always names the same grammar: it is a digest of the grammar and its options. A client that knows the
grammar can compute the id, and compiling the same grammar again gives the same id; an id is no secret. The grammar
process may lose its compiled grammars at any time (restart, full cache); the text is kept here and compiled again when
a request needs it. Bounded in bytes; the least recently used grammar is evicted first. Each tenant has its own
handles, so no tenant finds or evicts another's. Used on the event loop.

Not responsible for: compiling (see sidecar/compilations.py).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import cast

from gpu_engine.api.errors import GrammarNotConfigured, InvalidRequest, UnknownGrammar
from gpu_engine.api.ports import Compiled
from gpu_engine.api.request import GrammarOwner, GrammarSpec
from gpu_engine.front.grammar_field import check_grammar
from protos.engine.v1 import engine_pb2 as pb

OVERHEAD_BYTES = 512
"""Estimated size of an entry without its text."""


def grammar_id(spec: GrammarSpec, owner: str = "") -> str:
    """Return the id of a grammar. Two owners have two ids for one grammar."""
    options = [spec.kind.name, str(spec.whitespace), str(spec.backend), str(spec.allow_unenforced), str(spec.verify)]
    options += [f"{name}={value}" for name, value in spec.bounds]
    if spec.closed_objects is not None:
        options.append(f"closed_objects={spec.closed_objects}")
    digest = hashlib.blake2b("\0".join((*options, spec.source)).encode(), digest_size=16, key=owner.encode())
    return f"g-{digest.hexdigest()}"


class GrammarHandles:
    """The grammars of one owner, by their ids. `max_bytes` bounds their texts."""

    def __init__(self, max_bytes: int, owner: str = "") -> None:
        self._max_bytes, self._owner = max_bytes, owner
        self._specs: OrderedDict[str, GrammarSpec] = OrderedDict()
        self._bytes = 0

    async def compile(
        self,
        request: pb.CompileRequest,
        compile_spec: Callable[[GrammarSpec], Awaitable[Compiled]] | None,
        owner: GrammarOwner | None = None,
    ) -> pb.CompileResponse:
        """Answer a Compile call.

        `compile_spec` compiles in the grammar process, for `owner`; None: the server has none. Raises what
        `check_grammar` and `compile_spec` raise, and GrammarNotConfigured.
        """
        if not request.HasField("grammar"):
            raise InvalidRequest("grammar", "is required")
        if request.grammar.WhichOneof("spec") == "grammar_id":
            raise InvalidRequest("grammar.grammar_id", "is returned by Compile; give the grammar itself")
        spec = check_grammar(request.grammar)
        if compile_spec is None:
            raise GrammarNotConfigured("grammar: this server runs without a grammar process (its setting grammar=none)")
        compiled = await compile_spec(spec if owner is None else replace(spec, owner=owner))
        return pb.CompileResponse(
            grammar_id=self.keep(spec),
            backend=cast("pb.Backend", compiled.backend),
            cache_hit=compiled.cache_hit,
            compile_ms=compiled.compile_ms,
            memory_bytes=compiled.memory_bytes,
            min_tokens=compiled.min_tokens,
            known_answer_tokens=compiled.known_answer_tokens,
            warnings=compiled.warnings,
        )

    def keep(self, spec: GrammarSpec) -> str:
        """Store a grammar and return its id; older grammars are evicted to make room."""
        name = grammar_id(spec, self._owner)
        if name not in self._specs:
            self._specs[name] = spec
            self._bytes += _size(spec)
        self._specs.move_to_end(name)
        while self._bytes > self._max_bytes and len(self._specs) > 1:
            self._bytes -= _size(self._specs.popitem(last=False)[1])
        return name

    def spec(self, name: str) -> GrammarSpec:
        """Return the grammar with this id. Raises UnknownGrammar."""
        spec = self._specs.get(name)
        if spec is None:
            raise UnknownGrammar(f"grammar.grammar_id: {name[:64]!r} is not known to this server; call Compile (again)")
        self._specs.move_to_end(name)
        return spec

    def __repr__(self) -> str:
        return f"<GrammarHandles {len(self._specs)} grammars, {self._bytes} bytes>"


def _size(spec: GrammarSpec) -> int:
    return OVERHEAD_BYTES + len(spec.source.encode())
