"""Tokens that are held back, so that an answer can go back over them.

Of a verified answer the last `Backtracking.hold_tokens` tokens are held; the tokens before them were sent and stay. An
answer without a legal token goes back over held ones. Of an exact answer all tokens are held until it is accepted.
Invariant: how many tokens were sent when no token is legal depends only on the answer's tokens, not on the steps that
brought them. So an answer goes back to the same place with any number of drafts.
Not responsible for: how far back (the grammar process decides), the slot and the pages (see loop.py).
"""

from __future__ import annotations

from dataclasses import replace

from gpu_engine.api.request import TokenEvent
from gpu_engine.core.running import RunningSequence


def hold(sequence: RunningSequence, event: TokenEvent) -> None:
    """Send the tokens of `event`, except the tokens of a verified answer that must be held."""
    backtracking = sequence.request.backtracking
    if sequence.exact is not None:
        sequence.unsent = all_unsent(sequence, event)
        return
    if backtracking is None or not sequence.verified:
        sequence.request.sink(event)
        return
    event = all_unsent(sequence, event)
    count = max(0, len(event.token_ids) - backtracking.hold_tokens)
    if not count:
        sequence.unsent = event
        return
    sequence.unsent = _part(event, count, len(event.token_ids))
    held = len(sequence.unsent.token_ids)
    sequence.request.sink(replace(_part(event, 0, count), prompt_logprobs=event.prompt_logprobs, num_held=held))


def all_unsent(sequence: RunningSequence, event: TokenEvent) -> TokenEvent:
    """Return the held tokens and the tokens of `event` in one event; nothing is held any more."""
    held, sequence.unsent = sequence.unsent, None
    if held is None:
        return event
    return replace(
        event,
        token_ids=held.token_ids + event.token_ids,
        logprobs=held.logprobs + event.logprobs,
        origins=held.origins + event.origins,
        prompt_logprobs=held.prompt_logprobs or event.prompt_logprobs,
    )


def take_all_back(sequence: RunningSequence) -> None:
    """Take back the whole answer, of which no client has a token. The log-probabilities of the prompt stay."""
    sequence.answer.clear()
    sequence.unsent = None if sequence.unsent is None else _part(sequence.unsent, 0, 0)


def may_backtrack(sequence: RunningSequence) -> bool:
    """Return whether an answer without a legal token may look for a way back."""
    backtracking, done = sequence.request.backtracking, sequence.telemetry.backtracks
    return backtracking is not None and sequence.verified and done < backtracking.max_backtracks


def go_back(sequence: RunningSequence, num_tokens: int, dead_texts: tuple[bytes, ...]) -> None:
    """Take back the tokens after the first `num_tokens`, which no client has."""
    sent, held = sequence.num_sent, sequence.unsent
    if num_tokens < sent:
        raise ValueError(f"num_tokens: {num_tokens} of {len(sequence.answer)} tokens, and {sent} were sent")
    del sequence.answer[num_tokens:]
    sequence.unsent = None if held is None else _part(held, 0, num_tokens - sent)
    sequence.backtracking, sequence.dead_texts = False, dead_texts
    sequence.telemetry.backtracks += 1


def _part(event: TokenEvent, begin: int, end: int) -> TokenEvent:
    """Return an event with some of the tokens of `event`."""
    whole = replace(event, token_ids=event.token_ids[begin:end], logprobs=event.logprobs[begin:end])
    return replace(whole, origins=event.origins[begin:end], prompt_logprobs=None if begin else event.prompt_logprobs)
