"""Loads the logits processors that the server's own configuration names.

An entry of the setting is `name=module:Class`, or `name=module:Class{...}` with a JSON object of options for the
constructor. Invariant: a module is imported because the server's configuration names it; no request imports anything.
Not responsible for: the syntax of an entry (see `parse_entry`, which the configuration calls as well), calls (see
step/processing/).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from gpu_engine.api.ports import Model
from gpu_engine.api.processors import (
    CapturableLogitsProcessor,
    CapturedRows,
    LoadedProcessor,
    ProcessorEntry,
    ProcessorError,
    Processors,
    ProcessorSetup,
)

_METHODS = ("process", "process_batch", "process_rows")


def load_processors(entries: Sequence[str], model: Model, device: torch.device) -> Processors:
    """Return the processors of the setting `logits_processors`, constructed.

    Raises ProcessorError: a module or class does not exist, a constructor fails, or a class is of no kind.
    """
    loaded: list[LoadedProcessor] = []
    column = first_argument = 0
    for number, text in enumerate(entries):
        entry = ProcessorEntry.parse(text)
        setup = ProcessorSetup(model.vocab_size, model.eos_token_ids, model.tokenizer, device, entry.options)
        made = _of_kind(entry.name, number, _construct(entry, setup))
        if (captured := made.captured) is not None:
            _try(made.name, captured, setup)
            made = replace(made, column=column, first_argument=first_argument)
            column, first_argument = column + 1, first_argument + captured.num_arguments
        loaded.append(made)
    return Processors(tuple(loaded))


def _error(name: str, problem: str) -> ProcessorError:
    return ProcessorError(f"logits_processors: {name}: {problem}")


def _construct(entry: ProcessorEntry, setup: ProcessorSetup) -> Any:
    try:
        module = importlib.import_module(entry.module)
    except Exception as error:  # whatever the module does when it is imported
        raise _error(entry.name, f"{entry.module} cannot be imported: {type(error).__name__}: {error}") from error
    made = getattr(module, entry.class_name, None)
    if not callable(made):
        raise _error(entry.name, f"{entry.module} has no class {entry.class_name}")
    try:
        return made(setup)
    except Exception as error:  # whatever the constructor does
        raise _error(entry.name, f"{entry.class_name} cannot be made: {type(error).__name__}: {error}") from error


def _of_kind(name: str, number: int, made: Any) -> LoadedProcessor:
    has = [method for method in _METHODS if callable(getattr(made, method, None))]
    if len(has) != 1 or not callable(getattr(made, "prepare", None)):
        raise _error(name, f"needs prepare and one of {', '.join(_METHODS)}; it has {', '.join(has) or 'none'}")
    captured = getattr(made, "capturable", False) is True
    if captured != (has[0] == "process_rows"):
        raise _error(name, "capturable = True and process_rows belong together")
    if not captured:
        kind = {"single": made} if has[0] == "process" else {"batched": made}
        return LoadedProcessor(name, number, made, **kind)
    if not isinstance(getattr(made, "num_arguments", None), int) or made.num_arguments < 0:
        raise _error(name, "num_arguments is not a number of arguments")
    return LoadedProcessor(name, number, made, captured=made)


def _try(name: str, processor: CapturableLogitsProcessor, setup: ProcessorSetup) -> None:
    """Run a captured processor once over two rows that no request has: a capture says less about what is wrong."""
    device = setup.device
    rows = CapturedRows(
        torch.zeros(2, 8, dtype=torch.int32, device=device),
        torch.tensor([3, 4], device=device),
        torch.tensor([2, 2], device=device),
        torch.zeros(2, processor.num_arguments, dtype=torch.float64, device=device),
        torch.zeros(2, dtype=torch.bool, device=device),
    )
    logits_NV = torch.zeros(2, setup.vocab_size, device=device)
    try:
        with torch.no_grad():
            out = processor.process_rows(rows, logits_NV)
    except Exception as error:  # whatever the processor does
        raise _error(name, f"process_rows fails: {type(error).__name__}: {error}") from error
    if (problem := unlike(out, logits_NV)) is not None:
        raise _error(name, f"process_rows {problem}")


def unlike(out: object, logits: torch.Tensor) -> str | None:
    """Return what is wrong with the result of a processor that got `logits`; None: it has their form."""
    if not isinstance(out, torch.Tensor):
        return f"returned {type(out).__name__}, must be a tensor"
    if (out.shape, out.dtype, out.device) != (logits.shape, logits.dtype, logits.device):
        got, must = (f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}" for t in (out, logits))
        return f"returned {got}, must be {must}"
    return None
