"""The configuration of a grammar process: one frozen dataclass, validated once, never changed.

Filled from flags, environment and TOML under the same names (see `read`).

Not responsible for: how settings are found (service_runtime/settings.py), or anything that a request can choose.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from grammar_service.backends.registry import NAMES
from grammar_service.grammar.value import BOUNDS, MAX_JSON_DEPTH, Reading, Whitespace
from service_runtime.cores import usable_cores
from service_runtime.settings import Merged, Sources, add_flags
from service_runtime.shared_settings import LogSettings, ProbeSettings, is_host_port, require

ENVIRONMENT_PREFIX = "LOCKSTEP_GRAMMAR_"
MAX_RULE_DEPTH = 1024
"""Both libraries were seen to follow chains of this length on the stack of a compile worker."""

CACHE_BYTES = 256 << 20
"""Default size of the cache; also the bound of the grammars that are held for their matchers without a cache."""

WHITESPACE = {value.name.lower(): value for value in Whitespace}
"""The values of the setting whitespace."""

QUEUE_S = 120.0
"""Longest wait of a compilation for a worker; then it is refused. The wait does not count toward its time limit, and a
running sequence waits for as long as it takes."""

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


def _bounds(text: str) -> dict[str, int]:
    """Return the bounds in the text of the setting json_bounds. Raises ValueError."""
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        require(name in BOUNDS, "json_bounds", f"{name!r} is not one of {', '.join(BOUNDS)}")
        require(name not in found, "json_bounds", f"{name} is given twice")
        in_range = value.isdecimal() and int(value) <= BOUNDS[name]
        require(in_range, "json_bounds", f"{part!r}: {name} must be an integer in [0, {BOUNDS[name]}]")
        found[name] = int(value)
    return found


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
class GrammarConfig(LogSettings, ProbeSettings):
    """Settings of the grammar process."""

    MERGED: ClassVar = (
        Merged("json_bounds", dict.fromkeys(BOUNDS, int), lambda old: ",".join(f"{k}={v}" for k, v in old.items())),
        Merged("cache_bytes", {"cache": bool}, lambda old: CACHE_BYTES if old["cache"] else 0),
    )
    DROPPED: ClassVar = {
        "compile_threads": "a compilation has one thread; compile_workers is the number of compilations at a time",
        "compile_queue_s": f"a compilation waits at most {QUEUE_S:g} s for a worker",
    }
    """For these names see service_runtime/settings.py."""

    dir: str = ""
    """Directory of the sockets grammar.sock and segment.sock, created with mode 0700 if it is missing. Required."""
    backend: str = "llguidance"
    """Default grammar library, "llguidance" or "xgrammar"; a request may name another one."""
    compile_timeout_s: float = 5.0
    """Time limit of one compilation in its worker, in seconds; the worker is killed when the limit is reached."""
    compile_workers: int = 0
    """Number of grammars of at most 1 KiB that are compiled at the same time, per backend, in processes that are
    started ahead of need. The same number applies to grammars of up to 8 KiB, to larger ones, and to slow compilations
    of larger and of other grammars. A compilation is slow, and gives its place to the next one, when it has used more
    than 0.25 s of a core and twice what an ordinary schema needs. 0: one fewer than the usable cores, at most 4."""
    compile_priority: str = "low"
    """Priority of the compile workers: "low" (a higher nice value), or "idle" (SCHED_IDLE: they run when no other
    process needs their core; once a compilation reached its time limit and had hardly run, they are "low")."""
    compile_queue: int = 256
    """Compilations that may wait for a worker, not counting those of running sequences; one more is refused. Tenants
    share these places by weight once all are taken."""
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
    whitespace: str = "spaced"
    """White space between JSON tokens for requests that choose none: "spaced" (one space after each comma and colon, as
    Python's json.dumps writes), "compact" (none), "bounded" (at most 8 characters in a row) or "any"."""
    closed_objects: bool = False
    """Whether an object whose schema lists `properties`, and says nothing about others, may have no others; for
    requests that do not set closed_objects. False: it may have any others, as JSON Schema says. The parameters of tools
    are closed in either case."""
    strict_formats: bool = False
    """Refuse schemas with a `format` that is not known. False: as JSON Schema says, it is an annotation without effect,
    and the response has a warning."""
    json_bounds: str = ""
    """Bounds of JSON values for requests that set none, separated by commas, such as "max_string_length=200,
    max_array_items=16". The bounds are max_string_length (characters of a string, and of a name that no schema lists),
    max_array_items, max_number_digits (digits before the decimal point, and after it, where at most 9 are allowed; such
    numbers have no exponent) and max_whitespace (white space characters in a row). They hold in addition to the bounds
    of a schema. Empty: none."""
    cache_bytes: int = CACHE_BYTES
    """Size limit of the compiled grammars in memory, in bytes; the least recently used is evicted first. 0: each
    request's grammar is compiled anew, unless an equal one is being compiled, and cache_dir is not used."""
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

    def __post_init__(self) -> None:
        require(bool(self.dir), "dir", "is required")
        require(self.backend in NAMES, "backend", f"{self.backend!r} is not one of {', '.join(NAMES)}")
        require(0 < self.compile_timeout_s <= 600, "compile_timeout_s", "must be in (0, 600]")
        require(0 <= self.compile_workers <= 64, "compile_workers", "must be in [0, 64]")
        priority = self.compile_priority
        require(priority in ("low", "idle"), "compile_priority", f"{priority!r} is not low or idle")
        require(self.compile_queue >= 1, "compile_queue", "must be at least 1")
        require(self.compile_memory_mb >= 64, "compile_memory_mb", "must be at least 64")
        require(1 <= self.max_grammar_bytes <= 64 << 20, "max_grammar_bytes", "must be in [1, 67108864]")
        require(1 <= self.max_grammar_depth <= MAX_JSON_DEPTH, "max_grammar_depth", f"must be in [1, {MAX_JSON_DEPTH}]")
        require(1 <= self.max_rule_depth <= MAX_RULE_DEPTH, "max_rule_depth", f"must be in [1, {MAX_RULE_DEPTH}]")
        require(1 << 16 <= self.max_artifact_bytes <= 1 << 30, "max_artifact_bytes", "must be in [65536, 1073741824]")
        policies = ", ".join(WHITESPACE)
        require(self.whitespace in WHITESPACE, "whitespace", f"{self.whitespace!r} is not one of {policies}")
        _bounds(self.json_bounds)
        require(self.cache_dir_bytes >= 1 << 20, "cache_dir_bytes", "must be at least 1048576")
        require(self.cache_bytes == 0 or self.cache_bytes >= 1 << 20, "cache_bytes", "must be 0 or at least 1048576")
        require(0 <= self.threads <= 64, "threads", "must be in [0, 64]")
        require(0.1 <= self.row_deadline_ms <= 10_000, "row_deadline_ms", "must be in [0.1, 10000]")
        require(0 <= self.spin_us <= 1e6, "spin_us", "must be in [0, 1000000]")
        self.check_logs()
        self.check_metrics()
        known = not self.health_listen or is_host_port(self.health_listen)
        require(known, "health_listen", f"{self.health_listen!r} is not host:port")

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
    def default_whitespace(self) -> Whitespace:
        """`whitespace`."""
        return WHITESPACE[self.whitespace]

    @property
    def answer_defaults(self) -> str:
        """The settings that say which answers a grammar has where a request leaves it open, as one line."""
        names = ("whitespace", "closed_objects", "strict_formats", "json_bounds")
        return " ".join(f"{name}={getattr(self, name)}" for name in names).lower()

    @property
    def reading(self) -> Reading:
        """How schemas are read where the request says nothing."""
        bounds: dict[str, Any] = _bounds(self.json_bounds)
        return Reading(strict_formats=self.strict_formats, **bounds)

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
