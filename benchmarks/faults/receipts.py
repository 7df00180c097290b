"""`python -m benchmarks receipts`: does every receipt of random traffic replay equal?

Invariant: a receipt is replayed on another server than the one that made it: after a restart, with another drafter,
another number of drafts, another batch size and another KV cache. Both servers preempt sequences and lose their grammar
process now and then.
Not responsible for: what a receipt says (docs/requests.md).
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import itertools
import os
import random
import signal
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from benchmarks.faults.attacks import Target
from benchmarks.harness.failure import CannotRun
from benchmarks.harness.flags import harness_parser, real, whole
from benchmarks.harness.server import EngineServer, ServerOptions
from benchmarks.harness.tables import Progress, table
from gpu_engine.api.signed_statements import NEEDS, StatementRefused, checked_claims, read_key
from gpu_engine.cli.receipt_differences import differences
from gpu_engine.cli.receipts import replayed
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc

SHAPES = (
    {"drafter": "ngram", "num_draft_tokens": 7, "max_batch_size": 16},
    {"drafter": "none", "num_draft_tokens": 0, "max_batch_size": 3},
    {"drafter": "ngram", "num_draft_tokens": 3, "max_batch_size": 8, "prefix_cache": False},
    {"drafter": "grammar", "num_draft_tokens": 15, "max_batch_size": 5},
)
"""Of servers, in turn."""
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_."
TIMEOUT_S = 300.0
LEAST_GUIDED = 30
"""The fewest max_tokens of a guided request: the shortest answer in bytes, for a model whose tokens are bytes."""
MAX_TRIES = 5
CHANGES = 4
"""Changed characters that are tried on each receipt."""
WORDS = (
    "a",
    "list",
    "of",
    "rivers,",
    "their",
    "lengths",
    "write",
    "it",
    "as",
    "data:",
    "one",
    "two",
    "17",
    "yes",
    "no",
)
SCHEMAS = (
    '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a"],'
    ' "additionalProperties": false}',
    '{"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5}',
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "tags": {"type": "array", "items":'
    ' {"type": "string", "maxLength": 4}, "maxItems": 3}}, "required": ["name", "tags"], "additionalProperties": false'
    "}",
)
VERIFIED = '{"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 4, "uniqueItems": true}'

EXAMPLES = """
examples:
  python -m benchmarks receipts --count 500                      the embedded model, two servers in turn
  python -m benchmarks receipts --count 10000 --rounds 10 --model FOLDER --dtype float32
