"""Has a running server answer a file of prompts, under the schemas of the prompts, as training data for a drafter.

    python -m tools.training.answers --prompts prompts.jsonl --out answers.jsonl --address 127.0.0.1:50051

Invariant: each line of the output is one whole answer with its token ids. A prompt whose answer is in the output is not
sent again, so a run may be interrupted and started again.
Not responsible for: training (see train_eagle3.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import grpc
from rich.progress import Progress, TaskID

from gpu_engine.cli.client import Client
from protos.engine.v1 import engine_pb2 as pb
from tools.training.prompts import TrainingPrompt

EXAMPLES = """
Each line of the input is one JSON object with name, messages [{role, content}], and optionally schema and max_tokens.
Every second answer is greedy, the others are sampled at --temperature. Prompts that the server refuses are counted and
left out.

examples:
  python -m tools.training.prompts --count 3000 > prompts.jsonl
  lockstep serve --listen 127.0.0.1:50051 &
  python -m tools.training.answers --prompts prompts.jsonl --out answers.jsonl
"""


@dataclass(frozen=True, slots=True)
class TrainingAnswer:
    """One line of the output."""

    name: str
    messages: tuple[tuple[str, str], ...]
    answer_ids: tuple[int, ...]
    finish: str

    def line(self) -> str:
        """Return the line, without its end."""
        messages = [{"role": role, "content": content} for role, content in self.messages]
        return json.dumps(
            {"name": self.name, "messages": messages, "answer_ids": self.answer_ids, "finish": self.finish}
        )

    @staticmethod
    def parse(line: str) -> TrainingAnswer:
        """Return the answer of a line. Raises ValueError or KeyError."""
        fields = json.loads(line)
        messages = tuple((message["role"], message["content"]) for message in fields["messages"])
        return TrainingAnswer(fields["name"], messages, tuple(fields["answer_ids"]), fields["finish"])


def read_prompts(path: Path) -> Iterator[TrainingPrompt]:
    """Yield the prompts of a file. Raises ValueError with the number of a wrong line."""
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield TrainingPrompt.parse(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None


def read_answers(path: Path) -> list[TrainingAnswer]:
    """Return the answers of a file, without a last line that an interrupted run left incomplete."""
    if not path.exists():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0]
    return [TrainingAnswer.parse(line) for line in whole.decode().splitlines()]


async def answer_all(
    client: Client, prompts: Iterable[TrainingPrompt], out: TextIO, *, temperature: float, concurrency: int,
    progress: Progress, task: TaskID,
) -> int:  # fmt: skip
    """Send every prompt, write each answer once it is whole, and return the number of refused prompts.

    Raises ConnectionError if the server cannot be reached or fails; the answers received before are written.
    """
    remaining = iter(enumerate(prompts))
    refused = 0

    async def send_remaining() -> None:
        nonlocal refused
        for number, prompt in remaining:
            try:
                answer = await _answer(client, prompt, temperature if number % 2 else 0.0, seed=number)
                out.write(answer.line() + "\n")
                out.flush()
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED):
                    raise
                refused += 1
                progress.console.print(f"{prompt.name}: {error.details()}")
            progress.advance(task)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(send_remaining())
    except* grpc.aio.AioRpcError as failed:
        error = failed.exceptions[0]
        assert isinstance(error, grpc.aio.AioRpcError)
        raise ConnectionError(f"the server at {client.address}: {error.code().name}: {error.details()}") from None
    return refused


async def _answer(client: Client, prompt: TrainingPrompt, temperature: float, seed: int) -> TrainingAnswer:
    request = pb.GenerateRequest(
        messages=pb.ChatMessages(messages=[pb.ChatMessage(role=role, content=text) for role, text in prompt.messages]),
        sampling=pb.SamplingParams(max_tokens=prompt.max_tokens, temperature=temperature, seed=seed),
        response=pb.ResponseOptions(omit_text=True),
    )
    if prompt.schema is not None:
        request.grammar.json_schema = prompt.schema
    tokens: list[int] = []
    finish = pb.FINISH_REASON_UNSPECIFIED
    async for response in client.generate(request):
        tokens += response.token_ids
        finish = response.finish_reason or finish
    return TrainingAnswer(prompt.name, prompt.messages, tuple(tokens), pb.FinishReason.Name(finish))


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.training.answers",
        description="Have a running server answer a file of prompts, and write its tokens to a file.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE.jsonl",
        help="answers are appended; prompts answered here are skipped",
    )
    parser.add_argument("--address", default="127.0.0.1:50051", help="address of the server (default 127.0.0.1:50051)")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="temperature of every second answer (default 0.7)"
    )
    parser.add_argument("--concurrency", type=int, default=8, help="requests at once (default 8)")
    return parser


async def _run(args: argparse.Namespace) -> int:
    answered = {answer.name for answer in read_answers(args.out)}
    prompts = [prompt for prompt in read_prompts(args.prompts) if prompt.name not in answered]
    with closing(args.out.open("a")) as out, Progress() as progress:
        task = progress.add_task("answers", total=len(prompts))
        async with Client(args.address) as client:
            refused = await answer_all(
                client,
                prompts,
                out,
                temperature=args.temperature,
                concurrency=args.concurrency,
                progress=progress,
                task=task,
            )
    print(f"{len(prompts) - refused} answers in {args.out}, {refused} prompts refused", file=sys.stderr)
    return 0


def main() -> int:
    """Answer the prompts; return 2 when a file is wrong or the server fails."""
    args = build_parser().parse_args()
    try:
        return asyncio.run(_run(args))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
