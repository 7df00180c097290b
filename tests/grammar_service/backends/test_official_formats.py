"""Calls as the server's formats have them are calls of the same models for xgrammar, which has a tag for each model.

The tags are an opinion from outside: nothing of the server reads them. They know no format for Granite 3, Phi 4 and
Seed-OSS. For gpt-oss the tag leaves out the space before `<|constrain|>`, which OpenAI's page of the format has.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar

from gpu_engine.api.conversation import Tool
from gpu_engine.front.tools import formats
from gpu_engine.front.tools.formats import ToolFormat
from tests.gpu_engine.front.tools.spelling import spelled_calls

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"enum": ["c", "f"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city", "days"],
}
NAMES = ("weather", "we.ather-2")
GIVEN = {"city": 'Oslo "N"', "days": 3, "units": "c", "tags": ["a", "b c"]}


@pytest.mark.parametrize(
    ("model", "form", "before"),
    [
        ("llama", formats.LLAMA3, ""),
        ("qwen_3", formats.HERMES, ""),
        ("qwen_3_coder", formats.QWEN3_CODER, ""),
        ("glm_4_7", formats.GLM_47, ""),
        ("kimi", formats.KIMI_K2, ""),
        ("deepseek_r1", formats.DEEPSEEK, ""),
        ("deepseek_v3_1", formats.DEEPSEEK_V31, ""),
        ("deepseek_v3_2", formats.DEEPSEEK_V32, "\n\n"),
        ("minimax", formats.MINIMAX_M2, "\n</think>" + 5 * "\n"),
    ],
)
def test_a_models_own_tag_takes_the_calls(model: str, form: ToolFormat, before: str) -> None:
    functions = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
    options: dict[str, Any] = {"tools": functions, "tool_choice": "required", "reasoning": "disabled"}
    tag = xgrammar.get_model_structural_tag(model, **options)
    bytes_alone = xgrammar.TokenizerInfo([chr(i) for i in range(256)], xgrammar.VocabType.RAW, stop_token_ids=[0])
    compiler = xgrammar.GrammarCompiler(bytes_alone, max_threads=1)
    compiled = compiler.compile_grammar(xgrammar.Grammar.from_structural_tag(tag))

    def takes(given: dict[str, Any]) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        calls = [(Tool(name, source=json.dumps(SCHEMA)), json.dumps(given)) for name in NAMES]
        return matcher.accept_string(before + spelled_calls(form, calls)) and matcher.is_completed()

    assert takes(GIVEN)
    assert takes({"city": "Oslo", "days": 3})
    assert not takes({**GIVEN, "units": "k"})
