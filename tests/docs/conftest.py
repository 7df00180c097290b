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
from tests.receipt_keys import new_key

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PROCESSORS = (
    "ngrams=gpu_engine.processors.ngrams:NoRepeatedNgrams",
    "end=gpu_engine.processors.long_answers:LengthPenalty",
)
"""Of the setting `logits_processors`."""


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a random model, a byte tokenizer and a chat template.

    A token is a byte, so a page's conversation with tools takes some 500: the model has room for several of them.
    """
    config = tiny.FAMILIES["llama"]()
    config.max_position_embeddings = 2048
    folder = Path(tiny.save(config, tmp_path_factory.mktemp("tiny"), rounds=True))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": CHAT_TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def adapters(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return the setting `adapters`, with one of each kind."""
    lora = save_lora(model_folder, tmp_path_factory.mktemp("low-rank"), seed=1)
    virtual = save_prompt(tmp_path_factory.mktemp("virtual"), tokens=4, hidden=64)
    return f"low-rank={lora}", f"virtual={virtual}"


@pytest.fixture(scope="session")
def server(model_folder: Path, adapters: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a server with the default drafter and both grammar libraries where they are installed."""
    options = ServerOptions(
        model=str(model_folder),
        dtype="float32",
        num_threads=1,
        max_batch_size=8,
        extra=(
            *("--max-model-len", "2048", "--stream-pace-ms", "0"),
            # A compile process has a low priority: next to other programs, a second of its work takes many.
            *("--compile-timeout-s", "120", "--grammar-wait-s", "120"),
            *("--allow-never-preempt", "--output-memory-bytes", "36000000"),
            *("--receipt-key", str(new_key(tmp_path_factory.mktemp("keys") / "key.pem"))),
            *(word for adapter in adapters for word in ("--adapter", adapter)),
            *(word for processor in PROCESSORS for word in ("--logits-processor", processor)),
        ),
        internal={"grammar_silence_s": 60.0},
    )
    with EngineServer(options) as engine:
        yield engine.address


@pytest.fixture(scope="session")
def gateway(server: str) -> Iterator[str]:
    """Return the address of a gateway before that server."""
    with start_gateway(server) as address:
        yield address
