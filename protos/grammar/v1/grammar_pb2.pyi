from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Backend(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BACKEND_UNSPECIFIED: _ClassVar[Backend]
    BACKEND_XGRAMMAR: _ClassVar[Backend]
    BACKEND_LLGUIDANCE: _ClassVar[Backend]
    BACKEND_AUTO: _ClassVar[Backend]

class Whitespace(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WHITESPACE_UNSPECIFIED: _ClassVar[Whitespace]
    WHITESPACE_COMPACT: _ClassVar[Whitespace]
    WHITESPACE_BOUNDED: _ClassVar[Whitespace]
    WHITESPACE_ANY: _ClassVar[Whitespace]
    WHITESPACE_SPACED: _ClassVar[Whitespace]

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    KIND_JSON_OBJECT: _ClassVar[Kind]
    KIND_JSON_SCHEMA: _ClassVar[Kind]
    KIND_REGEX: _ClassVar[Kind]
    KIND_EBNF: _ClassVar[Kind]
    KIND_LARK: _ClassVar[Kind]
    KIND_CHOICE: _ClassVar[Kind]
    KIND_STRUCTURAL_TAG: _ClassVar[Kind]
    KIND_COMPOSED: _ClassVar[Kind]
BACKEND_UNSPECIFIED: Backend
BACKEND_XGRAMMAR: Backend
BACKEND_LLGUIDANCE: Backend
BACKEND_AUTO: Backend
WHITESPACE_UNSPECIFIED: Whitespace
WHITESPACE_COMPACT: Whitespace
WHITESPACE_BOUNDED: Whitespace
WHITESPACE_ANY: Whitespace
WHITESPACE_SPACED: Whitespace
KIND_UNSPECIFIED: Kind
KIND_JSON_OBJECT: Kind
KIND_JSON_SCHEMA: Kind
KIND_REGEX: Kind
KIND_EBNF: Kind
KIND_LARK: Kind
KIND_CHOICE: Kind
KIND_STRUCTURAL_TAG: Kind
KIND_COMPOSED: Kind

class ConfigureRequest(_message.Message):
    __slots__ = ("tokenizer_json", "vocab_size", "stop_token_ids", "generation")
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    tokenizer_json: bytes
    vocab_size: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    generation: int
    def __init__(self, tokenizer_json: _Optional[bytes] = ..., vocab_size: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., generation: _Optional[int] = ...) -> None: ...

class ConfigureResponse(_message.Message):
    __slots__ = ("backends", "versions", "pid", "max_compilations", "attempt_limit_s", "compile_timeout_s", "defaults")
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    MAX_COMPILATIONS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    COMPILE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    backends: _containers.RepeatedScalarFieldContainer[Backend]
    versions: _containers.RepeatedScalarFieldContainer[str]
    pid: int
    max_compilations: int
    attempt_limit_s: float
    compile_timeout_s: float
    defaults: str
    def __init__(self, backends: _Optional[_Iterable[_Union[Backend, str]]] = ..., versions: _Optional[_Iterable[str]] = ..., pid: _Optional[int] = ..., max_compilations: _Optional[int] = ..., attempt_limit_s: _Optional[float] = ..., compile_timeout_s: _Optional[float] = ..., defaults: _Optional[str] = ...) -> None: ...

class CompileRequest(_message.Message):
    __slots__ = ("kind", "source", "whitespace", "backend", "allow_unenforced", "accepted", "verify", "owner", "owner_bytes", "max_string_length", "max_array_items", "max_number_digits", "max_whitespace", "tenant", "tenant_weight", "closed_objects")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    WHITESPACE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    ALLOW_UNENFORCED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    OWNER_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_STRING_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_ARRAY_ITEMS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUMBER_DIGITS_FIELD_NUMBER: _ClassVar[int]
    MAX_WHITESPACE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TENANT_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    CLOSED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    kind: Kind
    source: str
    whitespace: Whitespace
    backend: Backend
    allow_unenforced: bool
    accepted: bool
    verify: bool
    owner: str
    owner_bytes: int
    max_string_length: int
    max_array_items: int
    max_number_digits: int
    max_whitespace: int
    tenant: str
    tenant_weight: float
    closed_objects: bool
    def __init__(self, kind: _Optional[_Union[Kind, str]] = ..., source: _Optional[str] = ..., whitespace: _Optional[_Union[Whitespace, str]] = ..., backend: _Optional[_Union[Backend, str]] = ..., allow_unenforced: _Optional[bool] = ..., accepted: _Optional[bool] = ..., verify: _Optional[bool] = ..., owner: _Optional[str] = ..., owner_bytes: _Optional[int] = ..., max_string_length: _Optional[int] = ..., max_array_items: _Optional[int] = ..., max_number_digits: _Optional[int] = ..., max_whitespace: _Optional[int] = ..., tenant: _Optional[str] = ..., tenant_weight: _Optional[float] = ..., closed_objects: _Optional[bool] = ...) -> None: ...

class CompileResponse(_message.Message):
    __slots__ = ("grammar_id", "backend", "cache_hit", "compile_ms", "memory_bytes", "warnings", "min_tokens", "known_answer_tokens", "verified")
    GRAMMAR_ID_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    CACHE_HIT_FIELD_NUMBER: _ClassVar[int]
    COMPILE_MS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_ANSWER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    grammar_id: str
    backend: Backend
    cache_hit: bool
    compile_ms: float
    memory_bytes: int
    warnings: _containers.RepeatedScalarFieldContainer[str]
    min_tokens: int
    known_answer_tokens: int
    verified: bool
    def __init__(self, grammar_id: _Optional[str] = ..., backend: _Optional[_Union[Backend, str]] = ..., cache_hit: _Optional[bool] = ..., compile_ms: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., warnings: _Optional[_Iterable[str]] = ..., min_tokens: _Optional[int] = ..., known_answer_tokens: _Optional[int] = ..., verified: _Optional[bool] = ...) -> None: ...

class BindRequest(_message.Message):
    __slots__ = ("slot", "slot_gen", "grammar_id", "committed_tokens", "max_tokens", "request_id", "repetition_max_pattern_size", "repetition_min_pattern_size", "repetition_min_count", "min_tokens", "dead_texts", "any_spelling")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_GEN_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_ID_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REPETITION_MAX_PATTERN_SIZE_FIELD_NUMBER: _ClassVar[int]
    REPETITION_MIN_PATTERN_SIZE_FIELD_NUMBER: _ClassVar[int]
    REPETITION_MIN_COUNT_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEAD_TEXTS_FIELD_NUMBER: _ClassVar[int]
    ANY_SPELLING_FIELD_NUMBER: _ClassVar[int]
    slot: int
    slot_gen: int
    grammar_id: str
    committed_tokens: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    request_id: str
    repetition_max_pattern_size: int
    repetition_min_pattern_size: int
    repetition_min_count: int
    min_tokens: int
    dead_texts: _containers.RepeatedScalarFieldContainer[bytes]
    any_spelling: bool
    def __init__(self, slot: _Optional[int] = ..., slot_gen: _Optional[int] = ..., grammar_id: _Optional[str] = ..., committed_tokens: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., request_id: _Optional[str] = ..., repetition_max_pattern_size: _Optional[int] = ..., repetition_min_pattern_size: _Optional[int] = ..., repetition_min_count: _Optional[int] = ..., min_tokens: _Optional[int] = ..., dead_texts: _Optional[_Iterable[bytes]] = ..., any_spelling: _Optional[bool] = ...) -> None: ...

class BindResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BacktrackRequest(_message.Message):
    __slots__ = ("grammar_id", "committed_tokens", "max_tokens", "dead_texts", "first_position")
    GRAMMAR_ID_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEAD_TEXTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    grammar_id: str
    committed_tokens: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    dead_texts: _containers.RepeatedScalarFieldContainer[bytes]
    first_position: int
    def __init__(self, grammar_id: _Optional[str] = ..., committed_tokens: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., dead_texts: _Optional[_Iterable[bytes]] = ..., first_position: _Optional[int] = ...) -> None: ...

class BacktrackResponse(_message.Message):
    __slots__ = ("found", "num_tokens", "dead_texts")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEAD_TEXTS_FIELD_NUMBER: _ClassVar[int]
    found: bool
    num_tokens: int
    dead_texts: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, found: _Optional[bool] = ..., num_tokens: _Optional[int] = ..., dead_texts: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("slot", "slot_gen")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_GEN_FIELD_NUMBER: _ClassVar[int]
    slot: int
    slot_gen: int
    def __init__(self, slot: _Optional[int] = ..., slot_gen: _Optional[int] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClearCacheRequest(_message.Message):
    __slots__ = ("disk",)
    DISK_FIELD_NUMBER: _ClassVar[int]
    disk: bool
    def __init__(self, disk: _Optional[bool] = ...) -> None: ...

class ClearCacheResponse(_message.Message):
    __slots__ = ("dropped", "kept", "freed_bytes", "files")
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    dropped: int
    kept: int
    freed_bytes: int
    files: int
    def __init__(self, dropped: _Optional[int] = ..., kept: _Optional[int] = ..., freed_bytes: _Optional[int] = ..., files: _Optional[int] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("matchers", "cached_grammars", "cache_bytes", "compiled", "cache_hits", "compile_rejected", "compile_limited", "records", "rows_filled", "rows_by_kind", "fill_p50_us", "fill_p99_us", "generation")
    class RowsByKindEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MATCHERS_FIELD_NUMBER: _ClassVar[int]
    CACHED_GRAMMARS_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPILED_FIELD_NUMBER: _ClassVar[int]
    CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    COMPILE_REJECTED_FIELD_NUMBER: _ClassVar[int]
    COMPILE_LIMITED_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FILLED_FIELD_NUMBER: _ClassVar[int]
    ROWS_BY_KIND_FIELD_NUMBER: _ClassVar[int]
    FILL_P50_US_FIELD_NUMBER: _ClassVar[int]
    FILL_P99_US_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    matchers: int
    cached_grammars: int
    cache_bytes: int
    compiled: int
    cache_hits: int
    compile_rejected: int
    compile_limited: int
    records: int
    rows_filled: int
    rows_by_kind: _containers.ScalarMap[str, int]
    fill_p50_us: float
    fill_p99_us: float
    generation: int
    def __init__(self, matchers: _Optional[int] = ..., cached_grammars: _Optional[int] = ..., cache_bytes: _Optional[int] = ..., compiled: _Optional[int] = ..., cache_hits: _Optional[int] = ..., compile_rejected: _Optional[int] = ..., compile_limited: _Optional[int] = ..., records: _Optional[int] = ..., rows_filled: _Optional[int] = ..., rows_by_kind: _Optional[_Mapping[str, int]] = ..., fill_p50_us: _Optional[float] = ..., fill_p99_us: _Optional[float] = ..., generation: _Optional[int] = ...) -> None: ...

class GetMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMetricsResponse(_message.Message):
    __slots__ = ("exposition",)
    EXPOSITION_FIELD_NUMBER: _ClassVar[int]
    exposition: bytes
    def __init__(self, exposition: _Optional[bytes] = ...) -> None: ...
