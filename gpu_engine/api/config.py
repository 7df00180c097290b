"""What an engine process is told at its start: small frozen dataclasses, validated once, never changed.

`cli.py` fills them from flags, environment and TOML under the same names. Not here: anything a request can choose.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from gpu_engine.api.prefill_shapes import LANES, PrefillShapes

EMBEDDED_MODEL = "embedded"
"""The model that comes as a PyPI package: SmolLM2-135M-Instruct."""

MAX_DRAFT_TOKENS = 15
"""Upper bound of drafts per step, K and F: 16 rows a slot."""


def _require(condition: bool, name: str, problem: str) -> None:
    if not condition:
        raise ValueError(f"{name}: {problem}")


def _is_host_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdecimal() and int(port) < 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The model and the shape of its batches."""

    RENAMED: ClassVar = {"forced_draft_tokens": "jump_forward_tokens", "draft_forced": "jump_forward"}
    """Old names of settings, read for one version (service_runtime/settings.py)."""

    model: str = EMBEDDED_MODEL
    """A directory in Hugging Face's format, a GGUF file, or "embedded"."""
    dtype: str = "auto"
    """"auto" (bfloat16 where the device multiplies it natively, else float32), "bfloat16", "float32"."""
    device: str = "auto"
    """"auto" (the first CUDA device if torch sees one, else the CPU), "cpu", "cuda" or "cuda:N"."""
    fuse: bool = True
    """Run the parts of a model that are recognised, and give the same numbers, as fused kernels and joined products."""
    num_threads: int = 0
    """Threads of the model's forward on a CPU. 0: as many as there are usable cores; with four cores or more and a
    grammar process, one core in eight (at least one, at most three) stays free for it."""
    split_cores: bool = True
    """With one to three cores more than the model has threads: all else of the engine, with a grammar process that it
    starts, keeps to those, and that compiles when nobody else wants them (its compile_priority)."""
    max_batch_size: int = 16
    """Slots: sequences that run at once."""
    max_model_len: int = 2048
    """Prompt plus answer in tokens; lowered to what the model allows."""
    page_size: int = 16
    """Tokens a page of the KV cache holds."""
    kv_cache_tokens: int = 0
    """Size of the KV cache; 0: max_batch_size * max_model_len."""
    prefill_chunk: int = 0
    """Prompt tokens per prefill call, on a GPU of several sequences; decode steps run between the chunks. 0: 256 on a
    CPU, 512 on a GPU."""
    prefix_cache: bool = True
    """Who begins with the tokens of an earlier prompt and answer uses their pages, in whole ones and while nobody else
    needs them. Not with a drafting network, whose cache depends on what follows."""
    drafter: str = "ngram"
    """"ngram", "model", "eagle3", "mtp" (the model's own multi-token-prediction layer), "grammar" (what the grammar
    forces, and nothing else) or "none"."""
    draft_model: str = ""
    """With drafter=model: a model with the same tokenizer, in the forms of `model`. With drafter=eagle3: the directory
    of a head for this model; the embedded one has a head of its own."""
    draft_masks: str = "off"
    """With drafter=model, eagle3 or mtp: "on" masks the drafts with the grammar too, which costs one mask row a draft;
    "off" drafts without masks, and only verification applies the grammar."""
    jump_forward: bool = True
    """Text that the grammar forces, such as the name of a key, is drafted first; the drafter goes on behind it. With
    drafter=grammar always so."""
    draft_timeout_ms: float = 5.0
    """A draft waits this long for its row, then goes unmasked; verification guards it. What is forced is waited for as
    long, then goes undrafted."""
    num_draft_tokens: int = 7
    """K: drafts per step, the default and the upper limit of a request."""
    jump_forward_tokens: int = 15
    """F: what the grammar forces may be so many drafts; fewer than num_draft_tokens count as num_draft_tokens. The
    drafter behind still fills up to K alone, and a request that names its own num_draft_tokens has no more in all.
    Used where rows are left: on a CPU within step_rows, on a GPU in guided steps of at most 64 rows."""
    step_rows: int = 0
    """Rows that a decode step aims at: with more sequences each verifies fewer drafts. 0: 24 on a CPU, where rows are
    not free; 256 on a GPU, where products of more rows than some 200 take longer than reading the weights."""
    ngram_max: int = 4
    """Longest suffix that the n-gram drafter looks up."""
    ngram_min: int = 1
    """Shortest one."""
    overlap: bool | None = None
    """Launch a step before the last one's tokens are read. Pays on a GPU, where it is on unless set; on a CPU a stop is
    then found a step late."""
    sync: str = "auto"
    """How a step meets the grammar process: "inline" (the one on a CPU), "host_callback" or "device_flag". "auto" on a
    GPU: device_flag, with a grammar process that spins while somebody is guided, where the engine starts that itself
    and has 3 cores; else host_callback."""
    enforce_eager: bool = False
    """On a GPU: launch every kernel of every step instead of replaying captured graphs. Slow; for finding faults."""
    row_timeout_ms: float = 50.0
    """A step waits this long for a guided slot's rows, then defers the slot."""
    max_queue_size: int = 256
    """Sequences that may wait for a slot."""

    def __post_init__(self) -> None:
        dtypes = ("auto", "bfloat16", "float32")
        _require(self.dtype in dtypes, "dtype", f"{self.dtype!r} is not auto, bfloat16 or float32")
        known = re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", self.device) is not None
        _require(known, "device", f"{self.device!r} is not auto, cpu, cuda or cuda:N")
        on_cpu, on_gpu = ("auto", "inline"), ("auto", "host_callback", "device_flag")
        syncs = {"auto": tuple(dict.fromkeys(on_cpu + on_gpu)), "cpu": on_cpu}.get(self.device, on_gpu)
        _require(self.sync in syncs, "sync", f"{self.sync!r} on {self.device} is not one of {', '.join(syncs)}")
        _require(self.num_threads >= 0, "num_threads", "must not be negative")
        _require(self.max_batch_size in range(1, 257), "max_batch_size", "must be in [1, 256]")
        _require(self.max_model_len >= 16, "max_model_len", "must be at least 16")
        _require(self.page_size in (16, 32, 64, 128), "page_size", "must be 16, 32, 64 or 128")
        _require(self.prefill_chunk == 0 or self.prefill_chunk >= 16, "prefill_chunk", "must be 0 or at least 16")
        drafters = ("ngram", "model", "eagle3", "mtp", "grammar", "none")
        _require(self.drafter in drafters, "drafter", f"{self.drafter!r} is not one of {', '.join(drafters)}")
        _require(
            bool(self.draft_model) <= (self.drafter in ("model", "eagle3")),
            "draft_model",
            "goes with drafter=model and drafter=eagle3, and only with these",
        )
        _require(
            bool(self.draft_model) or self.drafter not in ("model", "eagle3") or self.drafts_with_shipped_head,
            "draft_model",
            f"drafter={self.drafter} needs one"
            + ("; only the embedded model comes with an EAGLE3 head" if self.drafter == "eagle3" else ""),
        )
        _require(self.draft_masks in ("on", "off"), "draft_masks", f"{self.draft_masks!r} is not on or off")
        _require(self.draft_timeout_ms > 0, "draft_timeout_ms", "must be positive")
        for name in ("num_draft_tokens", "jump_forward_tokens"):
            _require(0 <= getattr(self, name) <= MAX_DRAFT_TOKENS, name, f"must be in [0, {MAX_DRAFT_TOKENS}]")
        _require(self.step_rows >= 0, "step_rows", "must not be negative")
        _require(1 <= self.ngram_min <= self.ngram_max <= 8, "ngram_min", "needs 1 <= ngram_min <= ngram_max <= 8")
        _require(self.row_timeout_ms > 0, "row_timeout_ms", "must be positive")
        _require(self.max_queue_size >= 1, "max_queue_size", "must be at least 1")
        _require(
            self.kv_cache_tokens == 0 or self.kv_cache_tokens >= self.max_model_len,
            "kv_cache_tokens",
            "must be 0 or at least max_model_len, or no request of full length could ever run",
        )

    @property
    def on_cpu(self) -> bool:
        """True: the model runs on the CPU. Raises ValueError while `device` is "auto" (see ops/placement.py)."""
        _require(self.device != "auto", "device", "auto must be resolved before it is used")
        return self.device == "cpu"

    @property
    def max_inflight_steps(self) -> int:
        """Steps in flight when the next is launched: 1 with overlap, else 0."""
        return int(not self.on_cpu if self.overlap is None else self.overlap)

    @property
    def prefill_shapes(self) -> PrefillShapes:
        """What one prefill may hold. On a CPU one sequence: there tokens cost the same together and alone."""
        lanes, usual = (1, 256) if self.on_cpu else (min(LANES, self.max_batch_size), 512)
        chunk = self.prefill_chunk or usual
        return PrefillShapes(chunk, lanes, min(chunk, self.max_model_len))

    @property
    def num_drafts(self) -> int:
        """K as it is: 0 without a drafter."""
        return self.num_draft_tokens if self.drafter != "none" else 0

    @property
    def num_jump_forward(self) -> int:
        """F as it is: at least K, and K where nobody asks the grammar."""
        return max(self.num_drafts, self.jump_forward_tokens if self.jump_forward_first else 0)

    @property
    def most_step_rows(self) -> int:
        """`step_rows`, with 0 resolved for the device."""
        return self.step_rows or (24 if self.on_cpu else 256)

    @property
    def num_rows(self) -> int:
        """R = max(K, F) + 1: the most positions that a decode step verifies per slot."""
        return self.num_jump_forward + 1

    @property
    def drafts_with_shipped_head(self) -> bool:
        """The head is the one that comes with this package."""
        return self.drafter == "eagle3" and not self.draft_model and self.model == EMBEDDED_MODEL

    @property
    def drafts_by_net(self) -> bool:
        """A network drafts, whose links may be masked."""
        return self.num_rows > 1 and self.drafter in ("model", "eagle3", "mtp")

    @property
    def keeps_prefixes(self) -> bool:
        """`prefix_cache`, where the drafter allows it."""
        return self.prefix_cache and not self.drafts_by_net

    @property
    def jump_forward_first(self) -> bool:
        """The grammar is asked for forced tokens before the drafter drafts."""
        return self.num_drafts > 0 and (self.jump_forward or self.drafter == "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The public port and the way to the grammar process."""

    listen: str = "127.0.0.1:50051"
    """"host:port" or "unix:/path" (a socket with mode 0600)."""
    tls_cert: str = ""
    """PEM file with the server's certificate chain; the port then speaks TLS only. Renewed files are read again."""
    tls_key: str = ""
    """PEM file with its unencrypted key."""
    tls_client_ca: str = ""
    """PEM file with authorities: every client needs a certificate that one of them signed."""
    auth_token_file: str = ""
    """File with bearer tokens, one a line: every call needs one, but health. A changed file is read again."""
    health_listen: str = ""
    """A second address, for the health service alone, in clear text and without tokens: for probes."""
    grammar: str = "spawn"
    """"spawn" (start and supervise a sidecar), "connect" (one runs already), "none"."""
    grammar_dir: str = ""
    """Directory of the sidecar's two sockets, `grammar.sock` and `segment.sock`. Empty with "spawn": a private one."""
    grammar_backend: str = "llguidance"
    """"llguidance" or "xgrammar": the default of a spawned sidecar."""
    compile_timeout_s: float = 5.0
    """Bound on one grammar's compilation in a spawned sidecar."""
    compile_memory_mb: int = 2048
    """What one compilation may allocate in a spawned sidecar's worker, in MiB."""
    grammar_cache_dir: str = ""
    """A directory in which a spawned sidecar keeps compiled grammars over restarts; empty: a private one that goes
    with this process, 64 MiB at most, and none with a `grammar_dir`."""
    grammar_handles_bytes: int = 64 << 20
    """Bound on the grammars that Compile gave an id, in bytes of their text; the least recently used leaves first."""
    grammar_wait_s: float = 30.0
    """A guided request waits this long for a grammar process that is starting or was lost, then it is UNAVAILABLE."""
    grammar_silence_s: float = 5.0
    """A grammar process without a sign of life for this long counts as lost; a spawned one is killed. Guided steps
    pause after 0.1 s already, and go on where they are when it shows life in time."""
    grammar_memory_mb: int = 4096
    """A spawned grammar process with more memory of its own (MiB) is killed and started again; 0: no limit."""
    grammar_max_failures: int = 8
    """A spawned grammar process that ended so often within 60 s, with no guided token in between, is given up for
    `grammar_retry_s`; 0: never."""
    grammar_retry_s: float = 60.0
    """One that was given up is tried again after so long; guided requests are UNAVAILABLE until then."""
    max_n: int = 16
    """Most sequences of one request."""
    max_prompt_bytes: int = 4 << 20
    """Most bytes of a text prompt, before tokenisation."""
    stream_pace_ms: float = 50.0
    """Longest pause between two responses of a stream while other requests run. The pause itself follows the measured
    cost of a response, so that all responses take about 5% of a core; the end of an answer is sent at once. 0: a
    response after every step."""
    drain_timeout_s: float = 5.0
    """On SIGTERM running requests get this long to end."""
    metrics_listen: str = ""
    """"host:port" of both processes' Prometheus metrics, over HTTP; empty: none. Bind it where only the scraper
    comes."""
    log_format: str = "text"
    """"text" or "json" (one object a line), of both processes."""
    log_level: str = ""
    """"debug", "info", "warning" or "error"; empty: info, and warning for the demo."""

    def __post_init__(self) -> None:
        _require(
            self.grammar in ("spawn", "connect", "none"), "grammar", f"{self.grammar!r} is not spawn, connect or none"
        )
        _require(self.grammar != "connect" or bool(self.grammar_dir), "grammar_dir", "is required with grammar=connect")
        for name, address in (("listen", self.listen), ("health_listen", self.health_listen)):
            _require(
                (name == "health_listen" and not address)
                or (address.startswith("unix:") and address != "unix:")
                or _is_host_port(address),
                name,
                f"{address!r} is neither host:port nor unix:/path",
            )
        _require(bool(self.tls_cert) or not self.tls_key, "tls_cert", "is required with tls_key")
        _require(bool(self.tls_key) or not self.tls_cert, "tls_key", "is required with tls_cert")
        _require(bool(self.tls_cert) or not self.tls_client_ca, "tls_client_ca", "needs tls_cert and tls_key")
        _require(
            self.grammar_backend in ("llguidance", "xgrammar"),
            "grammar_backend",
            f"{self.grammar_backend!r} is unknown",
        )
        _require(0 < self.compile_timeout_s <= 600, "compile_timeout_s", "must be in (0, 600]")
        _require(self.compile_memory_mb >= 64, "compile_memory_mb", "must be at least 64")
        _require(self.grammar_handles_bytes >= 1 << 20, "grammar_handles_bytes", "must be at least 1048576")
        _require(self.grammar_wait_s > 0, "grammar_wait_s", "must be positive")
        _require(self.grammar_silence_s > 0, "grammar_silence_s", "must be positive")
        _require(
            self.grammar_memory_mb == 0 or self.grammar_memory_mb >= 128,
            "grammar_memory_mb",
            "must be 0 or at least 128: a grammar process begins with about 100",
        )
        _require(self.grammar_max_failures >= 0, "grammar_max_failures", "must not be negative")
        _require(self.grammar_retry_s > 0, "grammar_retry_s", "must be positive")
        _require(self.max_prompt_bytes >= 1, "max_prompt_bytes", "must be at least 1")
        _require(self.drain_timeout_s >= 0, "drain_timeout_s", "must not be negative")
        _require(
            not self.metrics_listen or _is_host_port(self.metrics_listen),
            "metrics_listen",
            f"{self.metrics_listen!r} is not host:port",
        )
        _require(self.log_format in ("text", "json"), "log_format", f"{self.log_format!r} is not text or json")
        levels = ("", "debug", "info", "warning", "error")
        _require(self.log_level in levels, "log_level", f"{self.log_level!r} is not one of {', '.join(levels[1:])}")
        _require(self.max_n >= 1, "max_n", "must be at least 1")
        _require(0 <= self.stream_pace_ms <= 1000, "stream_pace_ms", "must be in [0, 1000]")
