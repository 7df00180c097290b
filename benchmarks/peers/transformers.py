"""transformers' `generate` as a peer: with xgrammar's own logits processor, and with prompt lookup.

Invariant: it runs in this process, on the calling thread; concurrency c is a static, left-padded batch of c. A batch
ends when its longest answer ends, as it does for users of `generate`. A failure is reported and never worked around.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
import xgrammar.contrib.hf
from transformers.generation.streamers import BaseStreamer

from benchmarks.harness.measure import Answer, Run
from benchmarks.harness.systems import Prompt, SystemFailed


class Clock(BaseStreamer):  # type: ignore[no-untyped-call,misc,unused-ignore]
    """A streamer that notes when how many tokens came. `puts` holds (time in seconds, tokens per row)."""

    def __init__(self) -> None:
        self.puts: list[tuple[float, int]] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Take [B] or [1, n] new tokens; the first call carries the prompt."""
        if self._prompt_seen:
            self.puts.append((time.perf_counter(), value.shape[-1] if value.dim() > 1 else 1))
        self._prompt_seen = True

    def end(self) -> None:
        """Do nothing: the last put has the time."""

    def arrival(self, tokens: int) -> tuple[float, int]:
        """Return when the `tokens`-th token of a row came, and with which put, counted from 1."""
        seen = 0
        for step, (at_s, count) in enumerate(self.puts, start=1):
            seen += count
            if seen >= tokens:
                return at_s, step
        return self.puts[-1][0], len(self.puts)


class Weights:
    """The model, tokenizer and grammar compiler that all transformers systems share."""

    def __init__(self, directory: Path, dtype: str, num_threads: int, device: str = "cpu") -> None:
        torch.set_num_threads(num_threads)
        self.num_threads = num_threads
        self.dtype = dtype
        self.device = device
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
        self.model = model.to(device).eval()
        eos = self.model.generation_config.eos_token_id
        self.eos_ids: set[int] = set(eos) if isinstance(eos, list) else {eos}
        info = xgrammar.TokenizerInfo.from_huggingface(self.tokenizer, vocab_size=self.model.config.vocab_size)
        self.compiler = xgrammar.GrammarCompiler(info)

    def __repr__(self) -> str:
        return f"<Weights {self.model.config.model_type} {self.dtype} {self.device} threads={self.num_threads}>"


class Transformers:
    """`generate`, greedy. `lookup` > 0 adds prompt lookup with that many tokens; `grammar` False leaves schemas out."""

    def __init__(self, weights: Weights, *, lookup: int = 0, grammar: bool = True) -> None:
        self._weights = weights
        self._lookup = lookup
        self.guided = grammar
        parts = [
            "transformers",
            *(["xgrammar processor"] if grammar else []),
            *([f"lookup {lookup}"] if lookup else []),
        ]
        self.name = " + ".join(parts) + ("" if grammar else " (no grammar)")

    def __repr__(self) -> str:
        return f"<Transformers {self.name}>"

    def describe(self) -> str:
        """Versions, dtype and threads."""
        return (
            f"transformers {transformers.__version__}, xgrammar {version('xgrammar')}, torch {torch.__version__}: "
            f"{self._weights.dtype} on {self._weights.device}, {self._weights.num_threads} threads, static batches"
        )

    def run(self, prompts: Sequence[Prompt], concurrency: int, on_answer: Callable[[], None]) -> Run:
        """See `System.run`."""
        answers: list[Answer] = []
        started_s = time.perf_counter()
        for first in range(0, len(prompts), concurrency):
            batch = prompts[first : first + concurrency]
            try:
                answers += self._batch(batch)
            except (AssertionError, RuntimeError, ValueError) as error:
                raise SystemFailed(f"{type(error).__name__}: {_where(error)}") from error
            for _ in batch:
                on_answer()
        return Run(tuple(answers), time.perf_counter() - started_s)

    def _batch(self, prompts: Sequence[Prompt]) -> list[Answer]:
        weights = self._weights
        started_s = time.perf_counter()
        width = max(len(prompt.token_ids) for prompt in prompts)
        ids_BP = torch.full((len(prompts), width), min(weights.eos_ids))
        mask_BP = torch.zeros_like(ids_BP)
        for row, prompt in enumerate(prompts):
            ids_BP[row, width - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
            mask_BP[row, width - len(prompt.token_ids) :] = 1
        clock = Clock()
        options: dict[str, Any] = {"prompt_lookup_num_tokens": self._lookup} if self._lookup else {}
        with torch.inference_mode():
            out_BT = weights.model.generate(
                ids_BP.to(weights.device),
                attention_mask=mask_BP.to(weights.device),
                do_sample=False,
                max_new_tokens=max(prompt.item.max_tokens for prompt in prompts),
                pad_token_id=min(weights.eos_ids),
                logits_processor=self._processors(prompts),
                streamer=clock,
                **options,
            )
        return [
            self._answer(prompt, out_BT[row, width:].tolist(), clock, started_s) for row, prompt in enumerate(prompts)
        ]

    def _processors(self, prompts: Sequence[Prompt]) -> list[Any]:
        schemas = [prompt.item.schema for prompt in prompts]
        if not self.guided or schemas[0] is None:
            return []
        compiled = [self._weights.compiler.compile_json_schema(schema or "{}") for schema in schemas]
        return [xgrammar.contrib.hf.LogitsProcessor(compiled)]

    def _answer(self, prompt: Prompt, ids: list[int], clock: Clock, started_s: float) -> Answer:
        end = next((i for i, token in enumerate(ids) if token in self._weights.eos_ids), None)
        ids = ids[: prompt.item.max_tokens] if end is None else ids[: end + 1]
        last_s, steps = clock.arrival(len(ids))
        return Answer(
            name=prompt.item.name,
            text=str(self._weights.tokenizer.decode(ids, skip_special_tokens=True)),
            token_ids=tuple(ids),
            finish="length" if end is None else "stop",
            started_s=started_s,
            first_s=clock.puts[0][0],
            last_s=last_s,
            steps=steps,
        )

    def close(self) -> None:
        """Do nothing: the weights are shared."""


def _where(error: BaseException) -> str:
    """Say what failed and, for an error without words, where."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    place = "" if frame is None else f"{Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}"
    lines = str(error).splitlines()
    return lines[0][:120] if lines else f"no message, raised at {place}"
