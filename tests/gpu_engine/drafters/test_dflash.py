"""Drafts of a DFlash head in an engine are those of a plain reference, and read a target of any precision."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from gpu_engine.core.engine import Engine
from gpu_engine.drafters.chain import ChainDrafter
from gpu_engine.model.loaded_model import ModelNotSupported
from gpu_engine.model.loader import LoadedModel, load_model
from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.launches import place_of
from gpu_engine.step.prompt_rows import Hidden
from kernels.accept import StepTensors
from kernels.row_kinds import APPLY
from shared_mem.layout import Stage
from tests.fakes import EOS
from tests.gpu_engine import dflash
from tests.gpu_engine.core.guided_requests import legal
from tests.gpu_engine.harness import (
    UNHURRIED_MS,
    Answer,
    answer_all,
    ask,
    config,
    executor_of,
    tokens,
    unguided_engine,
    with_drafts,
)
from tests.gpu_engine.tiny import VOCAB
from tests.gpu_engine.toy_sidecar import Automaton, guided_engine
from tests.kernels.accept_cases import Case, reference_token

PATIENT = {"row_timeout_ms": UNHURRIED_MS, "draft_timeout_ms": UNHURRIED_MS}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of two heads: drafts of "repeating" are often right, those of "random" rarely."""
    repeating, random = (tmp_path_factory.mktemp(name) / "dflash" for name in ("repeating", "random"))
    dflash.save_repeating(repeating)
    dflash.save_random(random)
    return {"repeating": str(repeating), "random": str(random)}


# ---- what is drafted -----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Proposals:
    """Records what the drafter of an engine proposed: the tokens so far, the drafts, and how many were wanted."""

    drafter: ChainDrafter
    seen: list[tuple[list[int], list[int], int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._propose = self.drafter.propose
        self.drafter.propose = self.propose  # type: ignore[method-assign]

    def propose(self, batch: StepBatch, step: StepTensors, page_table_BN: torch.Tensor, hidden: Hidden) -> None:
        self._propose(batch, step, page_table_BN, hidden)
        slot, place_B = batch.slot, place_of(batch)
        for b in batch.lane.drafting_B[: batch.num_lanes].nonzero()[:, 0].tolist():
            place, wanted = int(place_B[b]), int(self.drafter._wanted_B[b])
            length, count = int(slot.length_S[place]), int(slot.num_drafts_S[place])
            so_far, drafts = slot.history_SL[place, :length], slot.drafts_SR[place, :count]
            self.seen.append((so_far.tolist(), drafts.tolist(), wanted))


def drafter_of(engine: Engine) -> ChainDrafter:
    drafter: ChainDrafter = executor_of(engine).runner.launcher._program.drafter  # type: ignore[attr-defined]
    return drafter


def reference_drafts(logits: torch.Tensor, so_far: list[int], answer: Answer, automaton: Automaton | None) -> list[int]:
    """Return the drafts by the definition: under the noise of their positions, and the masks after those before."""
    request, drafts = answer.request, list[int]()
    prompt = len(request.prompt_ids)
    for row in logits:
        history = so_far + drafts
        case = Case(history, prompt, temperature=request.sampling.temperature, seed=request.sampling.seed or 0)
        if automaton is not None:
            mask = torch.zeros(VOCAB, dtype=torch.bool)
            mask[sorted(automaton.legal(history[prompt:]))] = True
            case = replace(case, kinds=[APPLY], masks={0: mask})
        token = reference_token(case, history, row, 0)
        if token is None:
            break
        drafts.append(token)
    return drafts


@pytest.mark.parametrize("head", ["repeating", "random"])
@pytest.mark.parametrize("guided", [True, False])
def test_drafts_are_those_of_the_reference(llama: LoadedModel, heads: dict[str, str], head: str, guided: bool) -> None:
    """Masked and free, greedy and drawn with the shared noise, after every kind of acceptance."""
    plain, target = dflash.PlainDFlash.read(Path(heads[head])), dflash.PlainTarget(Path(llama.name))
    grammar = "40" if guided else None
    answers = [
        ask(tokens(11 + seed, seed), grammar=grammar, max_tokens=40, temperature=0.4 * seed, seed=seed)
        for seed in range(3)
    ]
    settings = with_drafts(
        5, draft_model=heads[head], draft_masks="on" if guided else "off", jump_forward_tokens=0, **PATIENT
    )
    with guided_engine(llama, settings) as (engine, _):
        proposals = Proposals(drafter_of(engine))
        answer_all(engine, answers)
    by_prompt = {tuple(answer.request.prompt_ids): answer for answer in answers}
    assert sum(wanted for _, _, wanted in proposals.seen) > 60
    with torch.inference_mode():
        for so_far, drafts, wanted in proposals.seen:
            (answer,) = (a for prompt, a in by_prompt.items() if tuple(so_far[: len(prompt)]) == prompt)
            logits = target.drafts(plain, so_far, wanted)
            automaton = Automaton.parse(grammar) if grammar else None
            assert drafts == reference_drafts(logits, so_far, answer, automaton)


# ---- tokens do not depend on drafts --------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "q4"}])
def test_a_head_reads_a_target_of_any_precision(
    llama: LoadedModel, heads: dict[str, str], precision: dict[str, str]
) -> None:
    target = load_model(config(model=llama.name, **precision))

    def run(num_drafts: int) -> tuple[list[list[int]], int]:
        named = {"draft_model": heads["repeating"]} if num_drafts else {}
        with unguided_engine(target, with_drafts(num_drafts, **named, **precision)) as engine:
            answers = [ask(tokens(9, seed), max_tokens=40, temperature=0.3 * seed, seed=seed) for seed in range(3)]
            return answer_all(engine, answers), engine.stats().accepted_draft_tokens

    (plain, _), (drafted, accepted) = run(0), run(5)
    assert drafted == plain
    assert accepted > 20


def test_masked_drafts_are_legal_and_their_rows_are_not_asked_for_again(
    llama: LoadedModel, heads: dict[str, str]
) -> None:
    settings = with_drafts(3, draft_model=heads["random"], draft_masks="on", jump_forward_tokens=0, **PATIENT)
    with guided_engine(llama, settings) as (engine, grammar):
        answer = ask(tokens(20, 3), grammar="31", max_tokens=90)
        answer_all(engine, [answer])
        records = grammar.sidecar.records
    assert legal(answer)
    automaton, so_far = Automaton.parse("31"), answer.tokens
    verified = [record for record in records if record.stage == Stage.VERIFY]
    for record in verified:
        before = so_far[: record.commit_pos + len(record.committed)]
        drafts = list(itertools.takewhile(lambda draft: draft != EOS, record.drafts))
        for k, draft in enumerate(drafts):
            assert draft in automaton.legal([*before, *drafts[:k]])
    assert {record.need_rows.bit_count() for record in verified if EOS not in record.drafts} == {1}


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_more_drafts_than_a_block_has_are_refused(llama: LoadedModel, heads: dict[str, str]) -> None:
    settings = with_drafts(8, draft_model=heads["random"])
    with pytest.raises(ModelNotSupported, match=r"num_draft_tokens: 8 drafts do not fit .* block_size is 8"):
        Engine(settings, replace(llama, max_model_len=settings.max_model_len))
