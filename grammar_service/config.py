"""The configuration of a grammar process: one frozen dataclass, validated once, never changed.

Filled from flags, environment and TOML under the same names (see `read`).

Not responsible for: how settings are found (service_runtime/settings.py), or anything that a request can choose.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grammar_service.backends.registry import NAMES
from grammar_service.grammar.value import BOUNDS, MAX_JSON_DEPTH, Reading
from service_runtime.cores import usable_cores
from service_runtime.logs import FORMATS, LEVELS
from service_runtime.settings import Sources, add_flags

ENVIRONMENT_PREFIX = "LOCKSTEP_GRAMMAR_"
MAX_RULE_DEPTH = 1024
"""Both libraries were seen to follow chains of this length on the stack of a compile worker."""

_DESCRIPTION = """\
The grammar process of Lockstep: it compiles grammars, and fills token masks in shared memory for one engine at a time.

An engine with --grammar spawn, the default, starts and supervises a grammar process by itself. Start one by hand to run
it in a container of its own or under another supervisor, and start the engine with --grammar connect --grammar-dir DIR.

Examples:
  python -m grammar_service --dir /run/lockstep
  python -m grammar_service --dir /run/lockstep --backend xgrammar --compile-timeout-s 10
  python -m grammar_service health --dir /run/lockstep    ask a running one: exit status 0 if it serves

