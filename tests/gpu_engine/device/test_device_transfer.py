"""KV pages of an engine on the recorded device, for another one there: the copies are in the order of its stream.

No GPU is needed. What a GPU adds, memory that is pinned and copies that run next to the host, is not shown here.
"""

from __future__ import annotations

import pytest

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.page_transfer import Opened, Piece, WantedPages
from gpu_engine.core.hooks import EngineHooks
from gpu_engine.extensions.transfer.identity import prefill_request
from gpu_engine.extensions.transfer.pages import PageTransfers
from gpu_engine.model.loader import LoadedModel
from tests.gpu_engine.device.device_engine import device_engine
from tests.gpu_engine.device.device_requests import INTERPRETED
from tests.gpu_engine.harness import answer_each, ask, tokens, unguided_engine, until_false, with_drafts

pytestmark = INTERPRETED

PAGE = 16
SMALL = {"max_batch_size": 2, "max_model_len": 64, "max_batched_tokens": 16}
PROMPTS = [tokens(2 * PAGE + 5, 3), tokens(PAGE + 3, 4)]
SOON_S = 60.0
TRANSFERS = EngineHooks(transfers=PageTransfers.of)


def settings(role: str, drafts: int = 0) -> EngineConfig:
    return with_drafts(drafts, device="cuda", fuse_parts=False, role=role, **SMALL)


def whole_pages(prompt: list[int]) -> list[int]:
    return prompt[: (len(prompt) - 1) // PAGE * PAGE]


@pytest.fixture(scope="module")
def pieces(llama: LoadedModel) -> list[list[Piece]]:
    """The pages of the prompts, as an engine on a device sends them."""
    found: list[list[Piece]] = []
    with device_engine(llama, settings("prefill"), hooks=TRANSFERS) as (engine, _):
        for number, prompt in enumerate(PROMPTS):
            request = prefill_request(whole_pages(prompt), "", f"p{number}")
            engine.submit(request)
            found.append([])
            while (at := sum(piece.num_pages for piece in found[-1])) * PAGE < len(whole_pages(prompt)):
                found[-1].append(engine.pages.read(request, at, 1).result(SOON_S))
            engine.drop(request)
        until_false(lambda: engine.stats().pages_used > 0)
        assert engine.stats().generated_tokens == 0
        assert {len(piece.data) for each in found for piece in each} == {engine.pages.form.page_bytes}
    return found


@pytest.fixture(scope="module")
def expected(llama: LoadedModel) -> list[list[int]]:
    with unguided_engine(llama, with_drafts(0, **SMALL)) as engine:
        return answer_each(engine, [ask(prompt, max_tokens=8, temperature=0.7) for prompt in PROMPTS])


@pytest.mark.parametrize("drafts", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_an_engine_on_a_device_goes_on_from_pages_of_another_one(
    llama: LoadedModel, pieces: list[list[Piece]], expected: list[list[int]], drafts: int
) -> None:
    with device_engine(llama, settings("decode", drafts), hooks=TRANSFERS) as (engine, _):
        answers = [ask(prompt, max_tokens=8, temperature=0.7) for prompt in PROMPTS]
        # The first one decodes, from pages that came, while the pages of the second come.
        for prompt, each, answer in zip(PROMPTS, pieces, answers, strict=True):
            wanted = WantedPages(whole_pages(prompt), "", answer.request.request_id)
            assert engine.pages.open(wanted).result(SOON_S) == Opened(0)
            answer.submit(engine, awaits_pages=True)
            for at, piece in enumerate(each):
                engine.pages.write(wanted, at, piece).result(SOON_S)
            engine.pages.close(wanted, [answer.request])
        assert [answer.wait().tokens for answer in answers] == expected
        assert [answer.telemetry.cached_tokens for answer in answers] == [2 * PAGE, PAGE]
        own = sum(len(prompt) - 1 - len(whole_pages(prompt)) for prompt in PROMPTS)
        assert engine.stats().prefill_tokens == own


def test_pages_are_read_as_they_were_written(llama: LoadedModel, pieces: list[list[Piece]]) -> None:
    """The pages are written in another order, so a page that was computed, or copied elsewhere, would differ."""
    token_ids, written = whole_pages(PROMPTS[0]), [*reversed(pieces[0])]
    with device_engine(llama, settings("decode"), hooks=TRANSFERS) as (engine, _):
        wanted = WantedPages(token_ids, "", "w")
        engine.pages.open(wanted).result(SOON_S)
        for at, piece in enumerate(written):
            engine.pages.write(wanted, at, piece).result(SOON_S)
        engine.pages.close(wanted, [])
        request = prefill_request(token_ids, "", "r")
        engine.submit(request)
        found = [engine.pages.read(request, at, 1).result(SOON_S) for at in range(len(written))]
        engine.drop(request)
        until_false(lambda: engine.stats().pages_used > 0)
    assert [bytes(piece.data) for piece in found] == [bytes(piece.data) for piece in written]
    assert bytes(written[0].data) != bytes(written[1].data)
