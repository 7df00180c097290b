"""The command line as a user sees it: streams, exit statuses, messages."""

from __future__ import annotations

import asyncio
import io
import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import grpc
import pytest

from gpu_engine.api.request import FinishReason, Request, TokenEvent
from gpu_engine.cli import commands as cli
from gpu_engine.cli.asking import hint
from gpu_engine.cli.demo import compared, how_to_call
from gpu_engine.cli.request_flags import build_request
from gpu_engine.cli.terminal import field_table, grammar_cost, loading_progress, logprob_table, summary
from lockstep_client.wire import engine_pb2 as pb
from tests.fakes import answers_with
from tests.gpu_engine.fake_servers import serving


async def run(*arguments: str) -> int:
    return await asyncio.to_thread(cli.main, arguments)


def flags(*arguments: str) -> pb.GenerateRequest:
    parsed = cli._parser().parse_args(["generate", *arguments])
    return build_request(parsed, io.StringIO("from stdin"))


def script(request: Request) -> Iterable[TokenEvent]:
    """End as the prompt says, or say "hello"."""
    word = bytes(request.prompt_ids).decode()
    if word in FinishReason.__members__:
        return [TokenEvent(0, finish=FinishReason[word])]
    return answers_with("hello")(request)


async def test_generate_streams_to_stdout_and_sums_up_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(script, listen=f"unix:{tmp_path}/s") as server:
        address = server.address

        async def generate(*arguments: str) -> tuple[int, str, str]:
            status = await run("generate", "--server", address, "--prompt", *arguments)
            return status, *capsys.readouterr()

        status, out, err = await generate("x", "--seed", "3")
        assert (status, out) == (cli.OK, "hello\n")
        assert "[stop] 1 + 6 tokens" in err
        assert "seed 3" in err
        assert (await generate("x", "--n", "2"))[:2] == (cli.OK, "[0] hello\n[1] hello\n")
        status, out, _ = await generate("x", "--output", "json")
        assert "".join(json.loads(line).get("text", "") for line in out.splitlines()) == "hello"
        status, out, err = await generate("x", "--max-tokens", "0")
        assert (status, out) == (cli.FAILED, "")
        assert "INVALID_ARGUMENT: sampling.max_tokens: is 0, must be at least 1" in err
        ends = [(await generate(name))[0] for name in ("LENGTH", "GRAMMAR_INCOMPLETE", "GRAMMAR_ERROR", "ABORTED")]
        assert ends == [cli.OK, *[cli.NOT_COMPLETE] * 3]
        assert await run("compile", "--server", address, "--regex", "a") == cli.FAILED
        assert "FAILED_PRECONDITION" in capsys.readouterr().err
        assert await run("info", "--server", address) == cli.OK
        shown = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
        names = ("model_type", "backends", "eos_token_ids", "num_slots")
        assert [shown[name] for name in names] == [["fake"], ["none"], ["256"], ["4"]]
        assert await run("tokenize", "--server", address, "--text", "ab") == cli.OK
        assert await run("tokenize", "--server", address, "--text", "ab", "--with-texts") == cli.OK
        assert await run("detokenize", "--server", address, "--ids", "97, 98 99") == cli.OK
        assert await run("detokenize", "--server", address, "--ids", "97,b") == cli.USAGE
        out, err = capsys.readouterr()
        assert out == '97,98\n97\t"a"\n98\t"b"\nabc\n'
        assert "token ids are numbers" in err
    assert (await generate("x"))[0] == cli.FAILED, "the server is gone"
    assert await run("compile", "--server", "unix:nowhere") == cli.USAGE
    assert "a grammar is required" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "details", "help_text"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses; Connection refused", "lockstep serve --listen a:1"),
        ("UNAVAILABLE", "failed to connect ... Socket closed", "needs --tls or --tls-ca"),
        ("UNAVAILABLE", "failed to connect ... CERTIFICATE_VERIFY_FAILED: handshake", "authorities of --tls-ca"),
        ("UNAVAILABLE", "failed to connect ... handshake WRONG_VERSION_NUMBER", "speaks no TLS"),
        ("UNAUTHENTICATED", "authorization: is missing", "--token-file"),
        ("UNAVAILABLE", "the server is shutting down", ""),
        ("INTERNAL", "failed to connect", ""),
    ],
)
def test_a_failed_call_says_what_helps(code: str, details: str, help_text: str) -> None:
    found = hint("a:1", grpc.StatusCode[code], details)
    assert help_text in found if help_text else found == ""


