"""The formulas against what was measured: one row for each figure of docs/log/ and docs/benchmarks.md that they
concern.

Invariant: a row says whether a number of its device was fitted to it; such a row shows no skill. Rows that the formulas
miss stay. Not responsible for: the formulas (see memory.py, step_time.py), the simulation (see replica.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import grpc

from benchmarks.harness.server import ServerOptions, start_engine
from benchmarks.harness.tables import table
from gpu_engine.api.config import EngineConfig
from gpu_engine.api.engine_settings import SLOT_TOKENS
from gpu_engine.api.stats import MemoryUse
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from tools.scale.device import DEVICES
from tools.scale.memory import FORMATS, Serving
from tools.scale.shape import PRESETS
from tools.scale.step_time import Roofline, StepLoad

_H200_CONTEXT = 300
"""Tokens of a sequence in the H200's steps: an assumption, since the log does not say it."""
_MS, _US, _MB = 1e3, 1e6, 1e-6
_SETTINGS = {"bfloat16-cpu": ("bfloat16", "none"), "q4-cpu": ("auto", "auto"), "int8-cpu": ("bfloat16", "int8")}
"""Format of the embedded model -> `dtype` and `quantization` of an engine that has it so; the others are defaults."""
_REPORTED = {
    "bfloat16-cpu": MemoryUse(weight_bytes=326_194_048, kv_cache_bytes=762_347_520, buffer_bytes=6_490_189),
    "q4-cpu": MemoryUse(weight_bytes=154_892_432, kv_cache_bytes=762_347_520, buffer_bytes=6_490_189),
    "int8-cpu": MemoryUse(weight_bytes=201_341_072, kv_cache_bytes=762_347_520, buffer_bytes=6_490_189),
}
"""What such engines reported (`python -m tools.scale compare --measure`)."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure and what the formulas say."""

    group: str
    name: str
    measured: float
    predicted: float
    unit: str
    fitted: bool = False
    """A number of the device was chosen so that this figure comes out."""

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


_SOURCES = {
    "memory of the embedded model": "16 slots of 2048 tokens (`python -m tools.scale compare --measure`)",
    "other memory": "docs/log/, 'products over blocks of 4 and 8 bits' and 'FP8 and int8 products on a GPU'",
    "forwards on two cores (near)": "docs/log/, 'prefill over blocks, the same bits in less time'",
    "steps on two cores": "docs/log/, 'the whole of it, on a quiet machine of two cores' (`perf record`)",
    "steps on one H200, free": "`python -m benchmarks bench_gpu`; docs/log/, 'the first runs on a device'",
    "steps on one H200, guided": "`python -m benchmarks bench_gpu`; docs/log/, 'the first runs on a device'",
    "kernels on one H200": "`python -m benchmarks bench_kernels`; docs/log/, 'the first runs on a device'",
}
"""Where each group was measured."""


def figures() -> list[Figure]:
    """Return every row."""
    return [*memory_figures(_REPORTED), *_other_memory(), *_forwards(), *_steps(), *_h200_steps(), *_h200_kernels()]


def serving_of(form: str) -> Serving:
    """Return the engine with the embedded model that `reported` starts."""
    dtype, quantization = _SETTINGS[form]
    config = EngineConfig(device="cpu", dtype=dtype, quantization=quantization, max_model_len=SLOT_TOKENS)
    return Serving(PRESETS["embedded"], FORMATS[form], config)


def reported() -> Iterator[tuple[str, MemoryUse]]:
    """Start an engine with the embedded model in each format; yield the format, and what the engine reports."""
    for form in _SETTINGS:
        config = serving_of(form).config
        options = ServerOptions(
            dtype=config.dtype,
            quantization=config.quantization,
            num_threads=1,
            max_batch_size=config.max_batch_size,
            extra=("--grammar=none",),
        )
        with start_engine(options) as address, grpc.insecure_channel(address) as channel:
            stats = engine_pb2_grpc.EngineStub(channel).GetStats(engine_pb2.GetStatsRequest())
        yield form, MemoryUse(stats.weight_bytes, stats.kv_cache_bytes, stats.buffer_bytes)


def memory_figures(memory: Mapping[str, MemoryUse]) -> Iterator[Figure]:
    """Yield what engines reported, by format, next to the formulas."""
    group = "memory of the embedded model"
    for form, use in memory.items():
        one = serving_of(form)
        parts = {
            "weights and tables": (use.weight_bytes, one.weights() + one.tables()),
            "KV pages": (use.kv_cache_bytes, one.kv_cache()),
            "buffers": (use.buffer_bytes, one.slot_buffers() + one.lane_buffers() + one.sampling()),
        }
        for name, (measured, predicted) in parts.items():
            yield Figure(group, f"{name}, {form}", measured * _MB, predicted * _MB, "MB")


def _other_memory() -> Iterator[Figure]:
    logits = 64 * PRESETS["embedded"].vocab * 4
    yield Figure("other memory", "64 rows of logits, float32", 12, logits * _MB, "MB")
    llama = Serving(PRESETS["llama-8b"], FORMATS["bfloat16"], EngineConfig(device="cuda"))
    read = llama.weights() - llama.shape.embedding_weights * 2
    yield Figure("other memory", "Llama 8B: weights that a step reads", 15_000, read * _MB, "MB")


