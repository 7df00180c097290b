"""Builds the container images, and tries them: `python -m tools.images`; `make images` runs it.

The images are the targets of `Dockerfile`. Each gets the labels of its version and commit. A trial starts the grammar
process, the engine and the gateway as compose.yaml does (another user than root, a read-only root filesystem, no
capabilities) but without any network, and takes a guided answer over gRPC and one over HTTP.

The invariant: an image is pushed or saved only after all were tried.

Not responsible for: what compose adds (see tests/compose), nor for a GPU: of the image for one, only its libraries and
its compiler are tried.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import tomllib
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
READY_S = 600.0
"""A start takes some seconds, and minutes on a busy machine."""
CONFINED = (
    *("--user", "10001:10001", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
    *("--tmpfs", "/tmp:size=64m,mode=1777"),
)
_VOLUMES = {"sockets": "/run/lockstep", "cache": "/var/cache/lockstep"}
_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "year": {"type": "integer"}},
    "required": ["city", "year"],
    "additionalProperties": False,
}
_ASK_GRPC = f"""
from lockstep_client import Client, Grammar
with Client("127.0.0.1:50051") as client:
    grammar = Grammar.schema({_SCHEMA!r})
    print(client.generate("A city and a year, as JSON: ", grammar=grammar, max_tokens=80).text)
"""
_ASK_HTTP = f"""
import json, urllib.request
schema = {_SCHEMA!r}
body = {{
    "model": "any",
    "messages": [{{"role": "user", "content": "A city and a year, as JSON."}}],
    "response_format": {{"type": "json_schema", "json_schema": {{"name": "a", "schema": schema}}}},
    "max_tokens": 80,
}}
address = "http://127.0.0.1:8000/v1/"
body["model"] = json.load(urllib.request.urlopen(address + "models"))["data"][0]["id"]
asked = urllib.request.Request(
    address + "chat/completions", json.dumps(body).encode(), {{"Content-Type": "application/json"}}
)
print(json.load(urllib.request.urlopen(asked, timeout=300))["choices"][0]["message"]["content"])
"""


class ImageError(Exception):
    """A build, a trial or a push failed; the message says which, and what the program printed."""


@dataclass(frozen=True, slots=True)
class Image:
    """One image: its name and tag, the target in `Dockerfile`, and build arguments."""

    repository: str
    tag: str
    target: str
    arguments: tuple[str, ...] = ()

    def names(self, prefix: str, version: str) -> tuple[str, str]:
        """Return its name as the newest release, and with its version, as compose.yaml has them."""
        if self.tag == "latest":
            return f"{prefix}{self.repository}:latest", f"{prefix}{self.repository}:{version}"
        return f"{prefix}{self.repository}:{self.tag}", f"{prefix}{self.repository}:{version}-{self.tag}"


IMAGES = {
    "engine-cpu": Image("lockstep-engine", "cpu", "engine-cpu"),
    "engine-gpu": Image("lockstep-engine", "gpu", "engine-gpu", ("TORCH=cuda",)),
    "grammar": Image("lockstep-grammar", "llguidance", "grammar", ("GRAMMAR_BACKEND=llguidance",)),
    "grammar-xgrammar": Image("lockstep-grammar", "xgrammar", "grammar", ("GRAMMAR_BACKEND=xgrammar",)),
    "gateway": Image("lockstep-gateway", "latest", "gateway"),
}
GRAMMARS = ("grammar", "grammar-xgrammar")
TOGETHER = ("engine-cpu", "gateway")
"""They are tried together, with each of the chosen grammar images."""


@dataclass(frozen=True, slots=True)
class Tool:
    """The program that builds and runs containers (`docker` or `podman`), and flags for each of its commands."""

    program: str
    build_flags: tuple[str, ...] = ()
    run_flags: tuple[str, ...] = ()

    def __call__(self, *arguments: str) -> str:
        """Run a command of it and return what it printed. Raises ImageError with the last lines of its stderr."""
        done = subprocess.run([self.program, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            tail = "\n".join((done.stderr or done.stdout).splitlines()[-20:])
            raise ImageError(f"{self.program} {arguments[0]} ended with {done.returncode}:\n{tail}")
        return done.stdout.strip()

    def build(self, image: Image, names: Sequence[str], labels: Sequence[str]) -> None:
        """Build one image and show the build's output."""
        command = [
            *(self.program, "build", "--target", image.target),
            *(word for argument in image.arguments for word in ("--build-arg", argument)),
            *(word for label in labels for word in ("--label", label)),
            *(word for name in names for word in ("--tag", name)),
            *self.build_flags,
            str(ROOT),
        ]
        done = subprocess.run(command, check=False)
        if done.returncode:
            raise ImageError(f"{names[0]} was not built: {self.program} build ended with {done.returncode}")

    def run(self, *arguments: str) -> str:
        """Run a container that has no way to gain rights, and return what it printed."""
        return self("run", *CONFINED, *self.run_flags, *arguments)

    def megabytes(self, name: str) -> float:
        """Return the size of an image, not compressed."""
        return int(self("image", "inspect", "--format", "{{.Size}}", name)) / 1e6