Both processes must see DIR, and nothing else: the segment is passed as a file descriptor through a socket in DIR.
"""

_EPILOG = f"""\
Every setting is also an environment variable ({ENVIRONMENT_PREFIX}COMPILE_TIMEOUT_S) and a key of the TOML file named
with --config (compile_timeout_s, or the same under a table [grammar]). A flag beats the environment, which beats the
file. Exit status: 0 after SIGTERM or SIGINT, 2 for a wrong setting, 70 when a mask computation hangs and cannot
be ended.
"""


def _require(condition: bool, name: str, problem: str) -> None:
    if not condition:
        raise ValueError(f"{name}: {problem}")


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Limits of one compilation. Each field is the setting of `GrammarConfig` that its docstring names."""

    timeout_s: float = 5.0
    """compile_timeout_s: from a free worker to the result in the grammar process."""
    memory_mb: int = 2048
    """compile_memory_mb: what the worker allocates after its start."""
    max_depth: int = 128
    """max_grammar_depth."""
    max_chain: int = 512
    """max_rule_depth."""
    max_artifact_bytes: int = 64 << 20
    """max_artifact_bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConfig:
    """Settings of the grammar process."""

    dir: str = ""
    """Directory of the sockets grammar.sock and segment.sock, created with mode 0700 if it is missing. Required."""
    backend: str = "llguidance"
    """Default grammar library, "llguidance" or "xgrammar"; a request may name another one."""
    compile_timeout_s: float = 5.0
    """Time limit of one compilation in its worker, in seconds; the worker is killed when the limit is reached."""
    compile_workers: int = 0
    """Compile processes per backend, started ahead of need. 0: one fewer than the usable cores, at most 4."""
    compile_priority: str = "low"
    """Priority of the compile workers: "low" (a higher nice value), or "idle" (SCHED_IDLE: they run when no other
    process needs their core; once a compilation reached its time limit and had hardly run, they are "low")."""
    compile_threads: int = 1
    """Threads within one compilation, in backends that have it (xgrammar). More than one pays where there are more
    cores than compile workers, and grammars take long."""
    compile_queue: int = 256
    """Compilations that may wait for a worker, not counting those of running sequences; one more is refused. Tenants
    share these places by weight once all are taken."""
    compile_queue_s: float = 120.0
    """Longest wait of a compilation for a worker, in seconds; then it is refused. The wait does not count toward
    compile_timeout_s, and a running sequence waits for as long as it takes."""
    compile_memory_mb: int = 2048
    """Memory that one compile worker may allocate after its start, in MiB."""
    max_grammar_bytes: int = 256 << 10
    """Longest grammar text, in bytes."""
    max_grammar_depth: int = 128
    """Deepest nesting of brackets, groups and repetitions, in levels."""
    max_rule_depth: int = 512
    """Longest chain of rules or $ref that refer to each other, in steps."""
    max_artifact_bytes: int = 64 << 20
    """Largest serialised compiled grammar that a worker may return, in bytes."""
    strict_formats: bool = False
    """Refuse schemas with a `format` that is not known. False: as JSON Schema says, it is an annotation without effect,
    and the response has a warning."""
    max_string_length: int = 0
    """The most characters of a string in JSON, and of a name that no schema lists, where a request sets no bound of its
    own. It holds beside the bounds of a schema. 0: none."""
    max_array_items: int = 0
    """The most items of an array in JSON, where a request sets no bound of its own. 0: none."""
    max_number_digits: int = 0
    """The most digits of a number in JSON before its point, and behind it (there at most 9), where a request sets no
    bound of its own; such numbers have no exponent. 0: none."""
    max_whitespace: int = 0
    """The most white space characters in a row in JSON, where a request sets no bound of its own. 0: none but that of
    the white space policy."""
    cache: bool = True
    """Reuse compiled grammars. False: each request's grammar is compiled anew, unless an equal one is being compiled,
    and cache_dir is not used; cache_bytes then bounds the grammars that are held for their matchers."""
    cache_bytes: int = 256 << 20
    """Size limit of the compiled grammars in memory, in bytes; the least recently used is evicted first."""
    cache_dir: str = ""
    """Directory that keeps compiled grammars across restarts, created if it is missing. Empty: none."""
    cache_dir_bytes: int = 1 << 30
    """Size limit of the files in cache_dir, in bytes; the least recently used is deleted first."""
    threads: int = 0
    """Threads that fill mask rows, and so the number of slots that may be slow at once without delaying the others.
    0: half of the usable cores, at least 3 and at most 8."""
    row_deadline_ms: float = 2.0
    """Time limit of one answer to a step, in milliseconds; rows not filled by then follow in a later answer."""
    spin_us: float = 50.0
    """Time that the worker thread polls for the next step before it sleeps, in microseconds. With a core to spare:
    1000000."""
    log_level: str = "info"
    """"debug", "info", "warning" or "error"."""
    log_format: str = "text"
    """"text", or "json": one object per line."""
    metrics_listen: str = ""
    """"host:port" on which to serve Prometheus metrics over HTTP. Empty: the engine alone can read them."""
    health_listen: str = ""
    """"host:port" for the health service alone, in clear text: for probes that cannot reach the socket in dir, such as
    those of Kubernetes. Empty: none."""

    def __post_init__(self) -> None:
        _require(bool(self.dir), "dir", "is required")
        _require(self.backend in NAMES, "backend", f"{self.backend!r} is not one of {', '.join(NAMES)}")
        _require(0 < self.compile_timeout_s <= 600, "compile_timeout_s", "must be in (0, 600]")
        _require(0 <= self.compile_workers <= 64, "compile_workers", "must be in [0, 64]")
        priority = self.compile_priority
        _require(priority in ("low", "idle"), "compile_priority", f"{priority!r} is not low or idle")
        _require(1 <= self.compile_threads <= 64, "compile_threads", "must be in [1, 64]")
        _require(self.compile_queue >= 1, "compile_queue", "must be at least 1")
        _require(0 < self.compile_queue_s <= 3600, "compile_queue_s", "must be in (0, 3600]")
        _require(self.compile_memory_mb >= 64, "compile_memory_mb", "must be at least 64")
        _require(1 <= self.max_grammar_bytes <= 64 << 20, "max_grammar_bytes", "must be in [1, 67108864]")
        _require(
            1 <= self.max_grammar_depth <= MAX_JSON_DEPTH, "max_grammar_depth", f"must be in [1, {MAX_JSON_DEPTH}]"
        )
        _require(1 <= self.max_rule_depth <= MAX_RULE_DEPTH, "max_rule_depth", f"must be in [1, {MAX_RULE_DEPTH}]")
        _require(1 << 16 <= self.max_artifact_bytes <= 1 << 30, "max_artifact_bytes", "must be in [65536, 1073741824]")
        for bound, most in BOUNDS.items():
            _require(0 <= getattr(self, bound) <= most, bound, f"must be in [0, {most}]")
        _require(self.cache_dir_bytes >= 1 << 20, "cache_dir_bytes", "must be at least 1048576")
        _require(self.cache_bytes >= 1 << 20, "cache_bytes", "must be at least 1048576")
        _require(0 <= self.threads <= 64, "threads", "must be in [0, 64]")
        _require(0.1 <= self.row_deadline_ms <= 10_000, "row_deadline_ms", "must be in [0.1, 10000]")
        _require(0 <= self.spin_us <= 1e6, "spin_us", "must be in [0, 1000000]")
        _require(self.log_level in LEVELS, "log_level", f"{self.log_level!r} is unknown")
        _require(self.log_format in FORMATS, "log_format", f"{self.log_format!r} is not text or json")
        for name, address in (("metrics_listen", self.metrics_listen), ("health_listen", self.health_listen)):
            host, colon, port = address.rpartition(":")
            is_host_port = bool(host and colon and port.isdecimal() and int(port) < 1 << 16)
            _require(not address or is_host_port, name, f"{address!r} is not host:port")

    @property
    def workers(self) -> int:
        """`compile_workers`, with 0 resolved for this machine."""
        return self.compile_workers or max(1, min(4, usable_cores() - 1))

    @property
    def compile_limits(self) -> CompileLimits:
        """Limits of one compilation."""
        return CompileLimits(
            timeout_s=self.compile_timeout_s,
            memory_mb=self.compile_memory_mb,
            max_depth=self.max_grammar_depth,
            max_chain=self.max_rule_depth,
            max_artifact_bytes=self.max_artifact_bytes,
        )

    @property
    def reading(self) -> Reading:
        """How schemas are read where the request says nothing."""
        return Reading(strict_formats=self.strict_formats, **{name: getattr(self, name) for name in BOUNDS})

    @property
    def fill_threads(self) -> int:
        """`threads`, with 0 resolved for this machine."""
        return self.threads or min(8, max(3, usable_cores() // 2))


def read(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[GrammarConfig, list[str]]:
    """Return the configuration from flags, environment and TOML, and a warning for each setting under an old name.

    Ends the process with status 2 and a message on a wrong setting, and with status 0 on --help.
    """
    parser = argparse.ArgumentParser(
        prog="python -m grammar_service",
        allow_abbrev=False,
        usage="%(prog)s --dir DIR [settings]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, [GrammarConfig], ENVIRONMENT_PREFIX)
    flags = parser.parse_args(arguments)
    try:
        sources = Sources(flags, environment, [GrammarConfig], prefix=ENVIRONMENT_PREFIX, table="grammar")
        return sources.fill(GrammarConfig), sources.warnings
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\nTry --help.\n")
