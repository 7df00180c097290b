"""A backend of vLLM's structured outputs: the grammar process in place of a library in the engine core.

vLLM loads `register` by its entry point `vllm.general_plugins` in each of its processes. With LOCKSTEP_VLLM=1 the
backend that is called "guidance" becomes this one; without it nothing changes. vLLM has no registry of these backends,
so three attributes are replaced, and only in a layout that `check_layout` knows:

    vllm.v1.structured_output.GuidanceBackend                        the class that `grammar_init` makes
    StructuredOutputManager._create_grammar                          so that the request's `max_tokens` is known
    vllm.v1.structured_output.backend_guidance.validate_guidance_grammar    so that no library reads a schema in the
                                                                            API server

Invariant: no error of a grammar leaves this module as an exception in the scheduler's loop, and no position is
unmasked. A matcher that fails allows only stop tokens and rejects them when they arrive, which ends its request with an
error.

Not responsible for: rows and restarts (see client.py).
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lockstep_grammar.client import Compiled, Grammars, Kind, Limits, Matcher, Row, has
from lockstep_grammar.errors import GrammarError, InvalidGrammar
from shared_mem.layout import MAX_ROWS, MAX_SLOTS

log = logging.getLogger(__name__)

SWITCH = "LOCKSTEP_VLLM"
PYTHON = "LOCKSTEP_SIDECAR_PYTHON"
VERIFY = "LOCKSTEP_VLLM_VERIFY"
UNENFORCED = "LOCKSTEP_VLLM_ALLOW_UNENFORCED"
_KINDS = {
    "JSON": Kind.JSON_SCHEMA,
    "JSON_OBJECT": Kind.JSON_OBJECT,
    "REGEX": Kind.REGEX,
    "CHOICE": Kind.CHOICE,
    "STRUCTURAL_TAG": Kind.STRUCTURAL_TAG,
}
_METHODS = {
    "StructuredOutputGrammar": {
        "accept_tokens", "fill_bitmask", "is_terminated", "reset", "rollback", "validate_tokens",
    },
    "StructuredOutputBackend": {"allocate_token_bitmask", "compile_grammar", "destroy"},
}  # fmt: skip


class Bitmask(Protocol):
    """vLLM's mask, a torch tensor int32 [positions, W]."""

    def numpy(self) -> npt.NDArray[np.int32]:
        """Return the same memory as an array."""


class UnknownLayout(RuntimeError):
    """This vLLM is not built as the adapter expects."""


class LockstepGrammar:
    """One request's grammar: vLLM's `StructuredOutputGrammar` over a matcher."""

    def __init__(self, matcher: Matcher, stops: Sequence[int], extra: Sequence[int] = (), request_id: str = "") -> None:
        """Args: `stops` are the grammar's stop tokens; `extra`, the request's other ones, are legal only with them."""
        self._matcher, self._stops, self._extra, self._request_id = matcher, stops, extra, request_id
        self._failed = False

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Advance over committed tokens; False: one is illegal, or the matcher has failed."""
        if self._failed:
            return False
        try:
            for token in tokens:
                if self._matcher.terminated:
                    return True
                if not self._matcher.accept(token):
                    # A stop token of the request that the grammar does not have: vLLM ends the answer there itself.
                    return token in self._extra and self._may_end()
            self._matcher.post()
        except GrammarError as error:
            self._fail(error)
            return False
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Return the legal prefix of drafts, without moving. Its rows are there when they are asked for."""
        if self._failed or self._matcher.terminated:
            return []
        drafts = tokens[: tokens.index(-1)] if -1 in tokens else tokens
        try:
            rows = self._matcher.rows(drafts[: MAX_ROWS - 1])
        except GrammarError as error:
            self._fail(error)
            return []
        legal = 0
        while legal < min(len(drafts), len(rows)) and has(rows[legal], drafts[legal]):
            legal += 1
        return list(drafts[:legal])

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        if not self._failed:
            self._matcher.rollback(num_tokens)

    def fill_bitmask(self, bitmask: Bitmask, batch_index: int) -> None:
        """Write the row of the next token."""
        target = bitmask.numpy()[batch_index]
        target[:] = 0
        try:
            if self._failed:
                raise InvalidGrammar("the matcher has failed before")
            row = self._matcher.row()
        except GrammarError as error:
            self._fail(error)
            for token in self._stops:
                _set(target, token)
            return
        target[: len(row)] = row
        if not self._may_end():
            for token in self._extra:
                target.view(np.uint32)[token >> 5] &= np.uint32(0xFFFFFFFF ^ 1 << (token & 31))

    def is_terminated(self) -> bool:
        """The answer is complete, and its stop token is accepted."""
        return not self._failed and self._matcher.terminated

    def reset(self) -> None:
        """Go back to the start of the answer."""
        self.rollback(len(self._matcher.tokens))

    def _may_end(self) -> bool:
        row = self._matcher.row()
        return any(has(row, token) for token in self._stops)

    def _fail(self, error: GrammarError) -> None:
        if not self._failed:
            self._failed = True
            log.error("request %s ends: %s", self._request_id, error)


