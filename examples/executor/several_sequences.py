"""Several sequences for one prompt: `is_sequence_final` ends each of them, `is_final` ends the request.

python examples/executor/several_sequences.py [host:port]        default: its own server with the embedded model
"""

from __future__ import annotations

import sys

from lockstep_client import Executor, OutputConfig, Request, Result, SamplingConfig

SEQUENCES = 3


def main(arguments: list[str]) -> list[Result]:
    """Return the results of one request for several sequences."""
    executor = Executor(address=arguments[0]) if arguments else Executor("embedded", max_batch_size=4)
    with executor:
        request_id = executor.enqueue_request(
            Request(
                text="A good name for a cat is",
                max_tokens=12,
                num_return_sequences=SEQUENCES,
                sampling_config=SamplingConfig(temperature=1, seed=7),
                output_config=OutputConfig(log_probs=0),
            )
        )
        results: list[Result] = []
        while not results or not results[-1].is_final:
            for response in executor.await_responses(request_id):
                result = response.result
                results.append(result)
                print(
                    f"request {response.request_id}, sequence {result.sequence_index}, "
                    f"is_sequence_final={result.is_sequence_final}, is_final={result.is_final}, "
                    f"log-probability {result.cum_log_probs[0]:.2f}: {result.texts[0]!r}"
                )
        return results


if __name__ == "__main__":
    main(sys.argv[1:])
