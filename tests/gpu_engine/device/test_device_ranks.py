"""A model over two ranks on a recorded device: the collectives are nodes of the captured step, as NCCL's are.

Rank 0's part runs by transformers' own modules, since fused layers are native code on a CPU, which no capture records.
Not responsible for: the fused forward of ranks (see model/parallel), Triton's kernels (see tests/kernels).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from gpu_engine.api.config import EngineConfig
from gpu_engine.model import attention
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import LoadedModel, load_model, prepare
from gpu_engine.model.parallel.shards import Shard
from tests.gpu_engine import tiny
from tests.gpu_engine.beams import search, search_all
from tests.gpu_engine.device.device_engine import device_engine, guided_device_engine
from tests.gpu_engine.device.recorded_stream import opaque
from tests.gpu_engine.harness import (
    UNHURRIED_MS,
    Answer,
    answer_all,
    ask,
    config,
    executor_of,
    tokens,
    unguided_engine,
    with_drafts,
)
from tests.gpu_engine.model.parallel.threads import ThreadRanks
from tests.gpu_engine.toy_sidecar import guided_engine

SMALL: dict[str, Any] = {"max_batch_size": 2, "max_model_len": 64, "row_timeout_ms": UNHURRIED_MS}


class Enqueued:
    """The work of a collective on a stream: what is after it waits, and the host does not."""

    def wait(self) -> None:
        pass


@dataclass(eq=False)
class NodesOfGroup:
    """A process group whose collectives are nodes while a step is captured, and run at each replay."""

    group: Any
    ran: Counter[str] = field(default_factory=Counter)

    def __getattr__(self, name: str) -> Any:
        return partial(self._start, name)

    def _start(self, name: str, *args: object) -> Enqueued:
        @opaque
        def run() -> None:
            getattr(self.group, name)(*args).wait()
            self.ran[name] += 1

        run()
        return Enqueued()


@dataclass(frozen=True)
class Site:
    """The place of a product that each rank has a part of."""

    module: nn.Module
    name: str

    @property
    def output(self) -> nn.Module:
        return self.module.get_submodule(self.name)

    down = output

    def replace_product(self, _: str, product: nn.Module) -> None:
        setattr(self.module, self.name, product)


@dataclass(frozen=True)
class SiteLayer:
    attention: Site
    gated: Site


@dataclass(frozen=True)
class OwnForward:
    """The forward of a part by its own modules."""

    model: LoadedModel
    layers: tuple[SiteLayer, ...]

    def logits(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> torch.Tensor:
        logits_BPS = self.model._forward(self.model.net, ids_BP, ctx).logits
        return logits_BPS.view(-1, logits_BPS.shape[-1])

    def fill(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> None:
        self.model._forward(self.model.net.get_decoder(), ids_BP, ctx)


def load_part(settings: EngineConfig, part: Shard) -> tuple[LoadedModel, Any]:
    """Load a part that is not fused."""
    attention.register()
    net = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32, attn_implementation=attention.NAME)
    whole = load_model(config(model=settings.model))
    model = prepare(
        config(model=settings.model, fuse_parts=False, quantization="none"), net, whole.tokenizer, part=part
    )
    layers = [SiteLayer(Site(layer.self_attn, "o_proj"), Site(layer.mlp, "down_proj")) for layer in net.model.layers]
    return model, OwnForward(model, tuple(layers))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A model with a KV head for each of two ranks."""
    shape = tiny.FAMILIES["llama"]()
    shape.num_attention_heads, shape.head_dim = 2, 32
    folder = tiny.save(shape, tmp_path_factory.mktemp("rounds"), rounds=True)
    return load_model(config(model=str(folder)))


@pytest.fixture(scope="module")
def ranks(llama: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadRanks]:
    settings = config(model=llama.name, tensor_parallel_size=2)
    two = ThreadRanks(settings, tmp_path_factory.mktemp("ranks") / "store", wrapped=NodesOfGroup, load=load_part)
    yield two
    two.end()


def cases() -> list[Answer]:
    return [
        ask([*range(196, 203)] * 2, max_tokens=8),
        ask(tokens(20, 3), grammar="12", max_tokens=14, temperature=1.0, seed=3),
        ask(tokens(9, 5), max_tokens=8, temperature=0.6, seed=5, ignore_eos=True),
    ]


def on_device(num_drafts: int) -> EngineConfig:
    return with_drafts(num_drafts, device="cuda", **SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_captured_steps_of_two_ranks_have_the_tokens_of_one_rank_on_a_cpu(
    llama: LoadedModel, ranks: ThreadRanks, num_drafts: int
) -> None:
    with guided_engine(llama, with_drafts(0, **SMALL)) as (engine, _):
        expected = answer_all(engine, cases())
    group, spent = ranks.collectives.group, ranks.collectives.spent
    with guided_device_engine(ranks.model, on_device(num_drafts)) as (engine, _, _):
        before, called = group.ran.copy(), {name: part.calls for name, part in spent.items()}
        assert answer_all(engine, cases()) == expected
        stats = executor_of(engine).runner.launcher.stats  # type: ignore[attr-defined]
    ran = group.ran - before
    assert stats.eager_steps == 0
    assert stats.replays > 5
    # Two layers have two sums each, and the prompts no logits.
    assert ran["gather"] == stats.replays
    assert ran["allgather"] == 4 * ran["broadcast"]
    assert ran["broadcast"] > stats.replays
    # The step's Python ran at the captures alone: replays repeat the collectives that it enqueued.
    assert {name: part.calls for name, part in spent.items()} == called


@pytest.mark.slow
def test_beams_copy_pages_of_every_rank_behind_the_steps(llama: LoadedModel, ranks: ThreadRanks) -> None:
    with unguided_engine(llama, with_drafts(0, **SMALL)) as engine:
        expected = search_all(engine, [search(tokens(21, 3), width=2, max_tokens=8)])[0].tokens
    with device_engine(ranks.model, on_device(0)) as (engine, _):
        assert search_all(engine, [search(tokens(21, 3), width=2, max_tokens=8)])[0].tokens == expected
