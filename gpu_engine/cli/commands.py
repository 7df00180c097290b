"""The command line: its commands with their flags and their help, and the two that run a server, `serve` and `demo`.

The invariant: answers go to stdout and everything else to stderr, and the exit status says how the command ended. The
client commands do not load the model's libraries.

Not responsible for: the commands that ask a server (see asking.py, chat.py), or the flags of a request (see
request_flags.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import grpc

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.transfer_config import TransferConfig
from gpu_engine.cli.access_flags import add_access_flags
from gpu_engine.cli.asking import (
    FAILED,
    INTERRUPTED,
    NOT_COMPLETE,
    OK,
    USAGE,
    refused,
    run_adapters,
    run_compile,
    run_detokenize,
    run_drafter,
    run_generate,
    run_health,
    run_info,
    run_tokenize,
    usage,
)
from gpu_engine.cli.chat import run_chat
from gpu_engine.cli.completion import SHELLS, run_completion
from gpu_engine.cli.grammar_flags import add_grammar_flags
from gpu_engine.cli.inputs import text
from gpu_engine.cli.models import run_list, run_pull, run_rm
from gpu_engine.cli.parser import Commands, Parser
from gpu_engine.cli.receipts import run_receipts, run_replay
from gpu_engine.cli.request_flags import add_chat_flags, add_request_flags, add_sampling_flags, seconds
from gpu_engine.cli.run import run_once
from gpu_engine.cli.terminal import loading_progress
from gpu_engine.ops.installation import DISTRIBUTION, installed_version
from service_runtime.logs import configure as configure_logs
from service_runtime.logs import json_line
from service_runtime.parent_death import stop_with_stdin
from service_runtime.settings import Sources, add_flags

log = logging.getLogger(__name__)

__all__ = ["FAILED", "INTERRUPTED", "NOT_COMPLETE", "OK", "USAGE", "main"]

_TIMEOUT = "end the call after this time (default: never)"

_TOP = """\
Lockstep: a text generation server with guided decoding (an answer that fits a grammar) and speculative decoding
(several tokens per step). `python -m gpu_engine` is the same command.

Start here:
  lockstep run "Name three rivers."    one answer from the embedded model; nothing to prepare
  lockstep demo                        one guided answer, checked and timed
  lockstep serve                       a server on 127.0.0.1:50051
  lockstep chat                        a conversation with it
  lockstep run OWNER/NAME              a conversation with a model of Hugging Face's hub, without a server of yours
  lockstep list                        the models that this machine has
  lockstep generate --chat "Hello"     one request to it
  lockstep COMMAND --help              the flags of a command, with examples
"""

_SERVE = """\
Run a server. Every setting is a flag, an environment variable LOCKSTEP_<NAME> and a key of the TOML file named with
--config. A flag beats the environment, which beats the file, which beats the default.

Examples:
  lockstep serve                                       the embedded model, and a grammar process for it
  lockstep serve --model /models/Qwen3-0.6B --max-batch-size 8 --max-model-len 4096
  lockstep serve --device cpu --num-threads 4          on the CPU, though there is a GPU
  lockstep serve --listen unix:/run/lockstep.sock      on a unix socket
  lockstep serve --http 127.0.0.1:8000                 with OpenAI's HTTP API as well as gRPC
  lockstep serve --grammar connect --grammar-dir /run/grammar   with a grammar process that runs already
  lockstep serve --config lockstep.toml                settings by name, such as max_batch_size = 8

