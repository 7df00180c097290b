"""Pages of one engine that another one uses: the same tokens, nothing prefilled twice, and no page lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_engine.api.errors import InternalError
from gpu_engine.api.page_transfer import Fallback, Opened, Piece, WantedPages
from gpu_engine.core.engine import Engine
from gpu_engine.core.hooks import EngineHooks
from gpu_engine.extensions.transfer.identity import prefill_request
from gpu_engine.extensions.transfer.pages import PageTransfers
from gpu_engine.model.loader import LoadedModel, load_model
from tests.gpu_engine.core.failing import FailsOnce
from tests.gpu_engine.harness import Answer, answer_all, ask, config, running, tokens, until_false, with_drafts

PAGE = 16
PROMPT = tokens(6 * PAGE + 5, 3)
WHOLE = PROMPT[: 6 * PAGE]
SOON_S = 20.0
TRANSFERS = EngineHooks(transfers=PageTransfers.of)


@pytest.fixture(scope="module")
def other(llama: LoadedModel) -> LoadedModel:
    """The same files, loaded again: two engines run at the same time."""
    return load_model(config(model=llama.name))


@contextmanager
def engine(model: LoadedModel, role: str, drafts: int = 3, **fields: object) -> Iterator[Engine]:
    settings = with_drafts(drafts, role=role, **fields)
    with running(Engine(settings, replace(model, max_model_len=settings.max_model_len), hooks=TRANSFERS)) as started:
        yield started
        until_false(lambda: used(started) > 0)  # what was dropped or closed last is released soon


@contextmanager
def pair(llama: LoadedModel, other: LoadedModel, **fields: object) -> Iterator[tuple[Engine, Engine]]:
    with engine(llama, "prefill") as prefill, engine(other, "decode", **fields) as decode:
        yield prefill, decode


def prefilled(prefill: Engine, token_ids: list[int] = WHOLE, salt: str = "") -> list[Piece]:
    """Return the pages of `token_ids`, one by one."""
    request = prefill_request(token_ids, salt, "p")
    prefill.submit(request)
    pieces: list[Piece] = []
    while (at := sum(piece.num_pages for piece in pieces)) * PAGE < len(token_ids):
        pieces.append(prefill.pages.read(request, at, 1).result(SOON_S))
    prefill.drop(request)
    return pieces


def waiting(prompt: list[int] = PROMPT, **sampling: object) -> Answer:
    return ask(prompt, **{"max_tokens": 20, "ignore_eos": True, "temperature": 0.7, **sampling})


def want(token_ids: list[int] = WHOLE, salt: str = "") -> WantedPages:
    return WantedPages(token_ids, salt, "w")


def write(decode: Engine, wanted: WantedPages, pieces: list[Piece], at: int = 0) -> None:
    for piece in pieces:
        decode.pages.write(wanted, at, piece).result(SOON_S)
        at += piece.num_pages


def alone(model: LoadedModel, prompt: list[int] = PROMPT) -> list[int]:
    with engine(model, "both") as one:
        return answer_all(one, [ask(prompt, max_tokens=20, ignore_eos=True, temperature=0.7)])[0]


def used(engine: Engine) -> int:
    return engine.stats().pages_used


@pytest.mark.parametrize("fetched", [6, 4], ids=["all", "those that came before a failure"])
def test_a_sequence_goes_on_from_pages_of_another_engine(llama: LoadedModel, other: LoadedModel, fetched: int) -> None:
    expected = alone(llama)
    with pair(llama, other) as (prefill, decode):
        pieces, wanted, answer = prefilled(prefill), want(), waiting()
        assert [piece.num_pages for piece in pieces] == [1] * 6
        assert prefill.stats().finished.total() == prefill.stats().generated_tokens == 0
        assert decode.pages.open(wanted).result(SOON_S) == Opened(0)
        answer.submit(decode, awaits_pages=True)
        write(decode, wanted, pieces[:fetched])
        assert not answer.events
        decode.pages.close(wanted, [answer.request])
        assert answer.wait().tokens == expected
        assert answer.telemetry.cached_tokens == fetched * PAGE
        assert decode.stats().prefill_tokens == len(PROMPT) - 1 - fetched * PAGE
        assert prefill.stats().prefill_tokens == 6 * PAGE


@pytest.mark.parametrize("family", ["gemma4 small", "gemma4", "deepseek_v3"])
def test_heads_of_several_sizes_and_latent_vectors_go_on_from_pages_of_another_engine(
    saved: Callable[[str], Path], family: str
) -> None:
    two = [load_model(config(model=str(saved(family)))) for _ in range(2)]
    expected = alone(two[0])
    with pair(*two) as (prefill, decode):
        pieces, wanted, answer = prefilled(prefill), want(), waiting()
        form = prefill.pages.form
        one_size = (1, 48, 0) if family == "deepseek_v3" else (0, 0, form.num_layers)
        assert (form.num_kv_heads, form.head_dim, len(form.layers)) == one_size
        assert (form.layout == "joined") == (family == "deepseek_v3")
        assert [len(piece.data) for piece in pieces] == [form.page_bytes] * 6
        decode.pages.open(wanted).result(SOON_S)
        answer.submit(decode, awaits_pages=True)
        write(decode, wanted, pieces)
        decode.pages.close(wanted, [answer.request])
        assert answer.wait().tokens == expected
        assert answer.telemetry.cached_tokens == 6 * PAGE


def test_the_pages_have_the_bits_of_an_own_prefill(llama: LoadedModel, other: LoadedModel) -> None:
    with pair(llama, other) as engines:
        theirs, own = (b"".join(bytes(piece.data) for piece in prefilled(one)) for one in engines)
        assert theirs == own
        forms = [one.pages.form for one in engines]
        assert forms[0] == forms[1]
        assert len(theirs) == 6 * forms[0].page_bytes


def test_an_import_begins_after_the_pages_that_are_cached(llama: LoadedModel, other: LoadedModel) -> None:
    with pair(llama, other) as (prefill, decode):
        answer_all(decode, [ask(PROMPT[: 2 * PAGE + 1], max_tokens=1)])
        wanted, answer = want(), waiting()
        assert decode.pages.open(wanted).result(SOON_S) == Opened(2)
        answer.submit(decode, awaits_pages=True)
        write(decode, wanted, prefilled(prefill)[2:], at=2)
        decode.pages.close(wanted, [answer.request])
        answer.wait()
        assert answer.telemetry.cached_tokens == 6 * PAGE
        again = want()
        assert decode.pages.open(again).result(SOON_S) == Opened(6)  # nothing is left to fetch, and nothing is held


def test_two_imports_with_one_beginning_end_as_one_chain_of_pages(llama: LoadedModel, other: LoadedModel) -> None:
    longer = [*WHOLE[: 4 * PAGE], *tokens(2 * PAGE, 9)]
    with pair(llama, other) as (prefill, decode):
        imports = [(want(), WHOLE), (want(longer), longer)]
        for wanted, _ in imports:
            assert decode.pages.open(wanted).result(SOON_S) == Opened(0)
        for wanted, token_ids in imports:
            write(decode, wanted, prefilled(prefill, token_ids))
        for wanted, _ in imports:
            decode.pages.close(wanted, [])
        answers = [ask([*token_ids, 7], max_tokens=4) for _, token_ids in imports]
        answer_all(decode, answers)
        assert [answer.telemetry.cached_tokens for answer in answers] == [6 * PAGE, 6 * PAGE]
        assert decode.stats().pages_cached == 6 + 2


def test_salts_hide_imported_pages(llama: LoadedModel, other: LoadedModel) -> None:
    with pair(llama, other) as (prefill, decode):
        wanted = want(salt="a")
        decode.pages.open(wanted).result(SOON_S)
        write(decode, wanted, prefilled(prefill, salt="a"))
        decode.pages.close(wanted, [])
        answers = [ask(PROMPT, max_tokens=2), ask(PROMPT, max_tokens=2)]
        answers[1].change(cache_salt="a")
        answer_all(decode, answers)
        assert [answer.telemetry.cached_tokens for answer in answers] == [0, 6 * PAGE]


@pytest.mark.parametrize("how", ["drop", "abort"])
def test_a_sequence_that_ends_while_it_waits_leaves_nothing(llama: LoadedModel, how: str) -> None:
    with engine(llama, "decode") as decode:
        wanted, answer = want(), waiting()
        decode.pages.open(wanted).result(SOON_S)
        answer.submit(decode, awaits_pages=True)
        until_false(lambda: not decode.stats().waiting)
        if how == "drop":
            decode.drop(answer.request)
        else:
            decode.abort(answer.request.request_id)
            answer.wait()
        until_false(lambda: decode.stats().waiting > 0)
        assert used(decode) == 6
        decode.pages.close(wanted, [answer.request])
        until_false(lambda: used(decode) > 0)
        assert decode.stats().pages_cached == 0  # no page was written, so none is indexed


def test_imports_are_bounded_in_bytes_and_by_the_cache(llama: LoadedModel) -> None:
    with engine(llama, "decode", transfer_bytes=1, kv_cache_tokens=256) as decode:
        first, second, third = want(), want(tokens(6 * PAGE, 5)), want(tokens(400 * PAGE, 6))
        assert decode.pages.open(third).result(SOON_S) == Opened(0, Fallback.NO_PAGES)
        assert decode.pages.open(first).result(SOON_S) == Opened(0)  # the first may have more
        assert decode.pages.open(second).result(SOON_S) == Opened(0, Fallback.BUSY)
        for wanted in (first, second, third):
            decode.pages.close(wanted, [])


def test_a_failed_step_ends_imports_and_what_waits_for_them(llama: LoadedModel) -> None:
    net = FailsOnce(llama.net)
    with engine(replace(llama, net=net, fused=replace(llama.fused, forward=None)), "decode") as decode:
        net.fails_next = True
        wanted, answer = want(), waiting()
        decode.pages.open(wanted).result(SOON_S)
        answer.submit(decode, awaits_pages=True)
        other = ask(PROMPT[:20], max_tokens=4)
        other.submit(decode)
        assert isinstance(other.wait().error, InternalError)
        assert isinstance(answer.wait().error, InternalError)
        piece = Piece(1, bytes(decode.pages.form.page_bytes))
        with pytest.raises(InternalError, match="has ended"):
            decode.pages.write(wanted, 0, piece).result(SOON_S)
        decode.pages.close(wanted, [answer.request])
        assert answer_all(decode, [ask(PROMPT, max_tokens=4)]) != [[]]


def test_reading_pages_of_a_sequence_that_ended_fails(llama: LoadedModel) -> None:
    with engine(llama, "prefill") as prefill:
        request = prefill_request(WHOLE, "", "p")
        with pytest.raises(InternalError, match="has ended"):
            prefill.pages.read(request, 0, 4).result(SOON_S)
        prefill.submit(request)
        reading = prefill.pages.read(request, 6, 4)  # pages that it does not have
        prefill.drop(request)
        with pytest.raises(InternalError, match="has ended"):
            reading.result(SOON_S)


def test_the_digest_of_the_weights_tells_models_apart(llama: LoadedModel, other: LoadedModel) -> None:
    parameter = next(iter(other.net.parameters()))
    parameter.data.flatten()[0] += 1.0
    try:
        with pair(llama, other) as (prefill, decode):
            assert prefill.pages.form.difference(decode.pages.form).startswith("fingerprint is ")
    finally:
        parameter.data.flatten()[0] -= 1.0
