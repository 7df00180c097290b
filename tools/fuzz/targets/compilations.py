"""A grammar of any kind, compiled and tried out by the code of a compile worker, in this process.

The first byte of an input is the kind, the second one chooses white space and options. A library that crashes ends the
fuzzer here, and a worker in production: the request that caused it gets an InternalError, which is the finding.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from random import Random

from grammar_service.backends.registry import load_backend
from grammar_service.compile.worker import Limits, Toolchain, reply, unpack
from grammar_service.completion.texts import TokenTexts
from grammar_service.errors import GrammarServiceError, InternalError
from grammar_service.grammar.value import SCHEMA_KINDS, Grammar, Reading, Whitespace, parse
from tools.enforced.bytes_vocabulary import bytes_vocabulary
from tools.fuzz.mutations import mutate_bytes
from tools.fuzz.target import Broken, Target
from tools.fuzz.targets.grammars import KINDS, MAX_CHAIN, MAX_DEPTH, mutate_grammar
from tools.fuzz.words import JSON_SCHEMA, NOTATIONS, TAGS

MAX_ARTIFACT_BYTES = 8 << 20


def compile_llguidance() -> Target:
    """Return the target for llguidance."""
    return _target("llguidance")


def compile_xgrammar() -> Target:
    """Return the target for xgrammar."""
    return _target("xgrammar")


def _target(backend: str) -> Target:
    vocabulary = bytes_vocabulary()
    toolchain = Toolchain(load_backend(backend, vocabulary), TokenTexts.of(vocabulary))
    limits = Limits(os.memfd_create("fuzzed-artifact"), 1024, MAX_DEPTH, MAX_CHAIN, MAX_ARTIFACT_BYTES)

    def run(data: bytes) -> None:
        if len(data) < 2:
            return
        options = data[1]
        try:
            grammar = parse(
                KINDS[data[0] % len(KINDS)],
                data[2:].decode("utf-8", "replace"),
                Whitespace(1 + options % 3),
                MAX_DEPTH,
            )
            vocabulary.refuse_special(grammar)
        except InternalError:
            raise
        except GrammarServiceError:
            return
        answer = _compiled(toolchain, limits, grammar, options)
        if answer.get("error") == InternalError.__name__:
            raise Broken(answer["message"])

    def mutate(data: bytes, random: Random) -> bytes:
        if len(data) < 2 or random.random() < 0.05:
            return mutate_bytes(data, random)
        changed = mutate_grammar(data[:1] + data[2:], random)
        return changed[:1] + data[1:2] + changed[1:]

    return Target(run, mutate, (*NOTATIONS, *JSON_SCHEMA, *TAGS), max_bytes=1024, timeout_s=30)


def _compiled(toolchain: Toolchain, limits: Limits, grammar: Grammar, options: int) -> dict[str, str]:
    """Return the head of the worker's answer to a grammar."""
    bounded = options & 16 and grammar.kind in SCHEMA_KINDS
    reading = Reading(
        strict_formats=bool(options & 4),
        max_string_length=8 if bounded else 0,
        max_array_items=3 if bounded else 0,
        max_number_digits=4 if bounded else 0,
    )
    head = {
        "kind": int(grammar.kind),
        "whitespace": int(grammar.whitespace),
        "reading": asdict(reading),
        "allow_unenforced": bool(options & 8),
    }
    frame = reply(toolchain, limits, json.loads(json.dumps(head)), grammar.text.encode())
    found: dict[str, str] = unpack(frame[4:])[0]
    return found
