"""`lockstep demo`: a whole server, one guided answer through a real client, and an independent check of the answer.

The invariant: the demo uses the real path. The answer crosses gRPC, the grammar process compiles the schema, and
jsonschema checks the answer; a wrong answer is exit status 1.

Not responsible for: anything that a server or a client needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.cli.asking import responses_of
from gpu_engine.cli.terminal import loading_progress, tokens_per_second
from gpu_engine.front.port.listening import ServerError
from gpu_engine.server import open_server
from lockstep_client.access import access_to
from lockstep_client.async_rpc import AsyncRpc
from lockstep_client.wire import engine_pb2 as pb

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "city": {"type": "string", "maxLength": 40},
        "country": {"type": "string", "maxLength": 40},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "architect": {"type": "string", "maxLength": 60},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "city", "country", "year", "architect", "tags"],
    "additionalProperties": False,
}

EXAMPLE = {
    "name": "Eiffel Tower",
    "city": "Paris",
    "country": "France",
    "year": 1889,
    "architect": "Gustave Eiffel",
    "tags": ["iron", "tower", "view"],
}

PROMPT = f"""Extract the facts as JSON.

Text: The Eiffel Tower is an iron tower in Paris, France. It was designed by Gustave Eiffel and opened in 1889. \
Keywords: iron, tower, view.
JSON:
{json.dumps(EXAMPLE, indent=2)}

Text: The Sydney Opera House is a concert hall in Sydney, Australia. It was designed by Jorn Utzon and opened in 1973. \
Keywords: music, opera, theatre.
JSON:
"""
"""One example and one task: the n-gram drafter can draft the parts of the answer that repeat the prompt."""


async def run_demo(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Run the demo on a free port, print to stdout, and return the exit status. Raises ServerError."""
    jsonschema = _jsonschema()
    # The prompt is sent twice, and the comparison is fair only if both requests prefill it.
    engine_config = dataclasses.replace(engine_config, prefix_cache=False)
    server_config = dataclasses.replace(
        server_config,
        listen="127.0.0.1:0",
        # The only client is in this process.
        tls_cert="",
        tls_key="",
        tls_client_ca="",
        auth_token_file="",
        health_listen="",
    )
    if server_config.grammar == "none":
        raise ServerError("grammar: the demo needs a grammar process")
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(loading_progress())
        async with open_server(engine_config, server_config, progress) as server, _client(server.address) as client:
            stack.close()
            print(f"model:  {server.model.name} ({server.model.dtype_name}, {server.engine.config.device})")
            print(
                f"server: {server.address}, grammar process {server.sidecar.pid if server.sidecar else 'connected'}\n"
            )
            print(f"schema: {json.dumps(SCHEMA)}\n")
            print(f"prompt: {PROMPT}\nanswer: ", end="", flush=True)
            text, last = await _ask(client, show=True)
            print("\n")
            valid = _check(jsonschema, text, last)
            print(f"with speculation:    {_speed(last)}")
            plain_text, plain = await _ask(client, num_draft_tokens=0)
            same = "the same answer" if plain_text == text else "ANOTHER ANSWER"
            print(f"without speculation: {_speed(plain)}; {same}")
            print(compared(tokens_per_second(last), tokens_per_second(plain)))
            print(_NEXT.format(lockstep=how_to_call(sys.executable, shutil.which, os.getcwd())))
    return 0 if valid else 1


def _client(address: str) -> AsyncRpc:
    return AsyncRpc(access_to(address, False, None, ()))


async def _ask(
    client: AsyncRpc, *, show: bool = False, num_draft_tokens: int | None = None
) -> tuple[str, pb.GenerateResponse]:
    request = pb.GenerateRequest(
        messages=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=PROMPT)]),
        sampling=pb.SamplingParams(temperature=0.0, max_tokens=256),
        grammar=pb.Grammar(json_schema=json.dumps(SCHEMA)),
    )
    if num_draft_tokens is not None:
        request.speculation.num_draft_tokens = num_draft_tokens
    text, last = "", pb.GenerateResponse()
    async with contextlib.aclosing(responses_of(client, request, 300)) as responses:
        async for response in responses:
            text += response.text
            last = response
            if show:
                print(response.text, end="", flush=True)
    return text, last


def _check(jsonschema: Any, text: str, last: pb.GenerateResponse) -> bool:
    reason = pb.FinishReason.Name(last.finish_reason)
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (json.JSONDecodeError, jsonschema.ValidationError) as error:
        print(f"check:  NOT VALID ({reason}): {error}\n", file=sys.stderr)
        return False
    print(f"check:  jsonschema says valid ({reason})")
    return True


def _speed(last: pb.GenerateResponse) -> str:
    t = last.telemetry
    return (
        f"{tokens_per_second(last):5.1f} tokens/s, {t.acceptance_length:.2f} tokens per step "
        f"({last.usage.completion_tokens} tokens, {t.accepted_draft_tokens} of {t.draft_tokens} drafts accepted, "
        f"first token after {t.ttft_ms:.0f} ms)"
    )


def compared(with_drafts: float, without: float) -> str:
    """Return one line on two rates in tokens/s; a reader must not take a slower one as a rule."""
    if with_drafts >= without:
        return f"speculation: {with_drafts / without:.2f} times as fast here\n" if without else ""
    return (
        "speculation: slower this time. One short answer is no measurement: it pays most in answers that repeat the "
        "prompt, and other work on this machine counts; `python -m benchmarks` repeats it\n"
    )


def _jsonschema() -> Any:
    try:
        import jsonschema
    except ImportError as error:
        raise ServerError("the demo checks its answer with jsonschema; install it: pip install jsonschema") from error
    return jsonschema


_NEXT = """Next:
  {lockstep} serve                    a server of your own
  {lockstep} chat                     chat with it
  {lockstep} generate --chat "Is Paris in France?" --choice yes --choice no --temperature 0
  {lockstep} generate --help          schemas, regexes, choices, grammars, with examples
  {lockstep} serve --help             models, batch sizes, settings; --help-all has the rest"""


def how_to_call(python: str, which: Callable[[str], str | None], directory: str) -> str:
    """Return how a shell in `directory` runs this environment's `lockstep`.

    Args:
        python: absolute path of the interpreter; the command is installed next to it, or not at all.
        which: finds a command on the shell's PATH, as `shutil.which` does.
    """
    command = os.path.join(os.path.dirname(python), "lockstep")
    if which("lockstep") == command:
        return "lockstep"
    here = directory.rstrip("/") + "/"
    return command.removeprefix(here) if which(command) else f"{python.removeprefix(here)} -m gpu_engine"
