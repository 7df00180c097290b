"""The configuration of an engine process: the settings, checked once when they are made, never changed.

Invariant: an object of these classes has values in range, and no combination that is refused.

Not responsible for: the settings themselves (engine_settings.py, server_settings.py), or which combinations are refused
(capabilities.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import entry_points

from gpu_engine.api.adapters import MAX_ADAPTERS, MAX_RANK, MAX_VIRTUAL_TOKENS, named_adapters
from gpu_engine.api.capabilities import OF_ENGINE, OF_SERVER, refuse
from gpu_engine.api.conversation import TOOL_FORMATS
from gpu_engine.api.engine_settings import DRAFTER_GROUP, DRAFTERS, MAX_DRAFT_TOKENS, EngineSettings
from gpu_engine.api.processors import MAX_LOADED, ProcessorEntry
from gpu_engine.api.server_settings import SERVICES, ServerSettings
from service_runtime.shared_settings import is_address, is_host_port, require


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(EngineSettings):
    """The model and the shape of its batches."""

    def __post_init__(self) -> None:
        self._check_names()
        self._check_device()
        self._check_sizes()
        self._check_drafts()
        self._check_processors()
        self._check_adapters()
        for name in ("tensor_parallel_size", "data_parallel_attention"):
            require(getattr(self, name) in range(1, 65), name, "must be in [1, 64]")
        require(self.data_parallel_rank >= 0, "data_parallel_rank", "must not be negative")
        refuse(OF_ENGINE, self)

    def _check_processors(self) -> None:
        names = []
        for text in self.logits_processors:
            try:
                names.append(ProcessorEntry.parse(text).name)
            except ValueError as error:
                raise ValueError(f"logits_processors: {error}") from None
        twice = next((name for name in names if names.count(name) > 1), "")
        require(not twice, "logits_processors", f"{twice!r} names two")
        require(len(names) <= MAX_LOADED, "logits_processors", f"has {len(names)}, at most {MAX_LOADED} are allowed")

    def _check_names(self) -> None:
        names = [name.strip() for name in self.served_model_name.split(",")] if self.served_model_name else []
        require(all(names), "served_model_name", f"{self.served_model_name!r} has an empty name")
        require(len(set(names)) == len(names), "served_model_name", f"{self.served_model_name!r} has a name twice")
        known = ("auto", *TOOL_FORMATS)
        require(self.tool_format in known, "tool_format", f"{self.tool_format!r} is not one of {', '.join(known)}")

    def _check_device(self) -> None:
        dtypes = ("auto", "bfloat16", "float32")
        require(self.dtype in dtypes, "dtype", f"{self.dtype!r} is not auto, bfloat16 or float32")
        kinds = ("auto", "none", "int8", "q4", "fp8")
        require(self.quantization in kinds, "quantization", f"{self.quantization!r} is not one of {', '.join(kinds)}")
        kv = self.kv_cache_dtype
        require(kv in ("auto", "int8"), "kv_cache_dtype", f"{kv!r} is not auto or int8")
        known = re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", self.device) is not None
        require(known, "device", f"{self.device!r} is not auto, cpu, cuda or cuda:N")
        syncs = ("auto", "inline", "host_callback", "device_flag")
        require(self.sync in syncs, "sync", f"{self.sync!r} is not one of {', '.join(syncs)}")

    def _check_sizes(self) -> None:
        require(self.num_threads >= 0, "num_threads", "must not be negative")
        require(self.max_batch_size in range(1, 257), "max_batch_size", "must be in [1, 256]")
        require(self.max_model_len == 0 or self.max_model_len >= 16, "max_model_len", "must be 0 or at least 16")
        require(self.page_size in (16, 32, 64, 128), "page_size", "must be 16, 32, 64 or 128")
        require(
            self.max_batched_tokens == 0 or self.max_batched_tokens >= 16,
            "max_batched_tokens",
            "must be 0 or at least 16",
        )
        require(self.row_timeout_ms > 0, "row_timeout_ms", "must be positive")
        require(self.max_beam_width in range(17), "max_beam_width", "must be in [0, 16]")
        require(self.max_queue_size >= 1, "max_queue_size", "must be at least 1")
        require(self.max_starvation_s >= 0, "max_starvation_s", "must not be negative")
        require(self.kv_cache_tokens >= 0, "kv_cache_tokens", "must not be negative")

    def _check_drafts(self) -> None:
        if self.drafter not in DRAFTERS:
            names = (*DRAFTERS, *entry_points(group=DRAFTER_GROUP).names)
            require(self.drafter in names, "drafter", f"{self.drafter!r} is not one of {', '.join(names)}")
        device = self.draft_device
        known = not device or re.fullmatch(r"cuda:[0-9]+", device) is not None
        require(known, "draft_device", f"{device!r} is not empty or cuda:N")
        kinds = ("", "auto", "none", "int8", "q4")
        require(
            self.draft_quantization in kinds,
            "draft_quantization",
            f"{self.draft_quantization!r} is not empty or one of {', '.join(kinds[1:])}",
        )
        require(self.draft_masks in ("on", "off"), "draft_masks", f"{self.draft_masks!r} is not on or off")
        require(self.draft_tree in ("on", "off"), "draft_tree", f"{self.draft_tree!r} is not on or off")
        require(self.draft_timeout_ms > 0, "draft_timeout_ms", "must be positive")
        for name in ("num_draft_tokens", "jump_forward_tokens"):
            require(0 <= getattr(self, name) <= MAX_DRAFT_TOKENS, name, f"must be in [0, {MAX_DRAFT_TOKENS}]")
        require(self.step_rows >= 0, "step_rows", "must not be negative")
        require(1 <= self.ngram_max <= 8, "ngram_max", "must be in [1, 8]")
        require(1 <= self.iteration_history <= 100_000, "iteration_history", "must be in [1, 100000]")
        require(self.draft_index_bytes >= -1, "draft_index_bytes", "must be -1, 0 or a number of bytes")

    def _check_adapters(self) -> None:
        try:
            named_adapters(self.adapters)
        except ValueError as error:
            require(False, "adapters", str(error))
        require(self.max_adapter_bytes >= -1, "max_adapter_bytes", "must be -1, 0 or a number of bytes")
        for name, most in (
            ("max_adapters", MAX_ADAPTERS),
            ("max_lora_rank", MAX_RANK),
            ("max_virtual_tokens", MAX_VIRTUAL_TOKENS),
        ):
            require(0 <= getattr(self, name) <= most, name, f"must be in [0, {most}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(ServerSettings):
    """The public port and the connection to the grammar process."""

    def __post_init__(self) -> None:
        require(
            self.grammar in ("spawn", "connect", "none"), "grammar", f"{self.grammar!r} is not spawn, connect or none"
        )
        for name, address in (("listen", self.listen), ("health_listen", self.health_listen or self.listen)):
            require(is_address(address), name, f"{address!r} is neither host:port nor unix:/path")
        self.check_port()
        self.check_metrics()
        self.check_logs()
        require(not self.http or is_host_port(self.http), "http", f"{self.http!r} is not host:port")
        require(
            self.grammar_backend in ("llguidance", "xgrammar"),
            "grammar_backend",
            f"{self.grammar_backend!r} is unknown",
        )
        require(0 < self.compile_timeout_s <= 600, "compile_timeout_s", "must be in (0, 600]")
        require(self.compile_memory_mb >= 64, "compile_memory_mb", "must be at least 64")
        require(self.grammar_handles_bytes >= 1 << 20, "grammar_handles_bytes", "must be at least 1048576")
        require(self.grammar_wait_s > 0, "grammar_wait_s", "must be positive")
        require(self.grammar_silence_s > 0, "grammar_silence_s", "must be positive")
        require(
            self.grammar_memory_mb == 0 or self.grammar_memory_mb >= 128,
            "grammar_memory_mb",
            "must be 0 or at least 128: a new grammar process uses about 100",
        )
        require(self.grammar_retry_s > 0, "grammar_retry_s", "must be positive")
        require(self.max_prompt_bytes >= 1, "max_prompt_bytes", "must be at least 1")
        for name in self.service_names:
            require(name in SERVICES, "services", f"{name!r} is not one of {', '.join(SERVICES)}")
        require(self.max_n >= 1, "max_n", "must be at least 1")
        require(self.max_queue_ms >= 0, "max_queue_ms", "must not be negative")
        require(self.output_memory_bytes >= 0, "output_memory_bytes", "must not be negative")
        require(0 <= self.stream_pace_ms <= 1000, "stream_pace_ms", "must be in [0, 1000]")
        refuse(OF_SERVER, self)
