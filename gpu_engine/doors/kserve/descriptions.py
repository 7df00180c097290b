"""What a client asks about the server and its model: metadata, configuration, and the list of models.

Invariant: the tensors are all that requests and responses may have (INPUTS, OUTPUTS).

Not responsible for: counts and times (see statistics.py).
"""

from __future__ import annotations

from gpu_engine.doors.kserve.infer_requests import INPUTS
from gpu_engine.doors.kserve.infer_responses import OUTPUTS, VERSION
from gpu_engine.doors.kserve.tensors import BOOL, BYTES, FP32, INT32, UINT64
from protos.kserve.v2 import inference_pb2 as pb

PLATFORM = "lockstep"
EXTENSIONS = ("model_configuration", "model_repository", "parameters", "schedule_policy", "statistics")
"""The served extensions, by the names of Triton's protocol."""

_TYPES = {
    BOOL: pb.TYPE_BOOL,
    BYTES: pb.TYPE_STRING,
    FP32: pb.TYPE_FP32,
    INT32: pb.TYPE_INT32,
    UINT64: pb.TYPE_UINT64,
}


def server_metadata(version: str) -> pb.ServerMetadataResponse:
    """Describe the server; `version` is this distribution's."""
    return pb.ServerMetadataResponse(name="lockstep", version=version, extensions=EXTENSIONS)


def model_metadata(name: str) -> pb.ModelMetadataResponse:
    """Describe the tensors, under the model's name that the client used."""
    response = pb.ModelMetadataResponse(name=name, versions=[VERSION], platform=PLATFORM)
    for tensors, described in ((INPUTS, response.inputs), (OUTPUTS, response.outputs)):
        for tensor_name, tensor in tensors.items():
            described.add(name=tensor_name, datatype=tensor.datatype, shape=tensor.shape)
    return response


def model_config(name: str) -> pb.ModelConfig:
    """Describe the model as a configuration of Triton would. Every input is optional: a prompt is one of two."""
    return pb.ModelConfig(
        name=name,
        platform=PLATFORM,
        backend=PLATFORM,
        max_batch_size=0,
        input=[
            pb.ModelInput(name=tensor_name, data_type=_TYPES[tensor.datatype], dims=tensor.shape, optional=True)
            for tensor_name, tensor in INPUTS.items()
        ],
        output=[
            pb.ModelOutput(name=tensor_name, data_type=_TYPES[tensor.datatype], dims=tensor.shape)
            for tensor_name, tensor in OUTPUTS.items()
        ],
        model_transaction_policy=pb.ModelTransactionPolicy(decoupled=True),
    )


def repository_index(name: str, *, ready: bool, only_ready: bool) -> pb.RepositoryIndexResponse:
    """List the only model; `only_ready` leaves it out while it is not `ready`."""
    response = pb.RepositoryIndexResponse()
    if ready or not only_ready:
        reason = "" if ready else "starting or shutting down"
        response.models.add(name=name, version=VERSION, state="READY" if ready else "UNAVAILABLE", reason=reason)
    return response
