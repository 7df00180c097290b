"""Tensors of the model next to the text: logits, hidden states, and the result of any module by name.

    python examples/executor/additional_outputs.py [host:port]        default: its own server

Asks for the logits of each token of an answer, and for the states after the last layer at the prompt and the answer. A
second answer to the same prompt lacks the states of the tokens that the prefix cache had: `start` says how many.
"""

from __future__ import annotations

import sys

from lockstep_client import AdditionalOutput, Executor, OutputConfig, Request, Result, SamplingConfig

PROMPT = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"
STATES = "hidden_states.30"


def main(arguments: list[str]) -> list[Result]:
    """Return two results for one prompt, with their tensors."""
    executor = Executor(address=arguments[0]) if arguments else Executor("embedded", max_batch_size=4)
    request = Request(
        text=PROMPT,
        max_tokens=8,
        sampling_config=SamplingConfig(temperature=0),
        output_config=OutputConfig(generation_logits=True, additional_outputs=[AdditionalOutput(STATES, context=True)]),
    )
    results = []
    with executor:
        names = executor.client.model_info().output_names
        print(f"the model has {len(names)} outputs, such as {', '.join(names[:3])} and {names[-1]}")
        for _ in range(2):
            (response,) = executor.await_responses(executor.enqueue_request(request))
            results.append(response.result)
    return results


if __name__ == "__main__":
    for result in main(sys.argv[1:]):
        print(repr(result.texts[0]))
        logits, states = result.generation_logits, result.additional_outputs[STATES]
        assert logits is not None
        for tensor in (logits, states):
            print(f"  {tensor.name}: {tensor.dtype} {list(tensor.shape)} from position {tensor.start} on")
        print("  the largest logit of each row is that of", [row.index(max(row)) for row in logits.tolist()])
        print("  the answer's tokens are                 ", list(result.output_token_ids[0]))
