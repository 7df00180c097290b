"""Guided decoding from Python: requests of four kinds of grammar run at once, and one is cancelled.

    python examples/python/guided.py [host:port]        default: the variable LOCKSTEP_SERVER, else 127.0.0.1:50051

Needs `lockstep-client` (pip install ./client). examples/cpp/guided.cpp does the same and prints the same.
"""

from __future__ import annotations

import asyncio
import sys

from lockstep_client import AsyncClient, CallError, Grammar

CITY = {
    "type": "object",
    "required": ["city", "people"],
    "additionalProperties": False,
    "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
}
REQUESTS = {
    "json": ("A JSON object: ", 48, Grammar.json_object()),
    "json_schema": ("Oslo as JSON: ", 64, Grammar.schema(CITY)),
    "regex": ("The date of today: ", 32, Grammar.regex("[0-9]{4}-[0-9]{2}-[0-9]{2}")),
    "ebnf": ("The answer is ", 16, Grammar.ebnf('root ::= ("yes" | "no") ", " [a-z]+ "."')),
}
"""Name -> prompt, most tokens, grammar."""


async def answer(client: AsyncClient, prompt: str, max_tokens: int, grammar: Grammar) -> str:
    """Return the text of a guided answer, or the error."""
    try:
        return (await client.generate(prompt, grammar=grammar, max_tokens=max_tokens, temperature=0)).text
    except CallError as error:
        return f"error {error}"


async def cancelled(client: AsyncClient) -> str:
    """Read the beginning of a stream and leave it, which ends the request in the engine."""
    async with client.stream_generate("Once upon a time", max_tokens=400, ignore_eos=True, temperature=0) as stream:
        async for delta in stream:
            if delta.text:
                break
    return "CANCELLED"


async def main() -> int:
    """Run all requests at once and print their answers by name."""
    async with AsyncClient(sys.argv[1] if len(sys.argv) > 1 else None) as client:
        names = [*REQUESTS, "cancelled"]
        texts = await asyncio.gather(*(answer(client, *each) for each in REQUESTS.values()), cancelled(client))
    for name, text in sorted(zip(names, texts, strict=True)):
        print(f"{name}: {text}")
    return int(any(text.startswith("error ") for text in texts))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