def labels(root: Path) -> tuple[str, ...]:
    """Return the labels that a build adds: version and commit."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    git = ["git", "rev-parse", "HEAD"]
    revision = subprocess.run(git, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    prefix = "org.opencontainers.image"
    return f"{prefix}.version={project['version']}", f"{prefix}.revision={revision}"


@contextmanager
def _containers(tool: Tool) -> Iterator[list[str]]:
    """Remove the containers whose names the block appends, with their volumes."""
    names: list[str] = []
    try:
        yield names
    finally:
        for name in reversed(names):
            tool("rm", "--force", "--volumes", name)


def try_three(tool: Tool, engine: str, grammar: str, gateway: str) -> tuple[str, str]:
    """Start the three images without a network, and return a guided answer over gRPC and one over HTTP.

    The gateway and the engine share a network namespace that has loopback only. Raises ImageError, also for an answer
    that is not the schema's object.
    """
    run = uuid.uuid4().hex[:8]
    # A new volume is a copy of the image's folder, so it has that folder's owner and mode.
    volumes = {f"{name}-{run}": folder for name, folder in _VOLUMES.items()}
    sockets, cache = (("--volume", f"{name}:{folder}") for name, folder in volumes.items())
    try:
        for volume in volumes:
            tool("volume", "create", volume)
        with _containers(tool) as started:
            started.append(f"grammar-{run}")
            tool.run("--detach", "--name", started[-1], "--network", "none", *sockets, grammar)
            started.append(f"engine-{run}")
            tool.run("--detach", "--name", started[-1], "--network", "none", *sockets, *cache, engine)
            wait = ("python", "-m", "gpu_engine", "health", "--server", "unix:/tmp/health.sock")
            _until(lambda: tool("exec", started[1], *wait), started, tool)
            over_grpc = tool("exec", started[1], "python", "-c", _ASK_GRPC)
            started.append(f"gateway-{run}")
            own = ("--network", f"container:{started[1]}", "--env", "LOCKSTEP_GATEWAY_ENGINE=127.0.0.1:50051")
            tool.run("--detach", "--name", started[-1], *own, gateway)
            health = "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=5)"
            _until(lambda: tool("exec", started[2], "python", "-c", health), started, tool)
            over_http = tool("exec", started[2], "python", "-c", _ASK_HTTP)
    finally:
        tool("volume", "rm", "--force", *volumes)
    for answer in (over_grpc, over_http):
        if set(json.loads(answer)) != {"city", "year"}:
            raise ImageError(f"an answer does not fit its schema: {answer}")
    return over_grpc, over_http


def _until(check: Callable[[], object], started: Sequence[str], tool: Tool) -> None:
    limit = time.monotonic() + READY_S
    while True:
        try:
            check()
        except ImageError:
            states = {name: tool("inspect", "--format", "{{.State.Running}}", name) for name in started}
            if time.monotonic() > limit or "false" in states.values():
                raise ImageError(f"the containers were not ready: running {states}\n{_logs(tool, started)}") from None
            time.sleep(1.0)
        else:
            return


def _logs(tool: Tool, names: Sequence[str]) -> str:
    command = [tool.program, "logs", "--tail", "20"]
    printed = []
    for name in names:
        done = subprocess.run(
            [*command, name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        printed.append(f"{name}:\n{done.stdout}")
    return "\n".join(printed)


def try_gpu(tool: Tool, name: str) -> str:
    """Return the versions in the image for a GPU, whose C compiler ran."""
    program = (
        "import subprocess, torch, triton, gpu_engine.server, kernels.cuda\n"
        "subprocess.run(['gcc', '--version'], check=True, stdout=subprocess.DEVNULL)\n"
        "assert torch.version.cuda, 'torch has no CUDA'\n"
        "print('torch', torch.__version__, 'triton', triton.__version__)"
    )
    return tool.run("--rm", "--network", "none", "--entrypoint", "python", name, "-c", program)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, try, list and push; return the exit status. `arguments`: by default, the command line's."""
    parser = argparse.ArgumentParser(prog="python -m tools.images", description=__doc__.partition("\n\n")[2])
    parser.add_argument("images", nargs="*", choices=[*IMAGES, []], help=f"of {', '.join(IMAGES)}; default: all")
    parser.add_argument("--tool", default="docker", help="docker (default) or podman")
    parser.add_argument(
        "--prefix", default="", help="registry and path before the names, such as registry.example.com/ml/"
    )
    parser.add_argument("--build-flag", action="append", default=[], help="a flag for each build; may be repeated")
    parser.add_argument("--run-flag", action="append", default=[], help="a flag for each container; may be repeated")
    parser.add_argument("--no-build", action="store_true", help="take images that are there")
    parser.add_argument("--no-try", action="store_true", help="start no container")
    parser.add_argument("--push", action="store_true", help="push the images after the trial")
    parser.add_argument("--save", type=Path, help="a folder for the images as files, which `docker load` reads")
    flags = parser.parse_args(arguments)
    if (flags.push or flags.save) and flags.no_try:
        parser.error("--push and --save need a trial")
    some = set(flags.images or IMAGES)
    if not flags.no_try and some & {*GRAMMARS, *TOGETHER} and not (some >= set(TOGETHER) and some & set(GRAMMARS)):
        parser.error(f"a trial needs {' and '.join(TOGETHER)} and one of {', '.join(GRAMMARS)}; name them, or --no-try")
    tool = Tool(flags.tool, tuple(flags.build_flag), tuple(flags.run_flag))
    chosen = {name: IMAGES[name] for name in flags.images or IMAGES}
    added = labels(ROOT)
    version = added[0].partition("=")[2]
    names = {name: image.names(flags.prefix, version) for name, image in chosen.items()}
    try:
        if not flags.no_build:
            for name, image in chosen.items():
                tool.build(image, names[name], added)
        for name in chosen:
            print(f"{names[name][0]}: {tool.megabytes(names[name][0]):,.0f} MB")
        if not flags.no_try:
            for grammar in (name for name in GRAMMARS if name in chosen):
                three = names["engine-cpu"][0], names[grammar][0], names["gateway"][0]
                print(*try_three(tool, *three), sep="\n")
            if "engine-gpu" in chosen:
                print(try_gpu(tool, names["engine-gpu"][0]))
        if flags.save:
            flags.save.mkdir(parents=True, exist_ok=True)
            for name in chosen:
                tool("save", "--output", str(flags.save / f"{name}.tar"), *names[name])
        if flags.push:
            for pushed in (pushed for name in chosen for pushed in names[name]):
                tool("push", pushed)
                print(f"pushed {pushed}")
    except ImageError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