Exit status: 0 after SIGTERM, SIGINT or SIGHUP; 1 the server cannot start or lost its device; 2 wrong usage.
"""

_RUN = """\
Print one answer of a model, or chat with it, without a server: this command starts one of its own, and ends it. MODEL
is `embedded` (the default), a directory, a GGUF file or a name on Hugging Face's hub, as for --model of `lockstep
serve`. One word is the prompt, unless it is the name of a model; then the prompt comes from --file or from stdin, and
in a terminal a chat begins, with the commands of `lockstep chat`. Settings of the server are variables LOCKSTEP_<NAME>,
as for `lockstep serve`.

Examples:
  lockstep run "Name three rivers."
  lockstep run unsloth/Qwen3-4B-GGUF:Q4_K_M       a chat
  lockstep run embedded "A year, as JSON." --schema '{"type": "integer"}' --max-tokens 20 --temperature 0
  lockstep run /models/Qwen3-0.6B "Is Paris in France?" --choice yes --choice no
  lockstep run "Which dates does the letter have?" --file letter.txt --regex '[0-9]{4}(, [0-9]{4})*'
  lockstep run --system "Answer in French." <question.txt >answer.txt

Only the answer goes to stdout. A line with tokens and times goes to stderr if that is a terminal, or the answer was
cut. Exit status: 0 the model ended its answer; 1 the server cannot start, refused or failed; 2 wrong usage; 3 the
answer was cut, or led to its end, by --max-tokens or the context, or was cut because it repeated itself, unless
--allow-cut is given; 130 interrupted.
"""

_GENERATE = """\
Send one request to a running server and stream the answer to stdout. A line with tokens and times goes to stderr.

Examples:
  lockstep generate --chat "Name three rivers." --temperature 0
  lockstep generate --chat "Describe Paris." --schema city.json --max-tokens 128 --temperature 0
  lockstep generate --chat "Is Paris in France?" --choice yes --choice no --temperature 0
  lockstep generate --prompt "The date is " --regex '[0-9]{4}-[0-9]{2}-[0-9]{2}'
  cat letter.txt | lockstep generate --max-tokens 200
  lockstep generate --prompt "1, 2, " --max-tokens 8 --n 3 --logprobs 2
  lockstep generate --server gpu1:50051 --tls-ca ca.crt --token-file token --chat "Hello"

Exit status: 0 the answer is complete or reached --max-tokens; 1 the server refused or failed; 2 wrong usage;
3 the answer was cut before its grammar was satisfied, or aborted; 130 interrupted.
"""

_CHAT = """\
Chat with the model of a running server. The conversation is sent with every question; /help lists the commands.

Examples:
  lockstep chat
  lockstep chat --system "Answer in one sentence." --temperature 0.7 --max-tokens 300
  lockstep chat --schema city.json          every answer fits the JSON Schema in your file
  lockstep chat --file letter.txt           the file's text goes with the first question

In a terminal, the lines that you enter are kept in ~/.local/state/lockstep/chat_history (below XDG_STATE_HOME, if that
is set) unless --no-history is given. Control-C ends a running answer, Control-D the conversation. Without a terminal
each line of stdin is a question, and a command that fails, such as /file, ends the conversation. Exit status: 0; 1 the
last question was not answered, a command failed without a terminal, or no server answered; 2 wrong usage.
"""

_TOKENIZE = """\
Print the token ids of a text, as a request would have them, separated by commas.

Examples:
  lockstep tokenize --text "Hello world"
  lockstep tokenize --chat "Hello" --with-texts      with the chat template's own tokens
  lockstep tokenize <letter.txt

Exit status: 0 the server answered; 1 it did not, or refused; 2 wrong usage.
"""

_DETOKENIZE = """\
Print the text of token ids.

Examples:
  lockstep detokenize --ids 504,3365,282
  lockstep tokenize --text "Hello world" | lockstep detokenize

Exit status: 0 the server answered; 1 it did not, or refused; 2 wrong usage.
"""

_COMPILE = """\
Compile a grammar on a running server ahead of time: its id goes to stdout, its cost and warnings to stderr.

Examples:
  lockstep compile --schema city.json                     a file of yours with a JSON Schema
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

_ADAPTERS = """\
List the adapters of a running server; with a flag, load or unload one first.

Examples:
  lockstep adapters
  lockstep adapters --load sql=/adapters/sql     below an --adapter-dir of the server
  lockstep generate --prompt "SELECT" --lora sql
  lockstep adapters --unload sql

Exit status: 0 the server answered; 1 it did not, or refused; 2 wrong usage.
"""

_DRAFTER = """\
Show the drafter of a running server and its draft model; with --exchange, load another model first. Requests that run
go on meanwhile, and have the same tokens.

Examples:
  lockstep drafter
  lockstep drafter --exchange /models/SmolLM2-135M     below a --draft-dir of the server

Exit status: 0 the server answered; 1 it did not, or refused; 2 wrong usage.
"""

_RECEIPTS = """\
Show the public key that checks receipts, or verify receipts. `key` prints it as a JSON Web Key: of a PEM file, or
without FILE of the running server. `verify` checks the signature, with --key without any server, and with the request
its digests as well.

Examples:
  lockstep generate --prompt "1, 2, " --max-tokens 8 --receipt answer.json
  lockstep receipts key >server.jwk
  lockstep receipts verify answer.json --key server.jwk      without a server
  lockstep receipts verify answer.json                       with the key of the running server

Exit status: 0 the receipts are valid; 1 one is not; 2 wrong usage, or no server answered.
"""

_REPLAY = """\
Send the request of a receipt to a running server again, with the same nonce and seed, and compare the two receipts: say
that they are equal, or which fields differ, why they may, and at which token the answers differ.

Examples:
  lockstep replay answer.json                                       a file of `lockstep generate --receipt`
  lockstep replay receipt.txt --request request.json --key server.jwk --server other:50051
  lockstep replay receipt.txt --request body.json --http http://127.0.0.1:8000 --key server.jwk

Exit status: 0 equal; 1 different, or a receipt is not valid; 2 wrong usage, or no server answered.
"""

_HEALTH = """\
Ask a server whether it serves; for health checks and scripts.

Examples:
  lockstep health
  lockstep health --server unix:/tmp/health.sock    the address of the server's --health-listen

Exit status: 0 it serves; 1 it does not, or does not answer; 2 wrong usage.
"""

_COMPLETION = """\
Print the script that lets a shell complete commands, flags and their values. It needs shtab, which the extra `engine`
brings. The folder of the script may have to be made first, with `mkdir -p`.

Examples:
  lockstep completion bash >~/.local/share/bash-completion/completions/lockstep
  lockstep completion zsh >~/.zfunc/_lockstep                in a folder of your fpath
  lockstep completion fish >~/.config/fish/completions/lockstep.fish

Exit status: 0 the script was printed; 1 shtab is missing; 2 wrong usage.
"""

_PULL = """\
Fetch a model of Hugging Face's hub into the cache of this machine, and print where it is. NAME is owner/name, or
owner/name:KIND for one GGUF file of a repository. What the cache has is not fetched again, and a download that was
interrupted goes on where it ended. HF_HUB_CACHE names the cache and HF_ENDPOINT the hub.

Examples:
  lockstep pull Qwen/Qwen3-0.6B
  lockstep pull unsloth/Qwen3-4B-GGUF:Q4_K_M

Exit status: 0 the model is there; 1 it cannot be fetched; 2 wrong usage.
"""

_LIST = """\
List what is in the cache of huggingface_hub, also what other programs fetched, and what --model does not take.

Examples:
  lockstep list

Exit status: 0.
"""

_RM = """\
Remove models from the cache of huggingface_hub, which other programs share. owner/name removes the whole repository,
owner/name:KIND one GGUF file of it.

Examples:
  lockstep rm unsloth/Qwen3-4B-GGUF:Q4_K_M

Exit status: 0 removed; 1 it is not there, or cannot be removed; 2 wrong usage.
"""

_DEMO = """\
Start a server with the embedded model, ask it to extract facts as JSON under a schema, and stream the answer. Then
check the answer with an independent JSON Schema validator, and ask again without speculation to compare the speed.

Examples:
  lockstep demo
  lockstep demo --grammar-backend xgrammar   with the other grammar library

Takes the settings of `lockstep serve`. Exit status: 0 the answer fits the schema; 1 it does not, or the server cannot
start; 2 wrong usage.
"""


_MAIN_SETTINGS = (
    *("--config", "--model", "--served-model-name", "--dtype", "--quantization", "--device", "--num-threads"),
    *("--max-batch-size", "--max-model-len", "--kv-cache-tokens", "--drafter", "--draft-model"),
    *("--num-draft-tokens", "--adapter", "--listen", "--http", "--auth-token-file", "--grammar-backend"),
    *("--metrics-listen", "--log-level", "--log-format"),
)
"""What most servers set: the flags of the short help."""


def main(arguments: Sequence[str] | None = None, internal: Mapping[str, Any] | None = None) -> int:
    """Run a command and return the exit status. `internal`: fields of the config classes that are no settings."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["gateway"]:
        # The gateway is another package, which reads its own flags.
        os.execv(sys.executable, [sys.executable, "-m", "http_gateway", *words[1:]])
    parser = _parser()
    flags = parser.parse_args(words)
    flags.internal = internal or {}
    try:
        return int(flags.run(flags))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout has ended (`| head`). Python would report that again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


@cache
def _parser() -> Parser:
    version = f"{DISTRIBUTION} {installed_version()}"
    parser = Parser("lockstep", description=_TOP)
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_commands(version)
    serve = commands.add("serve", help="run a server", usage="%(prog)s [settings]", description=_SERVE)
    demo = commands.add("demo", help="see one guided answer", usage="%(prog)s [settings]", description=_DEMO)
    for command, run in ((serve, _run_serve), (demo, _run_demo)):
        add_flags(command, [EngineConfig, ServerConfig, TransferConfig])
        command.shorten_help(_MAIN_SETTINGS)
        command.set_defaults(run=run)
    _add_run(commands)
    _add_models(commands)
    commands.add("gateway", help="serve OpenAI's HTTP API for running servers", add_help=False)
    _add_generate(commands)
    chat = commands.add("chat", help="chat in the terminal", usage="%(prog)s [flags]", description=_CHAT)
    add_chat_flags(chat)
    chat.add_argument(
        "-f",
        "--file",
        metavar="FILE",
        action="append",
        default=[],
        help="text that goes with the first question; may be repeated",
    )
    chat.add_argument(
        "--history",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the lines that you enter for later chats",
    )
    chat.set_defaults(run=run_chat)
    add_grammar_flags(chat, "The form of each answer; without a flag here it is free text.")
    add_sampling_flags(chat)
    ahead = commands.add("compile", help="compile a grammar ahead of time", description=_COMPILE)
    add_grammar_flags(ahead, "The grammar to compile; exactly one is required.")
    ahead.add_argument("--timeout", type=seconds, metavar="SECONDS", help=_TIMEOUT)
    ahead.set_defaults(run=run_compile)
    tokenizing = _add_tokenizing(commands)
    info = commands.add("info", help="describe a server", description=_INFO)
    info.set_defaults(run=run_info)
    adapters = _add_adapters(commands)
    drafter = commands.add("drafter", help="show and exchange the draft model", description=_DRAFTER)
    drafter.add_argument("--exchange", type=text, metavar="PATH", help="load a draft model from a path of the server")
    drafter.set_defaults(run=run_drafter)
    receipts = _add_receipts(commands)
    health = commands.add("health", help="ask a server whether it serves", description=_HEALTH)
    health.add_argument(
        "--timeout", type=seconds, metavar="SECONDS", default=5.0, help="longest wait for an answer (default: 5)"
    )
    health.set_defaults(run=run_health)
    completion = commands.add("completion", help="completion for bash, zsh or fish", description=_COMPLETION)
    completion.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    completion.set_defaults(run=partial(run_completion, parser))
    for command in (chat, ahead, *tokenizing, info, adapters, drafter, *receipts, health):
        add_access_flags(command)
    return parser


def _add_run(commands: Commands) -> None:
    once = commands.add(
        "run", help="one answer or a chat without a server", usage="%(prog)s [MODEL] [PROMPT] [flags]", description=_RUN
    )
    once.add_words("words", type=text, metavar="[MODEL] PROMPT", help="the model, and the prompt")
    once.add_argument(
        "-f",
        "--file",
        metavar="FILE",
        action="append",
        default=[],
        help="text that follows the prompt, or is the prompt; -: stdin; may be repeated",
    )
    once.add_argument("--raw", action="store_true", help="the prompt as it is, without the chat template")
    once.add_argument(
        "--allow-cut",
        action="store_true",
        help="an answer that --max-tokens, the context or its repetition cut is no failure",
    )
    _add_output_flags(once)
    add_chat_flags(once)
    add_grammar_flags(once)
    add_sampling_flags(once)
    once.set_defaults(run=run_once)


def _add_models(commands: Commands) -> None:
    pull = commands.add("pull", help="fetch a model of the hub", description=_PULL)
    pull.add_argument("name", type=text, metavar="NAME", help="owner/name, or owner/name:KIND for a GGUF file")
    pull.add_argument(
        "--revision", type=text, metavar="REVISION", default="", help="branch, tag or commit (default: main)"
    )
    pull.add_argument(
        "--hf-token-file", metavar="FILE", default="", help="file with a token for private and gated models"
    )
    pull.set_defaults(run=run_pull)
    listing = commands.add("list", help="list the models of this machine", description=_LIST)
    listing.set_defaults(run=run_list)
    remove = commands.add("rm", help="remove models from this machine", description=_RM)
    remove.add_argument("names", type=text, nargs="+", metavar="NAME", help="as `lockstep list` shows it")
    remove.set_defaults(run=run_rm)


def _add_output_flags(parser: Parser) -> None:
    # What generate and run have in common besides the request.
    parser.add_argument(
        "--output",
        choices=("text", "json"),
        default="text",
        help="json: each response of the API as a line of JSON (default: text)",
    )
    parser.add_argument("--timeout", type=seconds, metavar="SECONDS", help=_TIMEOUT)


def _add_generate(commands: Commands) -> None:
    generate = commands.add("generate", help="send a request", usage="%(prog)s [flags]", description=_GENERATE)
    add_request_flags(generate)
    _add_output_flags(generate)
    generate.add_argument(
        "--receipt", metavar="FILE", help="ask for a signed receipt, and write it with the request to FILE, for replay"
    )
    generate.set_defaults(run=run_generate)
    add_access_flags(generate)


def _add_receipts(commands: Commands) -> list[Parser]:
    replay = commands.add("replay", help="generate the answer of a receipt again", description=_REPLAY)
    replay.add_argument("receipt", metavar="RECEIPT", help="a file of `lockstep generate --receipt`, or with receipts")
    replay.add_argument("--timeout", type=seconds, metavar="SECONDS", help=_TIMEOUT)
    replay.add_argument(
        "--http",
        type=text,
        metavar="URL",
        help="with a body of the HTTP API as --request: send it there, not over gRPC",
    )
    replay.set_defaults(run=run_replay)
    receipts = commands.add("receipts", help="show the key of receipts, or verify one", description=_RECEIPTS)
    receipts.add_argument("action", choices=("key", "verify"), metavar="ACTION", help="key or verify")
    receipts.add_argument("file", nargs="?", metavar="FILE", help="a file with a key, or with receipts")
    receipts.set_defaults(run=run_receipts)
    for command in (replay, receipts):
        command.add_argument(
            "--request",
            metavar="FILE",
            help="the request as JSON, with its nonce: a GenerateRequest, or for replay a body of the HTTP API",
        )
        command.add_argument(
            "--key",
            metavar="FILE",
            help="the public key of the receipt, as a JSON Web Key or in PEM (default: the server's)",
        )
    return [replay, receipts]


def _add_adapters(commands: Commands) -> Parser:
    adapters = commands.add("adapters", help="list, load and unload adapters", description=_ADAPTERS)
    change = adapters.add_mutually_exclusive_group()
    change.add_argument("--load", type=text, metavar="NAME=DIR", help="load an adapter from a directory of the server")
    change.add_argument("--unload", type=text, metavar="NAME", help="unload it when its last request has ended")
    adapters.set_defaults(run=run_adapters)
    return adapters


def _add_tokenizing(commands: Commands) -> list[Parser]:
    tokenize = commands.add("tokenize", help="turn text into token ids", description=_TOKENIZE)
    prompt = tokenize.add_mutually_exclusive_group()
    prompt.add_argument("--text", type=text, metavar="TEXT", help="plain text; without a flag here, stdin is read")
    prompt.add_argument("--chat", type=text, metavar="TEXT", help="a user message, in the model's chat template")
    prompt.add_argument(
        "--messages", metavar="FILE", help="a conversation: a JSON list of objects with role and content"
    )
    tokenize.add_argument("--no-special-tokens", action="store_true", help="with --text: add no special tokens")
    tokenize.add_argument("--with-texts", action="store_true", help="a line per token, with its text")
    tokenize.set_defaults(run=run_tokenize)
    detokenize = commands.add("detokenize", help="turn token ids into text", description=_DETOKENIZE)
    detokenize.add_argument("--ids", type=text, metavar="IDS", help="separated by commas; without it, stdin is read")
    detokenize.add_argument("--skip-special-tokens", action="store_true", help="leave special tokens out")
    detokenize.set_defaults(run=run_detokenize)
    return [tokenize, detokenize]


def _configure(flags: argparse.Namespace, default_level: str) -> tuple[EngineConfig, ServerConfig]:
    """Return the settings, with logging set up as they say. Raises ValueError for a wrong setting."""
    sources = Sources(
        flags,
        os.environ,
        [EngineConfig, ServerConfig, TransferConfig],
        others=("LOCKSTEP_GRAMMAR_", "LOCKSTEP_GATEWAY_"),
    )
    transfer = sources.fill(TransferConfig)
    engine_config = sources.fill(EngineConfig, {**flags.internal, "transfer": transfer})
    server_config = sources.fill(ServerConfig, flags.internal)
    level = server_config.log_level or default_level
    configure_logs(level, server_config.log_format, forwarded_loggers=("grammar_service", "http_gateway"))
    for warning in sources.warnings:
        log.warning("%s", warning)
    return engine_config, server_config


def _run_serve(flags: argparse.Namespace) -> int:
    try:
        engine_config, server_config = _configure(flags, "info")
    except ValueError as error:
        return usage(error)
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
        return usage(error)
    from gpu_engine.cli.demo import run_demo
    from gpu_engine.front.port.listening import ServerError

    try:
        return asyncio.run(run_demo(engine_config, server_config))
    except grpc.aio.AioRpcError as error:
        return refused("the demo's server", error)
    except (ServerError, OSError, ValueError, RuntimeError) as error:
        return _failed(error)


def _failed(error: Exception, *, as_json: bool = False) -> int:
    print(json_line(__name__, logging.ERROR, str(error)) if as_json else f"error: {error}", file=sys.stderr)
    return FAILED
