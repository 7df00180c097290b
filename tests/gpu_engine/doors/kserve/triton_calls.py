"""Calls of `tritonclient`, unmodified; results are plain values. It has its own process: client_process.py."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from google.protobuf import descriptor_pb2, text_format
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException

TIMEOUT_S = 20
DTYPES: dict[str, Any] = {
    "BYTES": np.object_,
    "BOOL": np.bool_,
    "INT32": np.int32,
    "UINT64": np.uint64,
    "FP32": np.float32,
}

Given = Mapping[str, tuple[str, Any]]
"""Tensor -> its datatype, and its elements in lists that have its shape."""


def _inputs(given: Given) -> list[triton.InferInput]:
    inputs = []
    for name, (datatype, elements) in given.items():
        array = np.array(elements, DTYPES.get(datatype, np.int64))
        tensor = triton.InferInput(name, array.shape, datatype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def _outputs(names: Sequence[str] | None) -> list[triton.InferRequestedOutput] | None:
    return None if names is None else [triton.InferRequestedOutput(name) for name in names]


def _result(result: triton.InferResult) -> dict[str, Any]:
    response = result.get_response()
    found: dict[str, Any] = {"id": response.id, "model": response.model_name}
    for name, value in response.parameters.items():
        found[name] = getattr(value, value.WhichOneof("parameter_choice"))
    for output in response.outputs:
        found[output.name] = result.as_numpy(output.name).tolist()
        found[f"{output.name} shape"] = list(output.shape)
    return found


def _error(error: InferenceServerException) -> dict[str, Any]:
    return {"error": error.message(), "status": error.status()}


def infer(
    address: str,
    given: Given,
    model: str = "fake",
    version: str = "",
    outputs: Sequence[str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Call ModelInfer; return the response, or `error` and `status`."""
    with triton.InferenceServerClient(address) as client:
        try:
            return _result(
                client.infer(
                    model,
                    _inputs(given),
                    model_version=version,
                    outputs=_outputs(outputs),
                    client_timeout=TIMEOUT_S,
                    **options,
                )
            )
        except InferenceServerException as error:
            return _error(error)


def stream(
    address: str,
    requests: Sequence[tuple[str, Given, dict[str, Any]]],
    model: str = "fake",
    until: int | None = None,
) -> list[dict[str, Any]]:
    """Send requests over one ModelStreamInfer; return all responses and errors, in the order in which they came.

    `requests`: id, tensors, and options of each; those after the end of the stream are not sent. `until`: cancel the
    stream after so many responses.
    """
    arrived: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def take(result: triton.InferResult | None, error: InferenceServerException | None) -> None:
        arrived.put(_error(error) if result is None else _result(result))

    built = [(request_id, _inputs(given), options) for request_id, given, options in requests]
    with triton.InferenceServerClient(address) as client:
        client.start_stream(take, stream_timeout=TIMEOUT_S)
        # Where the server has ended the stream by then, async_stream_infer raises; `take` gets the reason.
        with suppress(InferenceServerException):
            for request_id, inputs, options in built:
                client.async_stream_infer(model, inputs, request_id=request_id, **options)
        found = [arrived.get(timeout=TIMEOUT_S) for _ in range(until or 0)]
        client.stop_stream(cancel_requests=until is not None)
    while not arrived.empty():
        found.append(arrived.get())
    return found


def describe(address: str, model: str = "fake", version: str = "") -> dict[str, Any]:
    """Call everything that describes the server and the model."""
    with triton.InferenceServerClient(address) as client:
        return {
            "live": client.is_server_live(),
            "ready": client.is_server_ready(),
            "model_ready": client.is_model_ready(model, version),
            "server": client.get_server_metadata(as_json=True),
            "index": client.get_model_repository_index(as_json=True),
            "metadata": client.get_model_metadata(model, version, as_json=True),
            "config": client.get_model_config(model, version, as_json=True)["config"],
        }


def refusals(address: str, model: str, version: str = "") -> list[dict[str, Any]]:
    """Return whether a model is ready, and the errors of each call that describes it."""
    with triton.InferenceServerClient(address) as client:
        found: list[dict[str, Any]] = [{"ready": client.is_model_ready(model, version)}]
        for call in (client.get_model_metadata, client.get_model_config, client.get_inference_statistics):
            try:
                call(model, version)
            except InferenceServerException as error:
                found.append(_error(error))
    return found


def statistics(address: str, model: str = "") -> dict[str, Any]:
    """Return the statistics of the model."""
    with triton.InferenceServerClient(address) as client:
        (found,) = client.get_inference_statistics(model, as_json=True)["model_stats"]
    return dict(found)


def shared_memory(address: str, given: Given) -> dict[str, Any]:
    """Ask for an output in shared memory; return the error."""
    output = triton.InferRequestedOutput("text_output")
    output.set_shared_memory("region", 64)
    with triton.InferenceServerClient(address) as client:
        try:
            return _result(client.infer("fake", _inputs(given), outputs=[output], client_timeout=TIMEOUT_S))
        except InferenceServerException as error:
            return _error(error)


def file_descriptors() -> list[bytes]:
    """Return the descriptors of Triton's own protos."""
    found = []
    for module in (service_pb2, model_config_pb2):
        descriptor = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(descriptor)
        found.append(descriptor.SerializeToString())
    return found


def parsed_config(text: str) -> dict[str, Any]:
    """Parse a config.pbtxt as Triton does; return its tensors by name, and whether it is decoupled."""
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    types = model_config_pb2.DataType
    return {
        "name": config.name,
        "backend": config.backend,
        "max_batch_size": config.max_batch_size,
        "decoupled": config.model_transaction_policy.decoupled,
        "parameters": {name: value.string_value for name, value in config.parameters.items()},
        "inputs": {t.name: (types.Name(t.data_type), list(t.dims), t.optional) for t in config.input},
        "outputs": {t.name: (types.Name(t.data_type), list(t.dims)) for t in config.output},
        "instances": [(group.count, group.kind) for group in config.instance_group],
    }
