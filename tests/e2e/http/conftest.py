"""A gateway before the server of the end-to-end tests.

Not responsible for: gateways that an engine starts (tests/gpu_engine/test_http.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams

from benchmarks.harness.gateway import start_gateway
from tests.e2e.conftest import RunningServer


@pytest.fixture(scope="session")
def gateway(server: RunningServer) -> Iterator[str]:
    """Return the address of a gateway before the one server."""
    with start_gateway(server.address) as address:
        yield address


@pytest.fixture(scope="session")
def client(gateway: str) -> Iterator[openai.OpenAI]:
    """An unmodified client of OpenAI's."""
    with openai.OpenAI(base_url=f"http://{gateway}/v1", api_key="unused", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="session")
def model(client: openai.OpenAI) -> str:
    """The served model's name."""
    return client.models.list().data[0].id


class Asker:
    """Requests to the served model; fields that OpenAI's client does not know go into the body as they are."""

    def __init__(self, client: openai.OpenAI, model: str) -> None:
        self.client, self.model = client, model

    def chat(self, messages: Any = "Name a city of France, and its country.", **fields: Any) -> Any:
        """Return an answer or a stream of a conversation, or of one message."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        known, extra = _split(fields, CompletionCreateParamsBase)
        return self.client.chat.completions.create(
            **{"model": self.model, "messages": messages, "max_tokens": 60} | known, extra_body=extra
        )

    def complete(self, prompt: Any = "One, two, three,", **fields: Any) -> Any:
        """Return an answer or a stream, greedy unless the fields say otherwise."""
        known, extra = _split(fields, CompletionParams)
        return self.client.completions.create(
            **{"model": self.model, "prompt": prompt, "max_tokens": 4, "temperature": 0} | known, extra_body=extra
        )


def _split(fields: dict[str, Any], known: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    names = known.__annotations__.keys() | {"stream"}
    return (
        {name: value for name, value in fields.items() if name in names},
        {name: value for name, value in fields.items() if name not in names},
    )


@pytest.fixture(scope="session")
def ask(client: openai.OpenAI, model: str) -> Asker:
    return Asker(client, model)
