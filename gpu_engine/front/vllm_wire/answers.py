"""From what is new of a sequence to the messages of vLLM's wire: chunks of a stream, and one complete for each index.

Invariant: the token ids of an index's chunks, joined, are the `output_ids` of its complete. A complete is the last
message of its index, and has all of its tokens, its finish reason and its totals.

Not responsible for: text, which the gateway makes of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from smg_grpc_proto import vllm_engine_pb2 as vllm

from gpu_engine.api.request import FinishReason, Logprobs
from gpu_engine.front.text_output import Delta, SequenceOutput

FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.GRAMMAR_CLOSED: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.GRAMMAR_INCOMPLETE: "length",
    FinishReason.ABORTED: "abort",
    FinishReason.GRAMMAR_ERROR: "error",
}


class Answers:
    """The messages of one call. With `stream` False there are no chunks."""

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self._token_ids: dict[int, list[int]] = {}
        self._logprobs: dict[int, list[Logprobs]] = {}

    def respond(self, output: SequenceOutput, delta: Delta) -> list[vllm.GenerateResponse]:
        """Return the messages for `delta`: at most a chunk and a complete."""
        index = output.request.index
        self._token_ids.setdefault(index, []).extend(delta.token_ids)
        self._logprobs.setdefault(index, []).extend(delta.logprobs)
        messages = []
        if self._stream and delta.token_ids:
            messages.append(vllm.GenerateResponse(chunk=_chunk(output, delta)))
        if delta.finish:
            messages.append(vllm.GenerateResponse(complete=self._complete(output, delta, delta.finish)))
        return messages

    def _complete(self, output: SequenceOutput, delta: Delta, finish: FinishReason) -> vllm.GenerateComplete:
        request, index = output.request, output.request.index
        token_ids = self._token_ids[index]
        complete = vllm.GenerateComplete(
            output_ids=token_ids,
            finish_reason=FINISH_REASONS[finish],
            prompt_tokens=len(request.prompt_ids),
            completion_tokens=output.completion_tokens,
            cached_tokens=request.telemetry.cached_tokens,
            output_logprobs=_logprobs(token_ids, self._logprobs[index]),
            index=index,
            spec_accepted_tokens=request.telemetry.accepted_draft_tokens,
            spec_draft_tokens=request.telemetry.draft_tokens,
        )
        if delta.matched_stop is not None:
            complete.matched_stop_str = delta.matched_stop
        elif delta.matched_token_id is not None and delta.matched_token_id in request.sampling.stop_token_ids:
            complete.matched_token_id = delta.matched_token_id
        return complete


def _chunk(output: SequenceOutput, delta: Delta) -> vllm.GenerateStreamChunk:
    request = output.request
    return vllm.GenerateStreamChunk(
        token_ids=delta.token_ids,
        prompt_tokens=len(request.prompt_ids),
        completion_tokens=len(delta.token_ids),
        cached_tokens=request.telemetry.cached_tokens,
        output_logprobs=_logprobs(delta.token_ids, delta.logprobs),
        index=request.index,
    )


def _logprobs(token_ids: Sequence[int], entries: Sequence[Logprobs]) -> vllm.OutputLogProbs | None:
    if not entries:
        return None
    return vllm.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in entries],
        token_ids=token_ids,
        top_logprobs=[
            vllm.TopLogProbs(values=[logprob for _, logprob in entry.top], token_ids=[token for token, _ in entry.top])
            for entry in entries
        ],
    )
