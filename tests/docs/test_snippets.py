"""Every snippet of the pages: Python runs, commands exist with their flags, data parses,
links and paths lead somewhere.

A command line is run against a small server when it is a client of one, and is checked only when its fence carries a
mark (`serve`, `bench`, `docker`, `install`): it starts something, or needs what a test machine may lack.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import shlex
import tomllib
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import yaml
from google.protobuf import json_format

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.transfer_config import TransferConfig
from gpu_engine.cli import commands as cli
from gpu_engine.ops.installation import DISTRIBUTION
from grammar_service import config as grammar_config
from http_gateway import config as gateway_config
from lockstep_bench import cli as specgrammarbench
from protos.engine.v1 import engine_pb2 as pb
from service_runtime.settings import settings_of
from service_runtime.tenants import parse_tenants
from tests.docs.commands import commands
from tests.docs.pages import PAGES, ROOT, Snippet, prose, snippets

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_HTTP = "127.0.0.1:8000"
MARKS = {"serve", "bench", "docker", "install", "http", "tls"}
PYTHON_MARKS = {"embedded", "example", "http", "model", "tls"}
"""It starts its own server (tests/e2e/test_python_client.py runs it), or names machines and files that are not
there."""
SHELL = ("bash", "sh")
NOT_OURS = {
    "pip",
    "vllm/bin/pip",
    "vllm/bin/python",
    "llama-server",
    "pipx",
    "smg",
    "aiperf",
    "guidellm",
    "lm-eval",
    "vllm",
    "uv",
    "apt",
    ".",
    "python3",
    "python3.11",
    "openssl",
    "echo",
    "chmod",
    "helm",
    "kubectl",
    "serve",
}
"""Programs whose own flags are not looked at."""


@pytest.mark.parametrize("snippet", snippets("python"), ids=str)
def test_python_runs(snippet: Snippet, server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert snippet.marks <= PYTHON_MARKS
    code = compile(snippet.text.replace(DEFAULT_ADDRESS, server), str(snippet), "exec", dont_inherit=True)
    if snippet.marks:
        return
    with ThreadPoolExecutor(1) as pool:  # the snippet may run its own event loop
        pool.submit(exec, code, {"__name__": "__main__"}).result()
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("snippet", [s for s in snippets("python") if "http" in s.marks], ids=str)
def test_python_over_http_runs(snippet: Snippet, gateway: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(snippet.text.replace(DEFAULT_HTTP, gateway), str(snippet), "exec", dont_inherit=True), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("snippet", [s for s in snippets(*SHELL) if "http" in s.marks], ids=str)
def test_requests_over_http_are_answered(snippet: Snippet, gateway: str) -> None:
    for words in commands(snippet.text):
        url = next(word for word in words if word.startswith("http://")).replace(DEFAULT_HTTP, gateway)
        body = words[words.index("-d") + 1].encode() if "-d" in words else None
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
            assert answer.read()


@pytest.mark.parametrize("snippet", snippets(*SHELL), ids=str)
def test_commands_exist_with_their_flags(snippet: Snippet) -> None:
    assert snippet.marks <= MARKS
    for words in commands(snippet.text):
        check_command(words)


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_within_a_sentence_exist(page: Path) -> None:
    for span in re.findall(r"`((?:lockstep|make|python -m) [^`]+)`", prose(page)):
        if "NAME" not in span:
            check_command([word for word in shlex.split(span) if word not in ("...", "COMMAND")])


@pytest.mark.parametrize("snippet", [s for s in snippets(*SHELL) if not s.marks], ids=str)
def test_clients_run(
    snippet: Snippet, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "samples").symlink_to(ROOT / "samples")
    for words in commands(snippet.text):
        # tests/gpu_engine/cli/ has those that read stdin or start a server of their own.
        if words[0] == "lockstep" and words[1] not in ("chat", "run"):
            with ThreadPoolExecutor(1) as pool:  # the command runs its own event loop
                arguments = [grammar_id(word, server) for word in words[1:]]
                status = pool.submit(cli.main, [*arguments, "--server", server]).result()
            assert status == cli.OK, capsys.readouterr().err


@pytest.mark.parametrize("snippet", snippets("toml", "json", "yaml"), ids=str)
def test_data_parses(snippet: Snippet) -> None:
    match snippet.language:
        case "json":
            json.loads(snippet.text)
        case "yaml":
            yaml.safe_load(snippet.text)
        case "toml":
            engine = {s.name for kind in (EngineConfig, ServerConfig, TransferConfig) for s in settings_of(kind)}
            table = tomllib.loads(snippet.text)
            if "tenants" in table:
                assert parse_tenants(snippet.text.encode(), snippet.page).by_name
                return
            grammar = {s.name for s in settings_of(grammar_config.GrammarConfig)}
            assert set(table) <= engine or set(table.get("grammar", table)) <= grammar


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        name, _, anchor = target.partition("#")
        if "://" in name:
            continue
        path = (page.parent / name) if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            dead.append(target)
    assert dead == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_are_in_the_tree(page: Path) -> None:
    paths = re.findall(r"`((?:[A-Za-z0-9_.-]+/)+[A-Za-z0-9_.-]*)`", prose(page))
    ours = [path for path in paths if (ROOT / path.split("/")[0]).is_dir() and "NAME" not in path]
    assert [path for path in ours if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_class_names_are_in_the_code(page: Path) -> None:
    names = re.findall(r"`([A-Z][a-z0-9]+(?:[A-Z][A-Za-z0-9]*)+)`", prose(page))
    assert [name for name in names if name not in names_in_code()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_prose_have_at_most_120_columns(page: Path) -> None:
    lines = prose(page).splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_there_are_at_most_25_pages() -> None:
    assert len([*(ROOT / "docs").glob("*.md")]) <= 25


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_distributions_have_one_name_each() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {DISTRIBUTION, *re.findall(r'\bversion\("(lockstep[a-z-]*)"\)', sources())}
    installed = set(re.findall(r"\b(lockstep[a-z-]*)\[", "".join(page.read_text() for page in PAGES)))
    assert asked == {project["name"]}
    assert installed == {project["name"], "lockstep-grammar"}
    assert project["scripts"].keys() == {"lockstep"}
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text()


def grammar_id(word: str, server: str) -> str:
    """Replace `$(lockstep compile ...)` by what it prints."""
    if not (inner := re.fullmatch(r"\$\(lockstep (compile .*)\)", word)):
        return word

    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main([*shlex.split(inner[1]), "--server", server]) == cli.OK
    return out.getvalue().strip()


def check_command(words: list[str]) -> None:
    """Fail when a command, a target, a file or a flag does not exist."""
    match words:
        case ["lockstep", "gateway", *arguments]:
            gateway_config.read(arguments, {})
        case ["lockstep" | "lockstep.exe", *arguments]:
            cli._parser().parse_args(arguments)
        case ["lockstep-bench", *arguments]:
            specgrammarbench.parser().parse_args(arguments)
        case ["python", "-m", "grammar_service", *arguments]:
            grammar_config.read([a for a in arguments if a != "health"], {})
        case ["python", "-m", "pytest", *arguments]:
            assert all((ROOT / a.split("::")[0]).exists() for a in arguments if a.startswith("tests"))
        case ["python", "-m", "benchmarks", "NAME" | "--help", *_] | ["python", "-m", "benchmarks"]:
            pass  # the form of the command, and its list of names
        case ["python", "-m", "benchmarks", name, *arguments]:
            assert list((ROOT / "benchmarks").glob(f"*/{name}.py")), name
            flags_exist("benchmarks", arguments)
        case ["python", "-m", module, *arguments]:
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
            flags_exist(module.split(".")[0], arguments)
        case ["make", target, *_]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
        case ["docker", "compose", *arguments]:
            files = [after for flag, after in itertools.pairwise(arguments) if flag == "-f"]
            assert all((ROOT / file).exists() for file in files)
        case ["docker", "run", *arguments]:
            mounts = [after.split(":")[0] for flag, after in itertools.pairwise(arguments) if flag == "-v"]
            assert mounts
            assert all((ROOT / mount).exists() for mount in mounts)
        case ["curl", *arguments]:
            assert any(argument.startswith(f"http://{DEFAULT_HTTP}/") for argument in arguments)
        case ["grpcurl", *arguments]:
            body = arguments[arguments.index("-d") + 1]
            json_format.Parse(body, pb.GenerateRequest())
            service, _, method = arguments[-1].rpartition("/")
            assert method in pb.DESCRIPTOR.services_by_name[service.rpartition(".")[2]].methods_by_name
        case [program, *_]:
            assert program in NOT_OURS, f"{program}: unknown program; add a case that checks it"


def flags_exist(package: str, arguments: list[str]) -> None:
    text = "\n".join(path.read_text() for path in (ROOT / package).rglob("*.py"))
    flags = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    assert [flag for flag in flags if f'"{flag}"' not in text] == []


@cache
def names_in_code() -> frozenset[str]:
    """Return the names of our classes, messages and RPCs."""
    return frozenset(re.findall(r"\b(?:class|message|rpc) (\w+)", sources()))


@cache
def sources() -> str:
    """Return all of our Python and proto files as one text."""
    folders = (
        "benchmarks",
        "client",
        "gpu_engine",
        "grammar_service",
        "http_gateway",
        "kernels",
        "protos",
        "service_runtime",
        "shared_mem",
        "tools",
    )
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".proto")]
    return "\n".join(path.read_text() for path in files if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")))


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)
