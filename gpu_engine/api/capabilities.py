"""The combinations of settings that are refused: one table, with the condition, the setting at fault, and the reason.

The checks at the start, the table in docs/features.md (tools/capabilities.py) and the tests are made from it.
Invariant: a combination that does not work is refused by name, and the message says what was given.

Not responsible for: the range of a single setting (config.py, transfer_config.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, TypeVar

from gpu_engine.api.engine_settings import EngineSettings
from gpu_engine.api.server_settings import ServerSettings
from gpu_engine.api.transfer_config import least_model_len

T = TypeVar("T")

_WITH_MODEL = ("model", "decoupled", "eagle3", "dflash")


@dataclass(frozen=True, slots=True)
class Refusal(Generic[T]):
    """One refused combination, of settings or of settings and a loaded model."""

    setting: str
    """Setting that the message names."""
    reason: str
    """Text after the setting, formatted with the fields of the checked object as `c`."""
    when: Callable[[T], bool]
    """Returns whether the combination is given."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """Settings with the combination. Empty: it depends on a file or a package."""

    def message(self, given: T) -> str:
        """Return the message for a refused object."""
        return f"{self.setting}: {self.reason.format(c=given)}"


@dataclass(frozen=True, slots=True)
class Start:
    """The settings of a server, together."""

    engine: EngineSettings
    server: ServerSettings

    @property
    def least_model_len(self) -> int:
        """Smallest max_model_len of an engine that transfers pages."""
        return least_model_len(self.engine.page_size)


@dataclass(frozen=True, slots=True)
class LoadedFiles:
    """Facts of loaded files that settings may contradict."""

    engine: EngineSettings
    file: str = ""
    """Name of a file with quantised weights that is divided among ranks; empty: none."""
    exact_file: bool = True
    """The file's integers can only be used as they are."""
    head: str = ""
    """Directory of a head that drafts whole blocks."""
    block_size: int = 0
    """Tokens of its block, the last true token included."""
    like_layers: bool = True
    """Each layer has its own keys and values, in heads of one size and number."""
    embeds_rows: bool = True
    """The target's embedding is a matrix of the head's shape."""
    model_type: str = ""


def _cuda(c: EngineSettings) -> bool:
    return c.device.startswith("cuda")


def _ranks(c: EngineSettings) -> bool:
    return c.tensor_parallel_size > 1


def _shares(c: EngineSettings) -> bool:
    return c.data_parallel_attention > 1


_RANKS = {"tensor_parallel_size": 2}
_SHARES = {"data_parallel_attention": 2, "data_parallel_dir": "d"}

