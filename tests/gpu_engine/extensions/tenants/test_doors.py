"""Tenants at every door: what one may call, what it sees of another (nothing), and what a limit refuses."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc

from gpu_engine.api.request import FinishReason, TokenEvent
from gpu_engine.doors.found import found_doors
from gpu_engine.extensions.tenants.access import ENGINE
from protos.engine.v1 import engine_pb2 as pb
from protos.kserve.v2 import inference_pb2, inference_pb2_grpc
from protos.transfer.v1 import transfer_pb2
from service_runtime.from_files import CHECK_EVERY_S
from tests.fakes import answers_with
from tests.gpu_engine.extensions.tenants.tenant_serving import (
    ACME,
    AS_ACME,
    AS_BETA,
    AS_BOSS,
    FILE,
    bearer,
    refusal,
    serving,
)
from tests.gpu_engine.front.serving import ask
from tests.waiting import eventually

YES = answers_with("yes")
DENIED, UNKNOWN = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED
EXHAUSTED, MISSING = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.NOT_FOUND
LONG_S = 30.0

OPERATORS = {
    "lockstep.engine.v1.Engine": {
        *("GetStats", "WatchStats", "ClearGrammarCache", "LoadAdapter", "UnloadAdapter", "ExchangeDrafter"),
    },
    "vllm.grpc.engine.VllmEngine": {
        *("GetServerInfo", "GetLoads", "SubscribeKvEvents", "FlushCache", "StartProfile", "StopProfile"),
    },
    "inference.GRPCInferenceService": {"ModelStatistics"},
    "lockstep.transfer.v1.KvTransfer": {"Fetch"},
}


def test_every_method_is_either_the_tenants_or_the_operators() -> None:
    known = {each.service: each for each in (ENGINE, *(door.METHODS for door in found_doors()))}
    for file in (pb, vllm, inference_pb2, transfer_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                own = service.full_name in known and method.name in known[service.full_name].tenants
                assert own != (method.name in OPERATORS[service.full_name]), f"{service.full_name}/{method.name}"


async def test_a_stranger_gets_nowhere_and_what_concerns_all_is_for_operators(tmp_path: Path) -> None:
    async with serving(tmp_path, YES) as setup:
        for metadata in ((), bearer("an-unknown-token-of-tests"), (*AS_ACME, *AS_ACME)):
            assert (await refusal(setup.stub.Generate(ask(), metadata=metadata)))[0] is UNKNOWN
            assert (await refusal(setup.stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata)))[0] is UNKNOWN
        calls: list[tuple[str, Any]] = [
            ("GetStats", pb.GetStatsRequest()),
            ("ClearGrammarCache", pb.ClearGrammarCacheRequest()),
            ("LoadAdapter", pb.LoadAdapterRequest(name="a", path="/a")),
            ("UnloadAdapter", pb.UnloadAdapterRequest(name="a")),
            ("ExchangeDrafter", pb.ExchangeDrafterRequest(path="/a")),
            ("WatchStats", pb.WatchStatsRequest()),
        ]
        for name, message in calls:
            found = await refusal(getattr(setup.stub, name)(message, metadata=AS_ACME))
            assert found == (DENIED, f"{name}: is for operators (operator = true of a tenant)")
        engine = setup.engine
        assert (engine.submitted, engine.adapters.loaded, engine.draft_models.name) == ([], {}, "")
        assert (await setup.stub.GetStats(pb.GetStatsRequest(), metadata=AS_BOSS)).num_slots == 4


async def test_ids_and_salts_are_the_tenant_s_own(tmp_path: Path) -> None:
    async with serving(tmp_path, YES) as setup:
        for metadata in (AS_ACME, AS_BETA):
            call = setup.stub.Generate(ask(request_id="x", cache_salt="s"), metadata=metadata)
            assert {response.request_id async for response in call} == {"x"}
        assert [(request.request_id, request.salt) for request in setup.engine.submitted] == [
            ("acme/x", "acme\0s"),
            ("beta/x", "beta\0s"),
        ]


async def test_a_request_of_another_tenant_is_unknown_at_every_door(tmp_path: Path) -> None:
    async with serving(tmp_path) as setup:  # no event comes by itself
        first = setup.stub.Generate(ask(request_id="x"), metadata=AS_ACME)
        second = setup.stub.Generate(ask(request_id="x"), metadata=AS_BETA)  # one id, two tenants: two requests
        await eventually(lambda: len(setup.engine.submitted) == 2, LONG_S)
        assert (await refusal(setup.stub.Generate(ask(request_id="x"), metadata=AS_BETA)))[0] is (
            grpc.StatusCode.INVALID_ARGUMENT
        )
        aborted = [
            (await setup.stub.Abort(pb.AbortRequest(request_id=name), metadata=metadata)).aborted
            for name, metadata in (("x", AS_BOSS), ("acme/x", AS_BETA), ("acme/x", AS_BOSS), ("x", AS_BETA))
        ]
        assert aborted == [False, False, False, True]
        wire: Any = vllm_engine_pb2_grpc.VllmEngineStub(setup.channel)
        await wire.Abort(vllm.AbortRequest(request_ids=["x", "acme/x"]), metadata=AS_BETA)
        stop = inference_pb2.ModelInferRequest(model_name=setup.engine.config.served_names[0], id="x")
        stop.inputs.add(name="stop", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
        kserve: Any = inference_pb2_grpc.GRPCInferenceServiceStub(setup.channel)
        await kserve.ModelInfer(stop, metadata=AS_BETA)
        # Had one of them reached the request of acme, the event of its end would be before this one.
        last = [response async for response in second][-1]
        assert last.finish_reason == pb.FINISH_REASON_ABORTED
        (mine,) = [request for request in setup.engine.submitted if request.request_id == "acme/x"]
        setup.engine.emit(mine, TokenEvent(0, (65,), finish=FinishReason.LENGTH))
        assert [response async for response in first][-1].finish_reason == pb.FINISH_REASON_LENGTH


SHARING = """
[tenants.{name}]
tokens = ["{token}"]
shares = ["prefix_cache", "grammars"]
"""


async def test_tenants_that_share_have_one_salt_and_one_set_of_grammars(tmp_path: Path) -> None:
    others = {"gamma": "gamma-token-of-tests", "delta": "delta-token-of-tests"}
    file = FILE + "".join(SHARING.format(name=name, token=token) for name, token in others.items())
    async with serving(tmp_path, YES, file) as setup:
        ids = []
        for metadata in (*map(bearer, others.values()), AS_ACME):
            await setup.texts(ask(), metadata)
            compiled = await setup.stub.Compile(pb.CompileRequest(grammar=pb.Grammar(regex="a")), metadata=metadata)
            ids.append(compiled.grammar_id)
        assert [request.salt for request in setup.engine.submitted] == ["\0", "\0", "acme\0"]
        assert ids[0] == ids[1] != ids[2]
        spaces = [spec.owner.space for spec in setup.grammar.compiled if spec.owner]
        assert spaces == ["", "", "acme"]
        tenants = [spec.owner.tenant for spec in setup.grammar.compiled if spec.owner]
        assert tenants == ["gamma", "delta", "acme"], "each one's compilations count for itself"


async def test_grammars_and_adapters_of_another_tenant_are_unknown(tmp_path: Path) -> None:
    async with serving(tmp_path, YES) as setup:
        compiled = await setup.stub.Compile(pb.CompileRequest(grammar=pb.Grammar(regex="a")), metadata=AS_ACME)
        named = ask(grammar=pb.Grammar(grammar_id=compiled.grammar_id))
        assert await setup.texts(named, AS_ACME) == "yes"
        for who in (AS_BETA, AS_BOSS):
            assert (await refusal(setup.stub.Generate(named, metadata=who)))[0] is MISSING
        (_, spec) = setup.grammar.prepared[-1]
        assert spec.owner is not None
        assert spec.owner.space == "acme"

        await setup.stub.LoadAdapter(pb.LoadAdapterRequest(name="legal", path="/legal"), metadata=AS_BOSS)
        every, listing = (AS_ACME, AS_BETA, AS_BOSS), pb.ListAdaptersRequest()
        listed = [await setup.stub.ListAdapters(listing, metadata=who) for who in every]
        assert [[each.name for each in one.adapters] for one in listed] == [[], ["legal"], ["legal"]]
        assert await setup.texts(ask(lora="legal"), AS_BETA) == "yes"
        assert await refusal(setup.stub.Generate(ask(lora="legal"), metadata=AS_ACME)) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "lora: there is no LoRA adapter 'legal'; there are: none",
        )


async def test_one_request_more_than_a_tenant_may_have_is_refused_at_every_door_and_others_go_on(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as setup:
        held = [setup.stub.Generate(ask(), metadata=AS_ACME) for _ in range(2)]
        await eventually(lambda: len(setup.engine.submitted) == 2, LONG_S)
        problem = "max_waiting: tenant acme: 2 sequences run or wait, and 2 may"
        assert await refusal(setup.stub.Generate(ask(), metadata=AS_ACME)) == (EXHAUSTED, problem)

        async def one() -> Any:
            yield pb.GenerateManyRequest(generate=ask(request_id="m"))

        (response,) = [r async for r in setup.stub.GenerateMany(one(), metadata=AS_ACME)]
        assert (response.error.code, response.error.message) == (EXHAUSTED.value[0], problem)
        wire: Any = vllm_engine_pb2_grpc.VllmEngineStub(setup.channel)
        tokenized = vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[1]))
        assert await refusal(wire.Generate(tokenized, metadata=AS_ACME)) == (EXHAUSTED, problem)
        kserve: Any = inference_pb2_grpc.GRPCInferenceServiceStub(setup.channel)
        infer = inference_pb2.ModelInferRequest(model_name=setup.engine.config.served_names[0])
        text = infer.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
        text.contents.bytes_contents.append(b"x")
        tokens = infer.inputs.add(name="max_tokens", datatype="INT32", shape=[1, 1])
        tokens.contents.int_contents.append(4)
        assert await refusal(kserve.ModelInfer(infer, metadata=AS_ACME)) == (EXHAUSTED, problem)

        setup.engine.script = YES
        assert await setup.texts(ask(), AS_BETA) == "yes"
        for request in setup.engine.submitted[:2]:
            setup.engine.emit(request, TokenEvent(0, (65,), finish=FinishReason.LENGTH))
        for call in held:
            assert [r async for r in call]
        assert await setup.texts(ask(), AS_ACME) == "yes", "the room is given back"

        setup.engine.script = None
        for count in range(len(setup.engine.submitted) + 2, len(setup.engine.submitted) + 8, 2):
            call = setup.stub.Generate(ask(sampling=pb.SamplingParams(n=2)), metadata=AS_ACME)
            await eventually(lambda count=count: len(setup.engine.submitted) == count, LONG_S)
            call.cancel()  # a client that leaves gives its room back as well
            await eventually(lambda: not len(setup.calls), LONG_S)
        assert [account.sequences for account in setup.tenants.accounts] == [0, 0]


async def test_tokens_of_prompts_and_answers_count(tmp_path: Path) -> None:
    file = FILE.replace("max_running = 1", "max_running = 1\ntokens_per_minute = 7")
    async with serving(tmp_path, YES, file) as setup:
        assert await setup.texts(ask("abc"), AS_ACME) == "yes"  # 3 of the prompt, 3 and an end of the answer
        status, text = await refusal(setup.stub.Generate(ask("a"), metadata=AS_ACME))
        assert status is EXHAUSTED
        assert text.startswith("tokens_per_minute: tenant acme: the limit is 7; try again in ")
        assert await setup.texts(ask("abc"), AS_BETA) == "yes"


async def test_a_file_that_changes_is_read_again_and_running_requests_go_on(tmp_path: Path) -> None:
    async with serving(tmp_path) as setup:
        call = setup.stub.Generate(ask(), metadata=AS_ACME)
        await eventually(lambda: setup.engine.submitted, LONG_S)
        setup.path.write_text(FILE.replace(ACME, "renewed-token-of-tests"))
        renewed = bearer("renewed-token-of-tests")
        async with asyncio.timeout(LONG_S):
            while True:  # files are looked at once in CHECK_EVERY_S
                asked = setup.stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=renewed)
                if await asked.code() is grpc.StatusCode.OK:
                    break
                await asyncio.sleep(CHECK_EVERY_S / 20)
        assert (await refusal(setup.stub.Generate(ask(), metadata=AS_ACME)))[0] is UNKNOWN
        setup.engine.emit(setup.engine.submitted[0], TokenEvent(0, (65,), finish=FinishReason.LENGTH))
        assert [r async for r in call][-1].finish_reason == pb.FINISH_REASON_LENGTH
