"""The command line: `lockstep serve`, `gateway`, `generate`, `compile`, `info`, `health`, `demo`.

The invariant: answers go to stdout and everything else to stderr, and the exit status says how the command ended. The
client commands do not load the model's libraries.

Not responsible for: the work behind a command (server.py, client.py, demo.py), or the flags of a request
(request_flags.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.cli.client import Access, Client, access_of, add_access_flags
from gpu_engine.cli.request_flags import (
    GRAMMAR_FLAGS,
    add_grammar_flags,
    add_request_flags,
    build_grammar,
    build_request,
    seconds,
)
from gpu_engine.cli.terminal import grammar_cost, loading_progress, summary
from gpu_engine.ops.installation import DISTRIBUTION, installed_version
from gpu_engine.ops.parent import stop_with_stdin
from protos.engine.v1 import engine_pb2 as pb
from service_runtime.logs import configure as configure_logs
from service_runtime.logs import json_line
from service_runtime.settings import Sources, add_flags

log = logging.getLogger(__name__)

OK, FAILED, USAGE, NOT_COMPLETE, INTERRUPTED = 0, 1, 2, 3, 130
INCOMPLETE = frozenset({pb.FINISH_REASON_ABORTED, pb.FINISH_REASON_GRAMMAR_INCOMPLETE, pb.FINISH_REASON_GRAMMAR_ERROR})

_TOP = """\
Lockstep: a text generation server with guided decoding (an answer that fits a grammar) and speculative decoding
(several tokens per step). `python -m gpu_engine` is the same command.

Start here:
  lockstep demo                        one guided answer from the embedded model; nothing to prepare
  lockstep serve                       a server on 127.0.0.1:50051
  lockstep generate --chat "Hello"     one request to that server
  lockstep COMMAND --help              the flags of a command, with examples
"""

_SERVE = """\
Run a server. Every setting is a flag, an environment variable LOCKSTEP_<NAME> and a key of the TOML file named with
--config. A flag beats the environment, which beats the file, which beats the default.

Examples:
  lockstep serve                                       the embedded model, with a grammar process of its own
  lockstep serve --model /models/Qwen3-0.6B --max-batch-size 8 --max-model-len 4096
  lockstep serve --device cpu --num-threads 4          on the CPU, though there is a GPU
  lockstep serve --listen unix:/run/lockstep.sock      on a unix socket
  lockstep serve --http 127.0.0.1:8000                 with OpenAI's HTTP API beside gRPC
  lockstep serve --grammar connect --grammar-dir /run/grammar   with a grammar process that runs already
  lockstep serve --config lockstep.toml                settings by name, such as max_batch_size = 8

Exit status: 0 after SIGTERM, SIGINT or SIGHUP; 1 the server cannot start or lost its device; 2 wrong usage.
"""

_GENERATE = """\
Send one request to a running server and stream the answer to stdout. A line with tokens and times goes to stderr.

Examples:
  lockstep generate --chat "Name three rivers." --temperature 0
  lockstep generate --chat "Describe Paris." --schema city.json     an answer that fits a JSON Schema
  lockstep generate --chat "Is 7 a prime?" --choice yes --choice no
  lockstep generate --prompt "The date is " --regex '[0-9]{4}-[0-9]{2}-[0-9]{2}'
  cat letter.txt | lockstep generate --max-tokens 200
  lockstep generate --server gpu1:50051 --tls-ca ca.crt --token-file token --chat "Hello"

Exit status: 0 the answer is complete or reached --max-tokens; 1 the server refused or failed; 2 wrong usage;
3 the answer was cut before its grammar was satisfied, or aborted; 130 interrupted.
"""

_COMPILE = """\
Compile a grammar on a running server ahead of time: its id goes to stdout, its cost and warnings to stderr.

Examples:
  lockstep compile --schema city.json
  lockstep generate --chat "Describe Paris." --grammar-id "$(lockstep compile --schema city.json)"
  lockstep compile --lark query.lark --backend auto       with the first library that enforces all of it

Exit status: 0 the grammar compiled; 1 the server refused it, with the reason; 2 wrong usage.
"""

_INFO = """\
Show the model, the limits and the counters of a running server.

Examples:
  lockstep info
  lockstep info --server gpu1:50051 --tls-ca ca.crt

Exit status: 0 the server answered; 1 it did not, or refused; 2 wrong usage.
"""

_HEALTH = """\
Ask a server whether it serves; for health checks and scripts.

Examples:
  lockstep health
  lockstep health --server unix:/tmp/health.sock    the address of the server's --health-listen