"""


@dataclass(slots=True)
class Made:
    """A receipt that waits to be replayed."""

    request: pb.GenerateRequest
    receipt: str


@dataclass(slots=True)
class Seen:
    """What the run has seen so far."""

    equal: int = 0
    different: list[str] = field(default_factory=list)
    refused: int = 0
    """Changed receipts that were refused."""
    accepted: int = 0
    tokens: int = 0
    kills: int = 0
    retried: int = 0
    """Calls that ended with UNAVAILABLE and were made again."""
    preempted: int = 0
    servers: int = 0
    finished: collections.Counter[str] = field(default_factory=collections.Counter)
    """Answers by finish reason."""


def random_request(generator: random.Random, number: int) -> pb.GenerateRequest:
    """Return a request of any kind that has a receipt."""
    text = " ".join(generator.choices(WORDS, k=generator.randint(1, 40)))
    request = pb.GenerateRequest(text=text, request_id=f"r{number}")
    sampling = request.sampling
    sampling.temperature = generator.choice((0.0, 0.3, 0.7, 1.0, 1.0, 1.5))
    for _ in range(generator.randint(0, 2)):
        generator.choice(_SAMPLINGS)(sampling, generator)
    generator.choice(_GRAMMARS)(request)
    sampling.max_tokens = generator.randint(LEAST_GUIDED if request.HasField("grammar") else 1, 64)
    if generator.random() < 0.5:
        sampling.seed = generator.getrandbits(64)
    if generator.random() < 0.1:
        sampling.n = 2
    if generator.random() < 0.3:
        request.speculation.num_draft_tokens = 0
    request.response.receipt_nonce = generator.randbytes(generator.randint(16, 64))
    request.response.whole = generator.random() < 0.5
    return request


def _set(**values: Any) -> Callable[[pb.SamplingParams, random.Random], None]:
    def change(sampling: pb.SamplingParams, generator: random.Random) -> None:
        sampling.MergeFrom(pb.SamplingParams(**values))

    return change


def _bias(sampling: pb.SamplingParams, generator: random.Random) -> None:
    for _ in range(3):
        sampling.logit_bias[generator.randint(32, 250)] = generator.uniform(-9, 9)


_SAMPLINGS: tuple[Callable[[pb.SamplingParams, random.Random], None], ...] = (
    _set(top_p=0.9),
    _set(top_k=20),
    _set(min_p=0.05),
    _set(repetition_penalty=1.2),
    _set(presence_penalty=0.5, frequency_penalty=0.5),
    _set(stop=["e", "17"]),
    _set(bad_words=["two"], bad_token_ids=[65]),
    _set(min_tokens=1),
    _set(repetition_max_pattern_size=8, repetition_min_count=3),
    _bias,
)


def _grammar(**values: Any) -> Callable[[pb.GenerateRequest], None]:
    return lambda request: request.grammar.CopyFrom(pb.Grammar(**values))


_GRAMMARS: tuple[Callable[[pb.GenerateRequest], None], ...] = (
    *(lambda request: None,) * 4,
    *(_grammar(json_schema=schema) for schema in SCHEMAS),
    _grammar(json_schema=SCHEMAS[2], whitespace=pb.WHITESPACE_ANY, max_whitespace=2),
    _grammar(json_schema=VERIFIED, unenforced=pb.UNENFORCED_VERIFY),
    _grammar(regex="[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    _grammar(choice=pb.Choice(choices=["yes", "no", "maybe so"])),
    _grammar(lark='start: "The answer is " /[a-z]{2,12}/ "."'),
    _grammar(json_object=True, max_string_length=5, max_array_items=3, max_number_digits=3),
)


class Server:
    """One running server, and what is sent to it."""

    def __init__(self, server: EngineServer, args: argparse.Namespace, seen: Seen) -> None:
        self._args, self._seen = args, seen
        self._target = Target(server.address, server.pid)
        self._channel = grpc.aio.insecure_channel(server.address)
        self._stub = engine_pb2_grpc.EngineStub(self._channel)

    async def key(self) -> Any:
        """Return the key of its receipts."""
        return read_key((await self._stub.GetModelInfo(pb.GetModelInfoRequest())).receipt_key)

    async def receipts_of(self, request: pb.GenerateRequest) -> list[str]:
        """Return the receipts of a request's sequences. A call that the faults have ended is made again."""
        for tries in range(1, MAX_TRIES + 1):
            call = self._stub.Generate(request, timeout=TIMEOUT_S)
            try:
                return [response.receipt async for response in call if response.finish_reason]
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or tries == MAX_TRIES:
                    raise
                self._seen.retried += 1
                await asyncio.sleep(tries)
        raise AssertionError("the last try returns or raises")

    async def each(self, jobs: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """Run jobs, `--concurrency` at a time, while the grammar process is killed now and then."""
        waiting = collections.deque(jobs)

        async def client() -> None:
            while waiting:
                await waiting.popleft()()

        background = [asyncio.create_task(self._kill()), asyncio.create_task(self._watch())]
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._args.concurrency):
                    group.create_task(client())
        finally:
            for task in background:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                    await task

    async def _kill(self) -> None:
        # The first one comes soon, so that a short round has one as well.
        for waits_s in itertools.chain((self._args.kill_every / 8,), itertools.repeat(self._args.kill_every)):
            await asyncio.sleep(waits_s)
            if pid := self._target.sidecar_pid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self._seen.kills += 1

    async def _watch(self) -> None:
        async for update in self._stub.WatchStats(pb.WatchStatsRequest(omit_requests=True)):
            self._seen.preempted += sum(each.preempted for each in update.iterations)

    async def aclose(self) -> None:
        """Close the connection."""
        await self._channel.close(None)


