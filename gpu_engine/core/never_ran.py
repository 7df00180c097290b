"""What a start on a device has that no GPU has run so far, as docs/gpu.md lists it: the log says so once.

Not responsible for: what single requests bring, such as beams, output tensors and prompt log-probabilities.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gpu_engine.api.config import EngineConfig

log = logging.getLogger(__name__)

RAN_TRITON = "3.6"
"""The version that compiled what ran."""
RAN_CAPABILITY = (9, 0)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the engine that never ran on a GPU."""

    name: str
    """As the table of docs/gpu.md has it."""
    uses: Callable[[EngineConfig, bool], bool]
    """Gets the settings, and whether the model has recurrent layers."""


EVERY_START = ("attention in parts of a head",)
"""Parts of every start on a GPU."""
NEVER_RAN = (
    Part("EAGLE3 heads", lambda c, recurrent: c.num_drafts > 0 and c.drafter == "eagle3"),
    Part("drafts by multi-token prediction", lambda c, recurrent: c.num_drafts > 0 and c.drafter == "mtp"),
    Part("trees of drafts under a grammar", lambda c, recurrent: c.verifies_trees),
    Part("`draft_device`", lambda c, recurrent: bool(c.draft_device)),
    Part("logits processors", lambda c, recurrent: bool(c.logits_processors)),
    Part("hybrids", lambda c, recurrent: recurrent),
    Part("KV pages moved between engines", lambda c, recurrent: c.transfer.moves_pages),
)


def say_what_never_ran(config: EngineConfig, device: torch.device, triton: str, *, recurrent: bool) -> None:
    """Log in one line what of this start no GPU has run.

    `triton`: its version; `recurrent`: the model has recurrent layers.
    """
    parts = [*EVERY_START, *(part.name.strip("`") for part in NEVER_RAN if part.uses(config, recurrent))]
    if not triton.startswith(f"{RAN_TRITON}."):
        parts.append(f"kernels that Triton {triton} compiled")
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) != RAN_CAPABILITY:
        parts.append("a GPU of compute capability {}.{}".format(*capability))
    log.warning("no GPU has run these parts of this start so far: %s; docs/gpu.md lists what ran", ", ".join(parts))
