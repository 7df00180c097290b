"""One small server for all tests of the pages: a random model with a byte tokenizer, and a real grammar process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness.gateway import start_gateway
from benchmarks.harness.server import EngineServer, ServerOptions
from tests.gpu_engine import tiny
from tests.gpu_engine.adapters.files import save_lora, save_prompt

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PROCESSORS = (
    *("--logits-processor", "ngrams=gpu_engine.processors.ngrams:NoRepeatedNgrams"),
    *("--logits-processor", "end=gpu_engine.processors.long_answers:LengthPenalty"),
)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a server with the default drafter and both grammar libraries where they are installed."""
    folder = tiny.save(tiny.FAMILIES["llama"](), tmp_path_factory.mktemp("tiny"), rounds=True)
    path = Path(folder) / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": CHAT_TEMPLATE}))
    lora = save_lora(folder, tmp_path_factory.mktemp("low-rank"), seed=1)
    virtual = save_prompt(tmp_path_factory.mktemp("virtual"), tokens=4, hidden=64)
    options = ServerOptions(
        model=str(folder),
        dtype="float32",
        num_threads=1,
        max_batch_size=8,
        extra=(
            *("--max-model-len", "512", "--stream-pace-ms", "0"),
            # A compile process has a low priority: beside other programs, a second of its work takes many.
            *("--compile-timeout-s", "120", "--grammar-wait-s", "120"),
            *("--allow-never-preempt", "--output-memory-bytes", "36000000"),
            *("--adapter", f"low-rank={lora}", "--adapter", f"virtual={virtual}"),
            *PROCESSORS,
        ),
        internal={"grammar_silence_s": 60.0},
    )
    with EngineServer(options) as engine:
        yield engine.address


@pytest.fixture(scope="session")
def gateway(server: str) -> Iterator[str]:
    """Return the address of a gateway in front of that server."""
    with start_gateway(server) as address:
        yield address
