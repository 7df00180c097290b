"""The adapters: vLLM's over small fakes of the types that it replaces, and transformers' in a real `generate`."""

from __future__ import annotations

import abc
import importlib.util
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lockstep_grammar import Grammars, InvalidGrammar
from lockstep_grammar.transformers import GrammarProcessor
from lockstep_grammar.vllm import LockstepBackend, LockstepGrammar, UnknownLayout, check_request, install
from tests.fakes import EOS, ByteTokenizer

VOCAB = 258
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"enum": ["x", "yz"]}}, "required": ["a"]})
ANSWER = list(b'{"a": "yz"}')


class Mask:
    def __init__(self, positions: int) -> None:
        self._words = np.full((positions, -(-VOCAB // 32)), -1, dtype=np.int32)

    def numpy(self) -> npt.NDArray[np.int32]:
        return self._words

    def legal(self, position: int) -> set[int]:
        return set(np.flatnonzero(np.unpackbits(self._words[position].view(np.uint8), bitorder="little")).tolist())


def vllm_like(*, more: str = "") -> tuple[Any, Any, Any]:
    """Return modules with the names of vLLM 0.32 that the adapter looks at."""

    def interface(name: str, methods: str) -> type:
        names = {method: abc.abstractmethod(lambda self: None) for method in [*methods.split(), *more.split()]}
        return abc.ABCMeta(name, (), dict(names))

    class StructuredOutputManager:
        def __init__(self) -> None:
            self.backend: Any = None
            self.reasoner_cls: Any = None

        def _create_grammar(self, request: Any) -> Any:
            return self.backend.compile_grammar(SimpleNamespace(name="JSON"), request.schema, stop_token_ids={EOS, 65})

    types = SimpleNamespace(
        StructuredOutputGrammar=interface(
            "StructuredOutputGrammar", "accept_tokens fill_bitmask is_terminated reset rollback validate_tokens"
        ),
        StructuredOutputBackend=interface("StructuredOutputBackend", "allocate_token_bitmask compile_grammar destroy"),
    )
    structured_output = SimpleNamespace(GuidanceBackend=object, StructuredOutputManager=StructuredOutputManager)
    return structured_output, SimpleNamespace(validate_guidance_grammar=None, __name__="backend_guidance"), types


def request_of(schema: str, max_tokens: int = 100) -> Any:
    return SimpleNamespace(request_id="r1", schema=schema, sampling_params=SimpleNamespace(max_tokens=max_tokens))


@pytest.fixture(scope="module")
def manager() -> Any:
    structured_output, guidance, types = vllm_like()
    install(structured_output, guidance, types)
    install(structured_output, guidance, types)  # every process of vLLM may do it twice
    made = structured_output.StructuredOutputManager()
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=2),
        num_speculative_tokens=3,
        model_config=SimpleNamespace(try_get_generation_config=lambda: {"eos_token_id": [EOS]}),
    )
    tokenizer = ByteTokenizer()
    tokenizer.eos_token_id = EOS  # type: ignore[attr-defined]
    made.backend = structured_output.GuidanceBackend(config, tokenizer=tokenizer, vocab_size=VOCAB)
    assert isinstance(made.backend, LockstepBackend)
    made.backend._grammars.row_timeout_s = 60.0
    yield made
    made.backend.destroy()


def test_drafts_as_vllm_walks_them(manager: Any) -> None:
    grammar: LockstepGrammar = manager._create_grammar(request_of(SCHEMA))
    mask = Mask(5)
    at = 0
    while at < len(ANSWER):
        drafts = [*ANSWER[at : at + 2], 0]
        assert grammar.validate_tokens([*drafts, -1]) == ANSWER[at : at + 2]
        for i, token in enumerate(ANSWER[at : at + 2]):
            grammar.fill_bitmask(mask, i)
            assert token in mask.legal(i)
            assert grammar.accept_tokens("r1", [token])
        grammar.rollback(len(ANSWER[at : at + 2]))
        assert grammar.accept_tokens("r1", ANSWER[at : at + 2])
        at += 2
    grammar.fill_bitmask(mask, 4)
    assert mask.legal(4) == {EOS}
    assert grammar.accept_tokens("r1", [EOS])
    assert grammar.is_terminated()
    grammar.reset()
    assert not grammar.is_terminated()


def test_a_stop_token_of_the_request_is_masked_inside_the_answer(manager: Any) -> None:
    schema = json.dumps({"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]})
    grammar: LockstepGrammar = manager._create_grammar(request_of(schema))
    mask = Mask(1)
    assert grammar.accept_tokens("r1", list(b'{"s": "'))
    grammar.fill_bitmask(mask, 0)
    assert 66 in mask.legal(0)
    assert 65 not in mask.legal(0)


def test_an_answer_is_closed_at_the_max_tokens_of_its_request(manager: Any) -> None:
    schema = json.dumps({"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]})
    grammar: LockstepGrammar = manager._create_grammar(request_of(schema, 20))
    mask, tokens = Mask(1), list(b'{"s": "')
    assert grammar.accept_tokens("r1", tokens)
    while not grammar.is_terminated():
        grammar.fill_bitmask(mask, 0)
        tokens.append(97 if 97 in mask.legal(0) else min(mask.legal(0)))
        assert grammar.accept_tokens("r1", tokens[-1:])
    assert len(tokens) <= 20
    json.loads(bytes(tokens[:-1]))


def test_an_error_ends_one_request(manager: Any, stop: Callable[..., AbstractContextManager[None]]) -> None:
    with pytest.raises(InvalidGrammar, match="uniqueItems"):
        manager._create_grammar(
            request_of(json.dumps({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}))
        )
    grammars: Grammars = manager.backend._grammars
    grammar: LockstepGrammar = manager._create_grammar(request_of(SCHEMA))
    other: LockstepGrammar = manager._create_grammar(request_of(SCHEMA))
    mask = Mask(1)
    other.fill_bitmask(mask, 0)
    grammar.fill_bitmask(mask, 0)
    with stop(grammars):
        grammar.accept_tokens("r1", ANSWER[:1])
        grammar.fill_bitmask(mask, 0)
        assert mask.legal(0) == {EOS}
    assert not grammar.is_terminated()
    assert not grammar.accept_tokens("r1", [EOS])
    assert grammar.validate_tokens(ANSWER[:2]) == []
    assert other.accept_tokens("r2", [*ANSWER, EOS])


def test_another_backend_with_the_switch_is_refused(manager: Any) -> None:
    structured_output, guidance, types = vllm_like()
    install(structured_output, guidance, types)
    with pytest.raises(InvalidGrammar, match="backend guidance"):
        structured_output.StructuredOutputManager()._create_grammar(request_of(SCHEMA))


def test_an_unknown_layout_is_refused_by_name() -> None:
    structured_output, guidance, types = vllm_like(more="peek")
    with pytest.raises(UnknownLayout, match="differs in peek"):
        install(structured_output, guidance, types)
    structured_output, guidance, types = vllm_like()
    del structured_output.StructuredOutputManager._create_grammar
    with pytest.raises(UnknownLayout, match="_create_grammar"):
        install(structured_output, guidance, types)


def test_the_api_server_only_checks_that_a_schema_is_json() -> None:
    check_request(SimpleNamespace(structured_outputs=SimpleNamespace(json="{}")))
    check_request(SimpleNamespace(structured_outputs=SimpleNamespace(json=None)))
    with pytest.raises(ValueError, match="Expecting"):
        check_request(SimpleNamespace(structured_outputs=SimpleNamespace(json="{")))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_installed_vllm_has_the_known_layout() -> None:
    from vllm.v1 import structured_output
    from vllm.v1.structured_output import backend_guidance, backend_types

    from lockstep_grammar.vllm import check_layout

    check_layout(structured_output, backend_guidance, backend_types)


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=EOS, pad_token_id=257, bos_token_id=257,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_generate_of_transformers_gives_valid_answers(grammars: Grammars) -> None:
    schema = json.dumps({"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]})
    prompts = torch.tensor([list(b"aa"), list(b"bc"), list(b"zz")])
    processor = GrammarProcessor(grammars.compile(schema), 2, max_new_tokens=40)
    torch.manual_seed(1)
    tokens = small_model().generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=40,
        do_sample=True,
        logits_processor=[processor],
    )
    for answer in tokens[:, 2:].tolist():
        assert EOS in answer
        assert set(json.loads(bytes(answer[: answer.index(EOS)]))) >= {"s"}
    assert not processor.errors


def test_a_failed_sequence_of_transformers_is_raised_or_kept(grammars: Grammars) -> None:
    compiled = grammars.compile(SCHEMA)
    scores = torch.zeros(2, VOCAB)
    tokens = torch.tensor([list(b"{"), list(b"x")])
    with pytest.raises(Exception, match="sequence 1: token 120 at 0 is illegal"):
        GrammarProcessor(compiled, 0)(tokens, scores)
    kept = GrammarProcessor(compiled, 0, keeps_errors=True)
    masked = kept(tokens, scores)
    assert torch.isfinite(masked[1]).nonzero().flatten().tolist() == [EOS]
    assert torch.isfinite(masked[0]).nonzero().flatten().tolist() == [ord('"')]
    assert set(kept.errors) == {1}
