"""Receipts of whole servers with a small random model: they replay equal on servers of other shapes, and over HTTP."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import receipts
from benchmarks.harness.gateway import start_gateway
from benchmarks.harness.server import EngineServer, ServerOptions
from gpu_engine.api.signed_statements import Signer, checked_claims, read_key
from gpu_engine.cli import commands as cli
from tests.gpu_engine import tiny
from tests.receipt_keys import new_key

NONCE = b"0123456789abcdef".hex()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = tiny.FAMILIES["llama"]()
    config.max_position_embeddings = 1024
    return str(tiny.save(config, tmp_path_factory.mktemp("tiny"), rounds=True))


@pytest.mark.slow
def test_receipts_of_random_requests_replay_equal_on_servers_of_other_shapes(model: str, tmp_path: Path) -> None:
    key = new_key(tmp_path / "key.pem")
    words = ["--count", "40", "--model", model, "--dtype", "float32", "--kill-every", "6", "--concurrency", "8"]
    args = receipts.parser().parse_args(words)
    seen = receipts.Seen()
    asyncio.run(receipts.run(args, receipts.servers(args, key), seen))
    assert (seen.equal, seen.different, seen.accepted) == (40, [], 0)
    assert seen.refused == 40 * receipts.CHANGES
    assert seen.servers == 3
    assert seen.kills > 0


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_key(tmp_path_factory.mktemp("key") / "key.pem")


@pytest.fixture(scope="module")
def http(model: str, key: Path) -> Iterator[str]:
    extra = ("--max-model-len", "512", "--receipt-key", str(key), "--grammar", "none")
    options = ServerOptions(model=model, dtype="float32", num_threads=1, max_batch_size=4, extra=extra)
    with EngineServer(options) as engine, start_gateway(engine.address) as gateway:
        yield f"http://{gateway}"


def choices_of(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choice of a whole answer, or the last choice of a stream."""
    asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(asked, timeout=60) as answer:
        text = answer.read().decode()
    if not body.get("stream"):
        return list(json.loads(text)["choices"])
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [choice for event in events for choice in json.loads(event)["choices"]]


def test_receipts_over_http_replay_equal(
    http: str, key: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"prompt": "one two", "max_tokens": 20, "temperature": 1.0, "stop": ["zz"], "receipt_nonce": NONCE}
    made = []
    for options in (
        {},
        {"stream": True},
        {"n": 2},
        {"seed": 7, "stream": True, "stream_options": {"include_usage": True}},
    ):
        choices = choices_of(http, {**body, **options})
        assert all(("receipt" in choice) == bool(choice["finish_reason"]) for choice in choices)
        made += [choice["receipt"] for choice in choices if "receipt" in choice]
    assert len(made) == 5
    files = [tmp_path / name for name in ("receipts", "body.json", "jwk")]
    jwk = json.dumps(Signer.of_file(key).jwk)
    for file, text in zip(files, ("\n".join(made), json.dumps(body), jwk), strict=True):
        file.write_text(text)
    command = ["replay", str(files[0]), "--request", str(files[1]), "--key", str(files[2]), "--http", http]
    assert cli.main(command) == 0
    assert capsys.readouterr().out.count("equal: ") == 5
    assert checked_claims(made[-1], read_key(jwk))["sampling"]["seed"] == "7"
    files[1].write_text(json.dumps({**body, "temperature": 0.5}))
    assert cli.main(command) == 1
    out = capsys.readouterr().out
    assert "sampling.temperature: was 1.0, is 0.5" in out
    assert "may explain it" in out
    assert cli.main([*command[:-1], "http://127.0.0.1:9"]) == 2


def test_a_wrong_nonce_over_http_names_its_field(http: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        choices_of(http, {"prompt": "a", "receipt_nonce": "00"})
    assert caught.value.code == 400
    assert b"receipt_nonce" in caught.value.read()
