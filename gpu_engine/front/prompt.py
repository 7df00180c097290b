"""From a validated request to Requests: the chat template, the tokenizer, and the limits that need token counts.

Invariant: a Request that is returned fits into the context with room for at least one new token. Synchronous and
without state; `is_large` says when to call it off the event loop.

Not responsible for: protobuf messages and the other limits (see validation.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gpu_engine.api.conversation import Chat, Prompt, Tokens
from gpu_engine.api.errors import InvalidRequest
from gpu_engine.api.limits import Limits
from gpu_engine.api.ports import Tokenizer
from gpu_engine.api.request import Params, Request, SuffixScope, TokenEvent, ValidatedRequest
from gpu_engine.front.outputs_field import check_bytes, tensors_of
from gpu_engine.front.text_output import REPLACEMENT
from gpu_engine.front.tools.chat import render
from gpu_engine.front.tools.fields import chat_bytes
from gpu_engine.front.validation import check_prompt_length

LARGE_PROMPT_CHARS = 8 << 10
"""Tokenising this much text takes some milliseconds: longer texts must not block the event loop."""

FEW_BAD_WORDS = 8
HEAD_CHARS_PER_TOKEN = 16
HEAD_MARGIN_TOKENS = 64

_MASK_64 = (1 << 64) - 1


def is_large(valid: ValidatedRequest) -> bool:
    """Return whether `build_requests` takes long enough to run on another thread."""
    size = chars_of(valid.prompt)
    if valid.params.response.echo and isinstance(valid.prompt, Tokens):
        size = len(valid.prompt.ids)
    # A small prompt is built on the event loop: on a thread it could wait for large ones.
    return size > LARGE_PROMPT_CHARS or len(valid.bad_words) > FEW_BAD_WORDS


def chars_of(prompt: Prompt) -> int:
    """Return how many characters are to be tokenised."""
    match prompt:
        case str(text):
            return len(text)
        case Tokens():
            return 0
        case Chat():
            return chat_bytes(prompt)


def build_requests(
    valid: ValidatedRequest,
    tokenizer: Tokenizer,
    limits: Limits,
    sink: Callable[[TokenEvent], None],
    arrived_s: float,
    suffix_scope: SuffixScope | None = None,
) -> list[Request]:
    """Return the n sequences of a request, which share `sink` and `suffix_scope`. Raises InvalidRequest."""
    field, prompt_ids = _prompt_ids(valid, tokenizer, limits)
    if not prompt_ids:
        raise InvalidRequest(field, "has no tokens")
    echo_text = _echo_text(valid, prompt_ids, tokenizer) if valid.params.response.echo else None
    if valid.params.prompt_adapter is not None:
        prompt_ids = [*valid.params.prompt_adapter.virtual_ids, *prompt_ids]
    check_prompt_length(field, len(prompt_ids), limits.max_model_len)
    params = _resolved(valid, len(prompt_ids), tokenizer, limits)
    return [
        Request.of(
            _of_sequence(params, i),
            request_id=valid.request_id,
            index=i,
            prompt_ids=list(prompt_ids),
            sink=sink,
            arrived_s=arrived_s,
            suffix_scope=suffix_scope,
            echo_text=echo_text,
        )
        for i in range(valid.n)
    ]


def _resolved(valid: ValidatedRequest, prompt_length: int, tokenizer: Tokenizer, limits: Limits) -> Params:
    """Return the parts with what the tokenizer decides: `max_tokens` within the context, and the tokens of bad words.

    Raises InvalidRequest.
    """
    sampling = valid.params.sampling
    max_tokens = min(sampling.max_tokens, limits.max_model_len - prompt_length)
    if sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            "sampling.min_tokens",
            f"is {sampling.min_tokens}, at most {max_tokens} can be generated (max_tokens, context)",
        )
    tensors = valid.params.outputs.tensors
    check_bytes(tensors, num_sequences=valid.n, prompt_length=prompt_length, max_tokens=max_tokens, limits=limits)
    bad_token_ids, bad_words = _bad_words(valid, tokenizer)
    sampling = replace(sampling, max_tokens=max_tokens, bad_token_ids=bad_token_ids, bad_words=bad_words)
    return replace(valid.params, sampling=sampling)


def _of_sequence(params: Params, index: int) -> Params:
    """Return the parts of one of the n sequences: each has its own seed, and only the first describes the prompt."""
    if index == 0:
        return params
    outputs = params.outputs
    return replace(
        params,
        sampling=replace(params.sampling, seed=sequence_seed(params.sampling.seed, index)),
        outputs=replace(outputs, prompt_logprobs=None, tensors=tensors_of(outputs.tensors, index)),
    )


def sequence_seed(seed: int, index: int) -> int:
    """Return the seed of sequence `index`: the request's seed for 0, else its splitmix64 (Steele, Lea, Flood 2014).

    The answer's telemetry has the seed, so that one of n sequences can be generated again by itself.
    """
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return z ^ (z >> 31)


def _prompt_ids(valid: ValidatedRequest, tokenizer: Tokenizer, limits: Limits) -> tuple[str, list[int]]:
    match valid.prompt:
        case str(text):
            _check_head("text", text, tokenizer, limits)
            return "text", _encode(tokenizer, text, add_special_tokens=True)
        case Tokens(ids):
            return "token_ids.ids", list(ids)
        case Chat():  # the template writes the special tokens itself
            text = render(valid.prompt, tokenizer)
            _check_head("messages", text, tokenizer, limits)
            return "messages", _encode(tokenizer, text, add_special_tokens=False)


def encode_prompt(prompt: str | Chat, tokenizer: Tokenizer, *, add_special_tokens: bool = True) -> list[int]:
    """Return the ids of a prompt of any length. `add_special_tokens` is for text. Raises InvalidRequest."""
    if isinstance(prompt, str):
        return _encode(tokenizer, prompt, add_special_tokens=add_special_tokens)
    return _encode(tokenizer, render(prompt, tokenizer), add_special_tokens=False)


def _echo_text(valid: ValidatedRequest, prompt_ids: list[int], tokenizer: Tokenizer) -> str:
    """Return the prompt's text without an incomplete last character, with which the answer's text begins."""
    text = valid.prompt
    if not isinstance(text, str):
        skip = valid.params.response.skip_special_tokens
        (text,) = tokenizer.backend_tokenizer.decode_batch([prompt_ids], skip_special_tokens=skip)
    return text.rstrip(REPLACEMENT)


def _check_head(field: str, text: str, tokenizer: Tokenizer, limits: Limits) -> None:
    # Tokenising megabytes takes seconds of CPU time. A prompt that is far too long is recognised by its beginning,
    # which has at most a few tokens fewer when the rest follows it.
    head = HEAD_CHARS_PER_TOKEN * limits.max_model_len
    if len(text) > 2 * head:
        length = len(_encode(tokenizer, text[:head], add_special_tokens=False))
        if length > limits.max_model_len + HEAD_MARGIN_TOKENS:
            most = limits.max_model_len - 1
            raise InvalidRequest(
                field, f"has more than {length} tokens, at most {most} fit (max_model_len {limits.max_model_len})"
            )


def _encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    # The batch call releases the GIL; `encode` holds it for seconds on a long text.
    (encoding,) = tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoding.ids)


def _bad_words(valid: ValidatedRequest, tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    # Most vocabularies have different tokens for a word at the start of a text and after a space: both are forbidden.
    single, several = dict.fromkeys(valid.params.sampling.bad_token_ids), dict[tuple[int, ...], None]()
    for word in valid.bad_words:
        for form in (word, f" {word}"):
            ids = tuple(_encode(tokenizer, form, add_special_tokens=False))
            if len(ids) == 1:
                single[ids[0]] = None
            elif ids:
                several[ids] = None
    return tuple(single), tuple(several)
