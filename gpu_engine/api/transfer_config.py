"""The settings of page transfer: prompts that one engine prefills for another.

Not responsible for: how the settings are used (extensions/transfer/), or which of them cannot be combined
(capabilities.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from service_runtime.shared_settings import is_address, require

PROBE_TOKENS = 64
"""Tokens of the fixed prompt by which engines that transfer pages recognise each other, unless a page has more."""


def least_model_len(page_size: int) -> int:
    """Return the smallest `max_model_len` that has room for the fixed prompt."""
    return max(PROBE_TOKENS, page_size) + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """Prefill on another engine."""

    role: str = "both"
    """"both": the engine prefills and decodes its requests. "decode": the engines of prefill_from prefill its prompts,
    and it prefills the rest. "prefill": it prefills for other engines, runs without a grammar process, and refuses
    every Generate; see docs/deployment.md."""
    prefill_from: tuple[str, ...] = ()
    """With role=decode: addresses of engines with role=prefill, "host:port" or "unix:/path". The flag may be repeated,
    the variable has one address a line, and the TOML value is a list."""
    prefill_tokens: int = 128
    """With role=decode: prompts with fewer uncached tokens than this are prefilled by this engine."""
    prefill_timeout_s: float = 5.0
    """With role=decode: longest wait for the next pages of a prompt, in seconds; this engine then prefills the prompt.
    With role=prefill: longest time that another engine may take to read its next pages."""
    prefill_tls_ca: str = ""
    """With role=decode: PEM file with certificate authorities for the engines of prefill_from. Empty: clear text."""
    prefill_tls_cert: str = ""
    """PEM file with this engine's certificate, for engines of prefill_from that ask for one."""
    prefill_tls_key: str = ""
    """PEM file with the private key of prefill_tls_cert."""
    prefill_token_file: str = ""
    """File whose first token is sent to the engines of prefill_from. A changed file is read again."""
    transfer_bytes: int = 1 << 28
    """With role=decode: most bytes of KV pages that all running fetches together may wait for; a prompt whose pages
    exceed them is prefilled by this engine. A fetch that runs alone may have more."""

    def __post_init__(self) -> None:
        require(self.role in ("both", "decode", "prefill"), "role", f"{self.role!r} is not both, decode or prefill")
        for address in self.prefill_from:
            require(is_address(address), "prefill_from", f"{address!r} is neither host:port nor unix:/path")
        require(len(set(self.prefill_from)) == len(self.prefill_from), "prefill_from", "an address is given twice")
        require(self.prefill_tokens >= 1, "prefill_tokens", "must be at least 1")
        require(self.prefill_timeout_s > 0, "prefill_timeout_s", "must be positive")
        require(self.transfer_bytes >= 1, "transfer_bytes", "must be at least 1")

    @property
    def moves_pages(self) -> bool:
        """True: the engine sends or receives KV pages."""
        return self.role != "both"
