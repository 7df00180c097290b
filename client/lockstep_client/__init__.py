"""A client of Lockstep servers: `Client` and its asynchronous twin `AsyncClient`.

Constrained generation in one call: a schema in, an object out. The package needs grpcio and protobuf, and no part of
the engine.
"""

from lockstep_client.access import TLS
from lockstep_client.answers import (
    Answer,
    Delta,
    FieldLogprob,
    FinishReason,
    ModelInfo,
    OutputTensor,
    Part,
    PartKind,
    Stats,
    Telemetry,
    TokenLogprob,
    TokenLogprobs,
    Tokens,
    Usage,
)
from lockstep_client.async_client import AsyncClient, AsyncStream
from lockstep_client.client import Client, Stream
from lockstep_client.errors import (
    CallError,
    Cancelled,
    EmbeddedServerError,
    EngineNotInstalled,
    GrammarNotConfigured,
    InvalidRequest,
    LimitExceeded,
    LockstepError,
    NotAuthenticated,
    NotParsed,
    NotSupported,
    ServerFailed,
    TimedOut,
    Unavailable,
    UnknownGrammar,
)
from lockstep_client.grammars import CompiledGrammar, Grammar
from lockstep_client.messages import Message, Tool, ToolCall
from lockstep_client.options import AdditionalOutput, ChatOptions, Options, Reasoning
from lockstep_client.retrying import NO_RETRIES, Retries
from lockstep_client.schemas import Keywords

__all__ = [
    "NO_RETRIES",
    "TLS",
    "AdditionalOutput",
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "CallError",
    "Cancelled",
    "ChatOptions",
    "Client",
    "CompiledGrammar",
    "Delta",
    "EmbeddedServerError",
    "EngineNotInstalled",
    "FieldLogprob",
    "FinishReason",
    "Grammar",
    "GrammarNotConfigured",
    "InvalidRequest",
    "Keywords",
    "LimitExceeded",
    "LockstepError",
    "Message",
    "ModelInfo",
    "NotAuthenticated",
    "NotParsed",
    "NotSupported",
    "Options",
    "OutputTensor",
    "Part",
    "PartKind",
    "Reasoning",
    "Retries",
    "ServerFailed",
    "Stats",
    "Stream",
    "Telemetry",
    "TimedOut",
    "TokenLogprob",
    "TokenLogprobs",
    "Tokens",
    "Tool",
    "ToolCall",
    "Unavailable",
    "UnknownGrammar",
    "Usage",
]
