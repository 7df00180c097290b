from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToolChoice(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOOL_CHOICE_UNSPECIFIED: _ClassVar[ToolChoice]
    TOOL_CHOICE_AUTO: _ClassVar[ToolChoice]
    TOOL_CHOICE_NONE: _ClassVar[ToolChoice]
    TOOL_CHOICE_REQUIRED: _ClassVar[ToolChoice]
    TOOL_CHOICE_NAMED: _ClassVar[ToolChoice]

class Unenforced(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNENFORCED_UNSPECIFIED: _ClassVar[Unenforced]
    UNENFORCED_REFUSE: _ClassVar[Unenforced]
    UNENFORCED_WARN: _ClassVar[Unenforced]
    UNENFORCED_VERIFY: _ClassVar[Unenforced]

class Whitespace(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WHITESPACE_UNSPECIFIED: _ClassVar[Whitespace]
    WHITESPACE_COMPACT: _ClassVar[Whitespace]
    WHITESPACE_BOUNDED: _ClassVar[Whitespace]
    WHITESPACE_ANY: _ClassVar[Whitespace]
    WHITESPACE_SPACED: _ClassVar[Whitespace]

class Backend(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BACKEND_UNSPECIFIED: _ClassVar[Backend]
    BACKEND_XGRAMMAR: _ClassVar[Backend]
    BACKEND_LLGUIDANCE: _ClassVar[Backend]
    BACKEND_AUTO: _ClassVar[Backend]

class EarlyStopping(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EARLY_STOPPING_UNSPECIFIED: _ClassVar[EarlyStopping]
    EARLY_STOPPING_HEURISTIC: _ClassVar[EarlyStopping]
    EARLY_STOPPING_TRUE: _ClassVar[EarlyStopping]
    EARLY_STOPPING_NEVER: _ClassVar[EarlyStopping]

class TokenOrigin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOKEN_ORIGIN_UNSPECIFIED: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_SAMPLED: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_DRAFT: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_FORCED: _ClassVar[TokenOrigin]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORTED: _ClassVar[FinishReason]
    FINISH_REASON_GRAMMAR_INCOMPLETE: _ClassVar[FinishReason]
    FINISH_REASON_GRAMMAR_ERROR: _ClassVar[FinishReason]
    FINISH_REASON_GRAMMAR_CLOSED: _ClassVar[FinishReason]
    FINISH_REASON_GRAMMAR_INVALID: _ClassVar[FinishReason]
    FINISH_REASON_REPETITION: _ClassVar[FinishReason]
    FINISH_REASON_GRAMMAR_INEXACT: _ClassVar[FinishReason]
TOOL_CHOICE_UNSPECIFIED: ToolChoice
TOOL_CHOICE_AUTO: ToolChoice
TOOL_CHOICE_NONE: ToolChoice
TOOL_CHOICE_REQUIRED: ToolChoice
TOOL_CHOICE_NAMED: ToolChoice
UNENFORCED_UNSPECIFIED: Unenforced
UNENFORCED_REFUSE: Unenforced
UNENFORCED_WARN: Unenforced
UNENFORCED_VERIFY: Unenforced
WHITESPACE_UNSPECIFIED: Whitespace
WHITESPACE_COMPACT: Whitespace
WHITESPACE_BOUNDED: Whitespace
WHITESPACE_ANY: Whitespace
WHITESPACE_SPACED: Whitespace
BACKEND_UNSPECIFIED: Backend
BACKEND_XGRAMMAR: Backend
BACKEND_LLGUIDANCE: Backend
BACKEND_AUTO: Backend
EARLY_STOPPING_UNSPECIFIED: EarlyStopping
EARLY_STOPPING_HEURISTIC: EarlyStopping
EARLY_STOPPING_TRUE: EarlyStopping
EARLY_STOPPING_NEVER: EarlyStopping
TOKEN_ORIGIN_UNSPECIFIED: TokenOrigin
TOKEN_ORIGIN_SAMPLED: TokenOrigin
TOKEN_ORIGIN_DRAFT: TokenOrigin
TOKEN_ORIGIN_FORCED: TokenOrigin
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORTED: FinishReason
FINISH_REASON_GRAMMAR_INCOMPLETE: FinishReason
FINISH_REASON_GRAMMAR_ERROR: FinishReason
FINISH_REASON_GRAMMAR_CLOSED: FinishReason
FINISH_REASON_GRAMMAR_INVALID: FinishReason
FINISH_REASON_REPETITION: FinishReason
FINISH_REASON_GRAMMAR_INEXACT: FinishReason

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "messages", "sampling", "grammar", "speculation", "response", "tools", "reasoning", "cache_salt", "priority", "client_id", "logits_processors", "lora", "prompt_adapter", "beam_search", "max_queue_ms", "never_preempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    LOGITS_PROCESSORS_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    BEAM_SEARCH_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    NEVER_PREEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: TokenIds
    messages: ChatMessages
    sampling: SamplingParams
    grammar: Grammar
    speculation: Speculation
    response: ResponseOptions
    tools: Tools
    reasoning: Reasoning
    cache_salt: str
    priority: int
    client_id: str
    logits_processors: _containers.RepeatedCompositeFieldContainer[LogitsProcessor]
    lora: str
    prompt_adapter: str
    beam_search: BeamSearch
    max_queue_ms: int
    never_preempt: bool
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., messages: _Optional[_Union[ChatMessages, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., response: _Optional[_Union[ResponseOptions, _Mapping]] = ..., tools: _Optional[_Union[Tools, _Mapping]] = ..., reasoning: _Optional[_Union[Reasoning, _Mapping]] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., client_id: _Optional[str] = ..., logits_processors: _Optional[_Iterable[_Union[LogitsProcessor, _Mapping]]] = ..., lora: _Optional[str] = ..., prompt_adapter: _Optional[str] = ..., beam_search: _Optional[_Union[BeamSearch, _Mapping]] = ..., max_queue_ms: _Optional[int] = ..., never_preempt: _Optional[bool] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatMessages(_message.Message):
    __slots__ = ("messages", "template_arguments", "continue_final_message")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    template_arguments: str
    continue_final_message: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., template_arguments: _Optional[str] = ..., continue_final_message: _Optional[bool] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "parts", "name", "tool_calls", "tool_call_id", "reasoning")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    parts: _containers.RepeatedCompositeFieldContainer[ContentPart]
    name: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    reasoning: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[ContentPart, _Mapping]]] = ..., name: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., reasoning: _Optional[str] = ...) -> None: ...

class ContentPart(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class Tools(_message.Message):
    __slots__ = ("tools", "choice", "name", "parallel")
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_FIELD_NUMBER: _ClassVar[int]
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    choice: ToolChoice
    name: str
    parallel: bool
    def __init__(self, tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., choice: _Optional[_Union[ToolChoice, str]] = ..., name: _Optional[str] = ..., parallel: _Optional[bool] = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters", "text", "lark", "regex", "strict")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters: str
    text: bool
    lark: str
    regex: str
    strict: bool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters: _Optional[str] = ..., text: _Optional[bool] = ..., lark: _Optional[str] = ..., regex: _Optional[str] = ..., strict: _Optional[bool] = ...) -> None: ...

class Reasoning(_message.Message):
    __slots__ = ("enabled", "max_tokens", "effort", "begin", "end")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EFFORT_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    max_tokens: int
    effort: str
    begin: str
    end: str
    def __init__(self, enabled: _Optional[bool] = ..., max_tokens: _Optional[int] = ..., effort: _Optional[str] = ..., begin: _Optional[str] = ..., end: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop", "stop_token_ids", "bad_token_ids", "bad_words", "ignore_eos", "logprobs", "n", "include_stop_str_in_output", "skip_special_tokens", "logit_bias", "repetition_max_pattern_size", "repetition_min_pattern_size", "repetition_min_count", "masked_logprobs", "grammar_exact", "grammar_exact_tries", "grammar_exact_ms", "grammar_exact_error", "grammar_exact_shared_tries", "grammar_exact_any_spelling")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_MAX_PATTERN_SIZE_FIELD_NUMBER: _ClassVar[int]
    REPETITION_MIN_PATTERN_SIZE_FIELD_NUMBER: _ClassVar[int]
    REPETITION_MIN_COUNT_FIELD_NUMBER: _ClassVar[int]
    MASKED_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_EXACT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_EXACT_TRIES_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_EXACT_MS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_EXACT_ERROR_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_EXACT_SHARED_TRIES_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_EXACT_ANY_SPELLING_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    logprobs: int
    n: int
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    logit_bias: _containers.ScalarMap[int, float]
    repetition_max_pattern_size: int
    repetition_min_pattern_size: int
    repetition_min_count: int
    masked_logprobs: bool
    grammar_exact: bool
    grammar_exact_tries: int
    grammar_exact_ms: int
    grammar_exact_error: bool
    grammar_exact_shared_tries: int
    grammar_exact_any_spelling: bool
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., bad_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[str]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., n: _Optional[int] = ..., include_stop_str_in_output: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., repetition_max_pattern_size: _Optional[int] = ..., repetition_min_pattern_size: _Optional[int] = ..., repetition_min_count: _Optional[int] = ..., masked_logprobs: _Optional[bool] = ..., grammar_exact: _Optional[bool] = ..., grammar_exact_tries: _Optional[int] = ..., grammar_exact_ms: _Optional[int] = ..., grammar_exact_error: _Optional[bool] = ..., grammar_exact_shared_tries: _Optional[int] = ..., grammar_exact_any_spelling: _Optional[bool] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_object", "json_schema", "regex", "ebnf", "lark", "choice", "structural_tag", "grammar_id", "whitespace", "backend", "allow_unenforced", "unenforced", "max_string_length", "max_array_items", "max_number_digits", "max_whitespace", "max_backtracks", "hold_tokens", "closed_objects")
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    EBNF_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAG_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_ID_FIELD_NUMBER: _ClassVar[int]
    WHITESPACE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    ALLOW_UNENFORCED_FIELD_NUMBER: _ClassVar[int]
    UNENFORCED_FIELD_NUMBER: _ClassVar[int]
    MAX_STRING_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_ARRAY_ITEMS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUMBER_DIGITS_FIELD_NUMBER: _ClassVar[int]
    MAX_WHITESPACE_FIELD_NUMBER: _ClassVar[int]
    MAX_BACKTRACKS_FIELD_NUMBER: _ClassVar[int]
    HOLD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    json_object: bool
    json_schema: str
    regex: str
    ebnf: str
    lark: str
    choice: Choice
    structural_tag: str
    grammar_id: str
    whitespace: Whitespace
    backend: Backend
    allow_unenforced: bool
    unenforced: Unenforced
    max_string_length: int
    max_array_items: int
    max_number_digits: int
    max_whitespace: int
    max_backtracks: int
    hold_tokens: int
    closed_objects: bool
    def __init__(self, json_object: _Optional[bool] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., ebnf: _Optional[str] = ..., lark: _Optional[str] = ..., choice: _Optional[_Union[Choice, _Mapping]] = ..., structural_tag: _Optional[str] = ..., grammar_id: _Optional[str] = ..., whitespace: _Optional[_Union[Whitespace, str]] = ..., backend: _Optional[_Union[Backend, str]] = ..., allow_unenforced: _Optional[bool] = ..., unenforced: _Optional[_Union[Unenforced, str]] = ..., max_string_length: _Optional[int] = ..., max_array_items: _Optional[int] = ..., max_number_digits: _Optional[int] = ..., max_whitespace: _Optional[int] = ..., max_backtracks: _Optional[int] = ..., hold_tokens: _Optional[int] = ..., closed_objects: _Optional[bool] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("choices",)
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, choices: _Optional[_Iterable[str]] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("num_draft_tokens", "draft_index")
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_INDEX_FIELD_NUMBER: _ClassVar[int]
    num_draft_tokens: int
    draft_index: bool
    def __init__(self, num_draft_tokens: _Optional[int] = ..., draft_index: _Optional[bool] = ...) -> None: ...

class ResponseOptions(_message.Message):
    __slots__ = ("omit_text", "omit_token_ids", "echo", "prompt_logprobs", "per_field_logprobs", "whole", "cumulative", "context_logits", "generation_logits", "additional_outputs", "token_origins", "value_events", "items_of", "receipt_nonce")
    OMIT_TEXT_FIELD_NUMBER: _ClassVar[int]
    OMIT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PER_FIELD_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LOGITS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_LOGITS_FIELD_NUMBER: _ClassVar[int]
    ADDITIONAL_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ORIGINS_FIELD_NUMBER: _ClassVar[int]
    VALUE_EVENTS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_OF_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_NONCE_FIELD_NUMBER: _ClassVar[int]
    omit_text: bool
    omit_token_ids: bool
    echo: bool
    prompt_logprobs: int
    per_field_logprobs: bool
    whole: bool
    cumulative: bool
    context_logits: bool
    generation_logits: bool
    additional_outputs: _containers.RepeatedCompositeFieldContainer[AdditionalOutput]
    token_origins: bool
    value_events: bool
    items_of: str
    receipt_nonce: bytes
    def __init__(self, omit_text: _Optional[bool] = ..., omit_token_ids: _Optional[bool] = ..., echo: _Optional[bool] = ..., prompt_logprobs: _Optional[int] = ..., per_field_logprobs: _Optional[bool] = ..., whole: _Optional[bool] = ..., cumulative: _Optional[bool] = ..., context_logits: _Optional[bool] = ..., generation_logits: _Optional[bool] = ..., additional_outputs: _Optional[_Iterable[_Union[AdditionalOutput, _Mapping]]] = ..., token_origins: _Optional[bool] = ..., value_events: _Optional[bool] = ..., items_of: _Optional[str] = ..., receipt_nonce: _Optional[bytes] = ...) -> None: ...

class LogitsProcessor(_message.Message):
    __slots__ = ("name", "arguments")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    arguments: str
    def __init__(self, name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class BeamSearch(_message.Message):
    __slots__ = ("beam_width", "length_penalty", "early_stopping")
    BEAM_WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    beam_width: int
    length_penalty: float
    early_stopping: EarlyStopping
    def __init__(self, beam_width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[_Union[EarlyStopping, str]] = ...) -> None: ...

class AdditionalOutput(_message.Message):
    __slots__ = ("name", "context")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    name: str
    context: bool
    def __init__(self, name: _Optional[str] = ..., context: _Optional[bool] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "index", "text", "token_ids", "logprobs", "finish_reason", "matched_token_id", "matched_stop_str", "usage", "telemetry", "parts", "prompt_token_ids", "prompt_logprobs", "field_logprobs", "outputs", "beam_score", "token_origins", "held_tokens", "value_events", "receipt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_STR_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FIELD_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    BEAM_SCORE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ORIGINS_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VALUE_EVENTS_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reason: FinishReason
    matched_token_id: int
    matched_stop_str: str
    usage: Usage
    telemetry: Telemetry
    parts: _containers.RepeatedCompositeFieldContainer[AnswerPart]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    field_logprobs: _containers.RepeatedCompositeFieldContainer[FieldLogprob]
    outputs: _containers.RepeatedCompositeFieldContainer[OutputTensor]
    beam_score: float
    token_origins: _containers.RepeatedScalarFieldContainer[TokenOrigin]
    held_tokens: int
    value_events: _containers.RepeatedCompositeFieldContainer[ValueEvent]
    receipt: str
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., matched_token_id: _Optional[int] = ..., matched_stop_str: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., telemetry: _Optional[_Union[Telemetry, _Mapping]] = ..., parts: _Optional[_Iterable[_Union[AnswerPart, _Mapping]]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., field_logprobs: _Optional[_Iterable[_Union[FieldLogprob, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[OutputTensor, _Mapping]]] = ..., beam_score: _Optional[float] = ..., token_origins: _Optional[_Iterable[_Union[TokenOrigin, str]]] = ..., held_tokens: _Optional[int] = ..., value_events: _Optional[_Iterable[_Union[ValueEvent, _Mapping]]] = ..., receipt: _Optional[str] = ...) -> None: ...

class ValueEvent(_message.Message):
    __slots__ = ("kind", "pointer", "type", "value_json", "logprob", "tokens")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[ValueEvent.Kind]
        KIND_STARTED: _ClassVar[ValueEvent.Kind]
        KIND_FINISHED: _ClassVar[ValueEvent.Kind]
        KIND_ITEM: _ClassVar[ValueEvent.Kind]
    KIND_UNSPECIFIED: ValueEvent.Kind
    KIND_STARTED: ValueEvent.Kind
    KIND_FINISHED: ValueEvent.Kind
    KIND_ITEM: ValueEvent.Kind
    class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        TYPE_UNSPECIFIED: _ClassVar[ValueEvent.Type]
        TYPE_OBJECT: _ClassVar[ValueEvent.Type]
        TYPE_ARRAY: _ClassVar[ValueEvent.Type]
        TYPE_STRING: _ClassVar[ValueEvent.Type]
        TYPE_NUMBER: _ClassVar[ValueEvent.Type]
        TYPE_BOOLEAN: _ClassVar[ValueEvent.Type]
        TYPE_NULL: _ClassVar[ValueEvent.Type]
    TYPE_UNSPECIFIED: ValueEvent.Type
    TYPE_OBJECT: ValueEvent.Type
    TYPE_ARRAY: ValueEvent.Type
    TYPE_STRING: ValueEvent.Type
    TYPE_NUMBER: ValueEvent.Type
    TYPE_BOOLEAN: ValueEvent.Type
    TYPE_NULL: ValueEvent.Type
    KIND_FIELD_NUMBER: _ClassVar[int]
    POINTER_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    VALUE_JSON_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    kind: ValueEvent.Kind
    pointer: str
    type: ValueEvent.Type
    value_json: str
    logprob: float
    tokens: int
    def __init__(self, kind: _Optional[_Union[ValueEvent.Kind, str]] = ..., pointer: _Optional[str] = ..., type: _Optional[_Union[ValueEvent.Type, str]] = ..., value_json: _Optional[str] = ..., logprob: _Optional[float] = ..., tokens: _Optional[int] = ...) -> None: ...

class OutputTensor(_message.Message):
    __slots__ = ("name", "dtype", "shape", "data", "start")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    start: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., start: _Optional[int] = ...) -> None: ...

class AnswerPart(_message.Message):
    __slots__ = ("kind", "text", "tool_call_index", "tool_call_id", "tool_name")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[AnswerPart.Kind]
        KIND_REASONING: _ClassVar[AnswerPart.Kind]
        KIND_CONTENT: _ClassVar[AnswerPart.Kind]
        KIND_TOOL_CALL: _ClassVar[AnswerPart.Kind]
        KIND_TOOL_ARGUMENTS: _ClassVar[AnswerPart.Kind]
    KIND_UNSPECIFIED: AnswerPart.Kind
    KIND_REASONING: AnswerPart.Kind
    KIND_CONTENT: AnswerPart.Kind
    KIND_TOOL_CALL: AnswerPart.Kind
    KIND_TOOL_ARGUMENTS: AnswerPart.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    TOOL_NAME_FIELD_NUMBER: _ClassVar[int]
    kind: AnswerPart.Kind
    text: str
    tool_call_index: int
    tool_call_id: str
    tool_name: str
    def __init__(self, kind: _Optional[_Union[AnswerPart.Kind, str]] = ..., text: _Optional[str] = ..., tool_call_index: _Optional[int] = ..., tool_call_id: _Optional[str] = ..., tool_name: _Optional[str] = ...) -> None: ...

class FieldLogprob(_message.Message):
    __slots__ = ("pointer", "logprob", "tokens")
    POINTER_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    pointer: str
    logprob: float
    tokens: int
    def __init__(self, pointer: _Optional[str] = ..., logprob: _Optional[float] = ..., tokens: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ...) -> None: ...

class Telemetry(_message.Message):
    __slots__ = ("queue_ms", "compile_ms", "compile_cache_hit", "ttft_ms", "total_ms", "mask_wait_ms", "steps", "draft_tokens", "accepted_draft_tokens", "acceptance_length", "deferred_rows", "seed", "backend", "warnings", "backtracks", "exact_tries", "exact_tokens", "exact_log_mass")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    COMPILE_MS_FIELD_NUMBER: _ClassVar[int]
    COMPILE_CACHE_HIT_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    MASK_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DEFERRED_ROWS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    BACKTRACKS_FIELD_NUMBER: _ClassVar[int]
    EXACT_TRIES_FIELD_NUMBER: _ClassVar[int]
    EXACT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXACT_LOG_MASS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    compile_ms: float
    compile_cache_hit: bool
    ttft_ms: float
    total_ms: float
    mask_wait_ms: float
    steps: int
    draft_tokens: int
    accepted_draft_tokens: int
    acceptance_length: float
    deferred_rows: int
    seed: int
    backend: Backend
    warnings: _containers.RepeatedScalarFieldContainer[str]
    backtracks: int
    exact_tries: int
    exact_tokens: int
    exact_log_mass: float
    def __init__(self, queue_ms: _Optional[float] = ..., compile_ms: _Optional[float] = ..., compile_cache_hit: _Optional[bool] = ..., ttft_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., mask_wait_ms: _Optional[float] = ..., steps: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ..., acceptance_length: _Optional[float] = ..., deferred_rows: _Optional[int] = ..., seed: _Optional[int] = ..., backend: _Optional[_Union[Backend, str]] = ..., warnings: _Optional[_Iterable[str]] = ..., backtracks: _Optional[int] = ..., exact_tries: _Optional[int] = ..., exact_tokens: _Optional[int] = ..., exact_log_mass: _Optional[float] = ...) -> None: ...

class CompileRequest(_message.Message):
    __slots__ = ("grammar",)
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    grammar: Grammar
    def __init__(self, grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class CompileResponse(_message.Message):
    __slots__ = ("grammar_id", "backend", "cache_hit", "compile_ms", "memory_bytes", "min_tokens", "warnings", "known_answer_tokens")
    GRAMMAR_ID_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    CACHE_HIT_FIELD_NUMBER: _ClassVar[int]
    COMPILE_MS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_ANSWER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    grammar_id: str
    backend: Backend
    cache_hit: bool
    compile_ms: float
    memory_bytes: int
    min_tokens: int
    warnings: _containers.RepeatedScalarFieldContainer[str]
    known_answer_tokens: int
    def __init__(self, grammar_id: _Optional[str] = ..., backend: _Optional[_Union[Backend, str]] = ..., cache_hit: _Optional[bool] = ..., compile_ms: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., min_tokens: _Optional[int] = ..., warnings: _Optional[_Iterable[str]] = ..., known_answer_tokens: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: bool
    def __init__(self, aborted: _Optional[bool] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model", "model_type", "dtype", "vocab_size", "max_model_len", "max_batch_size", "max_queue_size", "num_draft_tokens", "drafter", "eos_token_ids", "backends", "num_parameters", "version", "device", "served_names", "tool_format", "reasoning_begin", "reasoning_end", "logits_processors", "max_beam_width", "output_names", "max_adapter_bytes", "page_size", "role", "draft_model", "weights", "receipt_key")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SERVED_NAMES_FIELD_NUMBER: _ClassVar[int]
    TOOL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    REASONING_BEGIN_FIELD_NUMBER: _ClassVar[int]
    REASONING_END_FIELD_NUMBER: _ClassVar[int]
    LOGITS_PROCESSORS_FIELD_NUMBER: _ClassVar[int]
    MAX_BEAM_WIDTH_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_NAMES_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTER_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_KEY_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_type: str
    dtype: str
    vocab_size: int
    max_model_len: int
    max_batch_size: int
    max_queue_size: int
    num_draft_tokens: int
    drafter: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    backends: _containers.RepeatedScalarFieldContainer[Backend]
    num_parameters: int
    version: str
    device: str
    served_names: _containers.RepeatedScalarFieldContainer[str]
    tool_format: str
    reasoning_begin: str
    reasoning_end: str
    logits_processors: _containers.RepeatedScalarFieldContainer[str]
    max_beam_width: int
    output_names: _containers.RepeatedScalarFieldContainer[str]
    max_adapter_bytes: int
    page_size: int
    role: str
    draft_model: str
    weights: str
    receipt_key: str
    def __init__(self, model: _Optional[str] = ..., model_type: _Optional[str] = ..., dtype: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_batch_size: _Optional[int] = ..., max_queue_size: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., drafter: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., backends: _Optional[_Iterable[_Union[Backend, str]]] = ..., num_parameters: _Optional[int] = ..., version: _Optional[str] = ..., device: _Optional[str] = ..., served_names: _Optional[_Iterable[str]] = ..., tool_format: _Optional[str] = ..., reasoning_begin: _Optional[str] = ..., reasoning_end: _Optional[str] = ..., logits_processors: _Optional[_Iterable[str]] = ..., max_beam_width: _Optional[int] = ..., output_names: _Optional[_Iterable[str]] = ..., max_adapter_bytes: _Optional[int] = ..., page_size: _Optional[int] = ..., role: _Optional[str] = ..., draft_model: _Optional[str] = ..., weights: _Optional[str] = ..., receipt_key: _Optional[str] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "messages", "tools", "add_special_tokens", "with_texts")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WITH_TEXTS_FIELD_NUMBER: _ClassVar[int]
    text: str
    messages: ChatMessages
    tools: Tools
    add_special_tokens: bool
    with_texts: bool
    def __init__(self, text: _Optional[str] = ..., messages: _Optional[_Union[ChatMessages, _Mapping]] = ..., tools: _Optional[_Union[Tools, _Mapping]] = ..., add_special_tokens: _Optional[bool] = ..., with_texts: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "texts")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., texts: _Optional[_Iterable[str]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids", "skip_special_tokens", "with_texts")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WITH_TEXTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    with_texts: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: _Optional[bool] = ..., with_texts: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text", "texts")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    text: str
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, text: _Optional[str] = ..., texts: _Optional[_Iterable[str]] = ...) -> None: ...

class GetTokenizerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerInfoResponse(_message.Message):
    __slots__ = ("encoded_vocab", "tokenizer_str", "stop_token_ids")
    ENCODED_VOCAB_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_STR_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    encoded_vocab: _containers.RepeatedScalarFieldContainer[str]
    tokenizer_str: str
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, encoded_vocab: _Optional[_Iterable[str]] = ..., tokenizer_str: _Optional[str] = ..., stop_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("waiting", "running", "num_slots", "pages_used", "num_pages", "steps", "generated_tokens", "prefill_tokens", "draft_tokens", "accepted_draft_tokens", "finished", "failed", "mask_wait_ms", "deferred_rows", "grammar_starts", "grammar_ready", "matchers", "cached_grammars", "cached_tokens", "pages_cached", "weight_bytes", "kv_cache_bytes", "buffer_bytes")
    class FinishedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class FailedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    MASK_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    DEFERRED_ROWS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_STARTS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_READY_FIELD_NUMBER: _ClassVar[int]
    MATCHERS_FIELD_NUMBER: _ClassVar[int]
    CACHED_GRAMMARS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUFFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    running: int
    num_slots: int
    pages_used: int
    num_pages: int
    steps: int
    generated_tokens: int
    prefill_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int
    finished: _containers.ScalarMap[str, int]
    failed: _containers.ScalarMap[str, int]
    mask_wait_ms: float
    deferred_rows: int
    grammar_starts: int
    grammar_ready: bool
    matchers: int
    cached_grammars: int
    cached_tokens: int
    pages_cached: int
    weight_bytes: int
    kv_cache_bytes: int
    buffer_bytes: int
    def __init__(self, waiting: _Optional[int] = ..., running: _Optional[int] = ..., num_slots: _Optional[int] = ..., pages_used: _Optional[int] = ..., num_pages: _Optional[int] = ..., steps: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ..., finished: _Optional[_Mapping[str, int]] = ..., failed: _Optional[_Mapping[str, int]] = ..., mask_wait_ms: _Optional[float] = ..., deferred_rows: _Optional[int] = ..., grammar_starts: _Optional[int] = ..., grammar_ready: _Optional[bool] = ..., matchers: _Optional[int] = ..., cached_grammars: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., pages_cached: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., kv_cache_bytes: _Optional[int] = ..., buffer_bytes: _Optional[int] = ...) -> None: ...

class GenerateManyRequest(_message.Message):
    __slots__ = ("generate", "abort")
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    generate: GenerateRequest
    abort: str
    def __init__(self, generate: _Optional[_Union[GenerateRequest, _Mapping]] = ..., abort: _Optional[str] = ...) -> None: ...

class GenerateManyResponse(_message.Message):
    __slots__ = ("request_id", "response", "error", "last")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    response: GenerateResponse
    error: RequestError
    last: bool
    def __init__(self, request_id: _Optional[str] = ..., response: _Optional[_Union[GenerateResponse, _Mapping]] = ..., error: _Optional[_Union[RequestError, _Mapping]] = ..., last: _Optional[bool] = ...) -> None: ...

class RequestError(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class WatchStatsRequest(_message.Message):
    __slots__ = ("history", "interval_ms", "omit_requests")
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    OMIT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    history: int
    interval_ms: int
    omit_requests: bool
    def __init__(self, history: _Optional[int] = ..., interval_ms: _Optional[int] = ..., omit_requests: _Optional[bool] = ...) -> None: ...

class WatchStatsResponse(_message.Message):
    __slots__ = ("iterations", "requests", "missed")
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    iterations: _containers.RepeatedCompositeFieldContainer[IterationStats]
    requests: _containers.RepeatedCompositeFieldContainer[RequestStats]
    missed: int
    def __init__(self, iterations: _Optional[_Iterable[_Union[IterationStats, _Mapping]]] = ..., requests: _Optional[_Iterable[_Union[RequestStats, _Mapping]]] = ..., missed: _Optional[int] = ...) -> None: ...

class IterationStats(_message.Message):
    __slots__ = ("iteration", "time_s", "iteration_ms", "waiting", "running", "num_slots", "decoding", "prefill_tokens", "generated_tokens", "draft_tokens", "accepted_draft_tokens", "parked", "preempted", "pages_used", "num_pages")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    ITERATION_MS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    iteration: int
    time_s: float
    iteration_ms: float
    waiting: int
    running: int
    num_slots: int
    decoding: int
    prefill_tokens: int
    generated_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int
    parked: int
    preempted: int
    pages_used: int
    num_pages: int
    def __init__(self, iteration: _Optional[int] = ..., time_s: _Optional[float] = ..., iteration_ms: _Optional[float] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ..., num_slots: _Optional[int] = ..., decoding: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ..., parked: _Optional[int] = ..., preempted: _Optional[int] = ..., pages_used: _Optional[int] = ..., num_pages: _Optional[int] = ...) -> None: ...

class RequestStats(_message.Message):
    __slots__ = ("request_id", "index", "client_id", "stage", "prompt_tokens", "prefilled_tokens", "generated_tokens", "slot", "pages")
    class Stage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STAGE_UNSPECIFIED: _ClassVar[RequestStats.Stage]
        STAGE_WAITING: _ClassVar[RequestStats.Stage]
        STAGE_PREFILL: _ClassVar[RequestStats.Stage]
        STAGE_DECODE: _ClassVar[RequestStats.Stage]
        STAGE_PARKED: _ClassVar[RequestStats.Stage]
    STAGE_UNSPECIFIED: RequestStats.Stage
    STAGE_WAITING: RequestStats.Stage
    STAGE_PREFILL: RequestStats.Stage
    STAGE_DECODE: RequestStats.Stage
    STAGE_PARKED: RequestStats.Stage
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    client_id: str
    stage: RequestStats.Stage
    prompt_tokens: int
    prefilled_tokens: int
    generated_tokens: int
    slot: int
    pages: int
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., client_id: _Optional[str] = ..., stage: _Optional[_Union[RequestStats.Stage, str]] = ..., prompt_tokens: _Optional[int] = ..., prefilled_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., slot: _Optional[int] = ..., pages: _Optional[int] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters", "max_bytes")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    max_bytes: int
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "kind", "path", "size", "memory_bytes", "in_use")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Adapter.Kind]
        KIND_LORA: _ClassVar[Adapter.Kind]
        KIND_PROMPT: _ClassVar[Adapter.Kind]
    KIND_UNSPECIFIED: Adapter.Kind
    KIND_LORA: Adapter.Kind
    KIND_PROMPT: Adapter.Kind
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    IN_USE_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: Adapter.Kind
    path: str
    size: int
    memory_bytes: int
    in_use: int
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[Adapter.Kind, str]] = ..., path: _Optional[str] = ..., size: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., in_use: _Optional[int] = ...) -> None: ...

class ExchangeDrafterRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class ExchangeDrafterResponse(_message.Message):
    __slots__ = ("model", "num_parameters")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    model: str
    num_parameters: int
    def __init__(self, model: _Optional[str] = ..., num_parameters: _Optional[int] = ...) -> None: ...

class ClearGrammarCacheRequest(_message.Message):
    __slots__ = ("disk",)
    DISK_FIELD_NUMBER: _ClassVar[int]
    disk: bool
    def __init__(self, disk: _Optional[bool] = ...) -> None: ...

class ClearGrammarCacheResponse(_message.Message):
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