Exit status: 0 it serves; 1 it does not, or does not answer; 2 wrong usage.
"""

_DEMO = """\
Start a server with the embedded model, ask it to extract facts as JSON under a schema, and stream the answer. Then
check the answer with an independent JSON Schema validator, and ask again without speculation to compare the speed.

Examples:
  lockstep demo
  lockstep demo --drafter eagle3             with the EAGLE-3 head of the embedded model

Takes the settings of `lockstep serve`. Exit status: 0 the answer fits the schema; 1 it does not, or the server cannot
start; 2 wrong usage.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["gateway"]:
        # The gateway is a package of its own, which reads its own flags.
        os.execv(sys.executable, [sys.executable, "-m", "http_gateway", *words[1:]])
    parser = _parser()
    flags = parser.parse_args(words)
    try:
        return int(flags.run(flags))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout has ended (`| head`). Python would report that again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("lockstep", description=_TOP, formatter_class=_Formatter)
    parser.add_argument("--version", action="version", version=f"{DISTRIBUTION} {installed_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    serve = commands.add_parser(
        "serve", help="run a server", usage="%(prog)s [settings]", description=_SERVE, formatter_class=_Formatter
    )
    demo = commands.add_parser(
        "demo", help="see one guided answer", usage="%(prog)s [settings]", description=_DEMO, formatter_class=_Formatter
    )
    for command, run in ((serve, _run_serve), (demo, _run_demo)):
        add_flags(command, [EngineConfig, ServerConfig])
        command.set_defaults(run=run)
    commands.add_parser("gateway", help="serve OpenAI's HTTP API in front of running servers", add_help=False)
    generate = commands.add_parser(
        "generate", help="send a request", usage="%(prog)s [flags]", description=_GENERATE, formatter_class=_Formatter
    )
    add_request_flags(generate)
    generate.add_argument("--timeout", type=seconds, metavar="SECONDS", help="end the call after this time")
    generate.set_defaults(run=_run_generate)
    ahead = commands.add_parser(
        "compile", help="compile a grammar ahead of time", description=_COMPILE, formatter_class=_Formatter
    )
    add_grammar_flags(ahead, "The grammar to compile; exactly one is required.")
    ahead.add_argument("--timeout", type=seconds, metavar="SECONDS", help="end the call after this time")
    ahead.set_defaults(run=_run_compile)
    info = commands.add_parser("info", help="describe a server", description=_INFO, formatter_class=_Formatter)
    info.set_defaults(run=_run_info)
    health = commands.add_parser(
        "health", help="ask a server whether it serves", description=_HEALTH, formatter_class=_Formatter
    )
    health.add_argument(
        "--timeout", type=seconds, metavar="SECONDS", default=5.0, help="longest wait for an answer (default: 5)"
    )
    health.set_defaults(run=_run_health)
    for command in (generate, ahead, info, health):
        add_access_flags(command)
    return parser


class _Parser(argparse.ArgumentParser):
    """Refuses abbreviated flags: an abbreviation would change its meaning when a longer flag is added."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False} | more)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the examples."""


def _configure(flags: argparse.Namespace, default_level: str) -> tuple[EngineConfig, ServerConfig]:
    """Return the settings, with logging set up as they say. Raises ValueError for a wrong setting."""
    sources = Sources(flags, os.environ, [EngineConfig, ServerConfig])
    engine_config, server_config = sources.fill(EngineConfig), sources.fill(ServerConfig)
    level = server_config.log_level or default_level
    configure_logs(level, server_config.log_format, forwarded_loggers=("grammar_service", "http_gateway"))
    for warning in sources.warnings:
        log.warning("%s", warning)
    return engine_config, server_config


def _run_serve(flags: argparse.Namespace) -> int:
    try:
        engine_config, server_config = _configure(flags, "info")
    except ValueError as error:
        return _usage(error)
    as_json = server_config.log_format == "json"
    if server_config.stop_with_stdin:
        stop_with_stdin()
    import uvloop

    from gpu_engine.front.port.listening import ServerError
    from gpu_engine.server import Server, serve

    with contextlib.ExitStack() as stack:
        # A progress bar is not JSON.
        progress = None if as_json else stack.enter_context(loading_progress())

        def ready(server: Server) -> None:
            stack.close()
            line = f"ready: {server.model.name} on {server.address}"
            line += f" and http://{server.http_address}" if server.http_address else ""
            print(json_line(__name__, logging.INFO, line) if as_json else line, flush=True)

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve(engine_config, server_config, progress, ready))
        except (ServerError, OSError, ValueError, RuntimeError) as error:
            return _failed(error, as_json=as_json)
    return OK


