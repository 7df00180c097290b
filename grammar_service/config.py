"""What a sidecar is told at its start: one frozen dataclass, validated once, never changed.

Filled from flags, environment and TOML under the same names (see `read`). Not here: anything that a request can choose.
"""

from __future__ import annotations

import argparse
import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grammar_service.backends.registry import NAMES
from grammar_service.compile.pool import CompileLimits
from grammar_service.grammar.value import MAX_JSON_DEPTH
from shared_mem.cores import usable_cores

GRPC_SOCKET_NAME = "grammar.sock"
"""In the directory `dir`."""

ENVIRONMENT_PREFIX = "LOCKSTEP_GRAMMAR_"
MAX_RULE_DEPTH = 1024
"""Chains up to here were walked by both libraries on the stack of a compile worker."""

_TEACHES = """\
The grammar process of Lockstep: it compiles grammars and fills token masks in shared memory for one engine at a time.

An engine started with --grammar spawn starts and supervises one of these by itself. Start one by hand to run it in its
own container or under its own supervisor, and start the engine with --grammar connect --grammar-dir DIR:

  python -m grammar_service --dir /run/lockstep
  python -m grammar_service --dir /run/lockstep --backend xgrammar --compile-timeout-s 10
  python -m grammar_service health --dir /run/lockstep    ask a running one; exit status 0 when it serves

Both processes must see DIR; nothing else is shared (the segment travels as a file descriptor through a socket in it).
"""

_CLOSING = f"""\
Every setting is also an environment variable ({ENVIRONMENT_PREFIX}COMPILE_TIMEOUT_S) and a key of the TOML file named
with --config (compile_timeout_s, or the same under a table [grammar]). A flag beats the environment, which beats the
file. Exit status: 0 after SIGTERM or SIGINT, 2 for a wrong setting, 70 when a mask computation hangs and cannot be
ended.
"""


def _setting(default: Any, teaches: str) -> Any:
    return field(default=default, metadata={"help": teaches})


