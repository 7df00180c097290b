"""The targets by name. Invariant: a target's module is imported when it is loaded, so that child.py can instrument it.

Native targets are C programs over the segment's bytes (see native.py).
"""

from __future__ import annotations

import importlib

from tools.fuzz.target import Target

TARGETS = {
    "grammar_text": "grammars",
    "structural_tag": "grammars",
    "schema_rewriting": "schemas",
    "pattern": "schemas",
    "compile_llguidance": "compilations",
    "compile_xgrammar": "compilations",
    "request": "requests",
    "chat": "requests",
    "answer_parts": "requests",
    "engine_service": "engine_services",
    "kserve_service": "inference",
    "vllm_service": "engine_services",
    "grammar_service": "grammar_services",
    "http_gateway": "gateway",
    "handover": "handover",
}
"""Name of a target -> the module that has a function of that name, which returns the target."""


def load(name: str) -> Target:
    """Import a target and return it."""
    module = importlib.import_module(f"tools.fuzz.targets.{TARGETS[name]}")
    target: Target = getattr(module, name)()
    return target
