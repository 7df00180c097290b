"""A processor that cannot be loaded, or is named wrongly, is an error that says which and why."""

from __future__ import annotations

import pytest
import torch

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.errors import InvalidRequest, ProcessorFailed
from gpu_engine.api.processors import ProcessorError, Processors, ProcessorSetup, captured_together
from gpu_engine.processors.loading import load_processors
from tests.fakes import FakeModel
from tests.gpu_engine.processor_cases import HERE, SETTING, CapturedWaves, Waves

HERE_TOO = "tests.gpu_engine.processors.test_loading"
NGRAMS = "x=gpu_engine.processors.ngrams:NoRepeatedNgrams"
IDS = {"request_id": "r", "client_id": "c"}


def load(*entries: str) -> Processors:
    return load_processors(entries, FakeModel(), torch.device("cpu"))


class TwoKinds(CapturedWaves):
    def process(self) -> None:
        pass


class NoKind:
    def __init__(self, setup: ProcessorSetup) -> None:
        pass


class Undeclared(CapturedWaves):
    capturable = False  # type: ignore[assignment]


class Narrow(CapturedWaves):
    def process_rows(self, rows: object, logits_NV: torch.Tensor) -> torch.Tensor:
        return logits_NV[:, 1:]


class Fails(CapturedWaves):
    def process_rows(self, rows: object, logits_NV: torch.Tensor) -> torch.Tensor:
        raise TypeError("no")


class WithoutNumber(CapturedWaves):
    num_arguments = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("x=no_such_module:C", "x: no_such_module cannot be imported: ModuleNotFoundError"),
        (f"x={HERE}:NoSuch", "has no class NoSuch"),
        (f"x={HERE}:SETTING", "has no class SETTING"),
        (f'{NGRAMS}{{"a": 1}}', "cannot be made: ValueError: knows no option 'a'"),
        (f"x={HERE_TOO}:TwoKinds", "needs prepare and one of .*; it has process, process_rows"),
        (f"x={HERE_TOO}:NoKind", "needs prepare and one of .*; it has none"),
        (f"x={HERE_TOO}:Undeclared", "capturable = True and process_rows belong together"),
        (f"x={HERE_TOO}:Narrow", r"process_rows returned \[2, .*\] float32 on cpu, must be"),
        (f"x={HERE_TOO}:Fails", "process_rows fails: TypeError: no"),
        (f"x={HERE_TOO}:WithoutNumber", "num_arguments is not a number of arguments"),
    ],
)  # fmt: skip
def test_a_processor_that_cannot_be_loaded_is_named(entry: str, problem: str) -> None:
    with pytest.raises(ProcessorError, match=rf"^logits_processors: x: .*{problem.removeprefix('x: ')}"):
        load(entry)


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        (("waves",), r"'waves' is not NAME=MODULE:CLASS"),
        (("a b=m:C",), "is not NAME=MODULE:CLASS"),
        (("a=m",), "is not NAME=MODULE:CLASS"),
        (("a=../m:C",), "is not NAME=MODULE:CLASS"),
        (("a=m:C{",), "a: the options are not a JSON object"),
        (("a=m:C", "a=m:D"), "'a' names two"),
        (tuple(f"a{i}=m:C" for i in range(65)), "has 65, at most 64 are allowed"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_loaded(entries: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=rf"^logits_processors: .*{problem}"):
        EngineConfig(logits_processors=entries)


def test_a_request_gets_what_prepare_returns() -> None:
    processors = load(*SETTING)
    use = processors.use("p[0]", "waves", '{"strength": 2.5}', **IDS)
    assert (use.loaded.name, use.arguments) == ("waves", 2.5)
    assert isinstance(use.loaded.single, Waves)
    assert processors.names[:3] == ("waves", "batch", "captured")
    assert [(each.name, each.column, each.first_argument) for each in processors.captured] == [
        ("captured", 0, 0),
        ("captured_nan", 1, 1),
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("other", "", "p.name: 'other' is no logits processor; this server has waves, batch, captured, wrong, "),
        ("waves", "{", "p.arguments: is not JSON: "),
        ("waves", "[]", "p.arguments: is not a JSON object"),
        ("waves", '{"strength": "2"}', "p.arguments: waves: strength is not a float"),
    ],
)
def test_a_wrong_request_names_the_field(name: str, arguments: str, problem: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load(*SETTING).use("p", name, arguments, **IDS)
    assert str(caught.value).startswith(problem)
    with pytest.raises(InvalidRequest, match=r"p\.name: 'a' is no logits processor; this server has none"):
        Processors().use("p", "a", "", **IDS)
    with pytest.raises(ProcessorFailed, match="p: waves raised KeyError; see the server's log"):
        load(*SETTING).use("p", "waves", '{"broken": true}', **IDS)


def test_a_captured_step_runs_processors_in_the_order_of_the_setting() -> None:
    processors = load(*SETTING)
    waves, first, second = (
        processors.use("p", name, '{"after": 1, "strength": 1.0}', **IDS)
        for name in ("waves", "captured", "captured_nan")
    )
    assert captured_together([first, second])
    for uses in ([second, first], [first, first], [first, waves]):
        assert not captured_together(uses)
