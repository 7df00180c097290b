"""Fields that chat and completions share: sampling, stopping, and what an answer carries.

Not responsible for: their ranges where the engine checks them; numbers are bounded by what its messages hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from http_gateway.wire.fields import Fields, Refusal
from http_gateway.wire.outputs import GrammarBackend, ResponseFormat, Schema, StructuredOutputs

Unsigned = Annotated[int, Field(ge=0, lt=1 << 32)]
Signed = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
Seed = Annotated[int, Field(ge=0, lt=1 << 64)]
Number = Annotated[float, Field(ge=-3e38, le=3e38)]
TokenIds = list[Unsigned]

SHARED_REFUSALS: Mapping[str, Refusal] = {
    "truncate_prompt_tokens": Refusal("a prompt is never cut; send a shorter one"),
    "allowed_token_ids": Refusal("use structured_outputs or logit_bias"),
    "vllm_xargs": Refusal("there are no such extensions"),
    "kv_cache_retention_config": Refusal("the prefix cache drops the pages that were unused for longest"),
    "lookahead_config": Refusal("the server's drafter ngram also drafts from earlier answers"),
    "kv_transfer_params": Refusal("prefill and decode run in one engine"),
    "mm_processor_kwargs": Refusal("the model reads only text"),
    "spaces_between_special_tokens": Refusal("special tokens are never set apart", (True, False)),
    "return_tokens_as_token_ids": Refusal("use return_token_ids", (False,)),
    "add_special_tokens": Refusal("send token ids for full control", (True,)),
    "prompt_embeds": Refusal("send text or token ids"),
    "lora_path": Refusal("name the adapter in model"),
    "separate_reasoning": Refusal("reasoning is always apart", (True,)),
}


class StreamOptions(Fields):
    """What the events of a stream carry."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {"include_obfuscation": Refusal("events are not padded", (False,))}

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Speculation(Fields):
    """Speculative decoding of this request. It changes the speed, never the tokens."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        name: Refusal("only the server drafts; a text in the prompt is drafted from")
        for name in ("draft_tokens", "draft")
    }

    num_draft_tokens: Unsigned | None = None
    draft_index: bool | None = None


class RepetitionDetection(Fields):
    """vLLM's field: an answer ends when its last tokens are one pattern, again and again."""

    max_pattern_size: Unsigned
    """Tokens of the longest pattern; 0: never."""
    min_pattern_size: Unsigned | None = None
    min_count: Unsigned | None = None
    """How many patterns in a row end the answer."""


class LogitsProcessor(Fields):
    """A logits processor in vLLM's form."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {"args": Refusal("arguments have names; use kwargs", ([],))}

    qualname: str
    """A name that the server's setting `logits_processors` has."""
    kwargs: dict[str, Any] | None = None


def _of_name(value: Any) -> Any:
    return {"qualname": value} if isinstance(value, str) else value


AnyProcessor = Annotated[LogitsProcessor, BeforeValidator(_of_name, json_schema_input_type=str | LogitsProcessor)]
"""A name by itself is a processor without arguments."""


class SamplingFields(Fields):
    """What chat and completions share."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = SHARED_REFUSALS

    model: str | None = None
    """A name that `/v1/models` lists, of a model or of an adapter. Unset: the first one."""
    max_tokens: Unsigned | None = None
    min_tokens: Unsigned | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Signed | None = None
    min_p: Number | None = None
    seed: Seed | None = None
    n: Unsigned | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    use_beam_search: bool | None = None
    """Return the `n` best answers of a beam search. It is not for streams."""
    best_of: Unsigned | None = None
    """Beams of the search; another name of `beam_width`."""
    beam_width: Unsigned | None = None
    """Beams of the search, `n` or more. Unset: `n`."""
    length_penalty: Number | None = None
    """An answer's score is its log-probability divided by its length to this power. Unset: 1."""
    early_stopping: bool | Literal["never"] | None = None
    """When the search ends, as in transformers. Unset: false."""
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    repetition_detection: RepetitionDetection | None = None
    """Ends an answer that repeats itself."""
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Number] | None = None
    bad_words: list[str] | None = None
    bad_token_ids: TokenIds | None = None
    logits_processors: list[AnyProcessor] | None = None
    """Names of the server's logits processors, or with arguments."""
    skip_special_tokens: bool | None = None
    prompt_logprobs: Unsigned | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: GrammarBackend | None = None
    guided_whitespace_pattern: str | None = None
    priority: Signed | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None
    """Without effect on the answer."""
    speculation: Speculation | None = None
    masked_logprobs: bool | None = None
    """Log-probabilities are among the tokens that the grammar allows."""
    field_logprobs: bool | None = None
    """The log-probability of each leaf of a guided JSON answer, in the choice's `field_logprobs`."""
    token_origins: bool | None = None
    """The text of each token, and whether it was `sampled`, an accepted `draft`, or `forced` by the grammar, in the
    choice's `token_origins`."""
    value_events: bool | None = None
    """Events of the values of a guided JSON answer, each when it is final, in the choice's `value_events`."""
    items_of: str | None = None
    """JSON Pointer of an array whose items have events, each when it has ended, in the choice's `value_events`."""
    receipt_nonce: Annotated[str, Field(pattern=r"^([0-9a-fA-F]{2}){16,64}$")] | None = None
    """16 to 64 secret bytes in hexadecimal digits. The choice's `receipt` is then a signed statement of what ran, whose
    digests can be checked with these bytes."""
    grammar_exact: bool | None = None
    """The answer has the model's own distribution, given that the whole answer matches the grammar."""
    grammar_exact_tries: int | None = Field(default=None, ge=1, le=65536)
    grammar_exact_ms: int | None = Field(default=None, ge=1, le=86_400_000)
    grammar_exact_shared_tries: int | None = Field(default=None, ge=0, le=65536)
    grammar_exact_any_spelling: bool | None = None
    telemetry: bool | None = None
    """Times, drafts and seed of each sequence, in the choice's `telemetry`."""

    def stops(self) -> list[str]:
        """Return the stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_events(self) -> bool:
        """Choices have `value_events`."""
        return bool(self.value_events) or self.items_of is not None

    def usage_events(self) -> tuple[bool, bool]:
        """Return whether a stream ends with its usage, and whether each event has one."""
        options = self.stream_options or StreamOptions()
        return options.include_usage, options.continuous_usage_stats


def as_text(value: Any) -> str:
    """Return the texts of parts joined, or the text itself."""
    return value if isinstance(value, str) else "".join(part.text for part in value)
