"""Logits processors of the tests, and requests that name them.

`Waves`, `WavesOfBatch` and `CapturedWaves` compute one function, which depends on every token of a row's prefix, on its
length and on the argument: a row that is processed with another prefix has other tokens with near certainty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from gpu_engine.api.processors import CapturedRows, ProcessorRequest, Processors, ProcessorSetup, SequenceRows
from tests.gpu_engine.harness import Answer

HERE = "tests.gpu_engine.processor_cases"
SETTING = (
    f"waves={HERE}:Waves",
    f"batch={HERE}:WavesOfBatch",
    f"captured={HERE}:CapturedWaves",
    f"wrong={HERE}:Wrong",
    f"wrong_batch={HERE}:WrongBatch",
    f"captured_nan={HERE}:CapturedNaN",
    f"only={HERE}:Only",
    f"by_client={HERE}:ByClient",
)
"""Of the setting `logits_processors`."""


def waves(sum_N: torch.Tensor, length_N: torch.Tensor, strength_N: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Return what is added to the logits, float32 [N, V], for sums and lengths of prefixes (integers)."""
    column_V = torch.arange(num_columns, dtype=torch.float64, device=sum_N.device)
    phase_N1 = ((sum_N * 31 + length_N * 17) % 4093).double()[:, None]
    return (strength_N.double()[:, None] * torch.sin(0.37 * column_V + phase_N1)).float()


class Waves:
    def __init__(self, setup: ProcessorSetup) -> None:
        self.calls = 0

    def prepare(self, request: ProcessorRequest) -> float:
        if request.arguments.get("broken"):
            raise KeyError("broken")
        strength = request.arguments.get("strength", 3.0)
        if not isinstance(strength, float):
            raise ValueError("strength is not a float")
        return strength

    def process(self, rows: SequenceRows, logits_RV: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        prefixes = [rows.prefix(row) for row in range(rows.num_rows)]
        sums = torch.tensor([int(prefix.sum()) for prefix in prefixes])
        lengths = torch.tensor([len(prefix) for prefix in prefixes])
        return logits_RV + waves(sums, lengths, torch.full(sums.shape, rows.arguments), logits_RV.shape[1])


class WavesOfBatch(Waves):
    process: Any = None

    def process_batch(self, sequences: Sequence[SequenceRows], logits_NV: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        prefixes = [(rows, rows.prefix(row)) for rows in sequences for row in range(rows.num_rows)]
        sums = torch.tensor([int(prefix.sum()) for _, prefix in prefixes])
        lengths = torch.tensor([len(prefix) for _, prefix in prefixes])
        strengths = torch.tensor([rows.arguments for rows, _ in prefixes])
        return logits_NV + waves(sums, lengths, strengths, logits_NV.shape[1])


class CapturedWaves:
    capturable: Literal[True] = True
    num_arguments = 1

    def __init__(self, setup: ProcessorSetup) -> None:
        pass

    def prepare(self, request: ProcessorRequest) -> Sequence[float]:
        return (request.arguments.get("strength", 3.0),)

    def process_rows(self, rows: CapturedRows, logits_NV: torch.Tensor) -> torch.Tensor:
        place_L = torch.arange(rows.tokens_NL.shape[1])
        sum_N = torch.where(place_L < rows.length_N[:, None], rows.tokens_NL, 0).sum(dim=1)
        return logits_NV + waves(sum_N, rows.length_N, rows.arguments_NA[:, 0], logits_NV.shape[1])


class Wrong:
    """Does `how` for each row whose prefix of `prompt and answer` ends with `after`; forbids the tokens in `never`."""

    def __init__(self, setup: ProcessorSetup) -> None:
        pass

    def prepare(self, request: ProcessorRequest) -> dict[str, Any]:
        return dict(request.arguments)

    def _is_hit(self, rows: SequenceRows, row: int) -> bool:
        prefix = rows.prefix(row)
        return len(prefix) > rows.prompt_length and int(prefix[-1]) in rows.arguments["after"]

    def process(self, rows: SequenceRows, logits_RV: torch.Tensor) -> Any:
        logits_RV[:, rows.arguments.get("never", [])] = -torch.inf
        hit = [row for row in range(rows.num_rows) if self._is_hit(rows, row)]
        if not hit:
            return logits_RV
        match rows.arguments["how"]:
            case "raise":
                raise RuntimeError("as asked")
            case "shape":
                return logits_RV[:, :-1]
            case "dtype":
                return logits_RV.double()
            case "none":
                return None
            case "nan":
                logits_RV[hit, 3] = torch.nan
            case "inf":
                logits_RV[hit, 3] = torch.inf
        return logits_RV


class WrongBatch(Wrong):
    process: Any = None

    def process_batch(self, sequences: Sequence[SequenceRows], logits_NV: torch.Tensor) -> Any:
        at, parts = 0, []
        for rows in sequences:
            parts.append(Wrong.process(self, rows, logits_NV[at : at + rows.num_rows]))
            at += rows.num_rows
        return None if any(part is None for part in parts) else torch.cat(parts)


class CapturedNaN:
    """NaN for each row of an answer whose prefix ends with the argument."""

    capturable: Literal[True] = True
    num_arguments = 1

    def __init__(self, setup: ProcessorSetup) -> None:
        pass

    def prepare(self, request: ProcessorRequest) -> Sequence[float]:
        return (request.arguments["after"],)

    def process_rows(self, rows: CapturedRows, logits_NV: torch.Tensor) -> torch.Tensor:
        last_N1 = rows.tokens_NL.gather(1, rows.length_N[:, None] - 1)
        hit_N1 = (last_N1 == rows.arguments_NA) & (rows.length_N > rows.prompt_length_N)[:, None]
        return torch.where(hit_N1, torch.nan, logits_NV)


class Only:
    """Leaves one token, the argument."""

    def __init__(self, setup: ProcessorSetup) -> None:
        self.vocab_size = setup.vocab_size

    def prepare(self, request: ProcessorRequest) -> int:
        return int(request.arguments["token"])

    def process(self, rows: SequenceRows, logits_RV: torch.Tensor) -> torch.Tensor:
        others = torch.arange(self.vocab_size) != rows.arguments
        return logits_RV.masked_fill(others, -torch.inf)


class ByClient:
    """Leaves the token that the client's id names; the request's id and index have to be there."""

    def __init__(self, setup: ProcessorSetup) -> None:
        pass

    def prepare(self, request: ProcessorRequest) -> str:
        return request.client_id

    def process(self, rows: SequenceRows, logits_RV: torch.Tensor) -> torch.Tensor:
        assert rows.request_id
        assert rows.arguments == rows.client_id
        allowed = int(rows.client_id) + rows.index
        return torch.full_like(logits_RV, -torch.inf).index_copy(
            1, torch.tensor([allowed]), logits_RV[:, allowed : allowed + 1]
        )


def processed(processors: Processors, answer: Answer, *uses: tuple[str, str]) -> Answer:
    """Return the answer of the same request with these processors: (name, arguments as JSON)."""
    request = answer.request
    ids = {"request_id": request.request_id, "client_id": request.scheduling.client_id}
    each = enumerate(uses)
    made = tuple(processors.use(f"logits_processors[{i}]", name, arguments, **ids) for i, (name, arguments) in each)
    answer.change(logits_processors=made)
    return answer
