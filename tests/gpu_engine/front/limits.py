"""The limits of the tests' server."""

from __future__ import annotations

from gpu_engine.api.limits import Limits

LIMITS = Limits(
    vocab_size=320,
    max_model_len=64,
    num_draft_tokens=7,
    jump_forward_tokens=15,
    max_n=4,
    max_prompt_bytes=1000,
    max_beam_width=6,
)