class LockstepBackend:
    """vLLM's `StructuredOutputBackend`: one grammar process for an engine core."""

    def __init__(self, vllm_config: Any, tokenizer: Any, vocab_size: int) -> None:
        self.vllm_config, self.tokenizer, self.vocab_size = vllm_config, tokenizer, vocab_size
        self._grammars = Grammars(
            tokenizer.backend_tokenizer.to_str().encode(),
            vocab_size,
            sorted(_stop_ids(vllm_config, tokenizer)),
            max_matchers=min(2 * vllm_config.scheduler_config.max_num_seqs, MAX_SLOTS),
            max_drafts=min(vllm_config.num_speculative_tokens, MAX_ROWS - 1),
            limits=_limits(os.environ),
            python=os.environ.get(PYTHON, ""),
        )

    def compile_grammar(
        self, request_type: Any, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> LockstepGrammar:
        """Compile in the process; runs in a thread of vLLM's. An error ends only this request."""
        kind = _KINDS.get(request_type.name)
        if kind is None:
            kind = Kind.LARK if "::=" not in grammar_spec else Kind.EBNF
        compiled: Compiled = self._grammars.compile(
            grammar_spec, kind, verify=_on(os.environ, VERIFY), allow_unenforced=_on(os.environ, UNENFORCED)
        )
        for warning in compiled.warnings:
            log.warning("request %s: %s", _request.id, warning)
        stops = self._grammars.stop_token_ids
        extra = sorted((stop_token_ids or set()).difference(stops))
        matcher = compiled.open(_request.max_tokens)
        # Built here, and not in the scheduler's thread: the first row of a hostile grammar delays no other request.
        matcher.row()
        return LockstepGrammar(matcher, stops, extra, _request.id)

    def allocate_token_bitmask(self, max_num_seqs: int) -> Any:
        """Return an int32 tensor [positions, W]."""
        import torch

        return torch.full((max_num_seqs, -(-self.vocab_size // 32)), -1, dtype=torch.int32)

    def destroy(self) -> None:
        """End the process."""
        self._grammars.close()

    @staticmethod
    def is_tokenizer_supported(tokenizer: Any) -> bool:
        """Return whether the tokenizer has a tokenizer.json."""
        return hasattr(tokenizer, "backend_tokenizer")


class _Request(threading.local):
    """The request whose grammar this thread compiles; `compile_grammar` is not told."""

    id = ""
    max_tokens = 0


_request = _Request()


def register() -> None:
    """Put the backend in place of vLLM's "guidance" where LOCKSTEP_VLLM=1. Raises UnknownLayout."""
    if not _on(os.environ, SWITCH):
        return
    from vllm.v1 import structured_output
    from vllm.v1.structured_output import backend_guidance, backend_types

    install(structured_output, backend_guidance, backend_types)


def install(structured_output: Any, backend_guidance: Any, backend_types: Any) -> None:
    """Replace the three attributes in these modules; a second call changes nothing. Raises UnknownLayout."""
    manager = structured_output.StructuredOutputManager
    if structured_output.GuidanceBackend is LockstepBackend:
        return
    check_layout(structured_output, backend_guidance, backend_types)
    backend_types.StructuredOutputGrammar.register(LockstepGrammar)
    structured_output.GuidanceBackend = LockstepBackend
    backend_guidance.validate_guidance_grammar = check_request
    manager._create_grammar = _with_request(manager._create_grammar)
    log.info("vLLM's backend guidance is now the grammar process of Lockstep")


def check_layout(structured_output: Any, backend_guidance: Any, backend_types: Any) -> None:
    """Raise UnknownLayout where one of the names that are used or replaced is missing, or an interface has grown."""
    for owner, name in (
        (structured_output, "GuidanceBackend"),
        (structured_output.StructuredOutputManager, "_create_grammar"),
        (backend_guidance, "validate_guidance_grammar"),
        (backend_types, "StructuredOutputGrammar"),
        (backend_types, "StructuredOutputBackend"),
    ):
        if not hasattr(owner, name):
            raise UnknownLayout(f"this vLLM has no {owner.__name__}.{name}: the adapter was written for vLLM 0.32")
    for name, methods in _METHODS.items():
        found = set(getattr(backend_types, name).__abstractmethods__)
        if found != methods:
            odd = ", ".join(sorted(found ^ methods))
            raise UnknownLayout(f"vLLM's {name} differs in {odd}: the adapter was written for vLLM 0.32")


def check_request(sampling_params: Any, tokenizer: Any = None) -> None:
    """Check in the API server only that a schema is JSON: everything else is judged by the grammar process."""
    document = sampling_params.structured_outputs.json
    if isinstance(document, str):
        json.loads(document)  # its ValueError is vLLM's 400


def _with_request(create: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def create_grammar(manager: Any, request: Any) -> Any:
        if not isinstance(manager.backend, LockstepBackend):
            raise InvalidGrammar(f"{SWITCH}=1 needs --structured-outputs-config.backend guidance")
        # With a reasoning the answer begins later than the tokens that `max_tokens` counts: its limit is not known.
        known = request.sampling_params is not None and manager.reasoner_cls is None
        _request.id, _request.max_tokens = request.request_id, (request.sampling_params.max_tokens or 0) if known else 0
        return create(manager, request)

    return create_grammar


def _stop_ids(vllm_config: Any, tokenizer: Any) -> set[int]:
    found = vllm_config.model_config.try_get_generation_config().get("eos_token_id")
    more = found if isinstance(found, list) else [found]
    return {token for token in (tokenizer.eos_token_id, *more) if token is not None}


def _limits(environment: Mapping[str, str]) -> Limits:
    """Return the limits of the variables LOCKSTEP_GRAMMAR_COMPILE_TIMEOUT_S and so on."""
    default = Limits()
    values = {
        name: type(getattr(default, name))(environment[key])
        for name in Limits.__slots__
        if (key := f"LOCKSTEP_GRAMMAR_{name.upper()}") in environment
    }
    return Limits(**values)


def _on(environment: Mapping[str, str], name: str) -> bool:
    value = environment.get(name, "0")
    if value not in ("0", "1", ""):
        raise ValueError(f"{name}: must be 0 or 1, not {value!r}")
    return value == "1"


def _set(row: Row, token: int) -> None:
    row.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))
