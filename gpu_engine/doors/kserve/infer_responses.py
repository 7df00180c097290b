"""From what is new of a sequence to the tensors of a ModelInferResponse.

Invariant: the texts and tokens of a streamed sequence, joined, equal the whole answer after its prompt. A whole
answer is one response with a row for each sequence; a streamed response has one row. The last response of a request,
and no other, has the parameter `triton_final_response` true.

Not responsible for: text (see front/text_output.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpu_engine.api.output_tensors import OutputRows
from gpu_engine.doors.kserve.tensors import BYTES, FP32, INT32, LIST, ROWS, Tensor, add_output
from gpu_engine.front.text_output import Delta, SequenceOutput
from protos.kserve.v2 import inference_pb2 as pb

VERSION = "1"
"""The version of the only model."""

OUTPUTS: dict[str, Tensor] = {
    "text_output": Tensor(BYTES, LIST),
    "output_ids": Tensor(INT32, ROWS),
    "sequence_length": Tensor(INT32, LIST),
    "sequence_index": Tensor(INT32, LIST),
    "finish_reason": Tensor(BYTES, LIST),
    "cum_log_probs": Tensor(FP32, LIST),
    "output_log_probs": Tensor(FP32, ROWS),
    "beam_scores": Tensor(FP32, LIST),
    "context_logits": Tensor(FP32, ROWS),
    "generation_logits": Tensor(FP32, ROWS),
}
"""Every tensor that a response may have. Except for the logits, it has a row or an element for each sequence."""
NEEDS = {
    "cum_log_probs": "return_log_probs",
    "output_log_probs": "return_log_probs",
    "beam_scores": "beam_width",
    "context_logits": "return_context_logits",
    "generation_logits": "return_generation_logits",
}
"""Output -> the input that asks for it."""
LOGITS = frozenset({"context_logits", "generation_logits"})
"""A row for each token of one sequence. A response without such tokens does not have the tensor."""
TEXTS = frozenset({"text_output"})


@dataclass(slots=True)
class _Row:
    """A sequence in one response."""

    index: int
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logits: list[OutputRows] = field(default_factory=list)
    score: float | None = None
    """The score of a beam that has ended."""
    finish: str = ""
    """Empty until the sequence ends."""


class Answers:
    """The responses of one request."""

    def __init__(
        self,
        request: pb.ModelInferRequest,
        request_id: str,
        outputs: Sequence[str],
        *,
        sequences: int,
        stream: bool,
        batched: bool,
        pad_id: int,
    ) -> None:
        """Args: see below.

        request_id: part of each response.
        outputs: the tensors of a response, of OUTPUTS.
        sequences: the request's n.
        stream: each response has what is new of one sequence, instead of all sequences when the last one ends.
        batched: shapes have a first dimension of 1.
        pad_id: fills a row up whose sequence is shorter than another one.
        """
        self._model, self._id, self._outputs = request.model_name, request_id, tuple(outputs)
        self._running, self._stream = sequences, stream
        self._batch, self._pad_id = (1,) if batched else (), pad_id
        self._rows = {index: _Row(index) for index in range(sequences)}
        self._sums = dict.fromkeys(range(sequences), 0.0)
        """The sum of each sequence's log-probabilities."""

    def respond(self, output: SequenceOutput, delta: Delta) -> list[pb.ModelInferResponse]:
        """Return the response for `delta`, if there is one."""
        index = output.request.index
        row = _Row(index) if self._stream else self._rows[index]
        if delta.echo is not None:
            row.text.append(delta.echo)
            row.token_ids.extend(output.request.prompt_ids)
        row.text.append(delta.text)
        row.token_ids.extend(delta.token_ids)
        row.logprobs.extend(entry.logprob for entry in delta.logprobs)
        row.logits.extend(delta.outputs)
        self._sums[index] += sum(entry.logprob for entry in delta.logprobs)
        if delta.finish:
            row.finish, row.score = delta.finish.name.lower(), delta.beam_score
            self._running -= 1
        if not self._stream:
            return [] if self._running else [self._response([self._rows[i] for i in sorted(self._rows)])]
        return [self._response([row])] if row.token_ids or row.finish or row.logits or any(row.text) else []

    def _response(self, rows: Sequence[_Row]) -> pb.ModelInferResponse:
        response = pb.ModelInferResponse(model_name=self._model, model_version=VERSION, id=self._id)
        response.parameters["triton_final_response"].bool_param = not self._running
        for name in self._outputs:
            shape, items = self._items(name, rows)
            if shape:
                add_output(response, name, OUTPUTS[name].datatype, (*self._batch, *shape), items)
        return response

    def _items(self, name: str, rows: Sequence[_Row]) -> tuple[Sequence[int], Any]:
        if name in LOGITS:
            return joined_rows([part for row in rows for part in row.logits if part.name == name])
        count = (len(rows),)
        match name:
            case "text_output":
                return count, ["".join(row.text) for row in rows]
            case "sequence_length":
                return count, [len(row.token_ids) for row in rows]
            case "sequence_index":
                return count, [row.index for row in rows]
            case "finish_reason":
                return count, [row.finish for row in rows]
            case "beam_scores":
                scores = [row.score for row in rows if row.score is not None]
                return (count if len(scores) == len(rows) else ()), scores
            case "cum_log_probs":
                return count, [self._sums[row.index] for row in rows]
            case "output_log_probs":
                return _padded([row.logprobs for row in rows], 0.0)
            case _:
                return _padded([row.token_ids for row in rows], self._pad_id)


def _padded(rows: Sequence[Sequence[Any]], pad: Any) -> tuple[Sequence[int], list[Any]]:
    longest = max(map(len, rows))
    return (len(rows), longest), [item for row in rows for item in (*row, *[pad] * (longest - len(row)))]


def joined_rows(parts: Sequence[OutputRows]) -> tuple[Sequence[int], Any]:
    """Return rows in 32 bits, with their shape; no shape: there are none."""
    if not parts:
        return (), ()
    rows = np.concatenate([_in_32_bits(part) for part in parts])
    return rows.shape, rows


def _in_32_bits(part: OutputRows) -> np.ndarray[Any, np.dtype[np.float32]]:
    data = np.ascontiguousarray(part.data)
    if part.spec.dtype == "bfloat16":  # the upper half of the 32 bits
        return (data.view("<u2").astype("<u4") << 16).view("<f4")
    return data.view({"float32": "<f4", "float16": "<f2"}[part.spec.dtype]).astype("<f4")
