"""`python -m benchmarks agents`: many short calls of agents, whose prompts begin with the same tools.

Invariant: two servers run at once, one without the prefix cache, and get the same calls in blocks, in turn; both must
give the same answers.
Not responsible for: whether a small model chooses the right tool (benchmarks/quality/function_calls.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.harness.client import Call, EngineClient
from benchmarks.harness.flags import add_engine_flags, engine_options, harness_parser, whole
from benchmarks.harness.measure import Answer
from benchmarks.harness.server import EngineServer
from benchmarks.harness.tables import Progress, number, table
from benchmarks.speed.prefixes import stats
from protos.engine.v1 import engine_pb2 as pb

EXAMPLES = """
what it does:
  Five agents with eight tools each call the model for a tool: their prompts share the tools, and each agent's its own
  system message. Each call has a question of its own. Prints calls/s and the share of the prompt tokens that the prefix
  cache had.

examples:
  python -m benchmarks agents
  python -m benchmarks agents --count 200 --concurrency 8

exit code: 0, 1 an answer differed, 2 a server failed
"""
AGENTS = ("a travel agent", "a shop's clerk", "a librarian", "a doctor's assistant", "an accountant")
TOOLS = {
    "weather": ("Tell the weather of a city.", {"city": 20}),
    "flights": ("Find flights between two cities.", {"origin": 20, "destination": 20}),
    "hotels": ("Find hotels in a city.", {"city": 20, "date": 10}),
    "price": ("Tell the price of a thing.", {"thing": 20}),
    "order": ("Order a thing for a customer.", {"thing": 20, "customer": 20}),
    "book": ("Find a book by its title.", {"title": 30}),
    "appointment": ("Make an appointment.", {"person": 20, "date": 10}),
    "invoice": ("Write an invoice.", {"customer": 20, "amount": 8}),
}
TASKS = ("for Ann in Oslo", "for Ben in Rome", "for Cleo in Paris", "for Dan in Lima", "for Eve in Kyoto")


def calls(count: int, max_tokens: int) -> list[Call]:
    """Return the calls, one agent after the other."""
    tools = pb.Tools(choice=pb.TOOL_CHOICE_REQUIRED, parallel=False)
    for name, (description, fields) in TOOLS.items():
        properties = {field: {"type": "string", "maxLength": length} for field, length in fields.items()}
        schema = {"type": "object", "properties": properties, "required": list(fields)}
        tools.tools.add(name=name, description=description, parameters=json.dumps(schema))
    made = []
    for i in range(count):
        request = pb.GenerateRequest(tools=tools)
        request.sampling.max_tokens, request.sampling.temperature = max_tokens, 0.0
        request.messages.messages.add(role="system", content=f"You are {AGENTS[i % len(AGENTS)]}. Use the tools.")
        task = TASKS[i // len(AGENTS) % len(TASKS)]
        request.messages.messages.add(role="user", content=f"Request {i}: please do what is needed {task}.")
        made.append(Call(str(i), request))
    return made


async def answered(client: EngineClient, block: Sequence[Call], concurrency: int) -> tuple[float, list[Answer]]:
    """Return the seconds that a block takes, and its answers."""
    room = asyncio.Semaphore(concurrency)

    async def ask(call: Call) -> Answer:
        async with room:
            return await client.generate(call)

    began_s = time.perf_counter()
    answers = await asyncio.gather(*map(ask, block))
    return time.perf_counter() - began_s, answers


async def measure(addresses: Sequence[str], args: argparse.Namespace) -> int:
    """Ask everything, print the table, and return how many answers differ."""
    clients = [EngineClient(address) for address in addresses]
    todo, seconds, tokens, differ = calls(args.count, args.max_tokens), [0.0, 0.0], 0, 0
    progress = Progress(args.count)
    try:
        for client in clients:
            await client.generate(
                Call("warm", pb.GenerateRequest(text="warm", sampling=pb.SamplingParams(max_tokens=4)))
            )
        for start in range(0, args.count, args.block):
            block, texts = todo[start : start + args.block], list[list[str]]([[], []])
            for at in (0, 1) if start // args.block % 2 else (1, 0):
                took_s, answers = await answered(clients[at], block, args.concurrency)
                seconds[at] += took_s
                texts[at] = [answer.text for answer in answers]
                tokens += sum(len(answer.token_ids) for answer in answers)
            differ += sum(one != other for one, other in zip(*texts, strict=True))
            for _ in block:
                progress.step("block")
        counters = [await stats(address) for address in addresses]
    finally:
        progress.close()
        for client in clients:
            await client.close()
    rows = [
        [
            name,
            number(args.count / took_s, 2),
            number(tokens / 2 / took_s, 1),
            f"{counted.prefill_tokens}",
            number(100 * counted.cached_tokens / (counted.cached_tokens + counted.prefill_tokens), 1, "%"),
        ]
        for name, took_s, counted in zip(("without", "with"), seconds, counters, strict=True)
    ]
    print(table(("prefix cache", "calls/s", "tokens/s", "tokens prefilled", "of the prompts cached"), rows))
    print(f"ratio {seconds[0] / seconds[1]:.2f}; answers that differ: {differ} of {args.count}")
    return differ


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = harness_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add_engine_flags(parser, "model", "dtype", "device", "threads")
    add("--count", type=whole(1), default=1000, help="calls (default 1000)")
    add("--concurrency", type=whole(1), default=16, help="calls at a time (default 16)")
    add("--block", type=whole(1), default=50, help="calls to one server before the other's turn (default 50)")
    add("--max-tokens", type=whole(1), default=48, help="tokens of an answer (default 48)")
    args = parser.parse_args(argv)
    options = engine_options(args, max_batch_size=args.concurrency)
    with EngineServer(replace(options, prefix_cache=False)) as without, EngineServer(options) as with_cache:
        return int(asyncio.run(measure((without.address, with_cache.address), args)) > 0)
