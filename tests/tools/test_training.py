"""Training a head: prompts and answers on disk, the replay, the loss, and resuming after an interruption."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import torch
from rich.progress import Progress

from gpu_engine.cli.client import Client
from gpu_engine.drafters.heads.eagle3_files import load_head
from gpu_engine.drafters.heads.eagle3_head import Eagle3Head
from tests.gpu_engine.drafters.test_eagle3_head import VD, H, V, make_head, target_config
from tools.training.answers import TrainingAnswer, answer_all, read_answers, read_prompts
from tools.training.evaluate import replay
from tools.training.features import FeatureFolder, batches, draft_vocabulary, split
from tools.training.prompts import TrainingPrompt, make_prompts
from tools.training.trainer import Recipe, Training, loss_of
from tools.training.unroll import Sequence


def answer(name: str, *ids: int) -> TrainingAnswer:
    return TrainingAnswer(name, (("user", "hi"),), ids, "FINISH_REASON_STOP")


def sequence(head: Eagle3Head, seed: int) -> Sequence:
    """Return a sequence that can be learned: hidden states determine the next token, which the head can propose."""
    draw = torch.Generator().manual_seed(seed)
    ids = head.target_ids[torch.randint(VD, (16,), generator=draw)]
    code = torch.randn(V, 3 * H, generator=torch.Generator().manual_seed(0))
    return Sequence(ids, code[ids.roll(-2)] + code[ids.roll(-3)] * 0.5, answer_at=4)


def test_equal_arguments_give_equal_prompts_with_valid_schemas() -> None:
    prompts = list(make_prompts(60))
    assert prompts == list(make_prompts(60))
    assert prompts != list(make_prompts(60, seed=1))
    assert {prompt.name.partition("-")[0] for prompt in prompts} == {"extract", "invent", "free"}
    for prompt in prompts:
        if prompt.schema is not None:
            schema = json.loads(prompt.schema)
            jsonschema.Draft202012Validator.check_schema(schema)
            assert schema["properties"]
            assert prompt.messages[0][0] == "system"


def test_a_prompt_is_read_back_from_its_line() -> None:
    for prompt in make_prompts(8):
        assert TrainingPrompt.parse(prompt.line()) == prompt
    assert (
        TrainingPrompt.parse('{"name": "a", "messages": [], "schema": {"type": "object"}}').schema
        == '{"type": "object"}'
    )


@pytest.mark.parametrize("line", ["[]", "{}", '{"name": "a", "messages": [1]}', "no json"])
def test_an_error_names_the_wrong_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(next(make_prompts(1)).line() + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2"):
        list(read_prompts(path))


def test_an_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    assert read_answers(path) == []
    path.write_text(answer("a", 1, 2).line() + "\n" + answer("b", 3).line()[:20])
    assert read_answers(path) == [answer("a", 1, 2)]


async def test_an_unreachable_server_is_a_connection_error_with_its_address(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/absent.sock"
    with (tmp_path / "answers.jsonl").open("w") as out, Progress(disable=True) as progress:
        async with Client(address) as client:
            with pytest.raises(ConnectionError, match=r"absent\.sock: UNAVAILABLE"):
                await answer_all(
                    client,
                    make_prompts(3),
                    out,
                    temperature=0.0,
                    concurrency=2,
                    progress=progress,
                    task=progress.add_task(""),
                )


def test_an_answer_stays_on_its_side_of_the_split_when_answers_are_added() -> None:
    answers = [answer(f"name {i}", 1) for i in range(200)]
    training, held_back = split(answers, 0.2)
    assert sorted(training + held_back) == list(range(200))
    assert 20 < len(held_back) < 60
    fewer, fewer_held_back = split(answers[:100], 0.2)
    assert set(fewer) <= set(training)
    assert set(fewer_held_back) <= set(held_back)


def test_the_draft_vocabulary_is_the_most_frequent_tokens_of_the_answers() -> None:
    answers = [answer("a", 9, 9, 9, 5, 5), answer("b", 7)]
    assert draft_vocabulary(answers, 3, V).tolist() == [5, 7, 9]
    assert draft_vocabulary(answers, 5, V).tolist() == [0, 1, 5, 7, 9]


def test_batches_hold_each_number_once_in_an_order_of_the_seed() -> None:
    found = list(batches(range(10), 4, seed=3))
    assert sorted(number for batch in found for number in batch) == list(range(10))
    assert [len(batch) for batch in found] == [4, 4, 2]
    assert found == list(batches(range(10), 4, seed=3)) != list(batches(range(10), 4, seed=4))


def test_features_are_read_back_and_another_fingerprint_is_refused(tmp_path: Path) -> None:
    folder = FeatureFolder(tmp_path, "this model")
    kept = Sequence(torch.tensor([1, 2, 3]), torch.randn(3, 6).bfloat16(), 1)
    folder.write(1, kept)
    assert folder.missing(3) == [0, 2]
    again = FeatureFolder(tmp_path, "this model").read(1)
    assert again.answer_at == 1
    torch.testing.assert_close(again.aux_nF, kept.aux_nF, rtol=0, atol=0)
    with pytest.raises(ValueError, match="another model"):
        FeatureFolder(tmp_path, "that model")


def test_the_replay_counts_the_drafts_that_verification_accepts() -> None:
    head = make_head()
    embedding = torch.randn(V, H)
    first, second = (sequence(head, seed) for seed in (1, 2))
    found = replay(head, embedding, [first, second], 3)
    assert found.tokens == len(first.region) + len(second.region)
    assert found.steps <= found.tokens
    assert found.tried[0] == found.steps or found.tried[0] < found.steps
    # A step yields its right drafts and one token more, except for a step that the end of the answer cuts off.
    assert found.tokens <= found.steps + sum(found.right)
    assert replay(head, embedding, [first], 0).length == 1.0


def test_training_raises_the_acceptance_length(tmp_path: Path) -> None:
    head, embedding = make_head(), torch.randn(V, H, generator=torch.Generator().manual_seed(5))
    recipe = Recipe(epochs=1, batch_size=4, learning_rate=1e-2, depth=3, seed=0)
    training = Training(head, recipe, tmp_path, updates=60)
    data = [sequence(head, seed) for seed in range(4)]
    before = replay(head, embedding, data, 3).length
    losses = [training.update(embedding, data) for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]
    assert replay(head, embedding, data, 3).length > before + 0.5


def test_tokens_outside_the_draft_vocabulary_have_no_loss() -> None:
    head = make_head()
    outside = next(i for i in range(V) if i not in set(head.target_ids.tolist()))
    strange = Sequence(torch.full((8,), outside), torch.randn(8, 3 * H), answer_at=3)
    loss = loss_of(head, torch.randn(V, H), strange, 3)
    assert float(loss) == 0.0
    assert not loss.requires_grad


def test_an_interrupted_training_ends_with_the_same_weights(tmp_path: Path) -> None:
    embedding = torch.randn(V, H)
    data = [sequence(make_head(), seed) for seed in range(4)]
    recipe = Recipe(epochs=1, batch_size=1, learning_rate=1e-3, depth=2, seed=0)
    straight = Training(make_head(), recipe, tmp_path / "a", updates=4)
    for item in data:
        straight.update(embedding, [item])
    folder = tmp_path / "b"
    folder.mkdir()
    first = Training(make_head(), recipe, folder, updates=4)
    assert not first.resume()
    for item in data[:2]:
        first.update(embedding, [item])
    first.save(torch.float32)
    second = Training(make_head(seed=1), recipe, folder, updates=4)
    assert second.resume()
    assert second.done == 2
    for item in data[2:]:
        second.update(embedding, [item])
    for name, tensor in straight.head.state_dict().items():
        torch.testing.assert_close(second.head.state_dict()[name], tensor, rtol=0, atol=0)
    with pytest.raises(ValueError, match="was begun for 4 updates, not 9"):
        Training(make_head(), recipe, folder, updates=9).resume()


def test_the_engine_loads_the_saved_head(tmp_path: Path) -> None:
    training = Training(make_head(), Recipe(epochs=1, batch_size=1, learning_rate=1e-3, depth=2, seed=0), tmp_path, 1)
    training.save(torch.bfloat16)
    head = load_head(tmp_path, target_config(), torch.bfloat16)
    assert head.lm_head.weight.dtype == torch.bfloat16
    torch.testing.assert_close(head.fc.weight, training.head.fc.weight.bfloat16())
    assert training.head.fc.weight.dtype == torch.float32
