"""A whole engine on a CUDA device: graphs, eager launches and a CPU have the same tokens in float32."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.harness.server import EngineServer, ServerOptions
from gpu_engine.api.request import FinishReason
from gpu_engine.core.prefill_graphs import Prefill
from protos.engine.v1 import engine_pb2 as pb
from shared_mem.channel import Record
from shared_mem.layout import Stage
from tests.e2e.asking import answer, idle_stats
from tests.fakes import EOS
from tests.gpu.on_gpu import GUIDED, SYNCS, UNGUIDED, Models, on_gpu
from tests.gpu_engine.harness import (
    PATIENCE_S,
    Answer,
    answer_all,
    answer_each,
    answer_staggered,
    ask,
    executor_of,
    tokens,
    unguided_engine,
    until_false,
    with_drafts,
)
from tests.gpu_engine.toy_sidecar import guided_engine
from tests.rpc_client import Client

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_drafts", [0, 3, 7])
def test_unguided_tokens_equal_those_of_a_cpu(
    models: Models, unguided_tokens: list[list[int]], num_drafts: int, overlap: bool, eager: bool
) -> None:
    with unguided_engine(models.gpu, on_gpu(num_drafts, overlap=overlap, enforce_eager=eager)) as engine:
        assert answer_all(engine, [make() for make in UNGUIDED]) == unguided_tokens
        assert answer_staggered(engine, [make() for make in UNGUIDED]) == unguided_tokens
        stats = engine.stats()
    assert (stats.accepted_draft_tokens > 20) == (num_drafts > 0)


@pytest.mark.parametrize("drafts_by", ["ngram", "model"])
def test_prompts_prefilled_together_have_the_tokens_of_a_cpu(models: Models, drafts_by: str) -> None:
    def made() -> list[Answer]:
        lengths = (2, 3, 5, 9, 17, 20, 28, 31, 32, 33, 34, 64, 65, 129, 200, 1)
        return [
            ask(tokens(length, at, repeat=length // 3), max_tokens=20, seed=at, temperature=0.5 * (at % 2))
            for at, length in enumerate(lengths)
        ]

    with unguided_engine(models.cpu, with_drafts(0)) as engine:
        expected = answer_each(engine, made())
    draft_model = models.cpu.name if drafts_by == "model" else ""
    settings = on_gpu(3, draft_model=draft_model, max_batched_tokens=512, max_batch_size=16)
    with unguided_engine(models.gpu, settings) as engine:
        prefill = executor_of(engine).prefill
        assert isinstance(prefill, Prefill)
        warmed = prefill.launches.copy()
        assert answer_all(engine, made()) == expected
        answers = made()

        def submit(first: Answer) -> None:
            first.on_event = None
            for answer in answers:
                answer.submit(engine)

        engine.submit(ask(tokens(3, 99), max_tokens=1, on_event=submit).request)
        assert [answer.wait().tokens for answer in answers] == expected
        assert set(prefill.launches) == set(warmed) == prefill.captured == set(settings.prefill_shapes.every)
        assert max(lanes for lanes, _ in prefill.launches - warmed) == 16


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("num_drafts", [0, 3, 7])
def test_guided_tokens_equal_those_of_a_cpu(
    models: Models, guided_tokens: list[list[int]], num_drafts: int, sync: str, eager: bool
) -> None:
    with guided_engine(models.gpu, on_gpu(num_drafts, sync=sync, enforce_eager=eager)) as (engine, _):
        assert answer_all(engine, [make() for make in GUIDED]) == guided_tokens
        assert answer_staggered(engine, [make() for make in GUIDED]) == guided_tokens
        assert engine.stats().deferred_rows == 0


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("drafts_by", ["ngram", "grammar", "model", "decoupled"])
def test_jump_forward_tokens_change_no_answer(
    models: Models, guided_tokens: list[list[int]], drafts_by: str, sync: str, eager: bool
) -> None:
    draft_model = models.cpu.name if drafts_by in ("model", "decoupled") else ""
    settings = on_gpu(3, sync=sync, enforce_eager=eager, draft_model=draft_model)
    with guided_engine(models.gpu, replace(settings, drafter=drafts_by)) as (engine, grammar):
        # After an odd number of tokens the proposal is two right tokens; otherwise it is wrong.
        grammar.sidecar.proposes = lambda automaton, emitted: (
            next((ids[len(emitted) :][:2] for ids in guided_tokens if ids[: len(emitted)] == emitted), [])
            if len(emitted) % 2
            else [len(emitted) % 256, 65, 66]
        )
        assert answer_all(engine, [make() for make in GUIDED]) == guided_tokens
        stats = engine.stats()
    assert stats.deferred_rows == 0
    assert stats.jump_forward_tokens > stats.accepted_jump_forward_tokens > 10


@pytest.mark.parametrize("sync", SYNCS)
def test_a_draft_model_changes_no_token_and_its_rows_are_cached(
    models: Models, guided_tokens: list[list[int]], sync: str
) -> None:
    with guided_engine(models.gpu, on_gpu(3, sync=sync, draft_model=models.cpu.name, draft_masks="on")) as (
        engine,
        grammar,
    ):
        assert answer_all(engine, [make() for make in GUIDED]) == guided_tokens
        stats = engine.stats()
        verified = [record for record in grammar.sidecar.records if record.stage == Stage.VERIFY]
    assert stats.accepted_draft_tokens > stats.draft_tokens * 0.9
    assert {record.need_rows.bit_count() for record in verified if EOS not in record.drafts} == {1}


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("num_drafts", [3, 7])
def test_a_decoupled_draft_model_is_exchanged_in_the_middle_of_answers(
    models: Models, unguided_tokens: list[list[int]], num_drafts: int, eager: bool
) -> None:
    name = models.cpu.name
    fields = {"drafter": "decoupled", "draft_model": name, "draft_dirs": (str(Path(name).parent),)}
    with unguided_engine(models.gpu, replace(on_gpu(num_drafts, enforce_eager=eager), **fields)) as engine:
        answers = [make() for make in UNGUIDED]
        for answer in answers:
            answer.submit(engine)
        assert engine.draft_models.exchange(name).name == name
        assert [answer.wait().tokens for answer in answers] == unguided_tokens
        assert answer_all(engine, [make() for make in UNGUIDED]) == unguided_tokens
        stats = engine.stats()
    assert stats.accepted_draft_tokens > stats.draft_tokens * 0.9 > 20


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_a_draft_model_on_a_gpu_of_its_own_is_right_as_the_target_is(
    models: Models, unguided_tokens: list[list[int]], eager: bool
) -> None:
    fields = {"drafter": "decoupled", "draft_model": models.cpu.name, "draft_device": "cuda:1"}
    with unguided_engine(models.gpu, replace(on_gpu(3, enforce_eager=eager), **fields)) as engine:
        assert answer_all(engine, [make() for make in UNGUIDED]) == unguided_tokens
        stats = engine.stats()
    assert stats.accepted_draft_tokens > stats.draft_tokens * 0.9 > 10


def test_logprobs_equal_those_of_a_cpu(models: Models) -> None:
    def made() -> Answer:
        return ask(tokens(8, 1), max_tokens=12, logprobs=5, ignore_eos=True)

    expected, got = made(), made()
    with unguided_engine(models.cpu, with_drafts(3)) as engine:
        answer_all(engine, [expected])
    with unguided_engine(models.gpu, on_gpu(3)) as engine:
        answer_all(engine, [got])
    for ours, theirs in zip(got.logprobs, expected.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_the_slot_of_an_aborted_request_is_reused(models: Models, unguided_tokens: list[list[int]]) -> None:
    with unguided_engine(models.gpu, on_gpu(3, max_batch_size=1)) as engine:
        endless = ask(tokens(5, 9), max_tokens=10_000, ignore_eos=True)
        endless.submit(engine)
        until_false(lambda: len(endless.tokens) < 4)
        following = UNGUIDED[0]()
        following.submit(engine)
        engine.abort(endless.request.request_id)
        assert endless.wait().finish in (FinishReason.ABORTED, FinishReason.LENGTH)
        assert following.wait().tokens == unguided_tokens[0]


@pytest.mark.parametrize("sync", SYNCS)
def test_a_step_without_rows_ends_and_answers_continue(
    models: Models, guided_tokens: list[list[int]], sync: str
) -> None:
    with guided_engine(models.gpu, on_gpu(3, sync=sync, row_timeout_ms=100.0)) as (engine, grammar):
        first, answers = grammar.sidecar, [make() for make in GUIDED]

        def die(record: Record) -> None:
            first.stopping |= record.commit_pos + len(record.committed) >= 15

        first.before = die
        for made in answers:
            made.submit(engine)
        grammar._thread.join(PATIENCE_S)
        grammar.kill_sidecar()
        engine.grammar_lost()
        assert answers[1].wait().tokens == guided_tokens[1]
        assert not answers[0].over
        grammar.start_sidecar()
        engine.grammar_restored()
        assert [made.wait().tokens for made in answers] == guided_tokens
        assert first.problems == []


@pytest.mark.parametrize("sync", SYNCS)
async def test_a_grammar_process_killed_during_an_answer_changes_no_token(models: Models, sync: str) -> None:
    flags = ("--sync", sync, "--max-model-len", "512")
    options = ServerOptions(model=models.cpu.name, device="cuda", dtype="float32", num_draft_tokens=3, extra=flags)
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[65, 66, 67]),
        grammar=pb.Grammar(regex="[a-z]{400}"),
        sampling=pb.SamplingParams(max_tokens=450, temperature=0.0),
    )
    before = {child.pid for child in psutil.Process().children()}
    with EngineServer(options) as server:
        (process,) = [child for child in psutil.Process().children() if child.pid not in before]
        async with Client(server.address) as client:
            undisturbed = await answer(client, request)
            starts = (await client.stats()).grammar_starts
            token_ids, killed, last = list[int](), False, pb.GenerateResponse()
            async for response in client.generate(request, timeout_s=PATIENCE_S):
                token_ids.extend(response.token_ids)
                last = response
                if not killed and token_ids:
                    (grammar,) = [child for child in process.children() if "grammar_service" in child.cmdline()]
                    os.kill(grammar.pid, signal.SIGKILL)
                    killed = True
            stats = await idle_stats(client)
    assert last.finish_reason == pb.FINISH_REASON_STOP
    assert token_ids == undisturbed.token_ids
    assert stats.grammar_starts == starts + 1
