"""Peers that live in their own Python: OpenVINO GenAI and vLLM, each driven through `worker.py`.

Invariant: the worker process has ended after `close`.
Not responsible for: installing them (see benchmarks/README.md).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Answer, Run
from benchmarks.harness.systems import Prompt, SystemFailed
from service_runtime.parent_death import dying_with_us

_WORKER = Path(__file__).with_name("worker.py")
_TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")


class ForeignSystem:
    """A system in a worker process: `python` runs `worker.py` with `arguments`, in `environment`.

    `settings` is what `describe` says next to the versions that the worker reports.

    Raises:
        SystemFailed: the worker did not become ready; the message has the reason in its first line.

    """

    guided = True

    def __init__(
        self,
        name: str,
        python: Path,
        arguments: Sequence[str],
        *,
        settings: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._settings = settings
        if not python.is_file():
            raise SystemFailed(f"{python} is not a file")
        descriptor, path = tempfile.mkstemp(prefix="lockstep-bench-peer-", suffix=".log")
        self.log = Path(path)
        with os.fdopen(descriptor, "wb") as log:
            self._process = subprocess.Popen(
                dying_with_us([str(python), "-P", str(_WORKER), *arguments]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(os.environ if environment is None else environment),
                cwd=tempfile.gettempdir(),
                start_new_session=True,
                text=True,
            )
        try:
            self._versions: dict[str, str] = self._read()["ready"]
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<ForeignSystem {self.name} pid={self._process.pid} log={self.log}>"

    def describe(self) -> str:
        """Versions and settings."""
        return f"{', '.join(f'{name} {version}' for name, version in self._versions.items())}: {self._settings}"

    def run(self, prompts: Sequence[Prompt], concurrency: int, on_answer: Callable[[], None]) -> Run:
        """See `System.run`."""
        job = {
            "concurrency": concurrency,
            "prompts": [
                {
                    "name": prompt.item.name,
                    "token_ids": list(prompt.token_ids),
                    "schema": prompt.item.schema,
                    "max_tokens": prompt.item.max_tokens,
                }
                for prompt in prompts
            ],
        }
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # _read says how the worker ended
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        reply = self._read()
        for _ in prompts:
            on_answer()
        return Run(tuple(_answer(raw) for raw in reply["answers"]), reply["wall_s"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = self.log.read_text(errors="replace").splitlines()[-3:]
            raise SystemFailed(f"the worker ended with {self._process.wait()}: {' | '.join(tail)} (log: {self.log})")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise SystemFailed(shortened(reply["error"]))
        return reply

    def close(self) -> None:
        """Close the worker's stdin, wait, and kill the rest of its session."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(BrokenPipeError):  # what it still held is for a worker that has ended
                self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def openvino(python: Path, gguf: Path, *, num_threads: int, batch: int, lookup: int = 0) -> ForeignSystem:
    """Start OpenVINO GenAI's continuous batching on `gguf`, greedy, with its structured output.

    `lookup` > 0 adds its prompt lookup with that many tokens.
    """
    # fmt: off
    arguments = [
        "--engine", "openvino", "--model", str(gguf), "--threads", str(num_threads),
        "--batch", str(batch), "--lookup", str(lookup),
    ]
    # fmt: on
    name = "openvino" + (f" + lookup {lookup}" if lookup else "")
    settings = f"{gguf.name} as it is, {num_threads} threads, continuous batching, structured output, no server"
    return ForeignSystem(name, python, arguments, settings=settings)


def vllm(
    python: Path,
    directory: Path,
    *,
    dtype: str,
    num_threads: int,
    batch: int,
    ngram: int = 0,
    prefix_cache: bool = False,
) -> ForeignSystem:
    """Start vLLM's offline engine on `directory`, greedy, with its structured outputs.

    `ngram` > 0 adds its n-gram drafts; `prefix_cache` lets the prompts of one pass share their pages.
    """
    # fmt: off
    arguments = [
        "--engine", "vllm", "--model", str(directory), "--threads", str(num_threads), "--dtype", dtype,
        "--batch", str(batch), "--lookup", str(ngram), *(["--prefix-cache"] if prefix_cache else []),
    ]
    # fmt: on
    name = "vllm" + (f" + ngram {ngram}" if ngram else "")
    cache = "with" if prefix_cache else "without"
    settings = f"{dtype}, {num_threads} threads, structured outputs as installed, {cache} prefix cache, no server"
    environment = vllm_environment(python, num_threads)
    return ForeignSystem(name, python, arguments, settings=settings, environment=environment)


def vllm_environment(python: Path, num_threads: int) -> dict[str, str]:
    """Return the environment that vLLM recommends for a CPU; libraries that are not installed are left out."""
    libraries = [path for path in (_TCMALLOC, python.parent.parent / "lib" / "libiomp5.so") if path.exists()]
    cores = sorted(os.sched_getaffinity(0))[:num_threads]
    environment = dict(os.environ) | {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if libraries:
        environment["LD_PRELOAD"] = ":".join(map(str, libraries))
    return environment


def shortened(words: str, most: int = 200) -> str:
    """Return the first line of `words`; from a longer one the middle is left out, because the reason is at the end."""
    line = (words.strip().splitlines() or [""])[0]
    return line if len(line) <= most else f"{line[: most // 4]} ... {line[5 - most + most // 4 :]}"


def _answer(raw: dict[str, Any]) -> Answer:
    return Answer(
        name=raw["name"],
        text=raw["text"],
        token_ids=tuple(raw["token_ids"]),
        finish=raw["finish"],
        started_s=raw["started_s"],
        first_s=raw["first_s"],
        last_s=raw["last_s"],
        steps=raw["steps"],
    )
