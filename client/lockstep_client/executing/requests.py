"""A request of an executor: what to generate, how to sample it, and what its results hold.

The invariant: an argument that is not given leaves its field unset, so that the server's default applies. Values are
checked by the server, which names the field; what the wire cannot hold is a ValueError that names the argument.

Not responsible for: ids (see book.py), results (see results.py).
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep_client.calls import AnyGrammar, chat_request, text_request
from lockstep_client.grammars import Grammar
from lockstep_client.messages import Conversation
from lockstep_client.options import AdditionalOutput, BeamSearch, LogitsProcessor
from lockstep_client.wire import engine_pb2 as pb

NO_END = -1
"""As `end_id`: the model's end-of-sequence token does not end an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How tokens are drawn; engine.proto documents each field with its default.

    Attributes:
        beam_width: above 1: beam search, with `length_penalty` and `early_stopping` (see BeamSearch).
        logit_bias: added to the logits of these tokens.

    """

    beam_width: int = 1
    length_penalty: float | None = None
    early_stopping: bool | Literal["heuristic", "never"] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """What a result holds besides tokens.

    Attributes:
        log_probs: log-probabilities of each token, and of this many alternatives. None: none.
        prompt_log_probs: the same for the tokens of the prompt.
        context_logits, generation_logits: the logits at the tokens of the prompt and of the answer.
        exclude_input_from_output: False: `output_token_ids` begins with the prompt's tokens, and `texts` with its text.
        text: the text of the answer, too.
        additional_outputs: tensors of the model, by the names that the server has.

    """

    log_probs: int | None = None
    prompt_log_probs: int | None = None
    context_logits: bool = False
    generation_logits: bool = False
    exclude_input_from_output: bool = True
    text: bool = True
    additional_outputs: Sequence[str | AdditionalOutput] = ()


class GuideType(enum.Enum):
    """Kinds of guided decoding."""

    JSON = "json_object"
    """Any JSON object."""
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF_GRAMMAR = "ebnf"
    """The GBNF dialect, from its rule `root`."""
    STRUCTURAL_TAG = "structural_tag"
    LARK = "lark"
    CHOICE = "choice"
    """`guide` is a JSON array of texts."""


@dataclass(frozen=True, slots=True)
class GuidedDecodingParams:
    """What an answer must match. `guide` is the schema, the expression or the grammar; None: any JSON."""

    guide_type: GuideType
    guide: str | None = None

    def grammar(self) -> Grammar:
        """Return the grammar. Raises ValueError where `guide` is missing, or is there for JSON."""
        if (self.guide is None) != (self.guide_type is GuideType.JSON):
            raise ValueError(f"guide: {'none is' if self.guide is None else 'is not'} for {self.guide_type.name}")
        match self.guide_type:
            case GuideType.JSON:
                return Grammar.json_object()
            case GuideType.CHOICE:
                return Grammar.choice(*json.loads(self.guide or ""))
            case kind:
                return Grammar(kind.value, self.guide or "", json.loads if kind is GuideType.JSON_SCHEMA else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request. The prompt is exactly one of `input_token_ids`, `text` and `messages`.

    Attributes:
        input_token_ids, text, messages: the prompt.
        max_tokens: most tokens of an answer. None: as many as the context has room for.
        streaming: results come as tokens do; False: one result for each sequence, when it has ended.
        return_all_generated_tokens: with `streaming`: each result has all tokens of its sequence so far, instead of
            those since the last one.
        num_return_sequences: sequences for the prompt; in beam search: how many of the beams are returned.
        sampling_config: how tokens are drawn.
        output_config: what results hold.
        end_id: a token that ends an answer, besides the model's own. NO_END: the model's own does not.
        pad_id: taken for the sake of other executors' requests. No answer is padded, so it has no effect.
        stop_words, bad_words: an answer ends before these, and never holds those. A text, or the id of one token in a
            sequence; a sequence of several ids is refused, because the server matches texts.
        guided_decoding_params: what the answer must match: its GuidedDecodingParams, a Grammar or a CompiledGrammar.
        client_id: names a group of requests.
        priority: a higher one leaves the waiting queue first.
        lora, prompt_adapter: names of loaded adapters.
        logits_processors: names of loaded logits processors, with or without arguments.
        max_queue_ms: most time in the waiting queue.
        never_preempt: the request keeps its slot until it ends.
        cache_salt: prompts share cached prefixes only where their salts are equal.
        num_draft_tokens: drafts per step; 0: no speculation.

    """

    input_token_ids: Sequence[int] | None = None
    text: str | None = None
    messages: Conversation | None = None
    max_tokens: int | None = None
    streaming: bool = False
    return_all_generated_tokens: bool = False
    num_return_sequences: int = 1
    sampling_config: SamplingConfig = field(default_factory=SamplingConfig)
    output_config: OutputConfig = field(default_factory=OutputConfig)
    end_id: int | None = None
    pad_id: int | None = None
    stop_words: Sequence[str | Sequence[int]] = ()
    bad_words: Sequence[str | Sequence[int]] = ()
    guided_decoding_params: GuidedDecodingParams | AnyGrammar | None = None
    client_id: str | int | None = None
    priority: int = 0
    lora: str | None = None
    prompt_adapter: str | None = None
    logits_processors: Sequence[str | LogitsProcessor] = ()
    max_queue_ms: int | None = None
    never_preempt: bool = False
    cache_salt: str | None = None
    num_draft_tokens: int | None = None

    @property
    def uses_beams(self) -> bool:
        """The request is a beam search."""
        return self.sampling_config.beam_width > 1

    @property
    def num_sequences(self) -> int:
        """Sequences that the request takes in the server's queue."""
        return max(self.num_return_sequences, self.sampling_config.beam_width)

    def message(self, name: str) -> pb.GenerateRequest:
        """Return the message for the server, with `name` as its id. Raises TypeError or ValueError."""
        prompts = {"input_token_ids": self.input_token_ids, "text": self.text, "messages": self.messages}
        given = [key for key, value in prompts.items() if value is not None]
        if len(given) != 1:
            raise ValueError(f"{', '.join(prompts)}: exactly one is required, {' and '.join(given) or 'none'} is there")
        if self.return_all_generated_tokens and not self.streaming:
            raise ValueError("return_all_generated_tokens: needs streaming; a whole result has all tokens")
        options, grammar = self._options(name), self._grammar()
        if self.messages is not None:
            return chat_request(self.messages, None, grammar, options, None).request
        prompt = self.text if self.text is not None else list(self.input_token_ids or ())
        return text_request(prompt, None, grammar, options, None).request

    def _grammar(self) -> AnyGrammar | None:
        params = self.guided_decoding_params
        return params.grammar() if isinstance(params, GuidedDecodingParams) else params

    def _options(self, name: str) -> dict[str, Any]:
        sampling, output = self.sampling_config, self.output_config
        stop, stop_ids = _words("stop_words", self.stop_words)
        bad, bad_ids = _words("bad_words", self.bad_words)
        if self.end_id is not None and self.end_id != NO_END:
            stop_ids.append(self.end_id)
        # The beams of a search are known when it has ended.
        whole = self.uses_beams or not self.streaming
        return {
            "request_id": name,
            "max_tokens": self.max_tokens,
            "n": self.num_return_sequences,
            "ignore_eos": True if self.end_id == NO_END else None,
            "whole": whole or None,
            "cumulative": (self.return_all_generated_tokens and not whole) or None,
            **{key: getattr(sampling, key) for key in _SAMPLING},
            "logit_bias": sampling.logit_bias,
            "beam_search": self._beams(),
            "logprobs": output.log_probs,
            "prompt_logprobs": output.prompt_log_probs,
            "context_logits": output.context_logits or None,
            "generation_logits": output.generation_logits or None,
            "additional_outputs": output.additional_outputs,
            "omit_text": None if output.text else True,
            "echo": None if output.exclude_input_from_output else True,
            "stop": stop,
            "stop_token_ids": stop_ids,
            "bad_words": bad,
            "bad_token_ids": bad_ids,
            "client_id": None if self.client_id is None else str(self.client_id),
            "priority": self.priority or None,
            "never_preempt": self.never_preempt or None,
            **{key: getattr(self, key) for key in _OWN},
        }

    def _beams(self) -> BeamSearch | None:
        sampling = self.sampling_config
        if not self.uses_beams:
            return None
        return BeamSearch(
            beam_width=sampling.beam_width,
            length_penalty=sampling.length_penalty,
            early_stopping=sampling.early_stopping,
        )


_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "seed", "min_tokens", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
_OWN = ("lora", "prompt_adapter", "logits_processors", "max_queue_ms", "cache_salt", "num_draft_tokens")


def _words(name: str, words: Sequence[str | Sequence[int]]) -> tuple[list[str], list[int]]:
    """Return the texts, and the single tokens. Raises ValueError for several tokens in a row."""
    if isinstance(words, str):
        raise TypeError(f"{name}: is one text, not a list of them")
    texts: list[str] = []
    token_ids: list[int] = []
    for i, word in enumerate(words):
        if isinstance(word, str):
            texts.append(word)
        elif len(word) == 1:
            token_ids.append(word[0])
        else:
            raise ValueError(f"{name}[{i}]: has {len(word)} token ids; give one id, or the text")
    return texts, token_ids
