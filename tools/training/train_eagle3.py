"""Trains an EAGLE3 head on the target's own answers: `python -m tools.training.train_eagle3`.

Invariant: equal arguments give an equal plan of updates, so an interrupted run continues from its last checkpoint.
Not responsible for: one update (see trainer.py), prompts and answers (see prompts.py and answers.py).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpu_engine.api.engine_settings import EMBEDDED_MODEL
from gpu_engine.drafters.heads.eagle3_head import Eagle3Config
from gpu_engine.model.embedded import ensure_embedded
from tools.training.answers import TrainingAnswer, read_answers
from tools.training.evaluate import Acceptance, replay
from tools.training.features import (
    FeatureFolder,
    TargetFeatures,
    batches,
    draft_vocabulary,
    fingerprint,
    split,
)
from tools.training.trainer import Recipe, Training, new_head

MIN_ANSWER_TOKENS = 4
"""Shorter answers have too few positions to train on."""

EXAMPLES = """
Each step may be interrupted and started again:

  python -m tools.training.prompts --count 3000 > prompts.jsonl       # or a file of your own
  lockstep serve --listen 127.0.0.1:50051 &
  python -m tools.training.answers --prompts prompts.jsonl --out answers.jsonl
  python -m tools.training.train_eagle3 --answers answers.jsonl --out head --plot head/training.png

