"""A gateway before the server of the end-to-end tests.

Not responsible for: gateways that an engine starts (tests/gpu_engine/test_http.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

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
