"""A scripted server, and both clients of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from lockstep_client import AsyncClient, Client, Retries
from tests.client.scripted import Scripted, Twin, serving

FAST = Retries(attempts=3, first_pause_s=0.001, longest_pause_s=0.002)


@pytest.fixture
def server() -> Scripted:
    return Scripted()


@pytest.fixture
def address(server: Scripted, tmp_path: Path) -> Iterator[str]:
    with serving(server, f"unix:{tmp_path}/s") as where:
        yield where


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address, retries=FAST) as connected:
        yield connected


@pytest.fixture(params=[Client, AsyncClient], ids=["Client", "AsyncClient"])
async def twin(request: pytest.FixtureRequest, address: str) -> AsyncIterator[Twin]:
    either = Twin(request.param(address, retries=FAST))
    yield either
    await either.close()