def _run_demo(flags: argparse.Namespace) -> int:
    try:
        engine_config, server_config = _configure(flags, "warning")
    except ValueError as error:
        return _usage(error)
    from gpu_engine.cli.demo import run_demo
    from gpu_engine.front.port.listening import ServerError

    try:
        return asyncio.run(run_demo(engine_config, server_config))
    except grpc.aio.AioRpcError as error:
        return _refused("the demo's server", error)
    except (ServerError, OSError, ValueError, RuntimeError) as error:
        return _failed(error)


def _run_generate(flags: argparse.Namespace) -> int:
    try:
        request, access = build_request(flags), access_of(flags)
    except (OSError, ValueError) as error:
        return _usage(error)
    return asyncio.run(_generate(flags.server, access, request, flags.timeout))


async def _generate(address: str, access: Access, request: pb.GenerateRequest, timeout_s: float | None) -> int:
    status = FAILED
    try:
        async with (
            Client(address, access) as client,
            contextlib.aclosing(client.generate(request, timeout_s=timeout_s)) as responses,
        ):
            async for response in responses:
                print(response.text, end="", flush=True)
                if response.finish_reason:
                    print()
                    print(summary(response), file=sys.stderr)
                    status = NOT_COMPLETE if response.finish_reason in INCOMPLETE else OK
    except grpc.aio.AioRpcError as error:
        return _refused(address, error)
    return status


def _run_compile(flags: argparse.Namespace) -> int:
    try:
        grammar, access = build_grammar(flags), access_of(flags)
        if grammar is None:
            raise ValueError(f"a grammar is required: {', '.join(GRAMMAR_FLAGS)}")
    except (OSError, ValueError) as error:
        return _usage(error)
    return asyncio.run(_compile(flags.server, access, grammar, flags.timeout))


async def _compile(address: str, access: Access, grammar: pb.Grammar, timeout_s: float | None) -> int:
    try:
        async with Client(address, access) as client:
            response = await client.compile(grammar, timeout_s=timeout_s)
    except grpc.aio.AioRpcError as error:
        return _refused(address, error)
    print(response.grammar_id)
    print(grammar_cost(response), file=sys.stderr)
    for warning in response.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return OK


def _run_info(flags: argparse.Namespace) -> int:
    try:
        access = access_of(flags)
    except ValueError as error:
        return _usage(error)
    return asyncio.run(_info(flags.server, access))


async def _info(address: str, access: Access) -> int:
    try:
        async with Client(address, access) as client:
            info, stats = await client.info(), await client.stats()
    except grpc.aio.AioRpcError as error:
        return _refused(address, error)
    for title, message in (("model", info), ("stats", stats)):
        print(title)
        for field in message.DESCRIPTOR.fields:
            print(f"  {field.name:<24} {_shown(message, field.name)}")
    return OK


def _run_health(flags: argparse.Namespace) -> int:
    try:
        access = access_of(flags)
    except ValueError as error:
        return _usage(error)
    status = health_of(flags.server, access, flags.timeout)
    print(f"{flags.server}: {status}")
    return OK if status == "SERVING" else FAILED


def health_of(address: str, access: Access, timeout_s: float) -> str:
    """Return "SERVING", "NOT_SERVING", or the reason for no answer."""
    with grpc.secure_channel(address, access.tls) if access.tls else grpc.insecure_channel(address) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s, metadata=access.metadata
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def _shown(message: pb.GetModelInfoResponse | pb.GetStatsResponse, name: str) -> str:
    value = getattr(message, name)
    if name == "backends":
        return ", ".join(pb.Backend.Name(backend).removeprefix("BACKEND_").lower() for backend in value) or "none"
    if hasattr(value, "items"):
        return ", ".join(f"{key}: {count}" for key, count in sorted(value.items())) or "none"
    if isinstance(value, float):
        return f"{value:.1f}"
    return str(list(value)) if hasattr(value, "extend") else str(value)


def _refused(address: str, error: grpc.aio.AioRpcError) -> int:
    print(f"{address}: {error.code().name}: {error.details()}", file=sys.stderr)
    return FAILED


def _usage(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    return USAGE


def _failed(error: Exception, *, as_json: bool = False) -> int:
    print(json_line(__name__, logging.ERROR, str(error)) if as_json else f"error: {error}", file=sys.stderr)
    return FAILED
