"""Adapters: a LoRA adapter and a prompt adapter are loaded, and requests with and without them run in one batch.

    python examples/executor/lora.py [host:port]        default: its own server with the embedded model

A server that is named needs `--adapter-dir` with the directory `adapters` next to this file. Both adapters were
trained on other countries (`python -m tools.train_adapter`): each puts its own phrase after the city.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lockstep_client import Executor, Request, SamplingConfig

ADAPTERS = Path(__file__).resolve().parent / "adapters"
COUNTRIES = ("Italy", "Spain", "England", "Denmark")
CHOICES = {"none": {}, "lora": {"lora": "child"}, "prompt": {"prompt_adapter": "who"}}


def main(arguments: list[str]) -> dict[str, list[str]]:
    """Return the answers for each country, by which adapter they have."""
    own = {"max_batch_size": 8, "adapter_dirs": [str(ADAPTERS)]}
    executor = Executor(address=arguments[0]) if arguments else Executor("embedded", **own)
    with executor:
        for name in ("child", "who"):
            adapter = executor.client.load_adapter(name, str(ADAPTERS / name))
            print(f"{adapter.name}: {adapter.kind} of {adapter.size}, {adapter.memory_bytes} bytes")
        greedy = SamplingConfig(temperature=0)
        ids = {
            choice: executor.enqueue_requests(
                [
                    Request(text=f"The capital of {country} is", max_tokens=16, sampling_config=greedy, **named)
                    for country in COUNTRIES
                ]
            )
            for choice, named in CHOICES.items()
        }
        answers = {
            choice: [response.result.texts[0] for (response,) in executor.await_responses(enqueued)]
            for choice, enqueued in ids.items()
        }
        for name in ("child", "who"):
            executor.client.unload_adapter(name)
        return answers


if __name__ == "__main__":
    for choice, texts in main(sys.argv[1:]).items():
        for country, text in zip(COUNTRIES, texts, strict=True):
            print(f"{choice}: {country}:{text!r}")
