"""The workloads: `extraction` (facts in the prompt), `schema` (facts to invent), `chat` (unguided text), `repeated`
(extraction jobs and tool calls, many under each of three schemas) and `long` (prompts of 400 words, short answers).

Invariant: equal arguments give equal items in the same order on any machine. Prompts have the form of JSON Mode Eval:
the schema is in the system message.
Not responsible for: tokenisation (see systems.py).
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from benchmarks.harness.domains import EXTRACTION, INVENTION, Json
from benchmarks.harness.jobs import repeated_jobs

WORKLOADS = ("extraction", "schema", "chat")
"""What `serve` runs if nothing else is asked for."""
ALL_WORKLOADS = (*WORKLOADS, "repeated", "long")
NUM_REPEATED = 48
NUM_LONG, LONG_WORDS = 32, 400


@dataclass(frozen=True, slots=True)
class Item:
    """One request: chat messages as (role, content), a schema for a guided answer, and a token budget."""

    name: str
    messages: tuple[tuple[str, str], ...]
    schema: str | None
    """JSON text, or None for free text."""
    max_tokens: int
    facts: str | None = None
    """The answer that the prompt's facts amount to, as JSON text, where there is one."""


def _guided(name: str, schema: Json, task: str, max_tokens: int, facts: Json | None = None) -> Item:
    source = json.dumps(schema, separators=(",", ":"))
    system = f"You answer with one JSON object and nothing else. The object follows this JSON schema:\n{source}"
    return Item(
        name=name,
        messages=(("system", system), ("user", task)),
        schema=source,
        max_tokens=max_tokens,
        facts=None if facts is None else json.dumps(facts),
    )


def _extraction() -> list[Item]:
    rounds = max(len(domain.facts) for domain in EXTRACTION)
    return [
        _guided(
            f"{domain.name}-{number}",
            domain.schema,
            f"Extract the {domain.name} from the text as JSON.\n\nText: {domain.tell(domain.facts[number])}",
            192,
            domain.facts[number],
        )
        for number in range(rounds)
        for domain in EXTRACTION
        if number < len(domain.facts)
    ]


def _schema() -> list[Item]:
    rounds = max(len(subjects) for _, _, subjects in INVENTION)
    return [
        _guided(f"{name}-{number}", schema, f"Invent {subjects[number]} as JSON.", 192)
        for number in range(rounds)
        for name, schema, subjects in INVENTION
        if number < len(subjects)
    ]


_PASSAGE = (
    "The lighthouse at Cape Morrow was built in 1874 by the engineer Samuel Orr. It stands on a cliff forty metres "
    "above the sea. For ninety years a keeper lit the lamp every evening. In 1964 the lamp became automatic, and the "
    "keeper's house is now a small museum that opens from April to October."
)

_CHAT = (
    ("capital", "What is the capital of France, and what is it known for?"),
    ("repeat", f"Repeat the following text word for word.\n\n{_PASSAGE}"),
    ("haiku", "Write a short poem about the autumn wind."),
    ("summary", f"Summarise this text in two sentences.\n\n{_PASSAGE}"),
    ("photosynthesis", "Explain photosynthesis to a ten year old child."),
    ("python", "Write a Python function that returns the sum of the squares of a list of numbers."),
    ("bread", "List the steps to bake a simple loaf of bread."),
    ("letter", "Write a polite letter that asks a landlord to repair a heater."),
    ("question", f"When did the lamp become automatic? Answer in one sentence.\n\n{_PASSAGE}"),
    ("advice", "Give five tips for learning a new language."),
    ("compare", "What is the difference between a lake and a sea?"),
    ("rewrite", f"Rewrite this text in the present tense.\n\n{_PASSAGE}"),
)


def _chat() -> list[Item]:
    return [Item(name=name, messages=(("user", task),), schema=None, max_tokens=128) for name, task in _CHAT]


def _repeated() -> list[Item]:
    return [_guided(job.name, job.schema, job.task, 192, job.facts) for job in repeated_jobs(NUM_REPEATED)]


_PLACES = ("the harbour", "the mill", "a school", "the market", "an old bridge", "the station", "a farm", "the library")
_PEOPLE = (
    "A baker",
    "The teacher",
    "Two sailors",
    "My neighbour",
    "An engineer",
    "The nurse",
    "A painter",
    "Her uncle",
)
_DEEDS = ("carried a lamp to", "wrote a letter about", "waited for rain at", "sold apples near", "drew a map of")
_TIMES = ("in the first week of March", "before the ferry left", "after a long winter", "on a windy morning")


def _long() -> list[Item]:
    """Prompts with hardly a sentence in common, so that no cache and no lookup of earlier text helps a system."""
    drawn, made = random.Random(0), list[Item]()
    for number in range(NUM_LONG):
        words = list[str]()
        while len(words) < LONG_WORDS:
            parts = (drawn.choice(part) for part in (_PEOPLE, _DEEDS, _PLACES, _TIMES))
            words += f"{' '.join(parts)}, in the year {drawn.randint(1700, 2000)}.".split()
        told = " ".join(words[:LONG_WORDS])
        made.append(Item(f"long-{number}", (("user", f"Continue this text.\n\n{told}"),), None, 32))
    return made


def workload(name: str, count: int | None = None, max_tokens: int | None = None) -> list[Item]:
    """Return the first `count` items of a workload (all when None), their budgets lowered to `max_tokens`.

    Raises:
        ValueError: `name` is no workload, or `count` or `max_tokens` is below 1.

    """
    makers = {"extraction": _extraction, "schema": _schema, "chat": _chat, "repeated": _repeated, "long": _long}
    if name not in makers:
        raise ValueError(f"workload: {name!r} is not one of {', '.join(makers)}")
    if count is not None and count < 1:
        raise ValueError("count: must be at least 1")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError("max_tokens: must be at least 1")
    items = makers[name]()[:count]
    if max_tokens is None:
        return items
    return [Item(item.name, item.messages, item.schema, min(item.max_tokens, max_tokens), item.facts) for item in items]
