"""A fake of the module that Triton gives to models of its Python backend: as much of it as deploy/triton uses.

Its names and signatures are those of the published one. A sender keeps what it is given, with a lock as Triton has.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class TritonModelException(Exception):
    pass


class TritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    def __init__(self, name: str, numpy_array: np.ndarray[Any, Any]) -> None:
        self._name, self._array = name, numpy_array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray[Any, Any]:
        return self._array


class InferenceResponse:
    def __init__(self, output_tensors: Sequence[Tensor], error: TritonError | None = None) -> None:
        self._tensors, self._error = list(output_tensors), error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class InferenceResponseSender:
    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.finals = 0
        self.final = threading.Event()
        self.cancel = threading.Event()

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if self.finals:
            raise RuntimeError("a response behind the final one")
        if response is not None:
            self.responses.append(response)
        if flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL:
            self.finals += 1
            self.final.set()

    def is_cancelled(self) -> bool:
        return self.cancel.is_set()


class InferenceRequest:
    def __init__(self, inputs: Mapping[str, np.ndarray[Any, Any]], outputs: Sequence[str]) -> None:
        self.inputs = {name: Tensor(name, array) for name, array in inputs.items()}
        self._outputs = list(outputs)
        self.sender = InferenceResponseSender()

    def get_response_sender(self) -> InferenceResponseSender:
        return self.sender

    def requested_output_names(self) -> list[str]:
        return self._outputs


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return request.inputs.get(name)