async def run(args: argparse.Namespace, start: Callable[[int], EngineServer], seen: Seen) -> None:
    """Make `--count` receipts on `--rounds` servers, and replay those of each on the next one. `start` returns the
    server of a round."""
    generator, made = random.Random(args.seed), list[Made]()
    shares = [args.count // args.rounds + (at < args.count % args.rounds) for at in range(args.rounds)]
    progress = Progress(2 * args.count)
    numbers = iter(range(args.count))
    try:
        for at, share in enumerate([*shares, 0]):
            with start(at) as process:
                seen.servers += 1
                server = Server(process, args, seen)
                try:
                    made = await _round(
                        server, seen, made, [random_request(generator, next(numbers)) for _ in range(share)], progress
                    )
                finally:
                    await server.aclose()
    finally:
        progress.close()


async def _round(
    server: Server, seen: Seen, before: Sequence[Made], requests: Sequence[pb.GenerateRequest], progress: Progress
) -> list[Made]:
    """Replay receipts and make new ones, at the same time; return the new ones."""
    key, made, generator = await server.key(), list[Made](), random.Random(len(before))

    def replay(each: Made) -> Callable[[], Awaitable[None]]:
        async def job() -> None:
            claims = checked_claims(each.receipt, key)
            (again,) = await server.receipts_of(replayed(each.request, claims))
            found = differences(claims, checked_claims(again, key))
            seen.equal += not found
            seen.tokens += claims["answer"]["tokens"]
            seen.finished[claims["answer"]["finish"]] += 1
            if found:
                seen.different.append(f"{each.request.request_id}: {'; '.join(map(str, found))}")
            _change(each.receipt, key, generator, seen)
            progress.step("replayed")

        return job

    def make(request: pb.GenerateRequest) -> Callable[[], Awaitable[None]]:
        async def job() -> None:
            receipts = await server.receipts_of(request)
            made.append(Made(request, receipts[-1]))  # of n sequences, the one that ended last
            progress.step("made")

        return job

    jobs = [*map(replay, before), *map(make, requests)]
    generator.shuffle(jobs)
    await server.each(jobs)
    return made


def _change(receipt: str, key: Any, generator: random.Random, seen: Seen) -> None:
    """Count whether receipts with another character somewhere are refused."""
    for _ in range(CHANGES):
        at = generator.randrange(len(receipt))
        other = generator.choice(ALPHABET.replace(receipt[at], ""))
        try:
            checked_claims(receipt[:at] + other + receipt[at + 1 :], key)
        except StatementRefused:
            seen.refused += 1
        else:
            seen.accepted += 1


def report(seen: Seen) -> str:
    """Return the result as text."""
    rows = [
        ["receipts replayed", str(seen.equal + len(seen.different))],
        ["equal", str(seen.equal)],
        ["tokens", str(seen.tokens)],
        ["changed receipts refused", f"{seen.refused} of {seen.refused + seen.accepted}"],
        ["servers", str(seen.servers)],
        ["kills of the grammar process", str(seen.kills)],
        ["calls made again", str(seen.retried)],
        ["preemptions", str(seen.preempted)],
        ["finish reasons", ", ".join(f"{name} {count}" for name, count in sorted(seen.finished.items()))],
    ]
    return "\n".join([table(("receipts", "count"), rows), *seen.different[:20]])


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = harness_parser(__doc__, EXAMPLES)
    made.add_argument("--count", type=whole(1), default=500, help="receipts (default: %(default)s)")
    made.add_argument("--rounds", type=whole(1), default=2, help="servers that make receipts (default: %(default)s)")
    made.add_argument("--concurrency", type=whole(1), default=16, help="requests at a time (default: %(default)s)")
    made.add_argument(
        "--kill-every", type=real(0.01), default=5.0, help="seconds between two kills (default: %(default)s)"
    )
    made.add_argument(
        "--kv-cache-tokens", type=whole(1), default=1024, help="few, for preemptions (default: %(default)s)"
    )
    made.add_argument("--seed", type=int, default=1, help="of the requests (default: %(default)s)")
    made.add_argument("--model", default="embedded", help="(default: %(default)s)")
    made.add_argument("--dtype", default="auto", help="(default: %(default)s)")
    return made


def servers(args: argparse.Namespace, key: Path) -> Callable[[int], EngineServer]:
    """Return what makes the server of a round."""

    def start(at: int) -> EngineServer:
        extra = ("--kv-cache-tokens", str(args.kv_cache_tokens), "--receipt-key", str(key), "--max-model-len", "512")
        options: Any = {**SHAPES[at % len(SHAPES)], "model": args.model, "dtype": args.dtype}
        return EngineServer(ServerOptions(extra=(*extra, "--grammar-wait-s", "120"), **options))

    return start


def write_key(path: Path) -> None:
    """Write a new private key. Raises CannotRun where the package that makes one is missing."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise CannotRun(NEEDS) from error
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path.write_bytes(ed25519.Ed25519PrivateKey.generate().private_bytes(encoding, form, serialization.NoEncryption()))


def main() -> int:
    """Run the harness; the exit status is 1 where a receipt did not replay equal, or a changed one was accepted."""
    args = parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key.pem"
        write_key(key)
        seen, whole = Seen(), False
        try:
            asyncio.run(run(args, servers(args, key), seen))
            whole = True
        finally:
            print(report(seen) if whole else f"{report(seen)}\nended before its end")
    return int(bool(seen.different or seen.accepted) or seen.equal == 0)
