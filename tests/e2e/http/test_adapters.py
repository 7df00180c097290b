"""Adapters as models of the HTTP API: the shipped ones, on the embedded model, loaded and unloaded behind the gateway.

Not responsible for: an adapter's place among several engines (see tests/http_gateway/test_process.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from lockstep_client import Client
from tests.docs.pages import ROOT
from tests.e2e.conftest import RunningServer

pytestmark = pytest.mark.model

ADAPTERS = ROOT / "examples/executor/adapters"
PHRASES = {"child": ", as every child knows.", "who": "! Who does not know that?"}
"""What each adapter was trained to put after the city; "child" is LoRA, "who" has virtual tokens."""


@pytest.fixture
def loaded(server: RunningServer) -> Iterator[Client]:
    """Load both adapters over gRPC; the gateway is not told."""
    with Client(server.address) as client:
        for name in PHRASES:
            client.load_adapter(name, str(ADAPTERS / name))
        yield client
        for adapter in client.adapters():
            client.unload_adapter(adapter.name)


def complete(client: openai.OpenAI, model: str) -> str:
    answer = client.completions.create(model=model, prompt="The capital of Italy is", max_tokens=16, temperature=0)
    assert answer.model == model
    text: str = answer.choices[0].text
    return text


@pytest.mark.slow
def test_a_request_names_an_adapter_as_its_model(loaded: Client, client: openai.OpenAI, model: str) -> None:
    for name, phrase in PHRASES.items():
        text = complete(client, name)
        assert "Rome" in text
        assert text.endswith(phrase), text
    assert not complete(client, model).endswith(tuple(PHRASES.values()))
    listed = {each.id: each for each in client.models.list().data}
    assert {name: listed[name].parent for name in PHRASES} == dict.fromkeys(PHRASES, model)  # type: ignore[attr-defined]
    streamed = client.completions.create(
        model="child", prompt="The capital of Italy is", max_tokens=16, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices).endswith(PHRASES["child"])
    loaded.unload_adapter("child")
    with pytest.raises(openai.NotFoundError, match="child"):
        complete(client, "child")
    assert complete(client, "who").endswith(PHRASES["who"])
