"""A model fitted to one real engine: an iteration's time by load, drafts and tokens by batch size, and lengths.

The time is a sum of non-negative shares: a constant, and one for each sequence, each draft, each prompt token, each
forward with a prompt, and each token in the KV cache. The fit minimises relative errors, so that short iterations count
as much as long ones. The deviations from the fit are kept as quantiles, and the simulation draws from them.

Invariant: a file that `load` reads says which engine and workload it describes, and how many iterations were measured.

Not responsible for: measuring (see calibrate.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_engine.api.config import EngineConfig
from tools.scale.replica import Drafts, EngineSpec, Grammars
from tools.scale.step_time import StepLoad

_FEATURES = ("constant", "lanes", "draft_rows", "prefill_tokens", "has_prefill", "context_tokens")
_BUCKETS = (1, 2, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_OUTLIER = 3.0
"""An iteration that took more than three times its fitted time is left out of the second fit, and kept in the noise."""
_NUM_QUANTILES = 101
_PAUSE_S = 0.005
"""A longer time between two iterations is one in which the engine had nothing to do."""

Matrix = npt.NDArray[np.float64]


class BadCalibration(ValueError):
    """A file is no calibration, or there are too few iterations for one; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One iteration of a real engine."""

    ended_s: float
    seconds: float
    lanes: int
    draft_rows: int
    prefill_tokens: int
    context_tokens: int
    generated: int


@dataclass(frozen=True, slots=True)
class FittedCost:
    """A `StepCost` from shares in seconds, in the order of `_FEATURES`."""

    shares: tuple[float, ...]

    def seconds(self, load: StepLoad) -> float:
        """See `StepCost`."""
        values = (1, load.lanes, load.draft_rows, load.prefill_tokens, load.prefill_tokens > 0, load.context_tokens)
        return sum(share * value for share, value in zip(self.shares, values, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was fitted to one engine and workload. Times are in seconds."""

    engine: str
    """What it is of: model, settings and machine, for people."""
    workload: str
    iterations: int
    mean_error: float
    """Mean of |fitted / measured - 1| over the iterations."""
    shares: tuple[float, ...]
    noise: tuple[float, ...]
    lanes: tuple[int, ...]
    drafts: tuple[float, ...]
    tokens: tuple[float, ...]
    gains: tuple[float, ...]
    front_s: float
    """Median time to the first token at the client, less the engine's own."""
    compile_s: float
    """Mean compilation of a grammar, as the engine saw it."""
    guided_share: float
    pairs: tuple[tuple[int, int], ...]
    """Tokens of (prompt, answer) of the measured requests."""
    settings: dict[str, Any]
    """Of `EngineConfig`, where they differ from the defaults."""
    mixes: bool = True

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Read a file that `save` wrote.

        Raises:
            BadCalibration: it is none.

        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            lists = {key: tuple(data[key]) for key in ("shares", "noise", "lanes", "drafts", "tokens", "gains")}
            return cls(**{**data, **lists, "pairs": tuple((int(a), int(b)) for a, b in data["pairs"])})
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise BadCalibration(f"{path}: {type(error).__name__}: {error}") from error

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def spec(self, **changes: Any) -> EngineSpec:
        """Return engines like the measured one; `changes` replace settings of `EngineConfig`."""
        return EngineSpec(
            cost=FittedCost(self.shares),
            config=EngineConfig(**{"device": "cpu", **self.settings, **changes}),
            mixes=self.mixes,
            drafts=Drafts(self.lanes, self.drafts, self.tokens, self.gains),
            grammars=Grammars(compile_s=self.compile_s),
            front_s=self.front_s,
            noise=self.noise,
        )


def back_to_back(samples: Sequence[Sample]) -> list[Sample]:
    """Return the iterations with the time from the end of the one before, where the engine did nothing else between."""
    found = list(samples[:1])
    for before, after in pairwise(samples):
        since_s = after.ended_s - before.ended_s
        busy = after.seconds <= since_s <= after.seconds + _PAUSE_S
        found.append(replace(after, seconds=since_s) if busy else after)
    return found


def fit_cost(samples: Sequence[Sample]) -> tuple[FittedCost, tuple[float, ...], float]:
    """Return the fitted time of an iteration, the quantiles of measured over fitted, and the mean relative error.

    Raises:
        BadCalibration: there are fewer than 50 iterations.

    """
    if len(samples) < 50:
        raise BadCalibration(f"{len(samples)} iterations are too few for a fit, at least 50 are needed")
    rows = [(1, s.lanes, s.draft_rows, s.prefill_tokens, s.prefill_tokens > 0, s.context_tokens) for s in samples]
    features, seconds = np.array(rows, dtype=np.float64), np.array([s.seconds for s in samples])
    shares = nonnegative(features / seconds[:, None], np.ones(len(seconds)))
    kept = seconds < _OUTLIER * (features @ shares)
    shares = nonnegative(features[kept] / seconds[kept, None], np.ones(int(kept.sum())))
    fitted = features @ shares
    ratio = seconds / fitted
    quantiles = np.quantile(ratio, np.linspace(0, 1, _NUM_QUANTILES))
    # Time is what counts for throughput: the draws have the mean of all seconds over all fitted ones.
    quantiles *= seconds.sum() / fitted.sum() / float(np.mean((quantiles[1:] + quantiles[:-1]) / 2))
    error = float(np.mean(np.abs(fitted / seconds - 1)))
    return FittedCost(tuple(float(s) for s in shares)), tuple(float(q) for q in quantiles), error


def nonnegative(features: Matrix, wanted: Matrix, rounds: int = 2000) -> Matrix:
    """Return the non-negative x for which |features x - wanted| is smallest, by coordinate descent.

    Each step is exact in one coordinate, so the sum of squares never grows (Franc, Hlavac and Navara 2005).
    """
    scale = np.sqrt((features**2).sum(axis=0))
    used = scale > 0
    scaled = features[:, used] / scale[used]
    gram, target = scaled.T @ scaled, scaled.T @ wanted
    x = np.zeros(int(used.sum()))
    for _ in range(rounds):
        before = x.copy()
        for k in range(len(x)):
            x[k] = max(0.0, x[k] + target[k] - gram[k] @ x)
        if np.abs(x - before).max(initial=0.0) < 1e-12:
            break
    found = np.zeros(len(scale))
    found[used] = x / scale[used]
    return found


def fit_drafts(samples: Sequence[Sample]) -> Drafts:
    """Return drafts and tokens of a sequence and step by the number of sequences, from buckets of neighbouring
    numbers."""
    lanes, drafts, tokens = [], [], []
    low = 1
    for high in _BUCKETS:
        inside = [s for s in samples if low <= s.lanes <= high]
        low = high + 1
        count = sum(s.lanes for s in inside)
        if not count:
            continue
        lanes.append(round(count / len(inside)))
        drafts.append(sum(s.draft_rows for s in inside) / count)
        tokens.append(max(1.0, sum(s.generated for s in inside) / count))
    if not lanes:
        raise BadCalibration("no iteration decoded")
    return Drafts(tuple(lanes), tuple(drafts), tuple(tokens))
