"""A client of Lockstep servers: `Client` and `Executor`, and their asynchronous twins.

Constrained generation in one call: a schema in, an object out. The package needs grpcio and protobuf, and no part of
the engine.
"""

from lockstep_client.access import TLS
from lockstep_client.answers import (
    Adapter,
    Answer,
    ClearedGrammars,
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
    TokenOrigin,
    Tokens,
    Usage,
    ValueEvent,
    ValueEventKind,
)
from lockstep_client.async_client import AsyncClient, AsyncItemStream, AsyncStatsStream, AsyncStream, AsyncValueStream
from lockstep_client.client import Client, ItemStream, StatsStream, Stream, ValueStream
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
from lockstep_client.executing.async_executor import AsyncExecutor
from lockstep_client.executing.executor import Executor
from lockstep_client.executing.requests import (
    NO_END,
    GuidedDecodingParams,
    GuideType,
    OutputConfig,
    Request,
    SamplingConfig,
)
from lockstep_client.executing.results import RequestStatsPerIteration, Response, Result
from lockstep_client.grammars import CompiledGrammar, Grammar
from lockstep_client.messages import Message, Tool, ToolCall
from lockstep_client.options import (
    AdditionalOutput,
    BeamSearch,
    ChatOptions,
    LogitsProcessor,
    Options,
    Reasoning,
)
from lockstep_client.retrying import NO_RETRIES, Retries
from lockstep_client.schemas import Keywords
from lockstep_client.statistics import IterationStats, RequestStats, Stage, StatsUpdate
from lockstep_client.tokenizer import TokenizerInfo
from lockstep_client.values import Value

__all__ = [
    "NO_END",
    "NO_RETRIES",
    "TLS",
    "Adapter",
    "AdditionalOutput",
    "Answer",
    "AsyncClient",
    "AsyncExecutor",
    "AsyncItemStream",
    "AsyncStatsStream",
    "AsyncStream",
    "AsyncValueStream",
    "BeamSearch",
    "CallError",
    "Cancelled",
    "ChatOptions",
    "ClearedGrammars",
    "Client",
    "CompiledGrammar",
    "Delta",
    "EmbeddedServerError",
    "EngineNotInstalled",
    "Executor",
    "FieldLogprob",
    "FinishReason",
    "Grammar",
    "GrammarNotConfigured",
    "GuideType",
    "GuidedDecodingParams",
    "InvalidRequest",
    "ItemStream",
    "IterationStats",
    "Keywords",
    "LimitExceeded",
    "LockstepError",
    "LogitsProcessor",
    "Message",
    "ModelInfo",
    "NotAuthenticated",
    "NotParsed",
    "NotSupported",
    "Options",
    "OutputConfig",
    "OutputTensor",
    "Part",
    "PartKind",
    "Reasoning",
    "Request",
    "RequestStats",
    "RequestStatsPerIteration",
    "Response",
    "Result",
    "Retries",
    "SamplingConfig",
    "ServerFailed",
    "Stage",
    "Stats",
    "StatsStream",
    "StatsUpdate",
    "Stream",
    "Telemetry",
    "TimedOut",
    "TokenLogprob",
    "TokenLogprobs",
    "TokenOrigin",
    "TokenizerInfo",
    "Tokens",
    "Tool",
    "ToolCall",
    "Unavailable",
    "UnknownGrammar",
    "Usage",
    "Value",
    "ValueEvent",
    "ValueEventKind",
    "ValueStream",
]