Then: lockstep serve --drafter eagle3 --draft-model head
"""


def draw(history: Sequence[dict[str, float]], num_drafts: int, path: Path) -> None:
    """Write a PNG with the loss and the acceptance length over the updates."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5))
    losses = [point for point in history if "loss" in point]
    evaluated = [point for point in history if "length" in point]
    left.plot([point["update"] for point in losses], [point["loss"] for point in losses], linewidth=0.8)
    left.set_title("loss", fontsize=9)
    right.plot([point["update"] for point in evaluated], [point["length"] for point in evaluated], marker="o")
    right.set_title(f"tokens per step, {num_drafts} drafts, held-back answers, without masks", fontsize=9)
    for axis in (left, right):
        axis.set_xlabel("update", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def collect_features(
    net: Any, tokenizer: Any, answers: Sequence[TrainingAnswer], folder: FeatureFolder, layers: Sequence[int],
    context: int, progress: Progress,
) -> None:  # fmt: skip
    """Run the target over every answer whose features are not in `folder`, and write them there."""
    missing = folder.missing(len(answers))
    features = TargetFeatures(net, tokenizer, layers, context)
    for number in progress.track(missing, description="features"):
        folder.write(number, features.of(answers[number]))


class Run:
    """One run of the program: the target, the answers with their features, and the training of the head."""

    def __init__(self, args: argparse.Namespace, progress: Progress) -> None:
        """Load the target and the answers, collect the features, and load the last checkpoint.

        Raises OSError or ValueError when a file or an argument does not fit.
        """
        self._args, self._progress = args, progress
        path = ensure_embedded() if args.model == EMBEDDED_MODEL else Path(args.model)
        self._dtype = getattr(torch, args.dtype)
        net: Any = AutoModelForCausalLM.from_pretrained(path, dtype=self._dtype)
        net = net.eval().requires_grad_(False).to(args.device)
        answers = [answer for answer in read_answers(args.answers) if len(answer.answer_ids) >= MIN_ANSWER_TOKENS]
        training_numbers, held_back = split(answers, args.held_back)
        if not training_numbers or not held_back:
            raise ValueError(
                f"answers: {len(training_numbers)} to train on and {len(held_back)} to evaluate on; both are needed"
            )
        config = Eagle3Config.of_target(
            net.config.get_text_config(), draft_vocab_size=args.draft_vocab, intermediate_size=args.intermediate_size
        )
        mark = fingerprint(args.model, self._dtype, config.aux_layers, args.answers, args.context)
        self._features = FeatureFolder(args.features, mark)
        tokenizer = AutoTokenizer.from_pretrained(path)
        collect_features(net, tokenizer, answers, self._features, config.aux_layers, args.context, progress)
        vocabulary = draft_vocabulary([answers[n] for n in training_numbers], args.draft_vocab, config.vocab_size)
        torch.manual_seed(args.seed)
        self._head = new_head(net, config, vocabulary).to(args.device)
        self._embedding = net.get_input_embeddings().weight.float()
        recipe = recipe_of(args)
        self._plan = [
            batch
            for epoch in range(recipe.epochs)
            for batch in batches(training_numbers, recipe.batch_size, recipe.seed + epoch)
        ]
        args.out.mkdir(parents=True, exist_ok=True)
        self._training = Training(self._head, recipe, args.out, len(self._plan))
        if self._training.resume():
            progress.console.print(f"continuing at update {self._training.done} of {len(self._plan)}")
        self._evaluated = [self._features.read(number) for number in held_back[: args.judge]]

    def train(self) -> Acceptance:
        """Make the updates that remain; return the acceptance of the held-back answers afterwards."""
        training = self._training
        found = self._report(None)
        last_s, mean = time.monotonic(), math.nan
        task = self._progress.add_task("updates", total=len(self._plan), completed=training.done)
        for batch in self._plan[training.done :]:
            loss = training.update(self._embedding, [self._features.read(number) for number in batch])
            mean = loss if math.isnan(mean) else 0.95 * mean + 0.05 * loss
            training.history.append({"update": training.done, "loss": loss})
            self._progress.advance(task)
            if time.monotonic() - last_s > self._args.report_s:
                found = self._report(mean)
                last_s = time.monotonic()
        return self._report(None if math.isnan(mean) else mean) if training.done else found

    def _report(self, loss: float | None) -> Acceptance:
        """Evaluate on the held-back answers, print a line, and save head, checkpoint and plot."""
        training, args = self._training, self._args
        found = replay(self._head, self._embedding, self._evaluated, args.num_drafts)
        training.history.append({"update": training.done, "length": found.length})
        rates = ", ".join(f"{rate:.0%}" for rate in found.rates)
        loss_text = "" if loss is None else f" loss {loss:.3f}"
        self._progress.console.print(
            f"update {training.done}:{loss_text} {found.length:.3f} tokens per step, right drafts by depth: {rates}"
        )
        training.save(self._dtype)
        if args.plot:
            draw(training.history, args.num_drafts, args.plot)
        return found


def recipe_of(args: argparse.Namespace) -> Recipe:
    """Return the hyperparameters among the arguments."""
    return Recipe(
        epochs=args.epochs,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        depth=args.depth,
        seed=args.seed,
        mixed=args.precision == "bfloat16",
    )


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.training.train_eagle3",
        description="Train an EAGLE3 draft head for a target on the target's own answers.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--answers", type=Path, required=True, metavar="FILE.jsonl", help="written by tools.training.answers")
    add("--out", type=Path, required=True, metavar="DIR", help="folder for the head, its checkpoint and its history")
    add("--features", type=Path, metavar="DIR", help="folder for the target's hidden states (default OUT/features)")
    add("--model", default=EMBEDDED_MODEL, help="the target: a Hugging Face directory (default: the embedded model)")
    add(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float32"),
        help="dtype of the target and of the written head",
    )
    add("--device", default="cpu")
    add("--draft-vocab", type=int, default=4096, help="number of tokens that the head can propose (default 4096)")
    add("--intermediate-size", type=int, default=0, help="width of the head's MLP (default: the target's)")
    add("--context", type=int, default=512, help="number of tokens at the end of a prompt to train on (default 512)")
    add("--epochs", type=int, default=3)
    add("--batch-size", type=int, default=8, help="answers per update (default 8)")
    add("--learning-rate", type=float, default=4e-4)
    add("--depth", type=int, default=5, help="number of drafts that the loss looks ahead (default 5)")
    add(
        "--precision", default="bfloat16", choices=("bfloat16", "float32"), help="dtype of the products during training"
    )
    add("--num-drafts", type=int, default=3, help="K of the reported acceptance length (default 3)")
    add("--held-back", type=float, default=0.05, help="share of the answers to evaluate on (default 0.05)")
    add("--judge", type=int, default=64, help="most held-back answers per report (default 64)")
    add("--report-s", type=float, default=120.0, help="seconds between reports and checkpoints (default 120)")
    add("--seed", type=int, default=0)
    add("--plot", type=Path, metavar="FILE.png")
    return parser


def main() -> int:
    """Train; return 2 when an argument or a file is wrong."""
    args = build_parser().parse_args()
    args.features = args.features or args.out / "features"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns) as progress:
            found = Run(args, progress).train()
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: {found.length:.3f} tokens per step with {args.num_drafts} drafts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
