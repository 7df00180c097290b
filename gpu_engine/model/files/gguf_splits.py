"""How text is split into words before a byte-level vocabulary's merges, by the name that a GGUF file has for it.

transformers knows some of the names, and splits text as GPT-2 does for all others. The tokens of numbers, contractions
and line ends would then be others than those that the model was trained with. A name that neither transformers nor this
module knows is logged. The source of the names and of their expressions is llama.cpp's src/llama-vocab.cpp.
Not responsible for: vocabularies of pieces, which split nothing, and names of families that are not read here.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from gpu_engine.model.files.gguf_header import GGUFHeader

log = logging.getLogger(__name__)

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
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""The letters with upper and lower case that DeepSeek's tokenizers list. Other scripts are not among them."""
_DEEPSEEK_SYMBOLS = r"!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_DEEPSEEK_OTHERS = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    rf"\s?[{_DEEPSEEK_SYMBOLS}]+",
    r"\s+$",
    _DEEPSEEK_OTHERS,
    r"\p{N}",
)
"""In the models' tokenizers each digit is a word. llama.cpp has one word for all digits of a number. The tokens are the
same, because these vocabularies have no merges of digits."""
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_OTHERS, r"\p{N}")
_NOT_HAN = r"&&[^\p{Han}]"
_KIMI_UPPER, _KIMI_LOWER = f"{_UPPER[:-1]}{_NOT_HAN}]", f"{_LOWER[:-1]}{_NOT_HAN}]"
_KIMI = (
    rf"[\p{{Han}}]+|{_BEFORE}{_KIMI_UPPER}*{_KIMI_LOWER}+{_ENDINGS}?|{_BEFORE}{_KIMI_UPPER}+{_KIMI_LOWER}*{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
)
"""The models' own expression. llama.cpp replaces it by code that does not split `aB` before the capital letter."""
_LLAMA_3_NAMES = ("falcon-h1", "falcon3", "lfm2", "llama-bpe", "llama-v3", "llama3", "midm-2.0", "pixtral")
_WORDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_LLAMA_3_NAMES, _LLAMA_3),
    "chatglm-bpe": _LLAMA_3,
    "dbrx": _LLAMA_3,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-v3": _DEEPSEEK_3,
    "glm4": _LLAMA_3,
    "glm5": _LLAMA_3,
    "hunyuan-dense": _DEEPSEEK_3,
    "joyai-llm": _DEEPSEEK_3,
    "kimi-k2": _KIMI,
    "minicpm5": (r"\p{N}{1,3}", *_LLAMA_3),
    "seed-coder": _SEED,
    "smaug-bpe": _LLAMA_3,
    "tekken": _TEKKEN,
}
"""The expressions that find words. The first splits the text into its matches and the text between them. Each later one
splits every part that the earlier ones made in the same way, their matches included. llama.cpp does the same."""
_LONE_DIGITS = frozenset({"command-r", "minerva-7b", "refact", "smollm", "starcoder"})
"""Names of vocabularies that split as GPT-2 does, after each digit is a word."""
_AS_GPT_2 = frozenset(
    {"a.x-4.0", "exaone4", "gigachat", "gpt-2", "granite-docling", "jais", "mellum", "mpt", "olmo", "phi-2", "trillion"}
)
"""Names of vocabularies that split as GPT-2 does."""
_WHOLE_WORDS = frozenset({"glm4", "glm5", "minicpm5", "tekken", *_LLAMA_3_NAMES})
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
    elif name is not None and name not in _AS_GPT_2 and isinstance(backend.pre_tokenizer, ByteLevel):
        log.warning(
            "the file splits text as %.80r, which is not known: its text is split as GPT-2's, so its tokens may differ"
            " from those that the model was trained with",
            name,
        )
    if parts:
        backend.pre_tokenizer = Sequence(parts)
    if name in _WHOLE_WORDS:
        backend.model.ignore_merges = True
