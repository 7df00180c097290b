"""Statistics of each iteration of the engine's loop, and of the requests that ran after it.

python examples/executor/statistics.py [host:port]        default: its own server with the embedded model
"""

from __future__ import annotations

import asyncio
import sys

from lockstep_client import AsyncExecutor, IterationStats, Request, RequestStatsPerIteration, SamplingConfig

REQUESTS = 6


async def run(arguments: list[str]) -> tuple[list[IterationStats], list[RequestStatsPerIteration]]:
    """Return the statistics of some requests that run together."""
    executor = AsyncExecutor(address=arguments[0]) if arguments else AsyncExecutor("embedded", max_batch_size=4)
    async with executor:
        await executor.get_latest_iteration_stats(timeout_s=0.2)  # those of the past
        greedy = SamplingConfig(temperature=0)
        await executor.enqueue_requests(
            [
                Request(text=f"{i} and {i} is", max_tokens=32, client_id="example", end_id=-1, sampling_config=greedy)
                for i in range(REQUESTS)
            ]
        )
        iterations: list[IterationStats] = []
        requests: list[RequestStatsPerIteration] = []
        ended = 0
        while ended < REQUESTS:
            ended += len(await executor.await_responses(timeout_s=0.2))
            iterations += await executor.get_latest_iteration_stats(timeout_s=0)
            requests += await executor.get_latest_request_stats(timeout_s=0)
        while (more := await executor.get_latest_iteration_stats()) != []:  # the server tells them every 100 ms
            iterations += more
        return iterations, requests


def main(arguments: list[str]) -> tuple[list[IterationStats], list[RequestStatsPerIteration]]:
    """Print and return what `run` returns."""
    iterations, requests = asyncio.run(run(arguments))
    for each in iterations[:8]:
        print(
            f"iteration {each.iteration}: {each.iteration_ms:.1f} ms, {each.decoding} sequences decoded and "
            f"{each.waiting} waited, {each.prefill_tokens} tokens of prompts, {each.generated_tokens} of answers"
        )
    print(f"... {len(iterations)} iterations, {sum(each.generated_tokens for each in iterations)} tokens")
    for state in requests[:2]:
        for each in state.requests:
            print(
                f"after iteration {state.iteration}: {each.request_id} of {each.client_id!r} is in {each.stage.value} "
                f"with {each.generated_tokens} tokens in {each.pages} pages"
            )
    return iterations, requests


if __name__ == "__main__":
    main(sys.argv[1:])
