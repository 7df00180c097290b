"""From the engine's values to protobuf messages.

Invariant: a field is left unset where its value is not known yet or was not asked for; it is never zero by accident.
The deltas of a sequence, joined, equal its whole response and the last of its cumulative ones.

Not responsible for: any decision about a request (see calls.py and text_output.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import cast

from gpu_engine.api.adapters import AdapterUse
from gpu_engine.api.config import EngineConfig
from gpu_engine.api.limits import Limits
from gpu_engine.api.output_tensors import OutputRows
from gpu_engine.api.ports import Model
from gpu_engine.api.request import PromptLogprobs
from gpu_engine.api.stats import EngineStats
from gpu_engine.front.text_output import Delta, SequenceOutput
from gpu_engine.front.tokens.value_events import ScoredEvent
from gpu_engine.front.tools.formats import reasoning_markers, tool_format
from protos.engine.v1 import engine_pb2 as pb

MAX_MESSAGE_BYTES = 1 << 20
"""The most bytes of tensors in one message, or one row where a row is larger. Clients take 4 MiB by default."""


class Responses:
    """The messages of one request: deltas, cumulative, or one for each sequence."""

    def __init__(self, options: pb.ResponseOptions) -> None:
        self._options = options
        self._so_far: dict[int, Delta] = {}
        """What was sent so far, by sequence; empty if the request asked for deltas."""

    def respond(self, output: SequenceOutput, delta: Delta) -> list[pb.GenerateResponse]:
        """Return the messages for what is new of a sequence; none while there is nothing to send.

        Rows of tensors are sent once, as they come: messages that have only rows may precede a whole response.
        """
        whole = self._options.whole
        if not whole and not self._options.cumulative:
            return delta_responses(output, delta, self._options)
        index = output.request.index
        so_far = self._so_far.setdefault(index, delta)
        has_news = so_far is delta or bool(
            delta.text or delta.token_ids or delta.outputs or delta.values or delta.ended
        )
        if so_far is not delta:
            so_far.add(delta)
        if whole and delta.finish is None:  # rows of tensors are too large to be kept
            return delta_responses(output, Delta(outputs=delta.outputs), self._options)
        if not has_news:
            return []
        responses = delta_responses(output, so_far, self._options)
        if delta.ended:
            del self._so_far[index]
        elif responses:  # only the first response has the prompt's tokens and their log-probabilities
            if so_far.echo is not None and not self._options.omit_text:
                so_far.text = so_far.echo + so_far.text
            so_far.echo = so_far.prompt_logprobs = None
            so_far.values = []
        return responses


def delta_responses(output: SequenceOutput, delta: Delta, options: pb.ResponseOptions) -> list[pb.GenerateResponse]:
    """Return the message for `delta`, as the request asks for it; none when the message would have no content.

    There are several where it has many rows of tensors: the first one has the text, and the last one the finish reason.
    """
    request, echo = output.request, delta.echo is not None
    text = delta.text if options.omit_text else (delta.echo or "") + delta.text
    has_ids = (delta.token_ids or echo) and not options.omit_token_ids
    has_numbers = delta.logprobs or delta.prompt_logprobs or delta.outputs or delta.origins
    if not (text or delta.finish or has_numbers or delta.values or has_ids):
        return []
    first = pb.GenerateResponse(
        request_id=request.client_request_id, index=request.index, text=text, held_tokens=delta.num_held
    )
    if echo and not options.omit_token_ids:
        first.prompt_token_ids.extend(request.text_prompt_ids)
    if not options.omit_token_ids:
        first.token_ids.extend(delta.token_ids)
    if delta.origins:
        first.token_origins.extend(cast("pb.TokenOrigin", origin.value) for origin in delta.origins)
    for part in delta.parts:
        first.parts.add(
            kind=cast("pb.AnswerPart.Kind", part.kind.value),
            text=part.text,
            tool_call_index=part.tool_call_index,
            tool_call_id=part.tool_call_id,
            tool_name=part.tool_name,
        )
    for scored in delta.values:
        _add_value(first, scored)
    if delta.prompt_logprobs is not None:
        first.prompt_logprobs.extend(_prompt_entries(delta.prompt_logprobs, request.num_virtual_tokens))
    for entry in delta.logprobs:
        top = [pb.TokenLogprob(token_id=token, logprob=logprob) for token, logprob in entry.top]
        first.logprobs.append(pb.TokenLogprobs(logprob=entry.logprob, top=top))
    responses = [first, *_add_outputs(first, delta.outputs)] if delta.outputs else [first]
    if delta.finish:
        _add_end(responses[-1], output, delta)
    return responses


def _add_value(response: pb.GenerateResponse, scored: ScoredEvent) -> None:
    event = scored.event
    response.value_events.add(
        kind=cast("pb.ValueEvent.Kind", event.kind.value),
        pointer=event.pointer,
        type=cast("pb.ValueEvent.Type", event.type.value),
        value_json=event.text,
        logprob=scored.logprob,
        tokens=scored.tokens,
    )


def _add_end(response: pb.GenerateResponse, output: SequenceOutput, delta: Delta) -> None:
    """Add what the last message of a sequence has."""
    request = output.request
    for leaf in delta.fields:
        response.field_logprobs.add(pointer=leaf.pointer, logprob=leaf.logprob, tokens=leaf.tokens)
    response.finish_reason = cast("pb.FinishReason", delta.finish.value if delta.finish else 0)
    if delta.matched_stop is not None:
        response.matched_stop_str = delta.matched_stop
    elif delta.matched_token_id is not None:
        response.matched_token_id = delta.matched_token_id
    if delta.beam_score is not None:
        response.beam_score = delta.beam_score
    response.receipt = delta.receipt
    response.usage.prompt_tokens = len(request.prompt_ids)
    response.usage.completion_tokens = output.completion_tokens
    response.usage.cached_tokens = output.telemetry.cached_tokens
    response.usage.reasoning_tokens = output.reasoning_tokens
    response.telemetry.CopyFrom(_telemetry(output))


def _add_outputs(first: pb.GenerateResponse, outputs: Sequence[OutputRows]) -> list[pb.GenerateResponse]:
    """Put rows into `first` and, where they are too many, into further messages, which are returned."""
    more: list[pb.GenerateResponse] = []
    response, room = first, MAX_MESSAGE_BYTES
    for rows in outputs:
        at, size = 0, rows.spec.row_bytes
        while at < len(rows.data):
            if room < size and room < MAX_MESSAGE_BYTES:
                response, room = pb.GenerateResponse(request_id=first.request_id, index=first.index), MAX_MESSAGE_BYTES
                more.append(response)
            count = min(len(rows.data) - at, max(room // size, 1))
            part = rows.data[at : at + count]
            shape = (count, *rows.spec.shape)
            response.outputs.add(
                name=rows.name, dtype=rows.spec.dtype, shape=shape, data=part.tobytes(), start=rows.start + at
            )
            at, room = at + count, room - count * size
    return more


def _prompt_entries(scores: PromptLogprobs, num_virtual_tokens: int) -> Iterator[pb.TokenLogprobs]:
    """Yield an entry for each token of the prompt; the first one, which has no log-probability, is empty."""
    yield pb.TokenLogprobs()
    rows = zip(scores.logprob_N.tolist(), scores.top_ids_NM.tolist(), scores.top_logprobs_NM.tolist(), strict=True)
    for logprob, ids, values in islice(rows, num_virtual_tokens, None):
        top = [pb.TokenLogprob(token_id=token, logprob=value) for token, value in zip(ids, values, strict=True)]
        yield pb.TokenLogprobs(logprob=logprob, top=top)


def _telemetry(output: SequenceOutput) -> pb.Telemetry:
    t, arrived_s = output.telemetry, output.request.arrived_s

    def since_arrival_ms(moment_s: float) -> float:
        return (moment_s - arrived_s) * 1e3 if moment_s else 0.0

    return pb.Telemetry(
        queue_ms=since_arrival_ms(t.scheduled_s),
        compile_ms=t.compile_ms,
        compile_cache_hit=t.compile_cache_hit,
        ttft_ms=since_arrival_ms(t.first_token_s),
        total_ms=since_arrival_ms(output.finished_s),
        mask_wait_ms=t.mask_wait_ms,
        steps=t.steps,
        draft_tokens=t.draft_tokens,
        accepted_draft_tokens=t.accepted_draft_tokens,
        acceptance_length=(t.accepted_draft_tokens + t.steps) / t.steps if t.steps else 0.0,
        deferred_rows=t.deferred_rows,
        seed=output.request.sampling.seed,
        backend=cast("pb.Backend", t.backend),
        warnings=t.warnings,
        backtracks=t.backtracks,
        exact_tries=t.exact_tries,
        exact_tokens=t.exact_tokens,
        exact_log_mass=t.exact_log_mass,
    )


def model_info(
    model: Model, config: EngineConfig, limits: Limits, backends: tuple[int, ...], version: str
) -> pb.GetModelInfoResponse:
    """Return the description of model, device and limits."""
    response = pb.GetModelInfoResponse(
        model=model.name,
        model_type=model.model_type,
        dtype=model.dtype_name,
        weights=model.weights,
        vocab_size=model.vocab_size,
        max_model_len=limits.max_model_len,
        max_batch_size=config.max_batch_size,
        max_queue_size=config.max_queue_size,
        num_draft_tokens=limits.num_draft_tokens,
        drafter=config.drafter,
        eos_token_ids=model.eos_token_ids,
        num_parameters=model.num_parameters,
        version=version,
        device=config.device,
        served_names=config.served_names,
        logits_processors=limits.logits_processors.names,
        output_names=model.outputs,
        max_beam_width=limits.max_beam_width,
        page_size=config.page_size,
        role=config.transfer.role,
        max_adapter_bytes=config.adapter_bytes,
    )
    response.backends.extend(cast("tuple[pb.Backend, ...]", backends))
    template = model.tokenizer.chat_template
    if form := tool_format(template):
        response.tool_format = form.name
    if markers := reasoning_markers(template):
        response.reasoning_begin, response.reasoning_end = markers.begin, markers.end
    return response


def adapter_message(use: AdapterUse) -> pb.Adapter:
    """Return the description of an adapter."""
    adapter = use.adapter
    return pb.Adapter(
        name=adapter.name,
        kind=cast("pb.Adapter.Kind", adapter.kind.value),
        path=adapter.path,
        size=adapter.size,
        memory_bytes=adapter.memory_bytes,
        in_use=use.in_use,
    )


def stats_response(
    stats: EngineStats, *, finished: Mapping[str, int], failed: Mapping[str, int]
) -> pb.GetStatsResponse:
    """Return the engine's part; `finished` and `failed` are counted where clients see them."""
    return pb.GetStatsResponse(
        waiting=stats.waiting,
        running=stats.running,
        num_slots=stats.num_slots,
        pages_used=stats.pages_used,
        pages_cached=stats.pages_cached,
        num_pages=stats.num_pages,
        steps=stats.steps,
        generated_tokens=stats.generated_tokens,
        prefill_tokens=stats.prefill_tokens,
        cached_tokens=stats.cached_tokens,
        draft_tokens=stats.draft_tokens,
        accepted_draft_tokens=stats.accepted_draft_tokens,
        finished=finished,
        failed=failed,
        mask_wait_ms=stats.mask_wait_ms,
        deferred_rows=stats.deferred_rows,
        weight_bytes=stats.memory.weight_bytes,
        kv_cache_bytes=stats.memory.kv_cache_bytes,
        buffer_bytes=stats.memory.buffer_bytes,
    )
