"""Writes prompts to train a drafter on: schemas of many shapes, with facts to extract or a request to invent some.

    python -m tools.training.prompts --count 3000 > prompts.jsonl

Invariant: equal arguments give equal prompts. Prompts are drawn from word lists and from no data set, so every data set
can measure a drafter that was trained on them.
Not responsible for: answers, which the target gives (see answers.py).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tools.training.subjects import ADJECTIVES, CITIES, FIRST, LAST, NOUNS, STREETS, SUBJECTS, VERBS

Json = dict[str, Any]
Draw = random.Random


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """One line of the file: chat messages, the JSON Schema of the answer (None: free text), and max_tokens."""

    name: str
    messages: tuple[tuple[str, str], ...]
    schema: str | None
    max_tokens: int

    def line(self) -> str:
        """Return the line, without its end."""
        messages = [{"role": role, "content": content} for role, content in self.messages]
        return json.dumps(
            {"name": self.name, "messages": messages, "schema": self.schema, "max_tokens": self.max_tokens}
        )

    @staticmethod
    def parse(line: str) -> TrainingPrompt:
        """Return the prompt of a line. Raises ValueError with the reason."""
        try:
            fields = json.loads(line)
            schema = fields.get("schema")
            return TrainingPrompt(
                str(fields["name"]),
                tuple((str(message["role"]), str(message["content"])) for message in fields["messages"]),
                schema if schema is None or isinstance(schema, str) else json.dumps(schema),
                int(fields.get("max_tokens", 256)),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"a prompt needs name, messages [{{role, content}}], and may have schema and max_tokens: {error!r}"
            ) from None


# ---- values --------------------------------------------------------------------------------------------------------


def _date(draw: Draw) -> str:
    return f"{draw.randint(1950, 2030)}-{draw.randint(1, 12):02d}-{draw.randint(1, 28):02d}"


def _name(draw: Draw) -> str:
    return f"{draw.choice(FIRST)} {draw.choice(LAST)}"


def _words(draw: Draw) -> str:
    return f"{draw.choice(ADJECTIVES)} {draw.choice(NOUNS)}"


def _code(draw: Draw) -> str:
    return f"{''.join(draw.choices('ABCDEFGHKLMNPRSTUVWX', k=draw.randint(1, 3)))}-{draw.randint(10, 99999)}"


def _sentence(draw: Draw) -> str:
    return f"{draw.choice(FIRST)} {draw.choice(VERBS)} the {_words(draw)} in {draw.choice(CITIES)}."


_TEXTS: dict[str, Callable[[Draw], str]] = {
    "name": _name,
    "words": _words,
    "code": _code,
    "date": _date,
    "city": lambda draw: draw.choice(CITIES),
    "address": lambda draw: f"{draw.randint(1, 250)} {draw.choice(STREETS)}, {draw.choice(CITIES)}",
    "email": lambda draw: f"{draw.choice(FIRST)}.{draw.choice(LAST)}@example.{draw.choice(('com', 'org'))}".lower(),
    "phone": lambda draw: f"+{draw.randint(1, 99)} {draw.randint(100, 999)} {draw.randint(1000000, 9999999)}",
    "time": lambda draw: f"{draw.randint(0, 23):02d}:{draw.choice((0, 15, 30, 45)):02d}",
    "url": lambda draw: f"https://www.{draw.choice(NOUNS)}{draw.choice(NOUNS)}.com/{draw.choice(NOUNS)}",
    "sentence": _sentence,
}
_FORMATS = {"date": "date", "email": "email", "url": "uri"}


def _leaf(draw: Draw, kind: str) -> tuple[Json, Any]:
    """Return a schema for a field of this kind, and a value that satisfies it."""
    if kind == "int":
        value = draw.choice((draw.randint(0, 20), draw.randint(1, 500), draw.randint(1000, 90000)))
        return {"type": "integer"} | ({"minimum": 0} if draw.random() < 0.3 else {}), value
    if kind == "num":
        return {"type": "number"}, round(draw.uniform(0, draw.choice((1, 100, 5000))), draw.choice((1, 2)))
    if kind == "bool":
        return {"type": "boolean"}, draw.random() < 0.5
    if kind.startswith("enum:"):
        values = kind[5:].split("|")
        return {"type": "string", "enum": values}, draw.choice(values)
    if kind.startswith("list:"):
        items = [_leaf(draw, kind[5:]) for _ in range(draw.randint(1, 4))]
        return {"type": "array", "items": items[0][0]}, [value for _, value in items]
    schema: Json = {"type": "string"}
    if kind in _FORMATS and draw.random() < 0.4:
        schema["format"] = _FORMATS[kind]
    elif draw.random() < 0.15:
        schema["maxLength"] = 120
    return schema, _TEXTS[kind](draw)


# ---- names ---------------------------------------------------------------------------------------------------------


def _cased(style: str, name: str) -> str:
    parts = name.split("_")
    if style == "camel":
        return parts[0] + "".join(part.capitalize() for part in parts[1:])
    if style == "pascal":
        return "".join(part.capitalize() for part in parts)
    return name.replace("_", "-") if style == "kebab" else name


def _object(draw: Draw, style: str, depth: int) -> tuple[Json, Json, str]:
    """Return an object schema, a value that satisfies it, and the name of its subject."""
    subject = draw.choice(list(SUBJECTS))
    fields = SUBJECTS[subject]
    chosen = draw.sample(fields, min(len(fields), draw.randint(2, 7)))
    properties: Json = {}
    value: Json = {}
    titled, described = draw.random() < 0.3, draw.random() < 0.25
    for name, kind in chosen:
        key = _cased(style, name)
        schema, leaf = _leaf(draw, kind)
        if titled:
            schema = {"title": name.replace("_", " ").title()} | schema
        if described:
            schema["description"] = f"The {name.replace('_', ' ')} of the {subject}"
        properties[key], value[key] = schema, leaf
    if depth and draw.random() < 0.5:
        inner, inner_value, inner_subject = _object(draw, style, depth - 1)
        key = _cased(style, inner_subject.replace(" ", "_"))
        if draw.random() < 0.5:
            several = [inner_value] + ([_varied(draw, inner_value)] if draw.random() < 0.7 else [])
            properties[key + "s"], value[key + "s"] = {"type": "array", "items": inner}, several
        else:
            properties[key], value[key] = inner, inner_value
    schema = {"type": "object", "properties": properties}
    if draw.random() < 0.9:
        names = list(properties)
        schema["required"] = names if draw.random() < 0.8 else names[: max(1, len(names) - 2)]
    if draw.random() < 0.4:
        schema["additionalProperties"] = False
    if draw.random() < 0.4:
        schema = {"title": subject.title().replace(" ", "")} | schema
    return schema, value, subject


def _varied(draw: Draw, value: Json) -> Json:
    changed = {
        key: _words(draw) if isinstance(leaf, str) else leaf + 1 if type(leaf) is int else leaf
        for key, leaf in value.items()
    }
    return changed


# ---- texts ---------------------------------------------------------------------------------------------------------


def _facts(draw: Draw, value: Any, path: str) -> Iterator[str]:
    """Yield the facts of a value, one sentence each."""
    words = path.replace("_", " ").replace("-", " ")
    words = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in words).strip()
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _facts(draw, item, key if not path or draw.random() < 0.5 else f"{path} {key}")
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for item in value:
            yield from _facts(draw, item, path.removesuffix("s"))
    else:
        said = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        said = {"True": "yes", "False": "no"}.get(said, said)
        yield draw.choice((f"The {words} is {said}.", f"{words.capitalize()}: {said}.", f"As {words} we noted {said}."))


_SYSTEMS = (
    "You are a helpful assistant that answers in JSON. Here's the json schema you must adhere to:\n"
    "<schema>\n{}\n</schema>",
    "You answer with one JSON object and nothing else. The object follows this JSON schema:\n{}",
    "Answer in JSON that matches this schema: {}",
    "Output JSON only. Schema:\n{}",
)
_EXTRACTIONS = (
    "Extract the {0} from the text as JSON.\n\nText: {1}",
    "{1}\n\nGive the {0} above as JSON.",
    "Here is what I know about a {0}. {1} Please put it into the required form.",
    "I am filing a {0}. {1} Could you format this for me?",
)
_INVENTIONS = (
    "Invent a {0} as JSON.",
    "Write an example of a {0}.",
    "Generate a realistic {0} for a test.",
    "Give me a valid instance of the schema.",
    "Make up a {0} from {2}.",
)
_QUESTIONS = (
    "What is a {0}?",
    "Name three things that matter about a {0}.",
    "Write two sentences about a {0} in {2}.",
    "How would you describe a {0} to a child?",
    "Tell a very short story about a {0} and a {1}.",
)


def make_prompts(count: int, seed: int = 0) -> Iterator[TrainingPrompt]:
    """Yield `count` prompts: 45 % extraction, 45 % invention, 10 % free text."""
    for number in range(count):
        draw = random.Random(f"{seed}/{number}")
        style = draw.choice(("snake", "snake", "camel", "camel", "pascal", "kebab"))
        schema, value, subject = _object(draw, style, depth=2)
        kind = draw.random()
        if kind < 0.1:
            task = draw.choice(_QUESTIONS).format(subject, _words(draw), draw.choice(CITIES))
            yield TrainingPrompt(f"free-{number}", (("user", task),), None, 128)
            continue
        facts = list(_facts(draw, value, ""))
        if draw.random() < 0.3:
            draw.shuffle(facts)
        tasks, name = (_EXTRACTIONS, "extract") if kind < 0.55 else (_INVENTIONS, "invent")
        task = draw.choice(tasks).format(subject, " ".join(facts), draw.choice(CITIES))
        source = json.dumps(schema, indent=draw.choice((None, None, 2)))
        system = draw.choice(_SYSTEMS).format(source)
        yield TrainingPrompt(f"{name}-{number}", (("system", system), ("user", task)), json.dumps(schema), 192)


def main() -> int:
    """Write prompts to stdout, one per line."""
    parser = argparse.ArgumentParser(prog="python -m tools.training.prompts", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--count", type=int, default=3000, help="number of prompts (default 3000)")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other prompts (default 0)")
    args = parser.parse_args()
    for prompt in make_prompts(args.count, args.seed):
        sys.stdout.write(prompt.line() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
