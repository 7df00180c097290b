"""Words of a vocabulary are spelled as its tokenizer spells them after a quote."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import tokenizers
import torch
from tokenizers import models, pre_tokenizers

from gpu_engine.core.cpu_executor import cpu_executor
from gpu_engine.drafters.bare_words import bare_words
from gpu_engine.model.loader import LoadedModel
from kernels.suffix import BareWords
from tests.fakes import byte_tokenizer
from tests.gpu_engine.harness import with_drafts


def spellings(words: BareWords) -> dict[int, list[int]]:
    starts = words.start_V.tolist()
    found = {token: words.tokens[begin:end].tolist() for token, (begin, end) in enumerate(itertools.pairwise(starts))}
    return {token: each for token, each in found.items() if each}


def byte_level(*merges: tuple[str, str]) -> tokenizers.Tokenizer:
    vocab = byte_tokenizer().get_vocab(with_added_tokens=False)
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[*merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def test_words_of_a_byte_level_vocabulary() -> None:
    merges = [
        ("\u0120", "M"),
        ("a", "r"),
        ("\u0120M", "ar"),
        ("\u0120Mar", "k"),
        (":", '"'),
        ("\u0120", '"'),
        ("\u0120", "\u00c3"),
        ("M", "ar"),
    ]
    tokenizer = byte_level(*merges)
    token = tokenizer.get_vocab()
    words = bare_words(tokenizer, 300)
    assert spellings(words) == {
        token["\u0120M"]: [token["M"]],
        token["\u0120Mar"]: [token["Mar"]],
        token["\u0120Mark"]: [token["Mar"], token["k"]],
    }, "no spelling where the text is no word of ASCII"
    assert words.quotes_V.nonzero().flatten().tolist() == sorted(token[text] for text in ('"', ':"', '\u0120"'))
    assert (len(words.start_V), words.start_V.dtype, words.tokens.dtype) == (301, torch.int32, torch.int32)


def test_words_of_sentencepiece_have_no_space_after_a_quote() -> None:
    vocab = {"<unk>": 0, "\u2581": 1, '"': 2, '\u2581"': 3, "V": 4, "i": 5, "Vi": 6, "\u2581Vi": 7, "\u2581V": 8}
    merges = [("\u2581", '"'), ("V", "i"), ("\u2581", "Vi"), ("\u2581", "V")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    words = bare_words(tokenizer, 9)
    assert spellings(words) == {7: [6], 8: [4]}
    assert words.quotes_V.tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 0]


def test_a_word_that_joins_the_quote_has_no_spelling_and_neither_has_one_beyond_the_logits() -> None:
    tokenizer = byte_level(("\u0120", "M"), ("\u0120", "V"))
    tokenizer.pre_tokenizer = None
    joined = byte_level(('"', "M"), ("\u0120", "M"), ("\u0120", "V"))
    joined.pre_tokenizer = None
    token = joined.get_vocab()
    assert spellings(bare_words(joined, 300)) == {token["\u0120V"]: [token["V"]]}
    assert spellings(bare_words(joined, token["\u0120V"])) == {}
    pieces = byte_level(("\u0120", "M"), ("\u0120M", "a"), ("M", "a"))
    assert spellings(bare_words(pieces, 300))[257] == [258]
    assert spellings(bare_words(pieces, 258)) == {256: [ord("M")]}, "258 is no column of these logits"
    assert spellings(bare_words(tokenizer, 300)) == {256: [ord("M")], 257: [ord("V")]}


def test_a_tokenizer_that_cannot_encode_a_quote_has_no_words() -> None:
    words = bare_words(tokenizers.Tokenizer(models.WordLevel({"\u0120M": 0}, unk_token="[UNK]")), 4)
    assert spellings(words) == {}
    assert words.quotes_V.tolist() == [0, 0, 0, 0]


def test_a_vocabulary_without_words_has_none() -> None:
    words = bare_words(byte_tokenizer(), 258)
    assert spellings(words) == {}
    assert words.quotes_V.nonzero().flatten().tolist() == [ord('"')]


def test_the_lookup_of_an_engine_knows_the_words_of_its_tokenizer(llama: LoadedModel) -> None:
    tokenizer: Any = SimpleNamespace(backend_tokenizer=byte_level(("\u0120", "M")))
    word, quote, bare = 256, ord('"'), ord("M")
    for model, drafts in ((replace(llama, tokenizer=tokenizer), [50]), (llama, [])):
        parts = with_drafts(3), replace(model, max_model_len=256), None
        suffix = cpu_executor(*parts, num_pages=16, max_inflight_steps=0).suffix
        assert suffix is not None
        slots, lanes = suffix._votes._slots, suffix._votes._lanes
        slots.history_SL[0, :5] = torch.tensor([word, 50, 51, quote, bare], dtype=torch.int32)
        slots.length_S[0], slots.prompt_length_S[0], slots.draft_limit_S[0], slots.max_length_S[0] = 5, 3, 3, 100
        lanes.slots_B[0], lanes.num_emitted_B[0] = 0, 1
        suffix._votes.draft(1, 3, jump_forward=False)
        assert slots.drafts_SR[0, : int(slots.num_drafts_S[0])].tolist() == drafts
