"""From checked values to Requests: the chat template, the tokenizer, and the limits that need token counts.

Invariant: a Request that is returned fits into the context with room for at least one new token. Synchronous and
without state; `is_large` says when to call it off the event loop.

Not responsible for: protobuf messages and the other limits (see validation.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gpu_engine.api.checked import Checked, Limits, Prompt, Tokens
from gpu_engine.api.conversation import Chat
from gpu_engine.api.errors import InvalidRequest
from gpu_engine.api.ports import Tokenizer
from gpu_engine.api.request import DraftScope, Request, SamplingParams, Telemetry, TokenEvent
from gpu_engine.front.outputs_field import check_bytes, of_sequence
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


def is_large(checked: Checked) -> bool:
    """Return whether `build_requests` takes long enough to run on another thread."""
    size = chars_of(checked.prompt)
    if checked.echo and isinstance(checked.prompt, Tokens):
        size = len(checked.prompt.ids)
    # A small prompt is built on the event loop: on the threads it could queue behind large ones.
    return size > LARGE_PROMPT_CHARS or len(checked.bad_words) > FEW_BAD_WORDS


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
    checked: Checked,
    tokenizer: Tokenizer,
    limits: Limits,
    sink: Callable[[TokenEvent], None],
    arrived_s: float,
    draft_scope: DraftScope | None = None,
) -> list[Request]:
    """Return the n sequences of a request, which share `sink` and `draft_scope`. Raises InvalidRequest."""
    field, prompt_ids = _prompt_ids(checked, tokenizer, limits)
    if not prompt_ids:
        raise InvalidRequest(field, "has no tokens")
    echo = _echo(checked, prompt_ids, tokenizer) if checked.echo else None
    if checked.prompt_adapter is not None:
        prompt_ids = [*checked.prompt_adapter.virtual_ids, *prompt_ids]
    check_prompt_length(field, len(prompt_ids), limits.max_model_len)
    room = limits.max_model_len - len(prompt_ids)
    max_tokens = room if checked.max_tokens is None else min(checked.max_tokens, room)
    if checked.min_tokens > max_tokens:
        raise InvalidRequest(
            "sampling.min_tokens",
            f"is {checked.min_tokens}, at most {max_tokens} can be generated (max_tokens, context)",
        )
    check_bytes(
        checked.outputs, num_sequences=checked.n, prompt_length=len(prompt_ids), max_tokens=max_tokens, limits=limits
    )
    sampling = _sampling(checked, max_tokens, tokenizer)
    telemetry = Telemetry(arrived_s=arrived_s)
    return [
        Request(
            request_id=checked.request_id,
            index=i,
            prompt_ids=list(prompt_ids),
            sampling=replace(sampling, seed=sequence_seed(checked.seed, i)),
            sink=sink,
            grammar=checked.grammar,
            num_draft_tokens=checked.num_draft_tokens,
            jump_forward_tokens=checked.jump_forward_tokens,
            draft_scope=draft_scope,
            priority=checked.priority,
            max_queue_s=None if checked.max_queue_ms is None else checked.max_queue_ms / 1e3,
            never_preempt=checked.never_preempt,
            outputs=of_sequence(checked.outputs, i),
            cache_salt=checked.cache_salt,
            client_id=checked.client_id,
            logits_processors=checked.logits_processors,
            lora=checked.lora,
            prompt_adapter=checked.prompt_adapter,
            prompt_logprobs=checked.prompt_logprobs if i == 0 else None,
            echo=echo,
            token_origins=checked.token_origins,
            backtracking=checked.backtracking,
            # The sequences of a beam search share their steps.
            telemetry=telemetry if checked.beams else Telemetry(arrived_s=arrived_s),
            beams=checked.beams,
            tenant=checked.tenant,
        )
        for i in range(checked.n)
    ]


def _sampling(checked: Checked, max_tokens: int, tokenizer: Tokenizer) -> SamplingParams:
    """Return the parameters of sequence 0."""
    bad_token_ids, bad_words = _bad_words(checked, tokenizer)
    return SamplingParams(
        max_tokens=max_tokens,
        seed=checked.seed,
        min_tokens=checked.min_tokens,
        temperature=checked.temperature,
        top_p=checked.top_p,
        top_k=checked.top_k,
        min_p=checked.min_p,
        repetition_penalty=checked.repetition_penalty,
        presence_penalty=checked.presence_penalty,
        frequency_penalty=checked.frequency_penalty,
        stop=checked.stop,
        stop_token_ids=checked.stop_token_ids,
        bad_token_ids=bad_token_ids,
        bad_words=bad_words,
        logit_bias=checked.logit_bias,
        ignore_eos=checked.ignore_eos,
        logprobs=0 if checked.logprobs is None and checked.field_logprobs else checked.logprobs,
        include_stop_str_in_output=checked.include_stop_str_in_output,
        skip_special_tokens=checked.skip_special_tokens,
        repetition=checked.repetition,
    )


def sequence_seed(seed: int, index: int) -> int:
    """Return the seed of sequence `index`: the request's seed for 0, else its splitmix64 (Steele, Lea, Flood 2014).

    The answer's telemetry has the seed, so that one of n sequences can be generated again alone.
    """
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return z ^ (z >> 31)


def _prompt_ids(checked: Checked, tokenizer: Tokenizer, limits: Limits) -> tuple[str, list[int]]:
    match checked.prompt:
        case str(text):
            _check_head("text", text, tokenizer, limits)
            return "text", _encode(tokenizer, text, add_special_tokens=True)
        case Tokens(ids):
            return "token_ids.ids", list(ids)
        case Chat():  # the template writes the special tokens itself
            text = render(checked.prompt, tokenizer)
            _check_head("messages", text, tokenizer, limits)
            return "messages", _encode(tokenizer, text, add_special_tokens=False)


def encode_prompt(prompt: str | Chat, tokenizer: Tokenizer, *, add_special_tokens: bool = True) -> list[int]:
    """Return the ids of a prompt of any length. `add_special_tokens` is for text. Raises InvalidRequest."""
    if isinstance(prompt, str):
        return _encode(tokenizer, prompt, add_special_tokens=add_special_tokens)
    return _encode(tokenizer, render(prompt, tokenizer), add_special_tokens=False)


def _echo(checked: Checked, prompt_ids: list[int], tokenizer: Tokenizer) -> str:
    """Return the prompt's text, without an incomplete character at its end: the answer's text begins with that one."""
    text = checked.prompt
    if not isinstance(text, str):
        (text,) = tokenizer.backend_tokenizer.decode_batch(
            [prompt_ids], skip_special_tokens=checked.skip_special_tokens
        )
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


def _bad_words(checked: Checked, tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    # Most vocabularies have different tokens for a word at the start of a text and after a space: both are forbidden.
    single, several = dict.fromkeys(checked.bad_token_ids), dict[tuple[int, ...], None]()
    for word in checked.bad_words:
        for form in (word, f" {word}"):
            ids = tuple(_encode(tokenizer, form, add_special_tokens=False))
            if len(ids) == 1:
                single[ids[0]] = None
            elif ids:
                several[ids] = None
    return tuple(single), tuple(several)
