"""The interface of a measured system: a `System` runs prompts at a concurrency and returns a `Run`. Ours is `Lockstep`.

Invariant: every system gets the same prompts in the same order, and samples greedily.
Not responsible for: other systems (see the room peers).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from benchmarks.harness.client import Call, CallRefused, EngineClient, make_call
from benchmarks.harness.failure import CannotRun
from benchmarks.harness.measure import Answer, Run
from benchmarks.harness.server import ServerOptions, engine_address
from benchmarks.harness.workloads import Item
from protos.engine.v1 import engine_pb2 as pb


@dataclass(frozen=True, slots=True)
class Prompt:
    """An item with its prompt rendered by the model's chat template and tokenised."""

    item: Item
    token_ids: tuple[int, ...]


class SystemFailed(CannotRun):
    """A system cannot run this workload; the message is what the table shows."""


class System(Protocol):
    """Something that answers prompts. Made by its constructor, ended by `close`."""

    name: str

    @property
    def guided(self) -> bool:
        """Whether the system enforces a schema; one that does not is no peer on a guided workload."""

    def run(self, prompts: Sequence[Prompt], concurrency: int, on_answer: Callable[[], None]) -> Run:
        """Answer all prompts, `concurrency` at a time, greedily. `on_answer` is called once per prompt.

        Raises:
            SystemFailed: the system cannot do this.

        """

    def describe(self) -> str:
        """One line for the header: versions and settings."""

    def close(self) -> None:
        """Free everything."""


def load_prompts(items: Sequence[Item], tokenizer_dir: Path) -> list[Prompt]:
    """Render and tokenise `items` with the chat template of the model in `tokenizer_dir`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    prompts = []
    for item in items:
        messages = [{"role": role, "content": content} for role, content in item.messages]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        prompts.append(Prompt(item, tuple(ids)))
    return prompts


def hf_directory(model: str, given: str | None) -> Path:
    """Return the Hugging Face directory of `model` for the peers: `given`, or `model` itself, or the embedded one.

    Raises:
        CannotRun: there is no such directory.

    """
    if given is None and model == "embedded":
        from gpu_engine.model.embedded import EmbeddedModelMissing, ensure_embedded

        try:
            return ensure_embedded()
        except EmbeddedModelMissing as missing:
            raise CannotRun(f"--hf-model: {missing}") from missing
    path = Path(given if given is not None else model)
    if not (path / "config.json").is_file():
        raise CannotRun(f"--hf-model: {path} is not a directory with config.json")
    return path


class Lockstep:
    """This engine, over gRPC, in its own process; or, given its address, an engine that runs already."""

    guided = True

    def __init__(self, options: ServerOptions, address: str | None = None) -> None:
        self.options = options
        self.name = f"lockstep K={options.num_draft_tokens}"
        with ExitStack() as stack:
            self.address = stack.enter_context(engine_address(address, options))
            self._runner = stack.enter_context(asyncio.Runner())
            self._client = self._runner.run(self._connect())
            self._info = self._runner.run(self._client.info())
            self._stack = stack.pop_all()
        self._passes = 0

    def __repr__(self) -> str:
        return f"<Lockstep {self.name} {self.address}>"

    async def _connect(self) -> EngineClient:
        return EngineClient(self.address)

    def describe(self) -> str:
        """Version, drafter, backend, K, quantization and threads."""
        return (
            f"lockstep {self._info.version}: K={self._info.num_draft_tokens}, drafter {self._info.drafter}, "
            f"{self._info.dtype}, quantization {self.options.quantization}, on {self._info.device}, "
            f"{self.options.num_threads} threads, {'with' if self.options.prefix_cache else 'without'} prefix cache, "
            f"{self.options.grammar_backend} in its own process, gRPC"
        )

    def run(self, prompts: Sequence[Prompt], concurrency: int, on_answer: Callable[[], None]) -> Run:
        """See `System.run`."""
        return self._run([_greedy(prompt.item) for prompt in prompts], concurrency, on_answer)

    def run_guidance_pairs(
        self, prompts: Sequence[Prompt], concurrency: int, on_answer: Callable[[], None]
    ) -> list[tuple[Answer, Answer]]:
        """Answer every prompt with its grammar and again without, for as many tokens; return (guided, free) pairs.

        At concurrency 1 the two alternate prompt by prompt, else block by block.
        """
        pairs: list[tuple[Answer, Answer]] = []
        block = concurrency if concurrency > 1 else 1
        for first in range(0, len(prompts), block):
            items = [prompt.item for prompt in prompts[first : first + block]]
            guided = self._run([_greedy(item) for item in items], concurrency, on_answer).answers
            twins = [_free_twin(item, len(answer.token_ids)) for item, answer in zip(items, guided, strict=True)]
            free = self._run(twins, concurrency, lambda: None).answers
            pairs += zip(guided, free, strict=True)
        return pairs

    def _run(self, calls: Sequence[Call], concurrency: int, on_answer: Callable[[], None]) -> Run:
        """Run one pass. A salt of its own keeps the pages that earlier passes left in the prefix cache from it."""
        self._passes += 1
        for call in calls:
            call.request.cache_salt = f"pass {self._passes}"
        try:
            return self._runner.run(self._client.run(calls, concurrency, on_answer))
        except CallRefused as refusal:
            raise SystemFailed(f"{refusal.status}: {refusal.reason}") from refusal

    def close(self) -> None:
        """Close the channel and stop the process."""
        self._runner.run(self._client.close())
        self._stack.close()


def _greedy(item: Item) -> Call:
    sampling = pb.SamplingParams(max_tokens=item.max_tokens, temperature=0.0)
    return make_call(item.name, item.messages, schema=item.schema, sampling=sampling)


def _free_twin(item: Item, tokens: int) -> Call:
    free = replace(item, schema=None, max_tokens=max(tokens, 1))
    call = _greedy(free)
    call.request.sampling.ignore_eos = True
    return call
