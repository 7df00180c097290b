"""Models by their id of the hub: the cache first, then a download, and one line for everything that can go wrong.

No hub is asked: a server of this file on the loopback address answers as one, and a cache is laid out by hand.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gpu_engine.model.hub import Hub, Wanted, locate, read_token
from gpu_engine.model.hub_cache import NotCached, cached_models, remove
from gpu_engine.model.loader import load_model
from gpu_engine.model.names import ModelNotSupported
from tests.gpu_engine.harness import config

COMMIT = "a" * 40
NAME = "tiny/llama"


@dataclass
class FakeHub:
    """A hub with one repository, whose files are those of a folder."""

    files: dict[str, bytes]
    token: str = ""
    """Every request needs it, unless it is empty."""
    gated: bool = False
    asked: list[str] = field(default_factory=list)
    """Paths of all requests."""
    address: str = ""

    @contextmanager
    def running(self) -> Iterator[FakeHub]:
        """Serve on a port of the loopback address."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            def do_HEAD(self) -> None:
                hub.answer(self)

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self.address = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer as the hub does: what a repository is, its tree, and its files."""
        path = request.path.partition("?")[0]
        self.asked.append(path)
        if NAME not in path:
            self._refuse(request, 404, "RepoNotFound")
        elif self.gated:
            self._refuse(request, 403, "GatedRepo")
        elif self.token and request.headers["Authorization"] != f"Bearer {self.token}":
            self._refuse(request, 401, "RepoNotFound")
        elif f"/api/models/{NAME}/tree/" in path:
            self._send(request, json.dumps([self._entry(name) for name in self.files]).encode())
        elif path.startswith(f"/api/models/{NAME}"):
            if path.endswith(("/revision/main", "/revision/v1", f"/revision/{COMMIT}", NAME)):
                names = [
                    {"rfilename": name, "size": len(content), "blobId": self._entry(name)["oid"]}
                    for name, content in self.files.items()
                ]
                self._send(request, json.dumps({"id": NAME, "sha": COMMIT, "siblings": names}).encode())
            else:
                self._refuse(request, 404, "RevisionNotFound")
        else:
            name = path.partition(f"/resolve/{COMMIT}/")[2]
            self._send(request, self.files[name], {"ETag": f'"{self._entry(name)["oid"]}"', "X-Repo-Commit": COMMIT})

    def _entry(self, name: str) -> dict[str, object]:
        content = self.files[name]
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def _refuse(self, request: BaseHTTPRequestHandler, status: int, code: str) -> None:
        request.send_response(status)
        request.send_header("X-Error-Code", code)
        request.send_header("Content-Length", "0")
        request.end_headers()

    def _send(self, request: BaseHTTPRequestHandler, content: bytes, headers: dict[str, str] | None = None) -> None:
        request.send_response(200)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(content)


@pytest.fixture
def llama_files(saved: Callable[[str], Path]) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in saved("llama").iterdir()}


def cached(cache: Path, files: dict[str, bytes], *, ref: str = "main") -> Path:
    """Lay a snapshot out as huggingface_hub does; return the cache."""
    repo = cache / "models--tiny--llama"
    snapshot = repo / "snapshots" / COMMIT
    for folder in (snapshot, repo / "refs", repo / "blobs"):
        folder.mkdir(parents=True)
    (repo / "refs" / ref).write_text(COMMIT)
    for name, content in files.items():
        blob = repo / "blobs" / hashlib.sha1(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / name).symlink_to(Path("../../blobs") / blob.name)
    return cache


UNREACHABLE = "http://127.0.0.1:9"
"""Nothing listens on the discard port."""


def test_a_model_of_the_cache_needs_no_hub(tmp_path: Path, llama_files: dict[str, bytes]) -> None:
    hub = Hub(endpoint=UNREACHABLE, cache=cached(tmp_path, llama_files))
    folder = locate(Wanted(NAME), hub)
    assert folder == tmp_path / "models--tiny--llama" / "snapshots" / COMMIT
    assert locate(Wanted(NAME, COMMIT), hub) == folder
    model = load_model(config(model=str(folder)))
    assert model.model_type == "llama"


def test_a_model_is_fetched_once_without_what_is_not_read(
    tmp_path: Path, llama_files: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    others = {
        "pytorch_model.bin": b"pickle",
        "original/model.safetensors": b"other",
        "consolidated.safetensors": b"same",
    }
    stages: list[tuple[str, float]] = []
    with FakeHub(llama_files | others).running() as fake:
        hub = Hub(endpoint=fake.address, cache=tmp_path)
        folder = locate(Wanted(NAME, "v1"), hub, lambda stage, done: stages.append((stage, done)))
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == llama_files
        requests = len(fake.asked)
        assert locate(Wanted(NAME, "v1"), hub) == folder
        assert len(fake.asked) == requests
    assert not [path for path in fake.asked if path.endswith(tuple(others))]
    assert stages[0] == (f"fetching {NAME} at v1 from {fake.address}", 0.0)
    assert stages[-1][1] == 1.0
    assert fake.address not in caplog.text  # addresses of files may be signed


def test_a_part_in_the_cache_is_completed(tmp_path: Path, llama_files: dict[str, bytes]) -> None:
    cached(tmp_path, {name: content for name, content in llama_files.items() if name != "model.safetensors"})
    with FakeHub(llama_files).running() as fake:
        folder = locate(Wanted(NAME), Hub(endpoint=fake.address, cache=tmp_path))
    assert (folder / "model.safetensors").read_bytes() == llama_files["model.safetensors"]
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ModelNotSupported, match=r"^model: tiny/llama is no path, and only a part of it is in the cache "
    ):
        locate(Wanted(NAME), Hub(endpoint=UNREACHABLE, cache=tmp_path))


def test_a_token_goes_to_the_hub(tmp_path: Path, llama_files: dict[str, bytes]) -> None:
    (tmp_path / "token").write_text("hf_secret\n")
    token = read_token(str(tmp_path / "token"))
    with FakeHub(llama_files, token="hf_secret").running() as fake:
        with pytest.raises(ModelNotSupported, match="or a private one: check the name, or give your token in HF_TOKEN"):
            locate(Wanted(NAME), Hub(endpoint=fake.address, cache=tmp_path / "cache", token="hf_wrong"))
        hub = Hub(endpoint=fake.address, cache=tmp_path / "cache", token=token)
        assert (locate(Wanted(NAME), hub) / "config.json").is_file()


@pytest.mark.parametrize("content", ["", "two tokens", "\xfc"])
def test_a_wrong_token_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "token"
    assert read_token("") is None
    with pytest.raises(ModelNotSupported, match=r"^hf_token_file: .* cannot be read"):
        read_token(str(path))
    path.write_text(content)
    with pytest.raises(ModelNotSupported, match=r"^hf_token_file: "):
        read_token(str(path))


def test_errors_of_the_hub_are_one_line_that_says_what_to_do(tmp_path: Path, llama_files: dict[str, bytes]) -> None:
    def message(wanted: Wanted, hub: Hub) -> str:
        with pytest.raises(ModelNotSupported) as raised:
            locate(wanted, hub)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    cache = tmp_path / "cache"
    fetch = "fetch it where the hub can be reached (`lockstep pull tiny/llama`) and copy the cache, or give a path"
    lost = message(Wanted(NAME), Hub(endpoint=UNREACHABLE, cache=cache))
    assert lost.startswith(
        f"model: tiny/llama is no path, and is not in the cache {cache}, and {UNREACHABLE} cannot be "
    )
    assert lost.endswith(fetch)
    offline = message(Wanted(NAME, setting="draft_model"), Hub(endpoint=UNREACHABLE, cache=cache, offline=True))
    assert offline == (
        f"draft_model: tiny/llama is no path, and is not in the cache {cache}, and HF_HUB_OFFLINE forbids to ask the "
        f"hub; {fetch}"
    )
    pickled = {name: content for name, content in llama_files.items() if name != "model.safetensors"}
    with FakeHub(pickled | {"pytorch_model-1.bin": b"", "pytorch_model-2.bin": b""}).running() as fake:
        hub = Hub(endpoint=fake.address, cache=cache)
        assert "has its weights only in pytorch_model-1.bin and 1 more: a pickle" in message(Wanted(NAME), hub)
        assert message(Wanted(NAME, "v9"), hub) == "revision: tiny/llama has no branch, tag or commit 'v9'"
        assert "has no such model" in message(Wanted("tiny/lama"), hub)
        fake.gated = True
        gated = message(Wanted(NAME), Hub(endpoint=fake.address, cache=tmp_path / "other"))
        assert gated.startswith(f"model: tiny/llama is gated: accept its terms at {fake.address}/tiny/llama")
    with pytest.raises(FileNotFoundError, match=r"^model: tiny is neither a directory, a GGUF file, a hub id"):
        locate(Wanted("tiny"), Hub())
    with pytest.raises(ModelNotSupported, match=r"^revision: 'v1' is for a model of the hub"):
        locate(Wanted(str(tmp_path), "v1"), Hub())


GGUFS = {
    "README.md": b"about",
    "llama-Q4_K_M.gguf": b"four bits",
    "llama-UD-Q8_K_XL.gguf": b"eight bits",
    "mmproj-F16.gguf": b"images",
    "BF16/llama-BF16-00001-of-00002.gguf": b"one",
    "BF16/llama-BF16-00002-of-00002.gguf": b"two",
}


def test_a_gguf_file_of_a_repository_is_fetched_by_its_kind_and_then_needs_no_hub(tmp_path: Path) -> None:
    with FakeHub(GGUFS).running() as fake:
        hub = Hub(endpoint=fake.address, cache=tmp_path)
        four = locate(Wanted(f"{NAME}:q4_k_m"), hub)
        assert (four.name, four.read_bytes()) == ("llama-Q4_K_M.gguf", b"four bits")
        assert [path.name for path in four.parent.iterdir()] == ["llama-Q4_K_M.gguf"]
        assert locate(Wanted(f"{NAME}:Q8_K_XL"), hub).read_bytes() == b"eight bits"
        assert locate(Wanted(f"{NAME}:mmproj-F16.gguf"), hub).read_bytes() == b"images"
        first = locate(Wanted(f"{NAME}:BF16"), hub)
        assert [path.read_bytes() for path in sorted(first.parent.iterdir())] == [b"one", b"two"]
        first.unlink()
        assert locate(Wanted(f"{NAME}:llama-BF16-00002-of-00002.gguf"), hub) == first
        assert first.read_bytes() == b"one", "the part that was lost is fetched again"
    assert locate(Wanted(f"{NAME}:bf16"), Hub(endpoint=UNREACHABLE, cache=tmp_path)) == first
    for kind in ("Q4_K_M", "llama-Q4_K_M.gguf"):
        assert locate(Wanted(f"{NAME}:{kind}"), Hub(endpoint=UNREACHABLE, cache=tmp_path)) == four


def test_a_gguf_file_that_cannot_be_had_is_refused_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def message(name: str, hub: Hub, revision: str = "") -> str:
        with pytest.raises(ModelNotSupported) as raised:
            locate(Wanted(name, revision), hub)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    third = {"llama-Q2_K-00001-of-00003.gguf": b"", "llama-Q2_K-00003-of-00003.gguf": b""}
    with FakeHub(GGUFS | third | {"other-Q4_0.gguf": b"", "llama-Q4_0.gguf": b""}).running() as fake:
        hub = Hub(endpoint=fake.address, cache=tmp_path)
        there = "BF16, Q2_K, Q4_0, Q4_K_M, UD-Q8_K_XL"
        assert message(f"{NAME}:Q9_K", hub) == f"model: tiny/llama has no GGUF file Q9_K; it has {there}"
        assert message(f"{NAME}:Q4_0", hub) == (
            "model: tiny/llama: several files are of the kind Q4_0; name one of them in its place: llama-Q4_0.gguf, "
            "other-Q4_0.gguf"
        )
        assert message(NAME, hub) == (
            f"model: tiny/llama has GGUF files and no safetensors; name a kind, such as tiny/llama:BF16: {there}"
        )
        assert message(f"{NAME}:Q4_K_M", hub, "v9") == "revision: tiny/llama has no branch, tag or commit 'v9'"
        assert message(f"{NAME}:Q2_K", hub) == (
            "model: tiny/llama: 2 of the 3 parts of llama-Q2_K-00001-of-00003.gguf are there, and not "
            "llama-Q2_K-00002-of-00003.gguf"
        )
        full = Hub(endpoint=fake.address, cache=tmp_path, free_bytes=lambda folder: 5)
        assert message(f"{NAME}:Q4_K_M", full).startswith(
            f"model: tiny/llama:Q4_K_M needs 0.0 MB in {tmp_path}, whose disk has 0.0 MB; remove others (`lockstep"
        )
        assert not [*tmp_path.iterdir()], "a refusal leaves nothing in the cache"
        assert locate(Wanted(f"{NAME}:Q4_K_M"), hub).is_file()
        (snapshots,) = tmp_path.glob("models--*/snapshots")
        shutil.rmtree(snapshots)  # as before a commit that changes other files only
        assert locate(Wanted(f"{NAME}:Q4_K_M"), full).is_file(), "what is in the cache needs no room"
    offline = Hub(endpoint=UNREACHABLE, cache=tmp_path, offline=True)
    assert f"is not in the cache {tmp_path} (which has Q4_K_M), and HF_HUB" in message(f"{NAME}:Q8_0", offline)
    lost = message(f"{NAME}:Q8_0", Hub(endpoint=UNREACHABLE, cache=tmp_path))
    assert f"{UNREACHABLE} cannot be reached" in lost
    assert "Retrying" not in caplog.text, "a hub that cannot be reached is asked once"
    (tmp_path / "x-00001-of-00003.gguf").touch()
    assert message(str(tmp_path / "x-00001-of-00003.gguf"), hub).endswith(
        "is one of 3 parts, and its folder has no x-00002-of-00003.gguf, x-00003-of-00003.gguf"
    )
    (unnumbered := tmp_path / "x-00001-of-00000.gguf").touch()
    assert locate(Wanted(str(unnumbered)), hub) == unnumbered


def test_removing_a_model_keeps_what_another_name_has(tmp_path: Path) -> None:
    files = {"a-Q4_0.gguf": b"x" * 1000, "b-F16.gguf": b"x" * 1000, "a-Q8_0.gguf": b"y" * 2000, "config.json": b"{}"}
    cached(tmp_path, files)
    repository = tmp_path / "models--tiny--llama"
    sizes = {f"{NAME}:F16": 1000, f"{NAME}:Q4_0": 1000, f"{NAME}:Q8_0": 2000}
    assert {model.name: model.num_bytes for model in cached_models(tmp_path)} == sizes
    assert (remove(f"{NAME}:q8_0", tmp_path), remove(f"{NAME}:Q4_0", tmp_path)) == (2000, 0)
    assert (repository / "snapshots" / COMMIT / "b-F16.gguf").read_bytes() == b"x" * 1000
    with pytest.raises(NotCached, match=r"^tiny/llama:Q4_0 is not in the cache; there is tiny/llama:F16$"):
        remove(f"{NAME}:Q4_0", tmp_path)
    assert remove(f"{NAME}:F16", tmp_path) == 1002
    assert not repository.exists()
    assert cached_models(tmp_path) == []
    assert cached_models(tmp_path / "nowhere") == []


def test_removing_a_model_leaves_another_one_of_the_same_commit_and_files_without_a_kind(tmp_path: Path) -> None:
    cached(tmp_path, {"a-Q4_0.gguf": b"x" * 1000, "plain.gguf": b"z" * 10, "config.json": b"{}"})
    shutil.copytree(tmp_path / "models--tiny--llama", tmp_path / "models--tiny--renamed", symlinks=True)
    assert remove(f"{NAME}:Q4_0", tmp_path) == 1000
    assert {path.name for path in (tmp_path / "models--tiny--llama/snapshots" / COMMIT).iterdir()} == {
        *("plain.gguf", "config.json")
    }
    assert remove(NAME, tmp_path) == 12
    assert [model.name for model in cached_models(tmp_path)] == ["tiny/renamed:Q4_0"]
    begun = tmp_path / "models--tiny--begun" / "blobs" / "ab.incomplete"
    begun.parent.mkdir(parents=True)
    begun.write_bytes(b"x" * 7)
    assert ("tiny/begun", 7) in {(model.name, model.num_bytes) for model in cached_models(tmp_path)}
    assert remove("tiny/begun", tmp_path) == 7


@pytest.mark.parametrize("revision", ["../../../out", "/out"])
def test_a_revision_that_leads_out_of_the_cache_is_refused(tmp_path: Path, revision: str) -> None:
    with pytest.raises(ModelNotSupported, match=r"^revision: .* is no name of a branch"):
        locate(Wanted(f"{NAME}:Q4_0", revision), Hub(endpoint=UNREACHABLE, cache=tmp_path))


@pytest.mark.slow
def test_the_command_line_fetches_lists_and_removes_without_the_model_libraries(tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        code = (
            "import sys; from gpu_engine.cli.commands import main; status = main(sys.argv[1:]); "
            "sys.exit(9 if 'torch' in sys.modules else status)"
        )
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=300, check=False)
        return done.returncode, done.stdout or done.stderr.splitlines()[-1]

    with FakeHub(GGUFS).running() as fake:
        own = {"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": fake.address}
        status, out = run("pull", f"{NAME}:Q4_K_M")
        assert (status, Path(out.strip()).read_bytes()) == (0, b"four bits")
        status, out = run("list")
        assert (status, out.splitlines()[1].split()[:2]) == (0, [f"{NAME}:Q4_K_M", "0.0"])
        assert run("rm", f"{NAME}:Q4_K_M") == (0, f"removed {NAME}:Q4_K_M: 0.0 MB\n")
        assert run("rm", f"{NAME}:Q4_K_M") == (1, f"error: {NAME}:Q4_K_M is not in the cache")
        assert run("pull", "embedded")[0] == 2


@pytest.mark.slow
def test_a_start_with_an_unknown_id_ends_with_one_line(tmp_path: Path) -> None:
    own = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    arguments = ["serve", "--model", "tiny/lama", "--grammar", "none", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "gpu_engine", *arguments],
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        f"error: model: tiny/lama is no path, and is not in the cache {tmp_path}, and HF_HUB_OFFLINE forbids to ask"
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("names", ["a,,b", ",", "a,a"])
def test_wrong_served_names_are_refused(names: str) -> None:
    with pytest.raises(ValueError, match=r"^served_model_name: "):
        config(served_model_name=names)


def test_served_names_are_the_models_own_unless_they_are_given() -> None:
    assert config(model="Qwen/Qwen3-0.6B").served_names == ("Qwen/Qwen3-0.6B",)
    assert config(served_model_name="qwen, gpt-4o").served_names == ("qwen", "gpt-4o")
