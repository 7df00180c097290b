"""From what is new of a sequence to the messages of vLLM's wire: chunks of a stream, and one complete for each index.

Invariant: the token ids of an index's chunks, joined, are the `output_ids` of its complete. A complete is the last
message of its index, and has all of its tokens, its finish reason and its totals. The log-probabilities of the prompt,
which all sequences share, are in messages of index 0.

Not responsible for: text, which the gateway makes of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from smg_grpc_proto import vllm_engine_pb2 as vllm

from gpu_engine.api.request import FinishReason, Logprobs, PromptLogprobs
from gpu_engine.front.text_output import Delta, SequenceOutput

FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.GRAMMAR_CLOSED: "length",
    FinishReason.GRAMMAR_INCOMPLETE: "length",
    FinishReason.REPETITION: "repetition",
    FinishReason.ABORTED: "abort",
    FinishReason.GRAMMAR_ERROR: "error",
    FinishReason.GRAMMAR_INVALID: "error",
    FinishReason.GRAMMAR_INEXACT: "error",
}


class Answers:
    """The messages of one call. With `stream` False there are no chunks."""

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self._token_ids: dict[int, list[int]] = {}
        self._logprobs: dict[int, list[Logprobs]] = {}
        self._prompt: vllm.InputLogProbs | None = None

    def respond(self, output: SequenceOutput, delta: Delta) -> list[vllm.GenerateResponse]:
        """Return the messages for `delta`: at most a chunk and a complete."""
        index = output.request.index
        self._token_ids.setdefault(index, []).extend(delta.token_ids)
        self._logprobs.setdefault(index, []).extend(delta.logprobs)
        messages = []
        if delta.prompt_logprobs is not None:
            self._prompt = _prompt_logprobs(output.request.prompt_ids, delta.prompt_logprobs)
        if self._stream and delta.token_ids:
            chunk = _chunk(output, delta)
            if delta.prompt_logprobs is not None:
                chunk.input_logprobs.CopyFrom(self._prompt)
            messages.append(vllm.GenerateResponse(chunk=chunk))
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
            cached_tokens=output.telemetry.cached_tokens,
            output_logprobs=_logprobs(token_ids, self._logprobs[index]),
            input_logprobs=self._prompt if index == 0 else None,
            index=index,
            spec_accepted_tokens=output.telemetry.accepted_draft_tokens,
            spec_draft_tokens=output.telemetry.draft_tokens,
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
        cached_tokens=output.telemetry.cached_tokens,
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


def _prompt_logprobs(prompt_ids: Sequence[int], scores: PromptLogprobs) -> vllm.InputLogProbs:
    """Return an entry for each token of the prompt, an empty one for the first, which has no log-probability."""
    values = [vllm.InputTokenLogProb(value=logprob) for logprob in scores.logprob_N.tolist()]
    rows = zip(scores.top_logprobs_NM.tolist(), scores.top_ids_NM.tolist(), strict=True)
    tops = [vllm.TopLogProbs(values=logprobs, token_ids=ids) for logprobs, ids in rows]
    return vllm.InputLogProbs(
        token_logprobs=[vllm.InputTokenLogProb(), *values],
        token_ids=prompt_ids,
        top_logprobs=[vllm.TopLogProbs(), *tops],
    )
