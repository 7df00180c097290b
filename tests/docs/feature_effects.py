"""What shows that a request used each feature of docs/features.md: the answer, and what the engine got.

An effect is a function from an answer to True. It is False for the answer of a request without the feature, and True in
any company that the page allows.
Not responsible for: which features are combined (see covering.py), the server (see recorded_server.py).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jsonschema

from gpu_engine.api.receipts import TokenChain
from gpu_engine.api.request import Backtracking, GrammarExact, GrammarKind, Request
from gpu_engine.api.signed_statements import unchecked_claims
from protos.engine.v1 import engine_pb2 as pb
from service_runtime.repetition import RepetitionLimit
from tests.docs.recorded_server import Noted
from tests.fakes import EOS

VIRTUAL_TOKENS = 4
"""Of the prompt adapter `virtual`."""


@dataclass(frozen=True)
class Answer:
    """An answer with its features, the fields that were sent, and what the engine noted."""

    features: frozenset[str]
    fields: dict[str, Any]
    responses: list[pb.GenerateResponse]
    noted: Noted

    @property
    def request(self) -> Request:
        return self.noted.requests[0]

    @property
    def indexes(self) -> list[int]:
        return sorted({response.index for response in self.responses})

    def of(self, index: int) -> list[pb.GenerateResponse]:
        return [response for response in self.responses if response.index == index]

    def last(self, index: int) -> pb.GenerateResponse:
        return self.of(index)[-1]

    def tokens(self, index: int) -> list[int]:
        """Return the tokens that count; the engine may have made more before it heard of a stop string."""
        return self.noted.tokens(index)[: self.last(index).usage.completion_tokens]

    def spelled(self, index: int) -> str:
        """Return the text of the tokens, special ones left out, whatever the responses show."""
        return bytes(token for token in self.tokens(index) if token < 256).decode(errors="replace")

    def content(self, index: int) -> str:
        """Return `spelled` without the reasoning."""
        text = self.spelled(index)
        return text.rpartition("</think>")[2] if "reasoning" in self.features else text

    def is_whole(self, index: int) -> bool:
        """Return whether the answer ended by itself."""
        last = self.last(index)
        return last.finish_reason == pb.FINISH_REASON_STOP and last.matched_token_id == EOS

    def thinks(self, index: int) -> bool:
        """Return whether the answer ended within its reasoning."""
        return self.spelled(index).startswith("<think>") and "</think>" not in self.spelled(index)

    def calls(self, index: int) -> bool:
        return "tools" in self.features and self.content(index).lstrip().startswith('{"n')

    @property
    def is_constrained(self) -> bool:
        return bool(self.features & {"grammar", "verified", "tools", "reasoning"})

    def prompt_text(self) -> str:
        return bytes(token for token in self.request.text_prompt_ids if token < 256).decode()


RECEIPT_NONCE = b"0123456789abcdef"
"""Of the feature `receipt`."""

Effect = Callable[[Answer], bool]


def float32(value: float) -> float:
    """Return the number that a float of a message has."""
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return float(rounded)


def every(check: Callable[[Answer, int], bool]) -> Effect:
    """Return an effect that holds for each sequence."""
    return lambda answer: all(check(answer, index) for index in answer.indexes)


def sampled(**expected: Any) -> Effect:
    """Return whether the engine got these parameters."""
    return lambda answer: all(getattr(answer.request.sampling, name) == value for name, value in expected.items())


def both(*effects: Effect) -> Effect:
    return lambda answer: all(effect(answer) for effect in effects)


def _matches(answer: Answer, index: int) -> bool:
    """Return whether the content matches the schema as far as it goes."""
    if answer.thinks(index) or answer.calls(index):
        return True
    content = answer.content(index).lstrip()
    if not answer.is_whole(index):
        return content[:1] in ("", "{")
    try:
        jsonschema.validate(json.loads(content), json.loads(answer.fields["grammar"]["jsonSchema"]))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def grammar(answer: Answer) -> bool:
    spec = answer.request.grammar
    composed = bool(answer.features & {"tools", "reasoning"})
    return (
        spec is not None
        and spec.kind is (GrammarKind.COMPOSED if composed else GrammarKind.JSON_SCHEMA)
        and "maxItems" in spec.source
        and every(_matches)(answer)
    )


def verified(answer: Answer) -> bool:
    spec = answer.request.grammar
    stays = answer.features & {"beams", "never_preempt", "tensors", "logits"}
    return (
        spec is not None
        and spec.verify
        and answer.request.backtracking == (None if stays else Backtracking(3, 8))
        and every(lambda a, i: any("uniqueItems" in warning for warning in a.last(i).telemetry.warnings))(answer)
        and grammar(answer)
    )


def bounds(answer: Answer) -> bool:
    spec = answer.request.grammar
    names = ("max_string_length", "max_array_items", "max_number_digits", "max_whitespace")

    def short(answer: Answer, index: int) -> bool:
        if answer.calls(index) or not answer.is_whole(index):
            return True
        value = json.loads(answer.content(index))
        return len(value["a"]) <= 1 and abs(value.get("b", 0)) < 100

    return spec is not None and spec.bounds == tuple(zip(names, (3, 1, 2, 1), strict=True)) and every(short)(answer)


def drafts(answer: Answer) -> bool:
    last = [answer.last(index).telemetry for index in answer.indexes]
    return answer.request.speculation.num_draft_tokens == answer.request.speculation.max_jump_forward == 3 and all(
        each.draft_tokens <= 3 * each.steps for each in last
    )


def repetition(answer: Answer) -> bool:
    least = answer.fields["sampling"].get("minTokens", 0)
    return answer.request.sampling.repetition == RepetitionLimit(8, 1, 4, least)


def stop(answer: Answer, index: int) -> bool:
    """Return whether no stop is in the answer but at its end, after the least tokens."""
    least = answer.request.sampling.min_tokens
    tokens = answer.tokens(index)
    text = bytes(token for token in tokens[least:-1] if token < 256)
    # A grammar may need a stop token within its text.
    return b"gh" not in text and (113 not in tokens[least:-1] or answer.is_constrained)


def bias(answer: Answer, index: int) -> bool:
    return "d" not in answer.spelled(index) or answer.is_constrained


def bans(answer: Answer, index: int) -> bool:
    return 102 not in answer.tokens(index) and "bq" not in answer.spelled(index)


def min_tokens(answer: Answer, index: int) -> bool:
    closed = answer.last(index).finish_reason in (pb.FINISH_REASON_GRAMMAR_CLOSED, pb.FINISH_REASON_GRAMMAR_INVALID)
    return len(answer.tokens(index)) > 7 or closed


def echo(answer: Answer, index: int) -> bool:
    """Return whether the first response, apart from those that have tensors alone, begins with the prompt."""
    text, ids = answer.prompt_text(), answer.request.text_prompt_ids
    first = next((each for each in answer.of(index) if each.text or each.prompt_token_ids), None)
    shows_text = "no_text" in answer.features or (first is not None and first.text.startswith(text))
    shows_ids = "output" in answer.features or (first is not None and list(first.prompt_token_ids) == ids)
    return answer.request.echo_text == text and shows_text and shows_ids


def tools(answer: Answer) -> bool:
    spec = answer.request.grammar
    shown = "no_text" in answer.features or every(lambda a, i: any(r.parts for r in a.of(i)) or a.thinks(i))(answer)
    composed = spec is not None and spec.kind is GrammarKind.COMPOSED and "add" in spec.source
    return composed and '"add"' in answer.prompt_text() and shown


def reasoning(answer: Answer) -> bool:
    spec = answer.request.grammar
    return spec is not None and spec.kind is GrammarKind.COMPOSED and "</think>" in spec.source and "10" in spec.source


def fields(answer: Answer, index: int) -> bool:
    leaves = [leaf.pointer for leaf in answer.last(index).field_logprobs]
    if not answer.is_whole(index) or answer.calls(index):
        return True
    value = json.loads(answer.content(index))
    items = [f"/a/{i}" for i in range(len(value["a"]))] or ["/a"]
    return leaves == items + ["/b"] * ("b" in value)


def events(answer: Answer, index: int) -> bool:
    """Return whether the finished leaves and the items have the values of the answer, in its order."""
    if not answer.is_whole(index):
        return any(response.value_events for response in answer.of(index))
    value = json.loads(answer.content(index))
    sent = [event for response in answer.of(index) for event in response.value_events]
    ended = {e.pointer: e for e in sent if e.kind == pb.ValueEvent.KIND_FINISHED}
    items = [json.loads(e.value_json) for e in sent if e.kind == pb.ValueEvent.KIND_ITEM]
    scored = answer.request.outputs.num_logprobs is not None
    return (
        items == value["a"]
        and list(ended)[-1:] == [""]
        and [json.loads(ended[f"/a/{i}"].value_json) for i in range(len(items))] == items
        and ("b" not in value or json.loads(ended["/b"].value_json) == value["b"])
        and all(e.HasField("logprob") is scored for e in ended.values())
    )


def receipt(answer: Answer, index: int) -> bool:
    """Return whether the last response of a sequence has a receipt of exactly its tokens."""
    chain = TokenChain(RECEIPT_NONCE)
    chain.push(answer.tokens(index))
    if not answer.last(index).receipt:
        return False
    claims = unchecked_claims(answer.last(index).receipt)
    finish = pb.FinishReason.Name(answer.last(index).finish_reason).removeprefix("FINISH_REASON_")
    ended = {"finish": finish, "tokens": len(chain), "links": chain.links, "end": chain.end}
    return claims["answer"] == ended and not any(each.receipt for each in answer.of(index)[:-1])


def _num_rows(answer: Answer, name: str, index: int) -> int:
    return sum(output.shape[0] for response in answer.of(index) for output in response.outputs if output.name == name)


def logits(answer: Answer) -> bool:
    of_prompt = len(answer.request.prompt_ids) - answer.last(0).usage.cached_tokens
    of_answers = [_num_rows(answer, "generation_logits", i) == len(answer.tokens(i)) for i in answer.indexes]
    return _num_rows(answer, "context_logits", 0) == of_prompt and all(of_answers)


def tensors(answer: Answer) -> bool:
    with_prompt = len(answer.request.prompt_ids) - answer.last(0).usage.cached_tokens + len(answer.tokens(0)) - 1
    of_answers = [_num_rows(answer, "model.layers.0.mlp", i) == len(answer.tokens(i)) for i in answer.indexes]
    return _num_rows(answer, "hidden_states.1", 0) == with_prompt and all(of_answers)


def whole(answer: Answer, index: int) -> bool:
    return sum(bool(each.text or each.token_ids or each.finish_reason) for each in answer.of(index)) == 1


def cumulative(answer: Answer, index: int) -> bool:
    """Return whether each response begins with the one before it, and the last one has the whole answer."""
    responses = [each for each in answer.of(index) if each.text or each.token_ids or each.finish_reason]
    grows = all(
        after.text.startswith(before.text) and list(after.token_ids)[: len(before.token_ids)] == list(before.token_ids)
        for before, after in pairwise(responses)
    )
    all_ids = "output" in answer.features or list(responses[-1].token_ids) == answer.tokens(index)
    return grows and all_ids


def processors(answer: Answer) -> bool:
    used = [(use.loaded.name, tuple(use.arguments)) for use in answer.request.logits_processors]

    def no_repeats(answer: Answer, index: int) -> bool:
        tokens = [*answer.request.text_prompt_ids, *answer.tokens(index)]
        prompt = len(answer.request.text_prompt_ids)
        seen = {tuple(tokens[i : i + 6]) for i in range(prompt - 5)}
        for i in range(max(prompt - 5, 0), len(tokens) - 5):
            gram = tuple(tokens[i : i + 6])
            if gram in seen and gram[-1] != EOS:
                return False
            seen.add(gram)
        return True

    return used == [("ngrams", (6,)), ("end", (4, 1.1))] and every(no_repeats)(answer)


def one_a_token(name: str) -> Effect:
    """Return whether the responses of each sequence have as many entries of a field as tokens."""

    def check(answer: Answer, index: int) -> bool:
        counts = [len(getattr(response, name)) for response in answer.of(index)]
        found = counts[-1] if "cumulative" in answer.features else sum(counts)
        return found == len(answer.tokens(index))

    return every(check)


EFFECTS: dict[str, Effect] = {
    "grammar": grammar,
    "verified": verified,
    "bounds": bounds,
    "drafts": drafts,
    "sampling": both(
        sampled(temperature=float32(0.8), top_p=float32(0.9), top_k=40, min_p=float32(0.01), seed=7),
        lambda answer: answer.last(0).telemetry.seed == 7,
    ),
    "penalties": sampled(repetition_penalty=float32(1.1), presence_penalty=0.5, frequency_penalty=0.5),
    "repetition": repetition,
    "stop": both(
        sampled(stop=("gh",), stop_token_ids=(113,)),
        lambda answer: answer.request.response.include_stop_str_in_output,
        every(stop),
    ),
    "bans": both(sampled(bad_token_ids=(102,)), every(bans)),
    "min_tokens": both(sampled(min_tokens=8), every(min_tokens)),
    "ignore_eos": both(sampled(ignore_eos=True), every(lambda a, i: a.last(i).matched_token_id != EOS)),
    "logprobs": both(
        one_a_token("logprobs"),
        lambda answer: all(len(entry.top) == 2 for response in answer.responses for entry in response.logprobs),
    ),
    "n": lambda answer: answer.indexes == [0, 1],
    "chat": lambda answer: answer.prompt_text().endswith("user: Add 1.\nassistant: "),
    "output": lambda answer: not any(response.token_ids for response in answer.responses),
    "index": lambda answer: all(request.suffix_scope is None for request in answer.noted.requests),
    "echo": every(echo),
    "priority": lambda answer: answer.request.scheduling.priority == 5,
    "salt": lambda answer: answer.request.scheduling.cache_salt == "a",
    "bias": both(sampled(logit_bias=((65, 1.5), (100, -50.0))), every(bias)),
    "tools": tools,
    "reasoning": reasoning,
    "prompt_logprobs": lambda answer: (
        sum(len(r.prompt_logprobs) for r in answer.of(0)) == len(answer.request.text_prompt_ids)
    ),
    "fields": both(every(fields), lambda answer: answer.request.outputs.num_logprobs is not None),
    "logits": logits,
    "tensors": tensors,
    "max_queue": lambda answer: answer.request.scheduling.max_queue_s == 60.0,
    "never_preempt": lambda answer: answer.request.scheduling.never_preempt,
    "whole": every(whole),
    "cumulative": every(cumulative),
    "client_id": lambda answer: answer.request.scheduling.client_id == "a",
    "processors": processors,
    "beams": both(
        lambda answer: answer.request.beams is not None and answer.request.beams.width == 2,
        every(lambda a, i: a.last(i).HasField("beam_score")),
    ),
    "origins": one_a_token("token_origins"),
    "events": every(events),
    "receipt": every(receipt),
    "exact": both(
        sampled(grammar_exact=GrammarExact(5000, 600.0)), every(lambda a, i: a.last(i).telemetry.exact_tries > 0)
    ),
    "lora": lambda answer: answer.request.lora is not None and answer.request.lora.name == "low-rank",
    "prompt_adapter": lambda answer: answer.request.num_virtual_tokens == VIRTUAL_TOKENS,
    "no_text": both(
        lambda answer: not answer.request.response.skip_special_tokens,
        lambda answer: not any(response.text or response.parts for response in answer.responses),
    ),
}
"""By the name of the feature."""
