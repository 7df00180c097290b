"""Tokens of verified answers that are held back, so that an answer without a legal token can go back over them.

The last `Backtracking.hold_tokens` tokens of an answer are held; what is further from its end was sent and stays.
Invariant: how many tokens were sent when no token is legal depends on the answer's tokens alone, not on the steps that
brought them. So an answer goes back to the same place with any number of drafts.
Not responsible for: where to (the grammar process says that), the slot and the pages (see loop.py).
"""

from __future__ import annotations

from dataclasses import replace

from gpu_engine.api.request import TokenEvent
from gpu_engine.core.running import SequenceState


def hold(state: SequenceState, event: TokenEvent) -> None:
    """Send the tokens of `event`, all but those that are to be held of a verified answer."""
    backtracking = state.request.backtracking
    if backtracking is None or not state.verified:
        state.request.sink(event)
        return
    event = all_unsent(state, event)
    count = max(0, len(event.token_ids) - backtracking.hold_tokens)
    if not count:
        state.held = event
        return
    state.held = _part(event, count, len(event.token_ids))
    held = len(state.held.token_ids)
    state.request.sink(replace(_part(event, 0, count), prompt_logprobs=event.prompt_logprobs, num_held=held))


def all_unsent(state: SequenceState, event: TokenEvent) -> TokenEvent:
    """Return the held tokens and those of `event` in one event; nothing is held any more."""
    held, state.held = state.held, None
    if held is None:
        return event
    return replace(
        event,
        token_ids=held.token_ids + event.token_ids,
        logprobs=held.logprobs + event.logprobs,
        origins=held.origins + event.origins,
        prompt_logprobs=held.prompt_logprobs or event.prompt_logprobs,
    )


def may_backtrack(state: SequenceState) -> bool:
    """Return whether an answer without a legal token may look for a way back."""
    backtracking, done = state.request.backtracking, state.request.telemetry.backtracks
    return backtracking is not None and state.verified and done < backtracking.max_backtracks


def go_back(state: SequenceState, num_tokens: int, dead_texts: tuple[bytes, ...]) -> None:
    """Take back the tokens behind the first `num_tokens`, which no client has."""
    sent, held = state.num_sent, state.held
    if num_tokens < sent:
        raise ValueError(f"num_tokens: {num_tokens} of {len(state.answer)} tokens, and {sent} were sent")
    del state.answer[num_tokens:]
    state.held = None if held is None else _part(held, 0, num_tokens - sent)
    state.backtracking, state.dead_texts = False, dead_texts
    state.request.telemetry.backtracks += 1


def _part(event: TokenEvent, begin: int, end: int) -> TokenEvent:
    """Return an event with some of the tokens of `event`."""
    whole = replace(event, token_ids=event.token_ids[begin:end], logprobs=event.logprobs[begin:end])
    return replace(whole, origins=event.origins[begin:end], prompt_logprobs=None if begin else event.prompt_logprobs)
