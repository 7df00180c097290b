"""Beam search: the most likely answers as a whole, best first, without a grammar and with one.

    python examples/executor/beams.py [host:port]        default: its own server with the embedded model

Needs `lockstep-client` (pip install ./client), and for its own server the engine in the same environment.
"""

from __future__ import annotations

import sys

from lockstep_client import BeamSearch, Client, Grammar

PROMPT = "The best thing about the sea is"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Prague", "Cairo"]}, "age": {"type": "integer", "maximum": 999}},
    "required": ["city", "age"],
    "additionalProperties": False,
}


def main(arguments: list[str]) -> dict[str, list[tuple[float, str]]]:
    """Return (score, text) of every answer, by what was asked for."""
    client = Client(arguments[0]) if arguments else Client.embedded(max_batch_size=4)
    with client:
        print("beams of a request:", client.model_info().max_beam_width)
        free = client.generate(PROMPT, beam_search=4, n=4, max_tokens=12)
        shorter = BeamSearch(beam_width=3, length_penalty=0.0, early_stopping=True)
        guided = client.generate("A city: ", grammar=Grammar.schema(SCHEMA), beam_search=shorter, n=3, max_tokens=40)
        return {
            kind: [(each.beam_score or 0.0, each.text) for each in (best, *best.others)]
            for kind, best in (("free", free), ("guided", guided))
        }


if __name__ == "__main__":
    for kind, answers in main(sys.argv[1:]).items():
        for score, text in answers:
            print(f"{kind}: {score:8.4f} {text!r}")
