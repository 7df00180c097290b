"""Results as tokens come: of any request, in the order of their arrival; one request is cancelled.

python examples/executor/streaming.py [host:port]        default: its own server with the embedded model
"""

from __future__ import annotations

import sys

from lockstep_client import Executor, FinishReason, Request, SamplingConfig

PROMPTS = ("Once upon a time", "In the morning", "The three largest rivers are")
CANCELLED_AFTER = 5


def main(arguments: list[str]) -> dict[int, tuple[str, FinishReason | None]]:
    """Return the text of each request and how it ended, by its id. The first one is cancelled."""
    executor = Executor(address=arguments[0]) if arguments else Executor("embedded", max_batch_size=4)
    with executor:
        sampling = SamplingConfig(temperature=0)
        first, *_ = executor.enqueue_requests(
            [
                Request(text=PROMPTS[0], max_tokens=400, end_id=-1, streaming=True, sampling_config=sampling),
                Request(text=PROMPTS[1], max_tokens=24, streaming=True, sampling_config=sampling),
                # All tokens so far, in each result.
                Request(
                    text=PROMPTS[2],
                    max_tokens=24,
                    streaming=True,
                    return_all_generated_tokens=True,
                    sampling_config=sampling,
                ),
            ]
        )
        texts: dict[int, str] = {}
        ended: dict[int, tuple[str, FinishReason | None]] = {}
        tokens = 0
        while responses := executor.await_responses():
            for response in responses:
                result, has_all = response.result, response.request_id == first + 2
                before = "" if has_all else texts.get(response.request_id, "")
                texts[response.request_id] = before + result.texts[0]
                tokens += len(result.output_token_ids[0]) if response.request_id == first else 0
                if result.is_final:
                    ended[response.request_id] = (texts[response.request_id], result.finish_reasons[0])
                    print(f"{response.request_id} {result.finish_reasons[0]}: {texts[response.request_id]!r}")
            if tokens >= CANCELLED_AFTER:
                executor.cancel_request(first)
        return ended


if __name__ == "__main__":
    main(sys.argv[1:])
