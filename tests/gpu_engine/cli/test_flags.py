"""Every field of the API has a flag, and every wrong flag is explained where it belongs."""

from __future__ import annotations

import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from gpu_engine.cli import commands as cli
from gpu_engine.cli.request_flags import build_request
from lockstep_client.wire import engine_pb2 as pb
from tests.docs.pages import ROOT

ALL = shlex.split("""
--max-tokens 5 --min-tokens 1 --temperature 0.5 --top-p 0.75 --top-k 7 --min-p 0.25 --seed 9 --n 2
--repetition-penalty 1.5 --presence-penalty 0.5 --frequency-penalty 0.25 --ignore-eos --include-stop
--keep-special-tokens --stop a --stop-token-id 4 --bad-word b --bad-token-id 5 --logit-bias 8=-1.5 --logprobs 2
--prompt-logprobs 1 --per-field-logprobs --token-origins --value-events --items-of /a --receipt-nonce 000102
--echo --omit-token-ids --omit-text --request-id r
--priority -2
--context-logits --generation-logits --tensor logits --context-tensor hidden_states.1
--max-queue-ms 250 --never-preempt
--repetition-max-pattern-size 6 --repetition-min-pattern-size 2 --repetition-min-count 5
--whole --cumulative --client-id c --lora l --prompt-adapter p
--cache-salt s --draft-tokens 3 --no-draft-index --reasoning --reasoning-tokens 9 --reasoning-effort low
--grammar-exact --grammar-exact-tries 9 --grammar-exact-ms 50 --grammar-exact-error --grammar-exact-shared-tries 4
--grammar-exact-any-spelling
--masked-logprobs --reasoning-begin <a> --reasoning-end </a> --processor a --processor 'b={"size": 2}'
--beam-width 4 --length-penalty 0.5 --early-stopping never
--continue-final-message --template-arguments '{"a": 1}' --tool-choice required --no-parallel-tool-calls
""")


def build(*arguments: str) -> pb.GenerateRequest:
    return build_request(cli._parser().parse_args(["generate", *arguments]), io.StringIO())


def set_fields(message: Any, prefix: str = "") -> set[str]:
    """Return the paths of the fields that are set."""
    found = set()
    for field, value in message.ListFields():
        nested = field.message_type is not None and not hasattr(value, "extend") and not hasattr(value, "items")
        found |= set_fields(value, f"{prefix}{field.name}.") if nested else {f"{prefix}{field.name}"}
    return found


def all_fields(descriptor: Any, prefix: str = "") -> set[str]:
    """Return the paths of all fields below a message, as far as `set_fields` goes."""
    found = set()
    for field in descriptor.fields:
        nested = field.message_type is not None and not field.is_repeated
        found |= all_fields(field.message_type, f"{prefix}{field.name}.") if nested else {f"{prefix}{field.name}"}
    return found


