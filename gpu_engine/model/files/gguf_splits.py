"""How text is split into words before a byte-level vocabulary's merges, by the name that a GGUF file has for it.

transformers knows some of the names, and splits text as GPT-2 does for all others. The tokens of numbers, contractions
and line ends would then be others than those that the model was trained with.
Not responsible for: vocabularies of pieces, which split nothing, and names of families that are not read here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from gpu_engine.model.files.gguf_header import GGUFHeader

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_LLAMA_3 = (rf"{_ENDINGS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",)
_SEED = (rf"{_ENDINGS}|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
_TEKKEN = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
)
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)
_WORDS: dict[str, tuple[str, ...]] = {
    "chatglm-bpe": _LLAMA_3,
    "dbrx": _LLAMA_3,
    "glm4": _LLAMA_3,
    "hunyuan-dense": _DEEPSEEK_3,
    "llama-bpe": _LLAMA_3,
    "seed-coder": _SEED,
    "smaug-bpe": _LLAMA_3,
    "tekken": _TEKKEN,
}
"""The expressions that find words, one after the other in what those before it have left between their words."""
_LONE_DIGITS = frozenset({"command-r", "refact", "smollm", "starcoder"})
"""Names of vocabularies that split as GPT-2 does, after each digit is a word."""
_WHOLE_WORDS = frozenset({"glm4", "llama-bpe", "tekken"})
"""Names of vocabularies where a word that is a token is not merged from its parts."""


def split_as_named(tokenizer: PreTrainedTokenizerFast, header: GGUFHeader) -> None:
    """Let a tokenizer that was read from a file split text in the file's way, if it is one of these."""
    name, backend = header.get("tokenizer.ggml.pre"), tokenizer.backend_tokenizer
    if header.get("tokenizer.ggml.model") != "gpt2":
        return
    parts: list[PreTokenizer] = []
    if name in _LONE_DIGITS:
        parts = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    elif name in _WORDS:
        parts = [Split(Regex(words), "isolated") for words in _WORDS[name]]
        parts.append(ByteLevel(add_prefix_space=False, use_regex=False))
    if parts:
        backend.pre_tokenizer = Sequence(parts)
    if name in _WHOLE_WORDS:
        backend.model.ignore_merges = True
