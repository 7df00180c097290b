"""Adapters at the public API: they are loaded, listed, named by requests and unloaded, and errors say what exists."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from protos.engine.v1 import engine_pb2 as pb
from tests.fakes import answers_with
from tests.gpu_engine.front.refusals import refusal
from tests.gpu_engine.front.serving import answer, ask, serving


async def test_adapters_are_loaded_listed_and_unloaded(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        loaded = await s.client.load_adapter("low", "/a/low")
        want = pb.Adapter(name="low", kind=pb.Adapter.KIND_LORA, path="/a/low", size=4, memory_bytes=64)
        assert loaded == want
        listed = await s.client.adapters()
        assert (list(listed.adapters), listed.max_bytes) == ([want], 1 << 20)
        await s.client.unload_adapter("low")
        assert not (await s.client.adapters()).adapters
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await s.client.unload_adapter("low")
        assert (caught.value.code(), str(caught.value.details())) == (
            grpc.StatusCode.NOT_FOUND,
            "name: there is no adapter 'low'; there are: ",
        )


async def test_a_request_has_the_adapters_that_it_names(tmp_path: Path) -> None:
    async with serving(tmp_path, answers_with("x")) as s:
        low, virtual = s.engine.adapters.load("low", "low"), s.engine.adapters.load("virtual", "prompt")
        request = ask("hi", lora="low", prompt_adapter="virtual", response=pb.ResponseOptions(echo=True))
        responses = await answer(s.client, request)
        submitted = s.engine.submitted[0]
        assert (submitted.lora, submitted.prompt_adapter) == (low, virtual)
        assert submitted.prompt_ids == [1000, 1001, 1002, 1003, *b"hi"]
        assert [token for response in responses for token in response.prompt_token_ids] == list(b"hi")
        assert "".join(response.text for response in responses) == "hix"
        assert responses[-1].usage.prompt_tokens == 6, "virtual tokens count"


async def test_virtual_tokens_count_for_the_context(tmp_path: Path) -> None:
    async with serving(tmp_path, answers_with("x")) as s:
        s.engine.adapters.load("virtual", "prompt")
        error = await refusal(s.client, ask("x" * 252, prompt_adapter="virtual"))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert str(error.details()).startswith("text: has 256 tokens, at most 255 fit")


@pytest.mark.parametrize("field", ["lora", "prompt_adapter"])
async def test_an_unknown_adapter_is_refused_with_the_names_that_exist(field: str, tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        s.engine.adapters.load("low", "low")
        error = await refusal(s.client, ask("hi", **{field: "other"}))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert str(error.details()) == f"{field}: there is no 'other'; there are: low"