OF_ENGINE: Sequence[Refusal[EngineSettings]] = (
    Refusal(
        "quantization", "q4 runs on a CPU only; device is {c.device}",
        lambda c: c.quantization == "q4" and _cuda(c), {"device": "cuda", "quantization": "q4"},
    ),
    Refusal(
        "quantization", "fp8 runs on a GPU only; device is cpu",
        lambda c: c.quantization == "fp8" and c.device == "cpu", {"device": "cpu", "quantization": "fp8"},
    ),
    Refusal(
        "quantization", "fp8 multiplies in bfloat16; dtype is float32",
        lambda c: c.quantization == "fp8" and c.dtype == "float32", {"dtype": "float32", "quantization": "fp8"},
    ),
    Refusal(
        "sync", "{c.sync} needs a GPU; device is cpu",
        lambda c: c.device == "cpu" and c.sync not in ("auto", "inline"), {"device": "cpu", "sync": "device_flag"},
    ),
    Refusal(
        "sync", "inline runs on a CPU only; device is {c.device}",
        lambda c: _cuda(c) and c.sync == "inline", {"device": "cuda", "sync": "inline"},
    ),
    Refusal(
        "kv_cache_dtype", "int8 runs on a CPU only; device is {c.device}",
        lambda c: c.kv_cache_dtype == "int8" and _cuda(c), {"device": "cuda", "kv_cache_dtype": "int8"},
    ),
    Refusal(
        "kv_cache_dtype", "int8 cannot be combined with role={c.transfer.role}, which transfers floats",
        lambda c: c.kv_cache_dtype == "int8" and c.transfer.moves_pages, {"kv_cache_dtype": "int8", "role": "prefill"},
    ),
    Refusal(
        "kv_cache_tokens", "must be 0 or at least max_model_len ({c.max_model_len}); it is {c.kv_cache_tokens}",
        lambda c: 0 < c.kv_cache_tokens < c.max_model_len, {"kv_cache_tokens": 64, "max_model_len": 128},
    ),
    Refusal(
        "draft_model", "needs drafter=model, decoupled, eagle3 or dflash; drafter is {c.drafter}",
        lambda c: bool(c.draft_model) and c.drafter not in _WITH_MODEL, {"drafter": "ngram", "draft_model": "m"},
    ),
    Refusal(
        "draft_model", "is required with drafter={c.drafter}",
        lambda c: not c.draft_model and c.drafter in _WITH_MODEL, {"drafter": "eagle3"},
    ),
    Refusal(
        "drafter", "dflash drafts on a CPU only; device is {c.device}",
        lambda c: c.drafter == "dflash" and _cuda(c), {"drafter": "dflash", "draft_model": "m", "device": "cuda"},
    ),
    Refusal(
        "draft_masks", "cannot be combined with drafter=decoupled; drafter=model can be masked",
        lambda c: c.drafter == "decoupled" and c.draft_masks == "on",
        {"drafter": "decoupled", "draft_model": "m", "draft_masks": "on"},
    ),
    Refusal(
        "draft_dirs", "needs drafter=decoupled; drafter is {c.drafter}",
        lambda c: c.drafter != "decoupled" and bool(c.draft_dirs), {"draft_dirs": ("/a",)},
    ),
    Refusal(
        "draft_device", "needs drafter=decoupled; drafter is {c.drafter}",
        lambda c: bool(c.draft_device) and c.drafter != "decoupled",
        {"drafter": "model", "draft_model": "m", "draft_device": "cuda:1", "device": "cuda"},
    ),
    # device=auto is checked again once it is resolved.
    Refusal(
        "draft_device", "needs a GPU; device is cpu", lambda c: bool(c.draft_device) and c.device == "cpu",
        {"drafter": "decoupled", "draft_model": "m", "draft_device": "cuda:1", "device": "cpu"},
    ),
    Refusal(
        "draft_device", "{c.draft_device} is the target's device; leave it empty to share the device",
        lambda c: c.draft_device == ("cuda:0" if c.device == "cuda" else c.device),
        {"drafter": "decoupled", "draft_model": "m", "draft_device": "cuda:0", "device": "cuda"},
    ),
    Refusal(
        "draft_quantization", "q4 runs on a CPU only; device is {c.device}",
        lambda c: c.draft_quantization == "q4" and _cuda(c),
        {"drafter": "decoupled", "draft_model": "m", "draft_quantization": "q4", "device": "cuda"},
    ),
    Refusal(
        "draft_quantization", "needs drafter=model or decoupled; drafter is {c.drafter}",
        lambda c: bool(c.draft_quantization) and c.drafter not in ("model", "decoupled"), {"draft_quantization": "q4"},
    ),
    Refusal(
        "draft_tree", "needs drafter=ngram or eagle3; drafter is {c.drafter}",
        lambda c: c.draft_tree == "on" and c.drafter not in ("ngram", "eagle3"),
        {"drafter": "model", "draft_model": "m", "draft_tree": "on"},
    ),
    Refusal(
        "draft_tree", "needs a GPU; device is cpu",
        lambda c: c.draft_tree == "on" and c.device == "cpu", {"draft_tree": "on", "device": "cpu"},
    ),
    Refusal(
        "draft_tree", "cannot be combined with logits_processors, which get the rows of a chain",
        lambda c: c.draft_tree == "on" and bool(c.logits_processors),
        {"draft_tree": "on", "logits_processors": ("a=m:C",)},
    ),
    Refusal(
        "draft_masks", "cannot be combined with draft_tree: the drafts of a tree are not masked",
        lambda c: c.draft_tree == "on" and c.draft_masks == "on",
        {"drafter": "eagle3", "draft_model": "m", "draft_tree": "on", "draft_masks": "on"},
    ),
    Refusal(
        "draft_index_bytes", "the suffix index needs drafter=ngram; drafter is {c.drafter}",
        lambda c: c.draft_index_bytes > 0 and c.drafter != "ngram",
        {"drafter": "grammar", "draft_index_bytes": 1 << 20},
    ),
    Refusal(
        "draft_index_bytes", "the suffix index runs on a CPU only; device is {c.device}",
        lambda c: c.draft_index_bytes > 0 and _cuda(c), {"device": "cuda", "draft_index_bytes": 1 << 20},
    ),
    Refusal(
        "max_adapter_bytes", "is 0, and adapters or adapter_dirs name adapters",
        lambda c: c.max_adapter_bytes == 0 and bool(c.adapters or c.adapter_dirs),
        {"adapters": ("a=/a",), "max_adapter_bytes": 0},
    ),
    Refusal(
        "role", "{c.transfer.role} needs the prefix cache; prefix_cache is false",
        lambda c: c.transfer.moves_pages and not c.prefix_cache, {"role": "decode", "prefix_cache": False},
    ),
    Refusal(
        "role", "{c.transfer.role} cannot be combined with drafter={c.drafter}, which has a cache inside the step",
        lambda c: c.transfer.moves_pages and c.drafts_by_net, {"role": "prefill", "drafter": "mtp"},
    ),
    Refusal(
        "tensor_parallel_size", "ranks run on a CPU only; device is {c.device}",
        lambda c: _ranks(c) and _cuda(c), {"device": "cuda", **_RANKS},
    ),
    Refusal(
        "tensor_parallel_size", "cannot be combined with adapters",
        lambda c: _ranks(c) and c.takes_adapters, {**_RANKS, "adapters": ("a=/a",)},
    ),
    Refusal(
        "tensor_parallel_size", "cannot be combined with role={c.transfer.role}: ranks do not transfer KV pages",
        lambda c: _ranks(c) and c.transfer.moves_pages, {**_RANKS, "role": "decode"},
    ),
    Refusal(
        "tensor_parallel_size", "cannot be combined with drafter=mtp, whose layer is not divided",
        lambda c: _ranks(c) and c.drafter == "mtp", {**_RANKS, "drafter": "mtp"},
    ),
    Refusal(
        "tensor_parallel_size", "cannot be combined with drafter=dflash, which reads the whole output head",
        lambda c: _ranks(c) and c.drafter == "dflash", {**_RANKS, "drafter": "dflash", "draft_model": "m"},
    ),
    Refusal(
        "data_parallel_rank", "must be below data_parallel_attention ({c.data_parallel_attention}); it is "
        "{c.data_parallel_rank}",
        lambda c: c.data_parallel_rank >= c.data_parallel_attention, {**_SHARES, "data_parallel_rank": 2},
    ),
    Refusal(
        "data_parallel_dir", "is required with data_parallel_attention",
        lambda c: _shares(c) and not c.data_parallel_dir, {"data_parallel_attention": 2},
    ),
    Refusal(
        "data_parallel_attention", "engines share experts on a CPU only; device is {c.device}",
        lambda c: _shares(c) and _cuda(c), {"device": "cuda", **_SHARES},
    ),
    Refusal(
        "data_parallel_attention", "cannot be combined with tensor_parallel_size {c.tensor_parallel_size}: an engine "
        "that shares its experts is one process",
        lambda c: _shares(c) and _ranks(c), {**_SHARES, **_RANKS},
    ),
    Refusal(
        "data_parallel_attention", "cannot be combined with role={c.transfer.role}: engines that share experts do not "
        "transfer KV pages",
        lambda c: _shares(c) and c.transfer.moves_pages, {**_SHARES, "role": "decode"},
    ),
    Refusal(
        "data_parallel_attention", "cannot be combined with drafter=mtp, whose experts are not shared",
        lambda c: _shares(c) and c.drafter == "mtp", {**_SHARES, "drafter": "mtp"},
    ),
)  # fmt: skip
"""Checked whenever an EngineSettings is made, and so again when `device` is resolved."""

