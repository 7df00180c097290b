"""The settings of a server: its public port, access to it, and its grammar process.

A field's docstring is its entry in `--help` and in docs/configuration.md (see engine_settings.py).

Not responsible for: checks (config.py), or settings of the model and its batches (engine_settings.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from service_runtime.settings import Merged
from service_runtime.shared_settings import LogSettings, PortSettings, ProbeSettings, require

SERVICES = ("kserve", "vllm", "kv_events", "auto")
"""The names that the setting services may have."""


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
class ServerSettings(LogSettings, ProbeSettings, PortSettings):
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
    """With tenant_file: file to which each call appends a line of JSON with its caller, time, method, tokens and
    outcome. Empty: none."""
    receipt_key: str = ""
    """PEM file with an Ed25519 private key, which signs the receipts that requests ask for; see docs/requests.md. Needs
    the extra `receipts`. Empty: no receipts."""
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
    """Longest wait of a guided request for a grammar process that starts or was lost, in seconds; the request then ends
    with UNAVAILABLE. If its grammar is not ready within grammar_wait_s plus compile_timeout_s (for each library that
    is tried) of its admission, the request ends with RESOURCE_EXHAUSTED, whatever the grammar waited for."""
    grammar_memory_mb: int = 4096
    """Private memory of a spawned grammar process, in MiB, above which it is killed and restarted. 0: no limit."""
    max_n: int = 16
    """Most sequences of one request."""
    max_prompt_bytes: int = 4 << 20
    """Longest text prompt, in bytes before tokenisation."""
    max_queue_ms: int = 0
    """Longest wait for a slot, in milliseconds, of a request that sets no max_queue_ms; it then ends with
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
    """gRPC services of the public port in addition to the engine's, separated by commas: "kserve"
    (inference.GRPCInferenceService, of KServe and Triton; docs/gateways.md), "vllm" (vllm.grpc.engine.VllmEngine, of
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

    @property
    def max_output_bytes(self) -> int:
        """Most bytes of the tensors of one request."""
        return self.output_memory_bytes // 4

    @property
    def service_names(self) -> tuple[str, ...]:
        """The names in `services`."""
        return tuple(name.strip() for name in self.services.split(",") if name.strip())
