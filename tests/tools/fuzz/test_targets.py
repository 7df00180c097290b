"""Each target of the fuzzer on its corpus, and on inputs made of it from a seed; atheris is not needed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from random import Random

import grpc
import pytest
from google.protobuf.message import Message

from protos.engine.v1 import engine_pb2 as pb
from tools.fuzz import corpus, native, rpc
from tools.fuzz.engine import instant_calls
from tools.fuzz.plain import bounded
from tools.fuzz.target import Broken, Target
from tools.fuzz.targets import TARGETS, load
from tools.fuzz.targets.engine_services import method_of

FEW, MANY = 15, 1500
HEAVY = ("compile_xgrammar", "grammar_service")
"""Their libraries, or each of their inputs, take long."""


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    logging.disable(logging.CRITICAL)
    loaded = load(request.param)
    yield loaded
    loaded.close()
    logging.disable(logging.NOTSET)


def run(name: str, target: Target, count: int) -> None:
    """Run the corpus, and `count` inputs made of it."""
    inputs, random = corpus.inputs(name), Random(1)
    assert inputs, "a target has inputs to begin from"
    made = {f"made {i}": b"" for i in range(count)}
    pool = list(inputs.values())
    for label in made:
        made[label] = target.mutate(random.choice(pool), random)[: target.max_bytes]
    for label, data in {"nothing": b"", "one byte": b"\xff", **inputs, **made}.items():
        try:
            target.run(data)
        except Exception as error:
            raise AssertionError(f"{name}: {label}: {data!r}") from error


@pytest.mark.parametrize(
    ("target", "name"),
    [pytest.param(name, name, marks=[pytest.mark.slow] if name in HEAVY else [], id=name) for name in TARGETS],
    indirect=["target"],
)
def test_no_input_of_the_corpus_shows_a_defect(target: Target, name: str) -> None:
    run(name, target, FEW)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "name"), [pytest.param(n, n, id=n) for n in TARGETS], indirect=["target"])
def test_no_made_input_shows_a_defect(target: Target, name: str) -> None:
    run(name, target, MANY)


def test_each_folder_of_the_corpus_is_of_a_target() -> None:
    assert {folder.name for folder in corpus.FOLDER.iterdir()} == {*TARGETS, *native.TARGETS}


def test_files_of_the_corpus_are_small() -> None:
    sizes = {path: path.stat().st_size for path in corpus.FOLDER.rglob("*") if path.is_file()}
    assert not {path: size for path, size in sizes.items() if size > 20_000}


@pytest.mark.parametrize(("flags", "expected"), [({}, 1024), ({"max_len": "200"}, 200), ({"max_len": "9999"}, 1024)])
def test_a_flag_lowers_the_bound_on_inputs(flags: dict[str, str], expected: int) -> None:
    target = Target(lambda data: None, lambda data, random: data, max_bytes=1024)
    assert bounded(target, flags).max_bytes == expected


def test_a_seed_makes_the_same_inputs_again() -> None:
    target = load("grammar_text")
    data = next(iter(corpus.inputs("grammar_text").values()))
    made = [[target.mutate(data, random) for _ in range(50)] for random in (Random(3), Random(3))]
    assert made[0] == made[1]
    assert len(set(made[0])) > 40


def test_each_example_of_an_inference_is_answered() -> None:
    """An example that is refused for the name of its model leads to none of the code after that."""
    from gpu_engine.doors.kserve.inference_servicer import InferenceServicer
    from protos.kserve.v2 import inference_pb2

    known = rpc.methods(inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"])
    examples = {
        name: data
        for name, data in corpus.inputs("kserve_service").items()
        if not name.startswith(("found", "refused"))
    }

    async def answer(servicer: InferenceServicer, data: bytes) -> str:
        method = method_of(known, data)
        context = await rpc.call(servicer, method, data[1:])
        assert context is not None
        streamed = method.output_type.name == "ModelStreamInferResponse"
        parts = map(inference_pb2.ModelStreamInferResponse.FromString, context.responses if streamed else [])
        return context.details + "".join(part.error_message for part in parts)

    async def answers() -> dict[str, str]:
        servicer = InferenceServicer(instant_calls(), version="0")
        return {name: await answer(servicer, data) for name, data in examples.items()}

    assert set(asyncio.run(answers()).values()) == {""}


def test_an_internal_error_of_a_service_is_a_defect() -> None:
    """What the fuzzer would report of a service that fails."""

    class Failing:
        async def Abort(self, request: Message, context: rpc.CallContext) -> None:
            await context.abort(grpc.StatusCode.INTERNAL, "a defect")

    (abort,) = (method for method in rpc.methods(pb.DESCRIPTOR.services_by_name["Engine"]) if method.name == "Abort")
    with pytest.raises(Broken, match="Abort: INTERNAL: a defect"):
        asyncio.run(rpc.call(Failing(), abort, b""))


def test_a_call_that_does_not_end_is_a_defect() -> None:
    class Endless:
        async def Abort(self, request: Message, context: rpc.CallContext) -> None:
            await asyncio.Event().wait()

    (abort,) = (method for method in rpc.methods(pb.DESCRIPTOR.services_by_name["Engine"]) if method.name == "Abort")
    with pytest.raises(Broken, match="Abort does not end"):
        asyncio.run(rpc.call(Endless(), abort, b"", hang_s=0.01))