def _require(condition: bool, name: str, problem: str) -> None:
    if not condition:
        raise ValueError(f"{name}: {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConfig:
    """One sidecar. The help text of each field says what it is, and in which unit."""

    dir: str = _setting("", "directory of grammar.sock and segment.sock; made with mode 0700 when missing; required")
    backend: str = _setting("llguidance", "default library, llguidance or xgrammar; a request may name another one")
    compile_timeout_s: float = _setting(5.0, "bound on one compilation; its process is killed at the end of it")
    compile_workers: int = _setting(
        0, "processes per backend that compile; they wait warm; 0: the usable cores but one, at most 4"
    )
    compile_priority: str = _setting(
        "low", "of compile workers: low (niceness), or idle: they run when nobody else wants their core (SCHED_IDLE)"
    )
    compile_queue: int = _setting(
        256, "compilations that may wait for a worker, beside those of accepted sequences; one more is refused"
    )
    compile_memory_mb: int = _setting(2048, "what one compile worker may allocate beyond its start, in MiB")
    max_grammar_bytes: int = _setting(256 << 10, "longest grammar text, in bytes")
    max_grammar_depth: int = _setting(128, "deepest nesting of brackets, groups and repetitions, in levels")
    max_rule_depth: int = _setting(512, "longest chain of rules or $ref that lead to each other, in steps")
    max_artifact_bytes: int = _setting(
        64 << 20, "largest compiled grammar that a worker hands over, serialised, in bytes"
    )
    cache_bytes: int = _setting(256 << 20, "bound on the compiled grammars kept; the least recently used leaves first")
    cache_dir: str = _setting(
        "", "directory that keeps compiled grammars over restarts; made when missing; empty: none"
    )
    cache_dir_bytes: int = _setting(1 << 30, "bound on the files in cache_dir; the least recently used leaves first")
    threads: int = _setting(
        0, "slots that may be slow at once while others go on, and threads that fill rows; 0: half of the cores, 3 to 8"
    )
    row_deadline_ms: float = _setting(
        2.0, "an answer that is not whole so long after it was begun goes out as it is, the rest follows"
    )
    spin_us: float = _setting(50.0, "how long to spin for the next step before sleeping; with a core to spare 1000000")
    log_level: str = _setting("info", "debug, info, warning or error")
    log_format: str = _setting("text", "text, or json: one object a line")
    metrics_listen: str = _setting("", "host:port of Prometheus metrics over HTTP; empty: only the engine is asked")

    def __post_init__(self) -> None:
        _require(bool(self.dir), "dir", "is required")
        _require(self.backend in NAMES, "backend", f"{self.backend!r} is not one of {', '.join(NAMES)}")
        _require(0 < self.compile_timeout_s <= 600, "compile_timeout_s", "must be in (0, 600]")
        _require(0 <= self.compile_workers <= 64, "compile_workers", "must be in [0, 64]")
        priority = self.compile_priority
        _require(priority in ("low", "idle"), "compile_priority", f"{priority!r} is not low or idle")
        _require(self.compile_queue >= 1, "compile_queue", "must be at least 1")
        _require(self.compile_memory_mb >= 64, "compile_memory_mb", "must be at least 64")
        _require(1 <= self.max_grammar_bytes <= 64 << 20, "max_grammar_bytes", "must be in [1, 67108864]")
        _require(
            1 <= self.max_grammar_depth <= MAX_JSON_DEPTH, "max_grammar_depth", f"must be in [1, {MAX_JSON_DEPTH}]"
        )
        _require(1 <= self.max_rule_depth <= MAX_RULE_DEPTH, "max_rule_depth", f"must be in [1, {MAX_RULE_DEPTH}]")
        _require(1 << 16 <= self.max_artifact_bytes <= 1 << 30, "max_artifact_bytes", "must be in [65536, 1073741824]")
        _require(self.cache_dir_bytes >= 1 << 20, "cache_dir_bytes", "must be at least 1048576")
        _require(self.cache_bytes >= 1 << 20, "cache_bytes", "must be at least 1048576")
        _require(0 <= self.threads <= 64, "threads", "must be in [0, 64]")
        _require(0.1 <= self.row_deadline_ms <= 10_000, "row_deadline_ms", "must be in [0.1, 10000]")
        _require(0 <= self.spin_us <= 1e6, "spin_us", "must be in [0, 1000000]")
        _require(self.log_level in ("debug", "info", "warning", "error"), "log_level", f"{self.log_level!r} is unknown")
        _require(self.log_format in ("text", "json"), "log_format", f"{self.log_format!r} is not text or json")
        host, colon, port = self.metrics_listen.rpartition(":")
        _require(
            not self.metrics_listen or bool(host and colon and port.isdecimal() and int(port) < 1 << 16),
            "metrics_listen",
            f"{self.metrics_listen!r} is not host:port",
        )

    @property
    def workers(self) -> int:
        """`compile_workers`, with 0 resolved for this machine."""
        return self.compile_workers or max(1, min(4, usable_cores() - 1))

    @property
    def compile_limits(self) -> CompileLimits:
        """What one compilation may use."""
        return CompileLimits(
            timeout_s=self.compile_timeout_s,
            memory_mb=self.compile_memory_mb,
            max_depth=self.max_grammar_depth,
            max_chain=self.max_rule_depth,
            max_artifact_bytes=self.max_artifact_bytes,
        )

    @property
    def fill_threads(self) -> int:
        """`threads`, with 0 resolved for this machine."""
        return self.threads or min(8, max(3, usable_cores() // 2))


def read(arguments: Sequence[str], environment: Mapping[str, str]) -> GrammarConfig:
    """Return the configuration from flags, environment and TOML.

    Ends the process with status 2 and a message on a wrong setting, and with status 0 on --help.
    """
    parser = argparse.ArgumentParser(
        prog="python -m grammar_service",
        allow_abbrev=False,
        description=_TEACHES,
        epilog=_CLOSING,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with any of these settings")
    settings = dataclasses.fields(GrammarConfig)
    for setting in settings:
        shown = "" if setting.default == "" else f" (default: {setting.default})"
        parser.add_argument(
            "--" + setting.name.replace("_", "-"),
            metavar=type(setting.default).__name__.upper(),
            help=setting.metadata["help"] + shown,
        )
    flags = vars(parser.parse_args(arguments))
    path = flags.pop("config") or environment.get(ENVIRONMENT_PREFIX + "CONFIG")
    try:
        values: dict[str, Any] = _from_file(path, {s.name for s in settings}) if path else {}
        for setting in settings:
            name = setting.name
            given = flags[name] if flags[name] is not None else environment.get(ENVIRONMENT_PREFIX + name.upper())
            if given is not None:
                values[name] = given
            if name in values:
                values[name] = _convert(name, values[name], type(setting.default))
        return GrammarConfig(**values)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\nTry --help.\n")


def _from_file(path: str, names: set[str]) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    table = document.get("grammar", document)
    unknown = sorted(set(table) - names)
    if unknown:
        raise ValueError(f"{path}: unknown setting {unknown[0]!r}")
    return dict(table)


def _convert(name: str, value: Any, kind: type) -> Any:
    # A file's values have types of their own; a flag or a variable is always text.
    if not isinstance(value, str) and not (type(value) is kind or (type(value) is int and kind is float)):
        raise ValueError(f"{name}: {value!r} is not {kind.__name__}")
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{name}: {value!r} is not {kind.__name__}") from None
