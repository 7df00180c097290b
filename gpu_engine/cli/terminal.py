"""Texts for a person at the terminal: loading progress, and one line on an answer or a grammar.

The invariant: they are for stderr; stdout carries only answers.

Not responsible for: logging (service_runtime/logs.py).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

from lockstep_client.wire import engine_pb2 as pb


@contextmanager
def loading_progress(stream: TextIO = sys.stderr) -> Iterator[Callable[[str, float], None]]:
    """Yield a callback for (stage, share done in [0, 1]), for any thread: a bar on a terminal, else a line per
    stage."""
    if not stream.isatty():
        yield lambda stage, done: print(f"{100 * done:3.0f}% {stage}", file=stream, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=stream), transient=True) as progress:
        task = progress.add_task("starting", total=1.0)
        yield lambda stage, done: progress.update(task, description=stage, completed=done)


_ENDS = {
    pb.FINISH_REASON_LENGTH: "cut at max_tokens or the longest sequence: raise --max-tokens for the rest",
    pb.FINISH_REASON_ABORTED: "aborted by the server",
    pb.FINISH_REASON_GRAMMAR_INCOMPLETE: "cut at max_tokens before it fitted its grammar: raise --max-tokens",
    pb.FINISH_REASON_GRAMMAR_ERROR: "the grammar allowed no further token",
    pb.FINISH_REASON_GRAMMAR_CLOSED: (
        "led to its end near max_tokens: it fits its grammar, but values may be missing or made up; raise --max-tokens"
    ),
    pb.FINISH_REASON_GRAMMAR_INVALID: "no answer was found that passes the checks",
    pb.FINISH_REASON_REPETITION: "ended because it repeated itself",
    pb.FINISH_REASON_GRAMMAR_INEXACT: "no answer was accepted within --grammar-exact-tries and --grammar-exact-ms",
}
"""Why an answer ended, in words, where the model did not end it."""


def summary(response: pb.GenerateResponse) -> str:
    """Return one line on a finished sequence, from its last response."""
    usage, t = response.usage, response.telemetry
    reason = pb.FinishReason.Name(response.finish_reason).removeprefix("FINISH_REASON_").lower()
    parts = [
        f"[{reason}] {usage.prompt_tokens} + {usage.completion_tokens} tokens",
        f"{tokens_per_second(response):.1f} tokens/s",
        f"first token {t.ttft_ms:.0f} ms",
        f"{t.acceptance_length:.2f} tokens/step",
        f"seed {t.seed}",
    ]
    if response.HasField("beam_score"):
        parts.append(f"score {response.beam_score:.4f}")
    if t.backend:
        backend = pb.Backend.Name(t.backend).removeprefix("BACKEND_").lower()
        cached = " (cached)" if t.compile_cache_hit else ""
        parts.append(
            f"{backend}: compiled in {t.compile_ms:.1f} ms{cached}, steps waited {t.mask_wait_ms:.1f} ms for masks"
        )
    if words := _ENDS.get(response.finish_reason):
        parts.append(words)
    return " | ".join([*parts, *(f"warning: {warning}" for warning in t.warnings)])


def tokens_per_second(response: pb.GenerateResponse) -> float:
    """Return the decode rate of a finished sequence: tokens after the first, over the time after the first."""
    seconds = (response.telemetry.total_ms - response.telemetry.ttft_ms) / 1e3
    return (response.usage.completion_tokens - 1) / seconds if seconds > 0 else 0.0


def grammar_cost(response: pb.CompileResponse) -> str:
    """Return one line on the cost of a grammar."""
    backend = pb.Backend.Name(response.backend).removeprefix("BACKEND_").lower()
    when = "from the cache" if response.cache_hit else f"compiled in {response.compile_ms:.1f} ms"
    least = f"at least {response.min_tokens} tokens per answer" if response.min_tokens else "shortest answer unknown"
    known = response.known_answer_tokens
    ends = f"completes within max_tokens of {known} or more" if known else "no complete answer was found"
    return f"{backend}, {when}, {response.memory_bytes / 1024:.0f} KiB, {least}, {ends}"


async def logprob_table(
    rows: Sequence[tuple[int, Sequence[int], Sequence[pb.TokenLogprobs]]],
    token_texts: Callable[[Sequence[int]], Awaitable[Sequence[str]]],
) -> str:
    """Return a line per token: its sequence, its text, its probability in percent, and the alternatives'.

    Args:
        rows: (sequence, token ids, log-probabilities) of each response. The prompt's first token has none.
        token_texts: returns the text of each token.
    """
    wanted = {token for _, tokens, _ in rows for token in tokens}
    wanted |= {top.token_id for _, _, values in rows for value in values for top in value.top}
    ordered = sorted(wanted)
    shown = (json.dumps(text, ensure_ascii=False) for text in await token_texts(ordered))
    texts = dict(zip(ordered, shown, strict=True))
    lines = []
    for index, tokens, values in rows:
        for token, value in zip(tokens, values, strict=True):
            # An empty entry is the prompt's first token, which nothing precedes.
            share = _percent(value.logprob) if value.ByteSize() else "     -"
            others = "  ".join(f"{texts[top.token_id]} {_percent(top.logprob)}" for top in value.top)
            lines.append(f"[{index}] {texts[token]:<16} {share}   {others}".rstrip())
    return "\n".join(lines)


def field_table(fields: Sequence[pb.FieldLogprob]) -> str:
    """Return a line per leaf of a JSON answer: its place and its probability in percent."""
    return "\n".join(
        f"{field.pointer or '/':<24} {_percent(field.logprob)} in {field.tokens} tokens" for field in fields
    )


def origin_counts(origins: Mapping[int, int]) -> str:
    """Return how many tokens came in which way, as one line."""
    return (
        f"{origins.get(pb.TOKEN_ORIGIN_SAMPLED, 0)} tokens sampled, {origins.get(pb.TOKEN_ORIGIN_DRAFT, 0)} accepted "
        f"drafts, {origins.get(pb.TOKEN_ORIGIN_FORCED, 0)} forced by the grammar"
    )


def _percent(logprob: float) -> str:
    return f"{100 * math.exp(logprob):5.1f}%"
