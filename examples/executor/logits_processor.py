"""Logits processors: the server loads them by name, and each request chooses its own, with arguments.

    python examples/executor/logits_processor.py

Starts its own server with the embedded model and the three processors that ship with the engine. Asks the same
question without a processor, without a repeated n-gram, with an end that comes closer with each token, and as a client
that may not get some tokens.
"""

from __future__ import annotations

from lockstep_client import Client, LogitsProcessor

PROMPT = "The cat sat on the mat. The cat sat on the mat. The cat"
ROOM = "gpu_engine.processors"
PROCESSORS = [
    f"ngrams={ROOM}.ngrams:NoRepeatedNgrams",
    f"end={ROOM}.long_answers:LengthPenalty",
    f'clients={ROOM}.client_tokens:ForbiddenForClient{{"clients": {{"guest": [" sat", " mat"]}}}}',
]
ASKED: dict[str, list[str | LogitsProcessor]] = {
    "as the model likes": [],
    "no three tokens twice": [LogitsProcessor("ngrams", {"size": 3})],
    "an early end": [LogitsProcessor("end", {"start": 4, "factor": 1.5})],
    "for a guest": ["clients"],
}


def main() -> dict[str, str]:
    """Return the answers by what was asked for."""
    with Client.embedded(num_threads=1, max_batch_size=2, logits_processors=PROCESSORS) as client:
        print("the server has", ", ".join(client.model_info().logits_processors))
        return {
            name: client.generate(
                PROMPT, max_tokens=24, temperature=0.0, client_id="guest", logits_processors=processors
            ).text
            for name, processors in ASKED.items()
        }


if __name__ == "__main__":
    for asked, text in main().items():
        print(f"{asked}: {text!r}")
