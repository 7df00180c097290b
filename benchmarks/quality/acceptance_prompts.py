"""The prompts of `acceptance`: facts to extract, schemas without facts, and many requests under few schemas.

Invariant: equal arguments give equal prompts in the same order; a schema that is too long for a prompt is skipped,
never cut.
Not responsible for: sending the prompts (see acceptance.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.client import Call, make_call
from benchmarks.harness.workloads import workload
from benchmarks.quality.schemas import PROMPT_SCHEMA_CHARS
from protos.engine.v1 import engine_pb2 as pb

OWN_GROUPS = {"extraction": "extraction", "generation": "schema", "repeated": "repeated"}
"""Group -> workload."""


@dataclass(frozen=True, slots=True)
class AcceptancePrompt:
    """One prompt of one group."""

    name: str
    group: str
    messages: tuple[tuple[str, str], ...]
    schema: str

    def call(self, num_drafts: int | None, max_tokens: int) -> Call:
        """Return the greedy request with so many drafts a step; None: as many as the server's requests have."""
        sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=0.0)
        return make_call(self.name, self.messages, schema=self.schema, sampling=sampling, num_draft_tokens=num_drafts)


def facts(value: Any, path: str = "") -> Iterator[str]:
    """Yield a sentence for each leaf of a JSON value, such as "The city name is Oslo."; null has none."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from facts(item, f"{path} {key}".strip())
    elif isinstance(value, list):
        for item in value:
            yield from facts(item, path)
    elif value is not None:
        yield f"The {path or 'value'} is {value}."


def read_prompts(path: Path, count: int) -> list[AcceptancePrompt]:
    """Return at most `count` prompts of each group from a MaskBench-style file; raises ValueError with the line."""
    extraction: list[AcceptancePrompt] = []
    generation: list[AcceptancePrompt] = []
    for at, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            case = json.loads(line)
            name, schema = str(case["name"]), json.dumps(case["schema"])
            valid = [test["data"] for test in case.get("tests", []) if test["valid"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}:{at}: not in MaskBench's form: {error!r}") from error
        if len(schema) > PROMPT_SCHEMA_CHARS:
            continue
        system = f"You answer with one JSON value and nothing else. It follows this JSON schema:\n{schema}"
        if name.startswith("JME_") and valid:
            task = "Extract the data from the text as JSON.\n\nText: " + " ".join(facts(valid[0]))
            extraction.append(AcceptancePrompt(name, "extraction", (("system", system), ("user", task)), schema))
        elif not name.startswith("JME_"):
            task = "Write one realistic JSON value that follows the schema."
            generation.append(AcceptancePrompt(name, "generation", (("system", system), ("user", task)), schema))
    return [*_spread(extraction, count), *_spread(generation, count)]


def _spread(prompts: list[AcceptancePrompt], count: int) -> list[AcceptancePrompt]:
    return [prompts[number * len(prompts) // count] for number in range(count)] if count < len(prompts) else prompts


def own_prompts(count: int, groups: Sequence[str] = tuple(OWN_GROUPS)) -> list[AcceptancePrompt]:
    """Return at most `count` prompts of each of these `OWN_GROUPS`, and four times as many that repeat schemas."""
    return [
        AcceptancePrompt(item.name, group, item.messages, item.schema or "")
        for group in groups
        for item in workload(OWN_GROUPS[group], count * 4 if group == "repeated" else count)
    ]
