"""The ring of the last iterations, and what each sequence is doing, of a real engine."""

from __future__ import annotations

from gpu_engine.api.stats import SequenceStats, Stage
from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import LoadedModel
from tests.gpu_engine.harness import Answer, answer_all, ask, settle, tokens, unguided_engine, with_drafts


def test_the_iterations_of_an_engine_add_up_to_its_counters(llama: LoadedModel, overlap: bool) -> None:
    with unguided_engine(llama, with_drafts(3, overlap=overlap, max_batch_size=2)) as engine:
        answers = [ask(tokens(40, i, repeat=10), max_tokens=12, drafts=3) for i in range(5)]
        answer_all(engine, answers)
        answer_all(engine, [ask(tokens(5, 9), max_tokens=1)])
        settle(engine)
        stats = engine.stats()
        found, end = engine.iterations.since(0)
    assert [each.number for each in found] == list(range(end))
    for name in ("generated_tokens", "draft_tokens", "accepted_draft_tokens", "prefill_tokens"):
        assert sum(getattr(each, name) for each in found) == getattr(stats, name), name
    assert sum(len(answer.tokens) for answer in answers) + 1 == stats.generated_tokens
    assert max(each.running for each in found) == max(each.decoding for each in found) == 2
    assert max(each.waiting for each in found) == 3
    assert all(each.seconds > 0 and each.parked == 0 and each.preempted == 0 for each in found)
    assert max(each.pages_used for each in found) > 0
    assert [each.ended_s for each in found] == sorted(each.ended_s for each in found)


def test_an_engine_says_what_each_sequence_is_doing(llama: LoadedModel) -> None:
    seen: list[list[SequenceStats]] = []
    running: list[Engine] = []

    def look(answer: Answer) -> None:
        if not seen and len(answer.tokens) >= 4:
            seen.append(running[0].sequence_stats())

    with unguided_engine(llama, with_drafts(0, max_batch_size=1)) as engine:
        running.append(engine)
        first = ask(tokens(20, 1), name="a", max_tokens=30, on_event=look)
        second = ask(tokens(6, 2), name="b", max_tokens=2)
        second.change(client_id="team")
        answer_all(engine, [first, second])
        assert engine.sequence_stats() == []
    decodes, waits = seen[0]
    assert (decodes.request_id, decodes.stage, decodes.slot, decodes.prompt_tokens) == ("a", Stage.DECODE, 0, 20)
    assert decodes.prefilled_tokens == 20
    assert 4 <= decodes.generated_tokens < 30
    assert decodes.pages > 0
    assert waits == SequenceStats("b", 0, "team", Stage.WAITING, 6, 0, 0, None, 0)