OF_SERVER: Sequence[Refusal[ServerSettings]] = (
    Refusal(
        "grammar_dir", "is required with grammar=connect",
        lambda c: c.grammar == "connect" and not c.grammar_dir, {"grammar": "connect"},
    ),
    Refusal(
        "auth_token_file", "cannot be combined with tenant_file, which has the tokens of the tenants",
        lambda c: bool(c.tenant_file and c.auth_token_file), {"tenant_file": "t", "auth_token_file": "a"},
    ),
    Refusal("audit_log", "needs tenant_file", lambda c: bool(c.audit_log) and not c.tenant_file, {"audit_log": "a"}),
)  # fmt: skip
"""Checked whenever a ServerSettings is made."""

OF_START: Sequence[Refusal[Start]] = (
    Refusal(
        "prefill_from", "needs role=decode; role is {c.engine.transfer.role}",
        lambda c: bool(c.engine.transfer.prefill_from) and c.engine.transfer.role != "decode",
        {"prefill_from": ("h:1",)},
    ),
    Refusal(
        "prefill_from", "role=decode needs the address of an engine with role=prefill",
        lambda c: c.engine.transfer.role == "decode" and not c.engine.transfer.prefill_from, {"role": "decode"},
    ),
    Refusal(
        "prefill_from", "is required with prefill_tls_ca and prefill_token_file",
        lambda c: bool(c.engine.transfer.prefill_tls_ca or c.engine.transfer.prefill_token_file)
        and not c.engine.transfer.prefill_from,
        {"prefill_token_file": "t"},
    ),
    Refusal(
        "prefill_tls_cert", "prefill_tls_cert and prefill_tls_key belong together",
        lambda c: bool(c.engine.transfer.prefill_tls_cert) != bool(c.engine.transfer.prefill_tls_key),
        {"role": "decode", "prefill_from": ("h:1",), "prefill_tls_key": "k"},
    ),
    Refusal(
        "prefill_tls_ca", "is required with prefill_tls_cert",
        lambda c: bool(c.engine.transfer.prefill_tls_cert) and not c.engine.transfer.prefill_tls_ca,
        {"role": "decode", "prefill_from": ("h:1",), "prefill_tls_cert": "c", "prefill_tls_key": "k"},
    ),
    Refusal(
        "max_model_len", "role={c.engine.transfer.role} needs at least {c.least_model_len}; it is "
        "{c.engine.max_model_len}",
        lambda c: c.engine.transfer.moves_pages and 0 < c.engine.max_model_len < c.least_model_len,
        {"role": "prefill", "max_model_len": 32},
    ),
    Refusal(
        "grammar", "cannot be connect with role=prefill, which generates nothing; use none",
        lambda c: c.engine.transfer.role == "prefill" and c.server.grammar == "connect",
        {"role": "prefill", "grammar": "connect", "grammar_dir": "d"},
    ),
    Refusal(
        "http", "cannot be combined with role=prefill, which generates nothing",
        lambda c: c.engine.transfer.role == "prefill" and bool(c.server.http), {"role": "prefill", "http": "h:1"},
    ),
    Refusal(
        "services", "{c.server.services} cannot be combined with role=prefill, which generates nothing",
        lambda c: c.engine.transfer.role == "prefill" and not set(c.server.service_names) <= {"auto"},
        {"role": "prefill", "services": "kserve"},
    ),
)  # fmt: skip
"""Checked when a server starts, before the model is loaded."""

