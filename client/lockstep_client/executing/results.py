"""Responses of an executor: an error, or a result with the tokens of one sequence, or of the beams of a search.

The invariant: of a request's results, the last has `is_final`, and the last of each sequence has `is_sequence_final`.

Not responsible for: which responses are ready (see book.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lockstep_client.answers import (
    Delta,
    FinishReason,
    OutputTensor,
    Telemetry,
    TokenLogprobs,
    Usage,
    joined_outputs,
)
from lockstep_client.errors import CallError
from lockstep_client.executing.requests import Request
from lockstep_client.statistics import RequestStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a request: new tokens, all tokens so far, or a whole answer, as the request asked for.

    Attributes:
        is_final: no further result of the request follows.
        is_sequence_final: no further result of this sequence follows.
        sequence_index: which of the `num_return_sequences` sequences, from 0; in beam search always 0.
        output_token_ids: the tokens of the sequence; in beam search those of each returned beam, best first.
        texts: their texts.
        finish_reasons: why each ended; None for one that has not.
        log_probs: an entry for each of its tokens, where the request asked for them.
        cum_log_probs: of each, the sum of its tokens' log-probabilities so far, where the request asked for them; in
            beam search its score, the sum over the length penalty.
        prompt_log_probs: an entry for each token of the prompt, in the first result of sequence 0.
        context_logits, generation_logits: the logits that the request asked for.
        additional_outputs: other tensors that it asked for, by name; in beam search those of the best one.
        usage, telemetry: in the last result of a sequence.

    """

    is_final: bool
    is_sequence_final: bool
    sequence_index: int
    output_token_ids: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    finish_reasons: tuple[FinishReason | None, ...]
    log_probs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    cum_log_probs: tuple[float, ...] = ()
    prompt_log_probs: tuple[TokenLogprobs, ...] = ()
    context_logits: OutputTensor | None = None
    generation_logits: OutputTensor | None = None
    additional_outputs: Mapping[str, OutputTensor] = field(default_factory=dict)
    usage: Usage | None = None
    telemetry: Telemetry | None = None


@dataclass(frozen=True, slots=True)
class Response:
    """A response of the request with this id: a result, or an error, which is then its last."""

    request_id: int
    client_id: str | int | None = None
    error: CallError | None = None
    _result: Result | None = None

    @property
    def has_error(self) -> bool:
        """The request was refused or failed: it has no result."""
        return self.error is not None

    @property
    def error_msg(self) -> str:
        """The error's message; empty without one."""
        return str(self.error) if self.error is not None else ""

    @property
    def result(self) -> Result:
        """The result. Raises the error of a request that was refused or failed."""
        if self._result is None:
            assert self.error is not None
            raise self.error
        return self._result

    @property
    def is_last(self) -> bool:
        """No further response of the request follows."""
        return self._result is None or self._result.is_final


@dataclass(frozen=True, slots=True)
class RequestStatsPerIteration:
    """What each request that waited or ran after an iteration was doing."""

    iteration: int
    requests: tuple[RequestStats, ...]


class ResultMaker:
    """Makes the results of one request from its deltas."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._whole = request.uses_beams or not request.streaming
        self._cumulates = self._whole or request.return_all_generated_tokens
        self._held: dict[int, list[Delta]] = {}
        """Of a sequence whose result is whole: the messages before its last one, which have rows of tensors."""
        self._ended: list[Delta] = []
        """Of a beam search: the sequences, as they come."""
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._sums: dict[int, float] = {}

    def take(self, delta: Delta, *, last: bool) -> Result | None:
        """Return the result of a delta; None for a part of one. `last`: it is the request's last."""
        if self._whole:
            held = self._held.setdefault(delta.index, [])
            held.append(delta)
            if delta.finish_reason is None:
                return None
            delta = _joined(held)
        if not self._request.uses_beams:
            return self._result([delta], delta.index, is_final=last)
        self._ended.append(delta)
        if not last:
            return None
        return self._result(sorted(self._ended, key=lambda beam: beam.index), 0, is_final=True)

    def _result(self, deltas: Sequence[Delta], index: int, *, is_final: bool) -> Result:
        first = deltas[0]
        outputs = joined_outputs(first.outputs)
        context, generation = outputs.pop("context_logits", None), outputs.pop("generation_logits", None)
        has_log_probs = self._request.output_config.log_probs is not None
        return Result(
            is_final=is_final,
            is_sequence_final=first.finish_reason is not None,
            sequence_index=index,
            output_token_ids=tuple(self._tokens(delta) for delta in deltas),
            texts=tuple(delta.text for delta in deltas),
            finish_reasons=tuple(delta.finish_reason for delta in deltas),
            log_probs=tuple(delta.logprobs for delta in deltas) if has_log_probs else (),
            cum_log_probs=self._cumulative(deltas) if has_log_probs or self._request.uses_beams else (),
            prompt_log_probs=first.prompt_logprobs,
            context_logits=context,
            generation_logits=generation,
            additional_outputs=outputs,
            usage=first.usage,
            telemetry=first.telemetry,
        )

    def _tokens(self, delta: Delta) -> tuple[int, ...]:
        """Return the tokens; a result with all of a sequence's begins with the prompt, if that was asked for."""
        if delta.prompt_token_ids:
            self._prompts[delta.index] = delta.prompt_token_ids
            return delta.prompt_token_ids + delta.token_ids
        return (self._prompts.get(delta.index, ()) if self._cumulates else ()) + delta.token_ids

    def _cumulative(self, deltas: Sequence[Delta]) -> tuple[float, ...]:
        sums = []
        for delta in deltas:
            if delta.beam_score is not None:
                sums.append(delta.beam_score)
                continue
            before = 0.0 if self._cumulates else self._sums.get(delta.index, 0.0)
            self._sums[delta.index] = before + sum(each.logprob for each in delta.logprobs)
            sums.append(self._sums[delta.index])
        return tuple(sums)


def _joined(deltas: list[Delta]) -> Delta:
    """Return the messages of a whole result as one: rows of tensors come before its end, in messages of their own."""
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(each for delta in deltas for each in delta.logprobs),
        parts=tuple(part for delta in deltas for part in delta.parts),
        prompt_token_ids=next((delta.prompt_token_ids for delta in deltas if delta.prompt_token_ids), ()),
        prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), ()),
        outputs=tuple(output for delta in deltas for output in delta.outputs),
    )
