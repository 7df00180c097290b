"""Writes what is made from the settings of all processes: `python -m tools.configuration --write`.

These are docs/configuration.md, and the names in the schema of the Helm chart's values.

The invariant: every name, default and meaning on the page comes from the config dataclasses, and a test compares the
page with `page()` and the schema with `chart_schema()`.

Not responsible for: how settings are read (service_runtime/settings.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.transfer_config import TransferConfig
from grammar_service.config import ENVIRONMENT_PREFIX, GrammarConfig
from http_gateway.config import ENVIRONMENT_PREFIX as GATEWAY_PREFIX
from http_gateway.config import GatewayConfig
from service_runtime.settings import ENV_PREFIX, Setting, old_names_of, settings_of, variable_of
from service_runtime.shared_settings import SHARED

PAGE = Path(__file__).resolve().parents[1] / "docs/configuration.md"
CHART_SCHEMA = PAGE.parents[1] / "deploy/helm/lockstep/values.schema.json"

_SHARED = {setting.name for kind in SHARED for setting in settings_of(kind)}
_PREFIXES = ((ServerConfig, ENV_PREFIX), (GrammarConfig, ENVIRONMENT_PREFIX), (GatewayConfig, GATEWAY_PREFIX))

_SECTIONS: tuple[tuple[str, type[Any], str], ...] = (
    ("Engine process: the model and its batches", EngineConfig, ENV_PREFIX),
    ("Engine process: addresses, access, and the grammar process", ServerConfig, ENV_PREFIX),
    ("Engine process: page transfer", TransferConfig, ENV_PREFIX),
    ("Grammar process", GrammarConfig, ENVIRONMENT_PREFIX),
    ("Gateway", GatewayConfig, GATEWAY_PREFIX),
)

_HEAD = f"""\
# Configuration

`python -m tools.configuration --write` makes this page from the settings in the code, and a test compares the two.

Every setting has one name, and four places can give its value. The first place that gives one wins:

1. the command line flag, such as `--max-batch-size 8`
2. the environment variable, such as `LOCKSTEP_MAX_BATCH_SIZE=8`
3. the TOML file named by `--config` or `LOCKSTEP_CONFIG`, in which the key is the setting's name
4. the default

```toml
# lockstep.toml, for `lockstep serve --config lockstep.toml`
model = "/models/Qwen3-0.6B"
max_batch_size = 8
listen = "0.0.0.0:50051"
```

An unknown flag or TOML key is an error. An unknown environment variable has no effect. `true`, `yes`, `on` and `1` mean
true, and `false`, `no`, `off` and `0` mean false.

If a table gives an old name for a setting, the flag, the variable and the key of the old name still work in this
version, with a warning.

The engine starts its grammar process by default (`grammar = "spawn"`), and passes its own environment on to it. So the
variables in the table [Grammar process](#grammar-process) also configure a grammar process that the engine starts,
except for the settings that the engine passes as flags: `dir`, `backend`, `compile_timeout_s`, `compile_memory_mb`,
`cache_dir`, the log settings and, where the engine decides on them, `spin_us` and `compile_priority`. A grammar process
that the engine does not start (`python -m grammar_service --dir DIR`) reads its own flags, its own variables and its
own TOML file (`--config` or `{ENVIRONMENT_PREFIX}CONFIG`). That file holds the settings at the top level or in a table
`[grammar]`.

A gateway (`lockstep gateway`, see [HTTP](http.md)) also has its own settings, which may be in a table `[gateway]` of a
TOML file. A gateway that the engine starts (`http`) reads the variables in the table [Gateway](#gateway), except for
the settings that the engine passes as flags: `listen`, `engine`, `drain_timeout_s`, the log settings and, where the
engine has them, the certificate and the tokens.
"""

_SHARED_HEAD = """
## Several processes

Each process has its own value for these settings. The variables of the engine begin with `LOCKSTEP_`, those of the
grammar process with `LOCKSTEP_GRAMMAR_`, and those of the gateway with `LOCKSTEP_GATEWAY_`.

"""

_TAIL = """\

## Variables that are not settings

| variable | read by | meaning |
|---|---|---|
| `LOCKSTEP_CACHE` | engine, tools | converted models, timed CPU units, vocabularies; default `~/.cache/lockstep` |
| `LOCKSTEP_SERVER` | `generate`, `compile`, `info`, `health` | the server's address; default `127.0.0.1:50051` |
| `OTEL_*` | engine | OpenTelemetry's own variables; see [operations](operations.md#traces) |

The variables of `docker compose` are in [operations](operations.md#docker-compose).
"""

_EXAMPLES = """
examples:
  python -m tools.configuration            print the page
  python -m tools.configuration --write    write it to docs/configuration.md, and the names into the chart's schema
"""


def table(kind: type[Any], prefix: str) -> str:
    """Return the Markdown table of one config class, without what several processes have."""
    lines = ["| setting | flag | variable | default | meaning |", "|---|---|---|---|---|"]
    for setting in settings_of(kind):
        if setting.hidden or setting.name in _SHARED:
            continue
        cells = (
            f"`{setting.name}`",
            f"`{setting.flag}`",
            f"`{variable_of(setting.name, prefix)}`",
            _default(setting.default),
            _meaning(setting),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def shared_table() -> str:
    """Return the Markdown table of the settings that several processes have."""
    lines = ["| setting | flag | variables | default | meaning |", "|---|---|---|---|---|"]
    for kind in SHARED:
        prefixes = [prefix for each, prefix in _PREFIXES if issubclass(each, kind)]
        for setting in settings_of(kind):
            variables = ", ".join(f"`{variable_of(setting.name, prefix)}`" for prefix in prefixes)
            cells = (f"`{setting.name}`", f"`{setting.flag}`", variables, _default(setting.default), _meaning(setting))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the whole of docs/configuration.md."""
    sections = [f"\n## {title}\n\n{table(kind, prefix)}" for title, kind, prefix in _SECTIONS]
    return _HEAD + "".join(sections) + _SHARED_HEAD + shared_table() + _TAIL


def chart_schema() -> str:
    """Return the schema of the chart's values, in which `settings` have the names that the processes know."""
    schema = json.loads(CHART_SCHEMA.read_text())
    kinds: dict[str, tuple[type[Any], ...]] = {
        "engine": (EngineConfig, ServerConfig, TransferConfig),
        "grammar": (GrammarConfig,),
    }
    for process, classes in kinds.items():
        names = {setting.name for kind in classes for setting in settings_of(kind)}
        names |= {name for kind in classes for name in old_names_of(kind)}
        settings = schema["properties"][process]["properties"]["settings"]
        settings["properties"] = {name: {"$ref": "#/$defs/setting"} for name in sorted(names)}
    return json.dumps(schema, indent=1) + "\n"


def _default(value: Any) -> str:
    if value is None:
        return "unset"
    if value == ():
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if value != "" else "empty"


def _meaning(setting: Setting) -> str:
    text = " ".join(setting.help.split()).replace("|", "\\|")
    old = ", ".join(f"`{name}`" for name in setting.old_names)
    return f"{text} Old name: {old}." if old else text


def main() -> int:
    """Print the page, or write it with `--write`."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.configuration",
        description="Make docs/configuration.md from the settings of all processes.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--write", action="store_true", help="write the page and the schema instead of printing the page"
    )
    if parser.parse_args().write:
        PAGE.write_text(page())
        CHART_SCHEMA.write_text(chart_schema())
    else:
        sys.stdout.write(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
