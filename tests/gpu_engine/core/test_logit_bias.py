"""Biases of logits: they move tokens, and neither drafts nor company change what they do."""

from __future__ import annotations

import pytest

from gpu_engine.model.loader import LoadedModel
from tests.gpu_engine.harness import Answer, answer_all, answer_each, ask, tokens, unguided_engine, with_drafts


def biased(*biases: tuple[int, float], **sampling: object) -> Answer:
    return ask(tokens(20, 2, repeat=8), max_tokens=24, ignore_eos=True, logit_bias=biases, **sampling)


def test_a_bias_lifts_one_token_and_keeps_another_away(llama: LoadedModel) -> None:
    with unguided_engine(llama, with_drafts(3)) as engine:
        free = answer_all(engine, [biased()])[0]
        often = max(set(free), key=free.count)
        never, always, banned = answer_each(
            engine,
            [
                biased((often, -100.0)),
                biased((7, 100.0), temperature=1.0),
                biased((often, 100.0), bad_token_ids=(often,)),
            ],
        )
        assert answer_all(engine, [biased()])[0] == free, "the slot's next owner has none of it"
    assert often not in never
    assert set(always) == {7}
    assert often not in banned, "a ban is stronger than a bias"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_of_any_drafter_change_no_biased_token(
    llama: LoadedModel, draft_models: dict[str, str], overlap: bool, temperature: float
) -> None:
    biases = tuple((token, 2.0 - token % 5) for token in range(0, 300, 2))

    def made() -> list[Answer]:
        return [biased(*biases, temperature=temperature), biased(temperature=temperature, logprobs=1)]

    with unguided_engine(llama, with_drafts(0)) as engine:
        answers = made()
        expected = answer_each(engine, answers)
    assert expected[0] != expected[1]
    for draft_model in ("", draft_models["same"], draft_models["trained eagle3"]):
        with unguided_engine(llama, with_drafts(3, overlap=overlap, draft_model=draft_model)) as engine:
            together = made()
            assert answer_all(engine, together) == expected, draft_model
            assert together[1].logprobs == answers[1].logprobs
            if draft_model == draft_models["same"]:
                # The draft model draws with the biases as well: else none of its drafts would be right.
                stats = engine.stats()
                assert stats.accepted_draft_tokens > 0.9 * stats.draft_tokens > 0