OF_FILES: Sequence[Refusal[LoadedFiles]] = (
    Refusal(
        "tensor_parallel_size", "cannot be combined with the integers of a quantised file ({c.file}): ranks would "
        "round them again; quantization is {c.engine.quantization}",
        lambda c: bool(c.file) and c.engine.quantization != "none"
        and (c.exact_file or c.engine.quantization != "int8"),
    ),
    Refusal(
        "tensor_parallel_size", "cannot be combined with a model whose layers differ in their heads, or share keys and "
        "values: they are not divided",
        lambda c: _ranks(c.engine) and not c.like_layers,
    ),
    Refusal(
        "num_draft_tokens", "{c.engine.num_drafts} drafts do not fit into a block of {c.head}, whose block_size is "
        "{c.block_size} with the last true token",
        lambda c: bool(c.head) and c.engine.num_drafts >= c.block_size,
    ),
    Refusal(
        "drafter", "dflash needs the rows of the embedding of {c.model_type} as a matrix",
        lambda c: bool(c.head) and not c.embeds_rows,
    ),
)  # fmt: skip
"""Checked when the files are loaded."""

OF_RECURRENT: Sequence[Refusal[LoadedFiles]] = (
    Refusal(
        "draft_tree", "cannot be combined with the recurrent layers of {c.model_type}, whose states follow a chain of "
        "drafts",
        lambda c: c.engine.verifies_trees, {"device": "cuda", "draft_tree": "on"},
    ),
    Refusal(
        "tensor_parallel_size", "cannot be combined with the recurrent layers of {c.model_type}, which are not divided",
        lambda c: _ranks(c.engine), _RANKS,
    ),
    Refusal(
        "data_parallel_attention", "cannot be combined with the recurrent layers of {c.model_type}",
        lambda c: _shares(c.engine), _SHARES,
    ),
    Refusal(
        "role", "{c.engine.transfer.role} cannot be combined with the recurrent layers of {c.model_type}, whose states "
        "are not transferred",
        lambda c: c.engine.transfer.moves_pages, {"role": "decode", "prefill_from": ("h:1",)},
    ),
    Refusal(
        "drafter", "mtp cannot be combined with the recurrent layers of {c.model_type}",
        lambda c: c.engine.drafter == "mtp" and c.engine.num_drafts > 0, {"drafter": "mtp"},
    ),
)  # fmt: skip
"""Checked when a model with recurrent layers is loaded."""


def refuse(table: Sequence[Refusal[T]], given: T, error: Callable[[str], Exception] = ValueError) -> None:
    """Raise `error` with the message of the first refusal that applies."""
    for refusal in table:
        if refusal.when(given):
            _raise(error(refusal.message(given)))


def _raise(error: Exception) -> NoReturn:
    raise error