def test_the_cost_of_a_grammar_is_one_line() -> None:
    response = pb.CompileResponse(backend=pb.BACKEND_XGRAMMAR, compile_ms=1.25, memory_bytes=2048, min_tokens=4)
    line = "xgrammar, compiled in 1.2 ms, 2 KiB, at least 4 tokens per answer, "
    assert grammar_cost(response) == line + "no complete answer was found"
    response.known_answer_tokens = 6
    assert grammar_cost(response) == line + "completes within max_tokens of 6 or more"
    assert "from the cache" in grammar_cost(pb.CompileResponse(backend=pb.BACKEND_LLGUIDANCE, cache_hit=True))


def test_flags_make_the_request(tmp_path: Path) -> None:
    schema = tmp_path / "s.json"
    schema.write_text("{}")
    request = flags(
        *("--chat", "u", "--system", "s", "--schema", str(schema), "--whitespace", "compact", "--backend", "xgrammar"),
        *("--max-tokens", "5", "--temperature", "0", "--stop", "a", "--stop", "b", "--draft-tokens", "0"),
    )
    assert [(m.role, m.content) for m in request.messages.messages] == [("system", "s"), ("user", "u")]
    assert request.grammar.json_schema == "{}"
    assert (request.grammar.whitespace, request.grammar.backend) == (pb.WHITESPACE_COMPACT, pb.BACKEND_XGRAMMAR)
    assert request.sampling.HasField("temperature")
    assert (request.sampling.max_tokens, list(request.sampling.stop)) == (5, ["a", "b"])
    assert request.speculation.HasField("num_draft_tokens")
    assert flags().text == "from stdin"
    assert flags("--prompt", "x") == pb.GenerateRequest(text="x", sampling=pb.SamplingParams())
    assert list(flags("--choice", "a", "--choice", "b").grammar.choice.choices) == ["a", "b"]
    assert flags("--json").grammar.json_object
    for source, kind in (('root ::= "a"', "ebnf"), ('start: "a"', "lark")):
        schema.write_text(source)
        assert getattr(flags("--grammar", str(schema)).grammar, kind) == source
    named = flags("--grammar-id", "g-1").grammar
    assert (named.grammar_id, named.allow_unenforced) == ("g-1", False)
    loose = flags("--regex", "a", "--backend", "auto", "--allow-unenforced").grammar
    assert (loose.backend, loose.allow_unenforced) == (pb.BACKEND_AUTO, True)
    assert flags("--json", "--unenforced", "verify").grammar.unenforced == pb.UNENFORCED_VERIFY
    assert flags("--regex", "").grammar.WhichOneof("spec") == "regex"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--prompt", "x", "--chat", "y"], "--prompt and --chat exclude each other"),
        (["generate", "--prompt", "x", "--system", "y"], "--system needs --chat"),
        (["generate", "--prompt", "x", "--backend", "xgrammar"], "--backend: needs a grammar"),
        (["generate", "--prompt", "x", "--max-tokens", "-1"], "--max-tokens: "),
        (["serve", "--max-batch-size", "0"], "max_batch_size: must be in [1, 256]"),
        (["serve", "--max-batch-size", "x"], "--max-batch-size: 'x' is not an integer"),
        (["serve", "--grammar", "connect"], "grammar_dir: is required"),
        (["serve", "--config", "nowhere.toml"], "nowhere.toml"),
        (["serve", "--listen", "nonsense"], "listen: 'nonsense' is neither host:port nor unix:/path"),
        (["serve", "--listen", ""], "listen: '' is neither"),
        (["serve", "--health-listen", "unix:"], "health_listen: 'unix:' is neither"),
        (["serve", "--device", "cuda:first"], "device: 'cuda:first' is not auto, cpu, cuda or cuda:N"),
        (["serve", "--num-threads", "-1"], "num_threads: must not be negative"),
        (["serve", "--log-level", "chatty"], "log_level: 'chatty' is not one of debug, info, warning, error"),
    ],
)
def test_wrong_usage_is_reported(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == cli.USAGE
    assert message in capsys.readouterr().err


def test_a_failure_to_start_is_an_object_among_json_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = f"{tmp_path}/tls.pem"
    flags = ("--listen", f"unix:{tmp_path}/s", "--tls-cert", missing, "--tls-key", missing, "--log-format", "json")
    assert cli.main(["serve", *flags]) == cli.FAILED
    line = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert (line["level"], line["message"]) == ("error", f"tls_cert: cannot read {missing}: No such file or directory")


def test_the_demo_says_that_one_slower_answer_is_no_measurement() -> None:
    assert compared(210.0, 198.0) == "speculation: 1.06 times as fast here\n"
    assert compared(198.0, 210.0).startswith("speculation: slower this time. One short answer is no measurement")
    assert compared(0.0, 0.0) == ""


@pytest.mark.parametrize(
    ("python", "installed", "on_path", "name"),
    [
        ("/usr/bin/python", True, True, "lockstep"),
        ("/repo/.venv/bin/python", True, False, ".venv/bin/lockstep"),
        ("/opt/bin/python", True, False, "/opt/bin/lockstep"),
        ("/repo/.venv/bin/python", False, False, ".venv/bin/python -m gpu_engine"),
    ],
)
def test_the_demo_names_the_command_of_its_own_environment(
    python: str, installed: bool, on_path: bool, name: str
) -> None:
    command = python.replace("python", "lockstep")
    found = ({command: command} if installed else {}) | ({"lockstep": command} if on_path else {})
    assert how_to_call(python, found.get, "/repo") == name


def test_clients_do_not_load_the_model_libraries() -> None:
    heavy = "('torch', 'transformers', 'numpy')"
    code = f"import sys, gpu_engine.cli.commands; sys.exit(any(name in sys.modules for name in {heavy}))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_progress_is_a_line_per_stage_without_a_terminal() -> None:
    stream = io.StringIO()
    with loading_progress(stream) as progress:
        progress("loading the weights", 0.25)
    assert stream.getvalue() == " 25% loading the weights\n"


def test_the_summary_names_the_grammar_library_and_its_warnings() -> None:
    telemetry = pb.Telemetry(ttft_ms=100, total_ms=1100, acceptance_length=2.5, seed=9, backend=pb.BACKEND_XGRAMMAR)
    telemetry.warnings.append("format is not enforced")
    response = pb.GenerateResponse(finish_reason=pb.FINISH_REASON_STOP, telemetry=telemetry)
    response.usage.completion_tokens = 11
    line = summary(response)
    shown = ("[stop]", "10.0 tokens/s", "2.50 tokens/step", "seed 9", "xgrammar", "warning: format is not enforced")
    assert [part for part in shown if part not in line] == []
    response.finish_reason = pb.FINISH_REASON_GRAMMAR_CLOSED
    assert "led to its end near max_tokens" in summary(response)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_serve_ends_in_order_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    code = f"""
import asyncio, signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.server import Parts, serve
from tests.fakes import FakeEngine, FakeModel
parts = Parts(lambda c, p: FakeModel(), lambda c, m, channel, grammar: FakeEngine(c))
config = ServerConfig(listen="unix:{tmp_path}/s", grammar="none")
ready = lambda server: print("ready", flush=True)
asyncio.run(serve(EngineConfig(max_model_len=256), config, None, ready, parts))
print("closed", flush=True)
"""
    root = Path(__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
            assert process.stdout.readline() == "closed\n"
            assert process.wait(60) == 0
        finally:
            process.kill()  # leaving the block waits for it


async def test_log_probabilities_are_shown_with_texts() -> None:
    async def token_texts(token_ids: Sequence[int]) -> list[str]:
        return [chr(token) for token in token_ids]

    likely = pb.TokenLogprobs(logprob=math.log(0.5), top=[pb.TokenLogprob(token_id=98, logprob=math.log(0.25))])
    table = await logprob_table([(0, [97, 98], [pb.TokenLogprobs(), likely]), (1, [97], [likely])], token_texts)
    first, second, other = table.splitlines()
    assert first.split() == ["[0]", '"a"', "-"]
    assert second.split() == ["[0]", '"b"', "50.0%", '"b"', "25.0%"]
    assert other.startswith("[1]")
    fields = [pb.FieldLogprob(pointer="/city", logprob=math.log(0.125), tokens=3)]
    assert field_table(fields).split() == ["/city", "12.5%", "in", "3", "tokens"]