def test_every_field_has_a_flag(tmp_path: Path) -> None:
    conversation = tmp_path / "m.json"
    conversation.write_text('[{"role": "user", "content": "a"}]')
    request = build("--messages", str(conversation), "--tools", str(ROOT / "samples/tools.json"), *ALL)
    other = build("--token-ids", "1,2"), build("--prompt", "x"), build("--prompt", "x", "--grammar-id", "g")
    for grammar in (["--json"], ["--schema", "{}"], ["--regex", "a"], ["--choice", "a"]):
        other += (build("--prompt", "x", *grammar, "--whitespace", "any", "--backend", "auto", "--allow-unenforced"),)
    for kind, file in (("ebnf", "list.gbnf"), ("lark", "order.lark"), ("structural-tag", "call.json")):
        other += (build("--prompt", "x", f"--{kind}", str(ROOT / "samples" / file)),)
    bounds = ["--max-string-length", "9", "--max-array-items", "3", "--max-number-digits", "5", "--max-whitespace", "1"]
    verify = ["--unenforced", "verify", "--max-backtracks", "3", "--hold-tokens", "9"]
    other += (build("--prompt", "x", "--json", "--no-closed-objects", *verify, *bounds),)
    named = build("--chat", "x", "--tools", str(ROOT / "samples/tools.json"), "--tool-choice", "weather")
    found = set().union(*(set_fields(each) for each in (request, named, *other)))
    assert all_fields(pb.GenerateRequest.DESCRIPTOR) == found
    assert request.sampling.logit_bias == {8: -1.5}
    assert [(each.name, each.arguments) for each in request.logits_processors] == [("a", ""), ("b", '{"size": 2}')]
    assert not request.sampling.skip_special_tokens
    assert json.loads(request.tools.tools[0].parameters)["required"] == ["city", "days"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--timeout", "-1"], "'-1' is not a number of seconds above 0"),
        (["compile", "--timeout", "nan"], "'nan' is not a number of seconds above 0"),
        (["health", "--timeout", "soon"], "'soon' is not a number of seconds above 0"),
        (["generate", "--max-batch-size", "4"], "generate: error: .*; --max-batch-size is a flag of `lockstep serve`"),
        (["generate", "--temprature", "0"], "lockstep generate: error: .*; did you mean --temperature?"),
        (["serve", "--max-batch", "4"], "lockstep serve: error: .*; did you mean --max-batch-size?"),
        (["generate", "--mdel", "x"], "lockstep generate: error: .*; `lockstep serve` has --model"),
        (["generate", "--zzzz", "x"], "lockstep generate: error: unrecognized arguments: --zzzz x$"),
        (["generate", "hello"], "generate: error: unrecognized arguments: hello; every value belongs to a flag"),
        (["--server", "x", "info"], "lockstep: error: --server belongs after its command: lockstep generate --server"),
        (["--zork"], "lockstep: error: --zork: a command comes first: serve"),
        (["genrate"], "lockstep: error: there is no command 'genrate'; did you mean 'generate'"),
        (["zork"], "there is no command 'zork'; the commands are serve"),
        (["generate", "--prompt", "\udcff"], "argument --prompt: is no UTF-8 at character 0"),
        (["generate", "--logit-bias", "a=1"], "argument --logit-bias: 'a=1' is not ID=BIAS"),
        (["generate", "--processor", "={}"], "argument --processor: '={}' is not NAME or NAME={...}"),
    ],
)
def test_a_wrong_command_line_is_explained(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == cli.USAGE
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--prompt", "x", "--schema", "nowhere.json"],
            "--schema: cannot read nowhere.json: No such file or directory",
        ),
        (["--prompt", "x", "--lark", "binary"], "--lark: binary is no UTF-8 at byte 0"),
        (["--messages", "binary"], "--messages: binary is no UTF-8"),
        (["--messages", "text"], "--messages: is no JSON"),
        (["--messages", "turn"], '--messages: .*"contents"'),
        (["--chat", "x", "--tools", "turn"], '--tools: .*"role"'),
        (["--chat", "x", "--tools", "object"], "--tools: must be a JSON list"),
        (["--prompt", "x", "--tools", "turn"], "--tools needs --chat or --messages"),
        (["--prompt", "x", "--reasoning"], "--reasoning needs --chat or --messages"),
        (["--chat", "x", "--tool-choice", "auto"], "--tool-choice and --no-parallel-tool-calls need --tools"),
        (["--token-ids", "1,b"], "--token-ids: '1,b' is no list of numbers"),
        (["--prompt", "x", "--stop-token-id", "-1"], "--stop-token-id: "),
        (["--prompt", "x", "--n", "-1"], "--n: "),
        (["--prompt", "x", "--token-ids", "1"], "--prompt and --token-ids exclude each other"),
    ],
)
def test_a_wrong_value_names_its_flag(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff")
    (tmp_path / "text").write_text("hello")
    (tmp_path / "object").write_text("{}")
    (tmp_path / "turn").write_text('[{"role": "user", "contents": "a"}]')
    with pytest.raises(ValueError, match=message):
        build(*arguments)


def test_stdin_that_is_no_utf_8_is_named() -> None:
    flags = cli._parser().parse_args(["generate"])
    with pytest.raises(ValueError, match=r"stdin \(the prompt\): is no UTF-8"):
        build_request(flags, io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))


@pytest.mark.parametrize(
    "command",
    ["serve", "run", "generate", "chat", "compile", "tokenize", "detokenize", "info", "health", "completion"],
)
def test_every_command_has_its_version_and_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flag, shown in (("--version", "lockstep-engine "), ("--help", f"usage: lockstep {command} ")):
        with pytest.raises(SystemExit) as caught:
            cli.main([command, flag])
        assert caught.value.code == 0
        assert capsys.readouterr().out.startswith(shown)


def test_the_help_of_serve_shows_the_settings_that_matter(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as caught:
            cli.main(["serve", flag])
        assert caught.value.code == 0
        shown.append(capsys.readouterr().out)
    short, whole = ({word for word in text.split() if re.fullmatch("--[a-z-]+", word)} for text in shown)
    assert {"--model", "--max-model-len", "--http"} <= short < whole
    assert "--row-timeout-ms" in whole - short
    assert len(shown[0].splitlines()) < 90 < len(shown[1].splitlines())


def test_help_states_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for flag in ("--temperature", "--top-p", "--max-tokens", "--n", "--seed", "--whitespace", "--priority"):
        assert "(default: " in shown.rpartition(f" {flag} ")[2][:200], flag


def test_a_conversation_of_the_api_is_taken_as_it_is(tmp_path: Path) -> None:
    conversation = tmp_path / "m.json"
    turns = [{"role": "assistant", "tool_calls": [{"id": "c", "name": "f", "arguments": "{}"}]}]
    conversation.write_text(json.dumps(turns))
    request = build("--messages", str(conversation), "--system", "S")
    expected = json_format.ParseDict({"messages": [{"role": "system", "content": "S"}, *turns]}, pb.ChatMessages())
    assert request.messages == expected