def _forwards() -> Iterator[Figure]:
    cost = Roofline(shape=PRESETS["embedded"], device=DEVICES["zen5-2"], form=FORMATS["q4-cpu"])
    group = "forwards on two cores (near)"
    for rows, ms, fitted in ((1, 2.13, True), (8, 4.93, False), (24, 9.9, False)):
        load = StepLoad(lanes=rows, context_tokens=200 * rows)
        yield Figure(group, f"{rows} rows", ms, cost.parts(load).forward * _MS, "ms", fitted)
    for tokens, ms, fitted in ((64, 13.3, False), (256, 54.4, True), (512, 126, False)):
        load = StepLoad(lanes=0, prefill_tokens=tokens, prompt_context=tokens // 2)
        yield Figure(group, f"prefill of {tokens}", ms, cost.parts(load).forward * _MS, "ms", fitted)


def _steps() -> Iterator[Figure]:
    cost = Roofline(shape=PRESETS["embedded"], device=DEVICES["zen5-2"], form=FORMATS["q4-cpu"])
    measured = {1: (4.0, 1.88, 0.21), 8: (10.6, 3.40, 1.78), 24: (23.1, 6.85, 4.07)}
    for rows, (whole, products, attention) in measured.items():
        parts = cost.parts(StepLoad(lanes=rows, context_tokens=280 * rows))
        name = f"{rows} rows"
        yield Figure("steps on two cores", f"{name}, products", products, (parts.products + parts.head) * _MS, "ms")
        yield Figure("steps on two cores", f"{name}, attention", attention, parts.attention * _MS, "ms")
        yield Figure("steps on two cores", f"{name}, whole step", whole, parts.total * _MS, "ms", rows != 8)


def _h200_steps() -> Iterator[Figure]:
    shapes = {"llama-8b": (0, 337), "embedded": (0, 322)}
    measured = {
        ("embedded", 0, 1): (0.99, 1.28),
        ("embedded", 0, 8): (1.01, 1.33),
        ("embedded", 0, 128): (2.1, 26.5),
        ("llama-8b", 0, 1): (4.443, 4.460),
        ("llama-8b", 0, 8): (4.607, 4.633),
        ("llama-8b", 0, 32): (5.15, 6.87),
        ("llama-8b", 0, 128): (9.56, 12.3),
        ("llama-8b", 7, 1): (4.577, 4.873),
        ("llama-8b", 7, 8): (5.05, 5.53),
        ("llama-8b", 7, 32): (7.64, 11.6),
        ("llama-8b", 7, 128): (21.6, 40.2),
    }
    for guided in (False, True):
        for (model, drafts, batch), both in measured.items():
            mask_s = 60e-6 if not drafts else 60e-6 + 8 * 12e-6
            nodes, posts = (
                shapes[model][1],
                1 if model == "llama-8b" else 5,
            )  # a host callback exposes five times as much
            cost = Roofline(
                shape=PRESETS[model],
                device=DEVICES["h200"],
                form=FORMATS["bfloat16"],
                mask_s=mask_s,
                posts=posts,
                nodes=nodes,
            )
            load = StepLoad(
                lanes=batch,
                draft_rows=drafts * batch,
                context_tokens=_H200_CONTEXT * batch,
                guided_lanes=batch * guided,
            )
            group = f"steps on one H200, {'guided' if guided else 'free'}"
            fitted = (model, batch, guided) == ("embedded", 1, False)
            yield Figure(group, f"{model}, K = {drafts}, {batch}", both[guided], cost.seconds(load) * _MS, "ms", fitted)


def _h200_kernels() -> Iterator[Figure]:
    device, shape = DEVICES["h200"], PRESETS["llama-8b"]
    sizes = {
        "qkv": (4096 * 6144, 14.7),
        "attention's output": (4096 * 4096, 11.1),
        "gate and up": (4096 * 28_672, 54.7),
        "down": (14_336 * 4096, 31.0),
        "head": (4096 * 128_256, 232.0),
    }
    for name, (weights, us) in sizes.items():
        yield Figure("kernels on one H200", f"{name}, 1 row", us, 2 * weights / device.bandwidth * _US, "us")
    token_bytes = shape.kv_numbers * 2 / shape.num_layers
    for lanes, context, us in ((128, 200, 56.0), (128, 1500, 269.0), (32, 200, 17.0), (1, 200, 8.0)):
        floor = lanes * context * token_bytes / device.bandwidth * _US
        yield Figure("kernels on one H200", f"attention of a layer, {lanes} x {context} tokens", us, floor, "us")


def page() -> str:
    """Return all rows as Markdown, a table for each group."""
    rows, texts = figures(), []
    for group, source in _SOURCES.items():
        text = as_table([figure for figure in rows if figure.group == group])
        texts.append(f"{group[0].upper()}{group[1:]}: {source}.\n\n{text}")
    return "\n\n".join(texts)


def as_table(rows: Sequence[Figure]) -> str:
    """Return figures as Markdown."""
    lines = [
        [
            f.name,
            f"{f.measured:.4g} {f.unit}" if f.measured < 10_000 else f"{f.measured:.0f} {f.unit}",
            f"{f.predicted:.0f} {f.unit}" if f.predicted >= 1000 else f"{f.predicted:.3g} {f.unit}",
            f"{f.error:+.0%}" + (" (fitted)" if f.fitted else ""),
        ]
        for f in rows
    ]
    return table(("figure", "measured", "formula", "error"), lines)
