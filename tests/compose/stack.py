"""A composed stack under its own project name: started from nothing, asked, broken, and taken away again.

Not responsible for: what must hold (see test_containers.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema

from lockstep_client.access import TLS, access_to
from protos.engine.v1 import engine_pb2 as pb
from tests.e2e.asking import Answer, answer
from tests.rpc_client import Client

PROJECT = "lockstep-test"
UP_TIMEOUT_S = 600
VARIABLES = {
    # Threads that meet after every product wait for each other on a machine that has other work.
    "LOCKSTEP_NUM_THREADS": "1",
    "GRAMMAR_BACKEND": "llguidance",
    # A stack of this machine's owner may run next to this one.
    "LOCKSTEP_PUBLISH": "127.0.0.1:0",
    "LOCKSTEP_PUBLISH_METRICS": "127.0.0.1:0",
    "LOCKSTEP_PUBLISH_HTTP": "127.0.0.1:0",
}


@dataclass(frozen=True, slots=True)
class Stack:
    """Runs `docker compose` in the checkout, with these files and variables."""

    root: Path
    files: tuple[str, ...] = ("compose.yaml",)
    variables: dict[str, str] = field(default_factory=dict)

    def compose(self, *arguments: str, check: bool = True) -> str:
        """Return stdout."""
        files = [part for name in self.files for part in ("--file", name)]
        done = subprocess.run(
            ["docker", "compose", "--project-name", PROJECT, *files, *arguments],
            cwd=self.root,
            env=os.environ | VARIABLES | self.variables,
            capture_output=True,
            text=True,
            timeout=UP_TIMEOUT_S,
            check=False,
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout.strip()

    def up(self) -> None:
        """Start what does not run as it should, from images that are there, and wait until it is healthy.

        Containers of overlays that are not among the files end.
        """
        self.compose("up", "--detach", "--wait", "--no-build", "--remove-orphans")

    def down(self) -> None:
        """Leave nothing."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "10")

    def container(self, service: str) -> str:
        """Return the id of the service's container, running or not."""
        return self.compose("ps", "--all", "--quiet", service)

    def restarts(self, service: str) -> int:
        """Return how often Docker started the container again by itself."""
        return int(self.inspect(service, "{{.RestartCount}}"))

    def recovered(self, service: str, restarts: int) -> bool:
        """Return whether the container was started again since `restarts`, and is healthy."""
        return self.restarts(service) > restarts and self.inspect(service, "{{.State.Health.Status}}") == "healthy"

    def inside(self, service: str, script: str, check: bool = True) -> str:
        """Run a shell script in the container; return its stdout."""
        return self.compose("exec", "--no-TTY", service, "sh", "-c", script, check=check)

    def inspect(self, service: str, template: str) -> str:
        """Return what `docker inspect --format` says."""
        command = ["docker", "inspect", "--format", template, self.container(service)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    @property
    def address(self) -> str:
        """Where the engine is published on this machine."""
        return self.compose("port", "engine", "50051")

    async def ask(self, request: pb.GenerateRequest, tls: TLS | bool = False, token: str | None = None) -> Answer:
        """Return the answer that a client on this machine gets."""
        access = access_to(self.address.replace("127.0.0.1", "localhost"), tls, token, ())
        async with Client(access.address, access) as client:
            return await answer(client, request)

    async def backends(self) -> list[int]:
        """Return the libraries that the engine may use now."""
        async with Client(self.address) as client:
            return list((await client.info()).backends)


def check(found: Answer, schema: object) -> None:
    assert pb.FinishReason.Name(found.last.finish_reason) == "FINISH_REASON_STOP"
    jsonschema.validate(json.loads(found.text), schema)


async def disturbed_answer(
    address: str, request: pb.GenerateRequest, disturb: Callable[[], Awaitable[None]], after: int = 100
) -> Answer:
    """Return an answer during which `disturb` ran, from its first `after` characters on."""
    disturbing: list[asyncio.Future[None]] = []

    def seen(found: Answer) -> None:
        if not disturbing and len(found.text) > after:
            disturbing.append(asyncio.ensure_future(disturb()))

    async with Client(address) as client:
        found = await answer(client, request, seen)
    await disturbing[0]
    return found


def listing(items: int) -> tuple[pb.GenerateRequest, dict[str, Any]]:
    """Return a request for a long list under a schema, greedy, and the schema."""
    item = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "year": {"type": "integer", "minimum": 1000}},
        "required": ["city", "year"],
        "additionalProperties": False,
    }
    schema = {"type": "array", "items": item, "minItems": items, "maxItems": items}
    request = pb.GenerateRequest(
        messages=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="List cities and years as JSON.")]),
        sampling=pb.SamplingParams(max_tokens=1800, temperature=0.8, seed=7),
        grammar=pb.Grammar(json_schema=json.dumps(schema), whitespace=pb.WHITESPACE_COMPACT),
    )
    return request, schema
