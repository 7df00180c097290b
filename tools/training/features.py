"""Collects the target's hidden states along its own answers, the features that an EAGLE3 head is trained on.

Invariant: features come from the target itself, in the dtype that it is served in. A folder of features records the
model, the dtype and the answers in a fingerprint, and a folder with another fingerprint is refused.
Not responsible for: training (see trainer.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tools.training.answers import TrainingAnswer
from tools.training.unroll import Sequence as TrainingSequence


class FeatureFolder:
    """Features of numbered answers, one file per answer, so that an interrupted run can continue."""

    def __init__(self, directory: Path, fingerprint: str) -> None:
        """Raises ValueError when `directory` has another fingerprint."""
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        mark = directory / "fingerprint"
        if mark.exists() and mark.read_text() != fingerprint:
            raise ValueError(
                f"{directory}: holds features of another model or other answers; remove it or name another"
            )
        mark.write_text(fingerprint)

    def path(self, number: int) -> Path:
        """Return the file of answer `number`."""
        return self._directory / f"{number:06d}.safetensors"

    def missing(self, count: int) -> list[int]:
        """Return the numbers below `count` whose features have not been written."""
        return [number for number in range(count) if not self.path(number).exists()]

    def write(self, number: int, sequence: TrainingSequence) -> None:
        """Write the features of one answer; the file is complete or absent."""
        path = self.path(number)
        draft = path.with_suffix(".new")
        save_file({"ids": sequence.ids_n, "aux": sequence.aux_nF, "answer_at": torch.tensor(sequence.answer_at)}, draft)
        draft.rename(path)

    def read(self, number: int) -> TrainingSequence:
        """Return the features of answer `number`, on the CPU."""
        tensors = load_file(self.path(number))
        return TrainingSequence(tensors["ids"], tensors["aux"], int(tensors["answer_at"]))


def fingerprint(model: str, dtype: torch.dtype, layers: Sequence[int], answers: Path, context: int) -> str:
    """Return a string that differs when the features would differ."""
    digest = hashlib.sha256(answers.read_bytes()).hexdigest()
    return json.dumps([model, str(dtype), list(layers), context, digest])


def prompt_ids(tokenizer: Any, messages: Sequence[tuple[str, str]]) -> list[int]:
    """Return the tokens of a conversation, rendered and tokenised as the server does it."""
    turns = [{"role": role, "content": content} for role, content in messages]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


class TargetFeatures:
    """Runs a transformers model and records the inputs of some of its layers."""

    def __init__(self, net: Any, tokenizer: Any, layers: Sequence[int], context: int) -> None:
        """Register the recording.

        Args:
            net: the target; hooks are added to its decoder's layers.
            layers: indices of the layers whose input is recorded.
            context: number of tokens at the end of a prompt whose features are returned; the target reads all of it.
        """
        self._net, self._tokenizer, self._context = net, tokenizer, context
        self._recorded: dict[int, torch.Tensor] = {}
        self._layers = tuple(layers)
        decoder = net.get_decoder()
        for layer in self._layers:
            decoder.layers[layer].register_forward_pre_hook(self._recorder(layer), with_kwargs=True)

    @torch.inference_mode()
    def of(self, answer: TrainingAnswer) -> TrainingSequence:
        """Return the features of one answer, on the CPU."""
        prompt = prompt_ids(self._tokenizer, answer.messages)
        ids_n = torch.tensor([*prompt, *answer.answer_ids])
        self._net.get_decoder()(input_ids=ids_n[None].to(self._net.device), use_cache=False)
        aux_nF = torch.cat([self._recorded[layer][0] for layer in self._layers], dim=-1).cpu()
        start = max(0, len(prompt) - self._context)
        return TrainingSequence(ids_n[start:].clone(), aux_nF[start:].clone(), len(prompt) - start)

    def _recorder(self, layer: int) -> Any:
        def record(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._recorded[layer] = args[0] if args else kwargs["hidden_states"]

        return record


def split(answers: Sequence[TrainingAnswer], held_back: float) -> tuple[list[int], list[int]]:
    """Return the numbers of the answers to train on, and of those to evaluate on.

    The name of a prompt decides, so an answer stays on the same side when answers are added.
    """

    def is_held_back(name: str) -> bool:
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) < held_back * 2**32

    numbers = range(len(answers))
    return [n for n in numbers if not is_held_back(answers[n].name)], [
        n for n in numbers if is_held_back(answers[n].name)
    ]


def draft_vocabulary(answers: Sequence[TrainingAnswer], size: int, vocab_size: int) -> torch.Tensor:
    """Return the `size` most frequent ids of the answers, filled up with the lowest ids: int64, ascending."""
    counts_V = torch.zeros(vocab_size)
    for answer in answers:
        counts_V.index_add_(0, torch.tensor(answer.answer_ids), torch.ones(len(answer.answer_ids)))
    # Of equals the lower id comes first: in a trained tokenizer that is the more common token.
    return (-counts_V).sort(stable=True).indices[:size].sort().values


def batches(numbers: Sequence[int], size: int, seed: int) -> Iterator[list[int]]:
    """Yield the numbers in an order drawn from `seed`, `size` at a time."""
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed)).tolist()
    for start in range(0, len(order), size):
        yield [numbers[i] for i in order[start : start + size]]
