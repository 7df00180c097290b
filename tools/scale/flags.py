"""The flags that several commands share, and what is made of them: an engine's memory, its step time, and a load.

Invariant: a value that makes no sense is a ValueError that names its flag. Not responsible for: the commands (see
__main__.py).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gpu_engine.api.config import EngineConfig
from tools.scale.calibration import Calibration
from tools.scale.device import DEVICES
from tools.scale.memory import FORMATS, Serving
from tools.scale.replica import Drafts, EngineSpec, Grammars
from tools.scale.routers import ROUTERS
from tools.scale.shape import PRESETS, load_shape
from tools.scale.step_time import Roofline
from tools.scale.traces import Arrival, Lengths, Load, read_trace

_MODEL_KINDS = ("model", "decoupled")
"""Drafters that are a second model."""
_DRAFT_KINDS = ("ngram", "none", *_MODEL_KINDS)


def add_model_flags(parser: argparse.ArgumentParser, model: str = "llama-8b") -> None:
    """Add the model, its device, and the settings of an engine."""
    add = parser.add_argument_group("the engine").add_argument
    add("--model", default=model, help=f"{', '.join(PRESETS)}, or a config.json of Hugging Face (default {model})")
    add("--device", default="h100", choices=sorted(DEVICES), help="what one rank runs on (default h100)")
    add("--format", choices=sorted(FORMATS), help="of the weights (default: bfloat16; q4-cpu on a CPU)")
    add("--tp", type=int, default=1, metavar="N", help="GPUs of one engine (default 1)")
    add("--max-batch", type=int, default=32, metavar="N", help="max_batch_size (default 32)")
    add("--max-model-len", type=int, default=4096, metavar="N", help="max_model_len (default 4096)")
    add("--kv-tokens", type=int, default=0, metavar="N", help="kv_cache_tokens (default: batch times length)")
    add("--page-size", type=int, default=16, help="page_size (default 16)")
    add("--drafts", type=int, default=0, metavar="K", help="num_draft_tokens; 0: none (default)")
    add("--drafter", default="ngram", choices=_DRAFT_KINDS, help="with drafts (default ngram)")
    add("--draft-model", metavar="MODEL", help="with --drafter model or decoupled: its shape, as --model")
    add("--no-prefix-cache", action="store_true", help="prefix_cache off")


def add_speed_flags(parser: argparse.ArgumentParser) -> None:
    """Add what a step's time depends on next to the model."""
    add = parser.add_argument_group("the step").add_argument
    add("--acceptance", type=float, default=0.6, metavar="A", help="chance that a draft is right (default 0.6)")
    add("--mask-us", type=float, default=25.0, help="microseconds a slot of bench_sidecar (default 25, K = 0)")


def add_fleet_flags(parser: argparse.ArgumentParser) -> None:
    """Add the load, the router, and what every engine of the fleet is."""
    add = parser.add_argument_group("the fleet").add_argument
    add("--calibration", type=Path, metavar="FILE", help="of a real engine (calibrate); replaces model and device")
    add("--router", default="least-loaded", choices=sorted(ROUTERS), help="(default least-loaded)")
    add("--compile-ms", type=float, help="mean compilation of a grammar (default 30, or the calibration's)")
    add("--compile-workers", type=int, default=2, help="compilations at a time in a grammar process (default 2)")
    add("--start-s", type=float, default=15.0, help="from an engine's end to its next request (default 15)")
    add("--detect-s", type=float, default=1.0, help="from an engine's end to the router's knowing it (default 1)")
    add("--max-queue", type=int, default=256, help="max_queue_size (default 256)")
    add = parser.add_argument_group("the load").add_argument
    add("--rate", type=float, default=4.0, help="requests a second (default 4)")
    add("--burstiness", type=float, default=1.0, help="1: Poisson; 0: at equal times; 3: bursts (default 1)")
    add("--seconds", type=float, default=120.0, help="of simulated arrivals (default 120)")
    add("--trace", type=Path, metavar="FILE", help="JSON lines instead: at_s, prompt_tokens, answer_tokens, ...")
    add("--prompt-tokens", type=float, help="mean (default 256, or the calibration's own lengths)")
    add("--answer-tokens", type=float, help="mean (default 128, or the calibration's own lengths)")
    add("--spread", type=float, default=0.6, help="standard deviation over mean of both lengths (default 0.6)")
    add("--guided", type=float, metavar="SHARE", help="of requests with a grammar (default 0, or the calibration's)")
    add("--grammars", type=int, default=20, help="distinct ones, asked for by Zipf's law (default 20)")
    add("--groups", type=int, default=0, help="groups of prompts that begin alike (default 0)")
    add("--group-tokens", type=int, default=512, help="tokens that a group shares (default 512)")
    add("--seed", type=int, default=0, help="(default 0)")


