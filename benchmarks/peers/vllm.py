"""vLLM as a peer: its offline engine in the Python of another environment, driven through `vllm_worker.py`.

Invariant: the worker process has ended after `close`.
Not responsible for: installing vLLM (see benchmarks/README.md).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Answer, Run
from benchmarks.harness.systems import Prompt, SystemFailed

_WORKER = Path(__file__).with_name("vllm_worker.py")
_TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")


def worker_environment(python: Path, num_threads: int) -> dict[str, str]:
    """Return the environment that vLLM recommends for a CPU; libraries that are not installed are skipped."""
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


class Vllm:
    """vLLM, greedy, with its structured outputs; `ngram` > 0 adds its n-gram drafts."""

    def __init__(
        self, python: Path, directory: Path, *, dtype: str, num_threads: int, batch: int, ngram: int = 0
    ) -> None:
        self.name = "vllm" + (f" + ngram {ngram}" if ngram else "")
        self._settings = f"{dtype}, {num_threads} threads, structured outputs as installed"
        # fmt: off
        argv = [
            str(python), "-P", str(_WORKER), "--model", str(directory), "--dtype", dtype,
            "--max-model-len", "2048", "--max-num-seqs", str(batch), "--ngram", str(ngram),
        ]
        # fmt: on
        descriptor, path = tempfile.mkstemp(prefix="lockstep-bench-vllm-", suffix=".log")
        self.log = Path(path)
        with os.fdopen(descriptor, "wb") as log:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=worker_environment(python, num_threads),
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
        return f"<Vllm {self.name} pid={self._process.pid} log={self.log}>"

    def describe(self) -> str:
        """Versions and settings."""
        return f"vllm {self._versions['vllm']} (torch {self._versions['torch']}): {self._settings}"

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
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        reply = self._read()
        if "error" in reply:
            raise SystemFailed(reply["error"].splitlines()[0][:160])
        for _ in prompts:
            on_answer()
        return Run(tuple(_answer(raw) for raw in reply["answers"]), reply["wall_s"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = self.log.read_text(errors="replace").splitlines()[-3:]
            raise SystemFailed(
                f"the vLLM worker ended with {self._process.wait()}: {' | '.join(tail)} (log: {self.log})"
            )
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        """Close the worker's stdin, wait, and kill the rest of its session."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


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
