"""Reports that a gateway asks an engine for: the model, the server, and its load.

Invariant: a value that this engine does not have is left at the zero of its type, which the wire reads as unknown.

Not responsible for: the counters (api/stats.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

from smg_grpc_proto import vllm_engine_pb2 as vllm

from gpu_engine.api.stats import EngineStats
from gpu_engine.front.calls import Calls

SERVER_TYPE = "vllm-grpc"
"""The name by which gateways recognise this wire."""
OWN_TOKENIZER = "engine:"
"""Before the model's name, it is no path and no id of a hub: a gateway that looks there first would take the files of
another revision, or of another model in the same place. It asks for the engine's own (GetTokenizer) instead."""
MIN_WINDOW_S = 1.0
"""Tokens per second are measured over at least this long, however often a gateway asks."""


def model_info(calls: Calls) -> vllm.GetModelInfoResponse:
    """Describe the model and its limits."""
    model, limits = calls.model, calls.limits
    tokenizer = model.tokenizer
    return vllm.GetModelInfoResponse(
        model_path=model.name,
        tokenizer_path=f"{OWN_TOKENIZER}{model.name}",
        served_model_name=calls.engine.config.served_names[0],
        model_type=model.model_type,
        is_generation=True,
        max_context_length=limits.max_model_len,
        max_req_input_len=limits.max_model_len - 1,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        pad_token_id=tokenizer.pad_token_id or 0,
        bos_token_id=tokenizer.bos_token_id or 0,
    )


class Reports:
    """Reports about one server. Used on the event loop; `version` is this distribution's."""

    def __init__(self, calls: Calls, version: str, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._calls, self._version, self._clock_s = calls, version, clock_s
        self._started_s = clock_s()
        self._received_unix_s = 0.0
        self._window = (self._started_s, 0)
        """Begin of the measurement, and the tokens generated until then."""
        self._tokens_per_s = 0.0

    def received(self) -> None:
        """Note that a Generate call has arrived."""
        self._received_unix_s = time.time()

    def server_info(self) -> vllm.GetServerInfoResponse:
        """Describe the server."""
        config = self._calls.engine.config
        return vllm.GetServerInfoResponse(
            active_requests=len(self._calls),
            is_paused=not self._calls.serving,
            last_receive_timestamp=self._received_unix_s,
            uptime_seconds=self._clock_s() - self._started_s,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            kv_cache_dtype=self._calls.model.dtype_name if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
            block_size=config.page_size,
            model_dtype=self._calls.model.dtype_name,
            max_num_seqs=config.max_batch_size,
            constrained_decoding_start="first_token",
        )

    def loads(self) -> vllm.GetLoadsResponse:
        """Return the load of the only rank."""
        return vllm.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=self._version,
            dp_rank_count=1,
            loads=[self._load(self._calls.engine.stats())],
        )

    def _load(self, stats: EngineStats) -> vllm.SchedulerLoad:
        page_size = self._calls.engine.config.page_size
        prompt_tokens = stats.cached_tokens + stats.prefill_tokens
        waiting = (output.request for output in self._calls.sequences() if not output.telemetry.scheduled_s)
        return vllm.SchedulerLoad(
            num_running_reqs=stats.running,
            num_waiting_reqs=stats.waiting,
            num_total_reqs=stats.running + stats.waiting,
            num_used_tokens=stats.pages_used * page_size,
            max_total_num_tokens=stats.num_pages * page_size,
            token_usage=stats.pages_used / stats.num_pages if stats.num_pages else 0.0,
            gen_throughput=self._measure(stats.generated_tokens),
            cache_hit_rate=stats.cached_tokens / prompt_tokens if prompt_tokens else 0.0,
            utilization=stats.running / stats.num_slots if stats.num_slots else 0.0,
            max_running_requests=stats.num_slots,
            num_waiting_uncached_tokens=sum(len(request.prompt_ids) for request in waiting),
        )

    def _measure(self, generated_tokens: int) -> float:
        begin_s, tokens = self._window
        elapsed_s = self._clock_s() - begin_s
        if elapsed_s >= MIN_WINDOW_S:
            self._tokens_per_s = (generated_tokens - tokens) / elapsed_s
            self._window = (begin_s + elapsed_s, generated_tokens)
        return self._tokens_per_s

    def __repr__(self) -> str:
        return f"<Reports {self._tokens_per_s:.1f} tokens/s>"