def config_of(args: argparse.Namespace) -> EngineConfig:
    """Return the engine's settings."""
    on_cpu = DEVICES[args.device].on_cpu
    drafter = args.drafter if args.drafts else "none"
    return EngineConfig(
        device="cpu" if on_cpu else "cuda",
        max_batch_size=args.max_batch,
        max_model_len=args.max_model_len,
        kv_cache_tokens=args.kv_tokens,
        page_size=args.page_size,
        num_draft_tokens=args.drafts,
        drafter=drafter,
        draft_model=(args.draft_model or "a draft model") if drafter in _MODEL_KINDS else "",
        prefix_cache=not args.no_prefix_cache,
        max_queue_size=getattr(args, "max_queue", 256),
    )


def serving_of(args: argparse.Namespace) -> Serving:
    """Return the engine whose memory is asked for. Raises ValueError."""
    if args.draft_model and args.drafter not in _MODEL_KINDS:
        raise ValueError("--draft-model: needs --drafter model or decoupled")
    draft = load_shape(args.draft_model) if args.draft_model else None
    form = FORMATS[args.format or ("q4-cpu" if DEVICES[args.device].on_cpu else "bfloat16")]
    return Serving(load_shape(args.model), form, config_of(args), args.tp, draft=draft)


def roofline_of(args: argparse.Namespace) -> Roofline:
    """Return the step time by formula. Raises ValueError."""
    serving = serving_of(args)
    return Roofline(
        shape=serving.shape,
        device=DEVICES[args.device],
        form=serving.form,
        tensor_parallel=args.tp,
        mask_s=args.mask_us * 1e-6,
    )


def spec_of(args: argparse.Namespace) -> tuple[EngineSpec, Calibration | None]:
    """Return what every engine of the fleet is, and the calibration that it is from. Raises ValueError."""
    grammars = {"compile_workers": args.compile_workers}
    if args.calibration is not None:
        calibration = Calibration.load(args.calibration)
        spec = calibration.spec(max_queue_size=args.max_queue)
        compile_s = spec.grammars.compile_s if args.compile_ms is None else args.compile_ms / 1e3
        return _with(spec, Grammars(compile_s=compile_s, **grammars), args.start_s), calibration
    compile_s = 0.03 if args.compile_ms is None else args.compile_ms / 1e3
    cost = roofline_of(args)
    spec = EngineSpec(
        cost=cost,
        config=config_of(args),
        mixes=cost.device.on_cpu,
        drafts=Drafts.constant(args.drafts, args.acceptance),
    )
    return _with(spec, Grammars(compile_s=compile_s, **grammars), args.start_s), None


def _with(spec: EngineSpec, grammars: Grammars, start_s: float) -> EngineSpec:
    values = {name: getattr(spec, name) for name in EngineSpec.__slots__}
    return EngineSpec(**{**values, "grammars": grammars, "start_s": start_s})


def traces_of(args: argparse.Namespace, calibration: Calibration | None, count: int) -> list[list[Arrival]]:
    """Return `count` traces of the load, or the one of `--trace`. Raises ValueError."""
    if args.trace is not None:
        return [read_trace(args.trace)]
    measured = calibration is not None and args.prompt_tokens is None and args.answer_tokens is None
    lengths = Lengths(
        pairs=calibration.pairs if measured and calibration is not None else (),
        prompt_mean=args.prompt_tokens or 256.0,
        answer_mean=args.answer_tokens or 128.0,
        spread=args.spread,
    )
    guided = args.guided
    if guided is None:
        guided = calibration.guided_share if calibration is not None else 0.0
    load = Load(
        rate=args.rate,
        burstiness=args.burstiness,
        lengths=lengths,
        guided_share=guided,
        grammars=args.grammars,
        groups=args.groups,
        group_tokens=args.group_tokens,
    )
    return [load.trace(args.seconds, args.seed + number) for number in range(count)]
