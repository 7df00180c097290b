"""The draft model at the public API: it is named, exchanged and refused."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from tests.gpu_engine.front.serving import serving


async def test_the_draft_model_is_named_and_exchanged(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        assert (await s.client.info()).draft_model == ""
        loaded = await s.client.exchange_drafter("/models/small")
        assert (loaded.model, loaded.num_parameters) == ("/models/small", 1000)
        assert (await s.client.info()).draft_model == "/models/small"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await s.client.exchange_drafter("/models/other")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == "path: its tokenizer is another one"
        assert (await s.client.info()).draft_model == "/models/small"
