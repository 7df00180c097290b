"""The workloads are deterministic, and what they claim about facts and schemas is true."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from benchmarks.harness.jobs import repeated_jobs
from benchmarks.harness.workloads import LONG_WORDS, NUM_LONG, NUM_REPEATED, WORKLOADS, workload


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from leaves(inner)
    else:
        yield value


@pytest.mark.parametrize("name", [*WORKLOADS, "repeated", "long"])
def test_two_calls_give_equal_items_with_distinct_names(name: str) -> None:
    items = workload(name)
    assert items == workload(name)
    assert len({item.name for item in items}) == len(items)


@pytest.mark.parametrize("item", workload("extraction"), ids=lambda item: item.name)
def test_every_fact_stands_in_the_prompt_and_satisfies_the_schema(item: Any) -> None:
    facts = json.loads(item.facts)
    Draft202012Validator(json.loads(item.schema)).validate(facts)
    prompt = item.messages[-1][1].lower()
    missing = [leaf for leaf in leaves(facts) if str(leaf).lower() not in prompt]
    assert missing == []


def test_repeated_jobs_have_three_schemas_and_many_texts() -> None:
    items = workload("repeated")
    assert len(items) == NUM_REPEATED
    assert [len({item.schema for item in items[at::3]}) for at in range(3)] == [1, 1, 1]
    assert len({item.messages[-1] for item in items}) > 0.9 * NUM_REPEATED
    assert repeated_jobs(7) == repeated_jobs(40)[:7]


@pytest.mark.parametrize("item", workload("repeated"), ids=lambda item: item.name)
def test_the_facts_of_a_job_satisfy_its_schema_and_are_in_its_messages(item: Any) -> None:
    facts = json.loads(item.facts)
    Draft202012Validator(json.loads(item.schema)).validate(facts)
    messages = " ".join(content for _, content in item.messages)
    # The text says in words whether a reply is wanted; the schema has the name of the tool.
    assert [leaf for leaf in leaves(facts) if not isinstance(leaf, bool) and str(leaf) not in messages] == []


def test_long_prompts_have_400_words_and_hardly_a_sentence_in_common() -> None:
    texts = [item.messages[0][1].partition("\n\n")[2] for item in workload("long")]
    assert [len(text.split()) for text in texts] == [LONG_WORDS] * NUM_LONG
    sentences = [sentence for text in texts for sentence in text.split(". ")]
    assert len(set(sentences)) > 0.99 * len(sentences)


@pytest.mark.parametrize("name", ["extraction", "schema"])
def test_guided_schemas_are_schemas_and_stand_in_the_system_message(name: str) -> None:
    for item in workload(name):
        assert item.schema is not None
        Draft202012Validator.check_schema(json.loads(item.schema))
        assert item.messages[0][0] == "system"
        assert item.schema in item.messages[0][1]


def test_count_and_budget_are_applied() -> None:
    items = workload("extraction", 3, 50)
    assert len(items) == 3
    assert {item.max_tokens for item in items} == {50}
    assert {item.max_tokens for item in workload("chat", max_tokens=4096)} == {128}, "a budget is lowered, never raised"
