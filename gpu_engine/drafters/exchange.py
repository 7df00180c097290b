"""Loads a draft model for a target, and exchanges the one of a running engine.

Another model is loaded next to the running engine, on the caller's thread, and takes the place of the one before
between two iterations. Requests that run keep their tokens, since drafts decide none. Invariant: what is loaded has the
target's tokenizer, or it is refused and the model before it drafts on; one exchange happens at a time. Not responsible
for: drafting (see decoupled.py, decoupled_graphs.py, nets.py).
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import nullcontext
from pathlib import Path

import torch

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.errors import ExchangeRefused, InvalidRequest, LimitExceeded, ShuttingDown, UnknownModel
from gpu_engine.api.ports import DraftModelInfo
from gpu_engine.drafters.decoupled import DraftModel, ExchangingDrafter
from gpu_engine.model.loaded_model import LoadedModel, ModelNotSupported
from gpu_engine.model.loader import load_model

log = logging.getLogger(__name__)


def load_draft_model(
    config: EngineConfig, target: LoadedModel, *, path: str = "", beside: bool = False
) -> tuple[LoadedModel, torch.Tensor | None]:
    """Load the draft model to its device; also return its `d2t_V`, None where its columns are the target's.

    Models of one family share a tokenizer and pad their logits to different widths. Then the columns of real tokens
    are the same, and `d2t_V` leaves the padding out.

    Args:
        config: of the engine.
        target: whose tokens it drafts.
        path: another model than the setting draft_model, named by a request's field of this name.
        beside: an engine runs meanwhile (see `load_model`).

    Raises ModelNotSupported or FileNotFoundError; the message begins with the setting, or the field.
    """
    setting, model = ("path", path) if path else ("draft_model", config.draft_model)
    own = {"model": model, "revision": "", "drafter": "none", "draft_model": "", "tensor_parallel_size": 1}
    own |= {"data_parallel_attention": 1, "data_parallel_rank": 0, "data_parallel_dir": ""}
    own |= {"draft_quantization": "", "draft_dirs": (), "kv_cache_dtype": "auto"}
    own |= {"generation_config": "none"}
    own |= {"adapters": (), "adapter_dirs": (), "max_adapter_bytes": 0}
    # As long as the target's sequences, and in pages of the engine's own: the memory is not looked at again.
    own |= {"max_model_len": target.max_model_len, "kv_cache_tokens": target.max_model_len}
    own |= {"quantization": config.draft_quantization or config.quantization}
    if config.device != "cpu" and target.device.type == "cpu":
        own |= {"device": "cpu", "sync": "auto"}
    elif config.draft_device:
        own |= {"device": _draft_device(config.draft_device)}
    own |= {"draft_device": ""}
    # Loading makes the model's device the thread's current one.
    with torch.cuda.device(target.device) if target.device.type == "cuda" else nullcontext():
        loaded = load_model(dataclasses.replace(config, **own), setting=setting, beside=beside)  # type: ignore[arg-type]
    if loaded.recurrent:
        raise ModelNotSupported(
            f"{setting}: {loaded.model_type} has recurrent layers, whose state goes past the drafts that are rejected; "
            "take a draft model with attention only"
        )
    vocabulary = loaded.tokenizer.get_vocab()
    if vocabulary != target.tokenizer.get_vocab():
        raise ModelNotSupported(
            f"{setting}: its tokenizer is not that of {target.name}, so its drafts mean other tokens"
        )
    if loaded.max_model_len < target.max_model_len:
        raise ModelNotSupported(
            f"{setting}: made for {loaded.max_model_len} tokens, the target serves {target.max_model_len}"
        )
    if loaded.vocab_size == target.vocab_size:
        return loaded, None
    count = min(max(vocabulary.values()) + 1, loaded.vocab_size, target.vocab_size)
    return loaded, torch.zeros(count, dtype=torch.int32, device=loaded.device)


def _draft_device(name: str) -> str:
    there = torch.cuda.device_count()
    if (torch.device(name).index or 0) >= there:
        raise ModelNotSupported(f"draft_device: {name} is not there; CUDA devices that torch sees: {there}")
    return name


class DraftModels:
    """The draft model of one engine, as other threads see it.

    Args:
        config: of the engine.
        target: of the engine.
        drafter: None where no draft model can be exchanged.
        post: runs a function on the engine's thread, between two iterations.
        exchanged: called there with the model that drafts from now on.
    """

    def __init__(
        self,
        config: EngineConfig,
        target: LoadedModel,
        drafter: ExchangingDrafter | None,
        post: Callable[[Callable[[], None]], None],
        exchanged: Callable[[DraftModel], None],
    ) -> None:
        self._config, self._target, self._drafter, self._post = config, target, drafter, post
        self._exchanged = exchanged
        self._dirs = tuple(Path(item).resolve() for item in config.draft_dirs)
        for item in self._dirs:
            if not item.is_dir():
                raise ModelNotSupported(f"draft_dirs: {item} is no directory")
        self._exchanging = threading.Lock()
        """One exchange at a time."""
        self._lock = threading.Lock()
        """Guards the next two."""
        self._pending: Future[None] | None = None
        self._closed = False

    @property
    def name(self) -> str:
        """The model that drafts now; empty: none does."""
        return self._config.draft_model if self._drafter is None else self._drafter.draft.model.name

    def exchange(self, path: str) -> DraftModelInfo:
        """See `DraftModelAccess.exchange`."""
        drafter = self._drafter
        if drafter is None:
            raise ExchangeRefused(f"path: drafter is {self._config.drafter}; only decoupled exchanges its model")
        if not self._dirs:
            raise ExchangeRefused("path: this server exchanges no draft model (its setting draft_dirs is empty)")
        place = Path(path).resolve()
        if not any(place.is_relative_to(item) for item in self._dirs):
            raise InvalidRequest("path", f"{path!r} is not below draft_dirs of the server")
        if not place.exists():
            raise UnknownModel(f"path: {path} is not there")
        with self._exchanging:
            try:
                model, d2t_V = load_draft_model(self._config, self._target, path=str(place), beside=True)
            except (ModelNotSupported, OSError) as error:
                raise InvalidRequest("path", str(error).removeprefix("path: ")) from error
            try:
                self._take_over(drafter, drafter.prepare(model, d2t_V))
            except RuntimeError as error:  # a device without memory for pages or graphs
                raise LimitExceeded(f"path: {model.name} was loaded and cannot draft here: {error}") from error
        log.info("%s drafts from now on", model.name)
        return DraftModelInfo(model.name, model.num_parameters)

    def _take_over(self, drafter: ExchangingDrafter, draft: DraftModel) -> None:
        """Have the engine's thread exchange the models, and wait for that. Raises ShuttingDown, or the RuntimeError of
        the exchange."""
        done: Future[None] = Future()
        with self._lock:
            if self._closed:
                raise ShuttingDown("the server is shutting down")
            self._pending = done

        def swap() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                drafter.exchange(draft)
            except RuntimeError as error:  # no fault of an iteration, which would end every sequence
                done.set_exception(error)
            else:
                self._exchanged(draft)
                done.set_result(None)

        self._post(swap)
        try:
            done.result()
        except CancelledError:
            raise ShuttingDown("the server is shutting down") from None

    def close(self) -> None:
        """End an exchange that waits. The engine's thread has ended."""
        with self._lock:
            self._closed = True
            if self._pending is not None:
                self._pending.cancel()

    def __repr__(self) -> str:
        return f"<DraftModels {self.name or None}>"
