"""Tensors of the model beside the text: logits, hidden states, and the result of any module by name.

    python examples/executor/additional_outputs.py

Starts a server of its own with the embedded model. Asks for the logits of each token of an answer, and for the states
behind the last layer at the prompt and the answer. The second answer to the same prompt lacks the states of the tokens
that the prefix cache had: `start` says how many.
"""

from __future__ import annotations

from lockstep_client import AdditionalOutput, Answer, Client

PROMPT = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"
STATES = "hidden_states.30"


def main() -> list[Answer]:
    """Return two answers to one prompt, with their tensors."""
    with Client.embedded(num_threads=1, max_batch_size=2) as client:
        names = client.model_info().output_names
        print(f"the model has {len(names)} outputs, such as {', '.join(names[:3])} and {names[-1]}")
        return [
            client.generate(
                PROMPT,
                max_tokens=8,
                temperature=0.0,
                generation_logits=True,
                additional_outputs=[AdditionalOutput(STATES, context=True)],
            )
            for _ in range(2)
        ]


if __name__ == "__main__":
    for answer in main():
        print(f"{answer.text!r}, {answer.usage.cached_tokens} tokens of the prompt were cached")
        for tensor in answer.outputs.values():
            print(f"  {tensor.name}: {tensor.dtype} {list(tensor.shape)} from position {tensor.start} on")
        rows = answer.outputs["generation_logits"].tolist()
        print("  the largest logit of each row is that of", [row.index(max(row)) for row in rows])
        print("  the answer's tokens are                 ", list(answer.token_ids))
