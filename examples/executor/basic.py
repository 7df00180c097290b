"""The executor: enqueue requests, do something else, await their responses.

    python examples/executor/basic.py [host:port]        default: its own server with the embedded model

Needs `lockstep-client` (pip install ./client), and for its own server the engine in the same environment.
"""

from __future__ import annotations

import sys

from lockstep_client import Executor, GuidedDecodingParams, GuideType, Request, SamplingConfig

PROMPTS = ("The capital of France is", "The capital of Italy is", "The capital of Spain is")
GREEDY = SamplingConfig(temperature=0)


def open_executor(arguments: list[str]) -> Executor:
    """Connect to the server that is named, or start one."""
    return Executor(address=arguments[0]) if arguments else Executor("embedded", max_batch_size=4)


def main(arguments: list[str]) -> list[str]:
    """Return the answers, in the order of the prompts; the last one is a date."""
    with open_executor(arguments) as executor:
        requests = [Request(text=prompt, max_tokens=8, sampling_config=GREEDY) for prompt in PROMPTS]
        date = GuidedDecodingParams(GuideType.REGEX, "[0-9]{4}-[0-9]{2}-[0-9]{2}")
        requests.append(Request(text="The date of today is ", sampling_config=GREEDY, guided_decoding_params=date))
        ids = executor.enqueue_requests(requests)
        print(f"enqueued {ids}")
        texts = []
        for (response,) in executor.await_responses(ids):
            if response.has_error:
                raise SystemExit(f"request {response.request_id}: {response.error_msg}")
            result = response.result
            texts.append(result.texts[0])
            print(f"{response.request_id}: {texts[-1]!r}, {len(result.output_token_ids[0])} tokens")
        return texts


if __name__ == "__main__":
    main(sys.argv[1:])
