"""`python -m tools.training.train_eagle3`: trains an EAGLE3 head on the target's own answers.

One invariant: the same arguments give the same plan of updates, so that a run that was stopped goes on from its last
checkpoint. Not here: an update (`training/trainer.py`), prompts and answers (`training/`).
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

from gpu_engine.api.config import EMBEDDED_MODEL
from gpu_engine.drafters.eagle3_head import Eagle3Config
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

EXAMPLES = """
Three steps, each of which may be interrupted and started again:

  python -m tools.training.prompts --count 3000 > prompts.jsonl       or a file of your own
  python -m gpu_engine serve --listen 127.0.0.1:50051 &
  python -m tools.training.answers --prompts prompts.jsonl --out answers.jsonl
  python -m tools.training.train_eagle3 --answers answers.jsonl --out head --plot head/training.png

Then: python -m gpu_engine serve --drafter eagle3 --draft-model head
"""


def draw(history: Sequence[dict[str, float]], num_drafts: int, path: Path) -> None:
    """Write a PNG: loss and acceptance length over the updates."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5))
    losses = [point for point in history if "loss" in point]
    judged = [point for point in history if "length" in point]
    left.plot([point["update"] for point in losses], [point["loss"] for point in losses], linewidth=0.8)
    left.set_title("loss", fontsize=9)
    right.plot([point["update"] for point in judged], [point["length"] for point in judged], marker="o")
    right.set_title(f"tokens a step with {num_drafts} drafts, held-back answers, unmasked", fontsize=9)
    for axis in (left, right):
        axis.set_xlabel("update", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def collect_features(
    net: Any, tokenizer: Any, answers: Sequence[TrainingAnswer], folder: FeatureFolder, layers: Sequence[int],
    context: int, told: Progress,
) -> None:  # fmt: skip
    """Have the target read every answer whose features are not there yet."""
    missing = folder.missing(len(answers))
    features = TargetFeatures(net, tokenizer, layers, context)
    for number in told.track(missing, description="features"):
        folder.write(number, features.of(answers[number]))


def train(args: argparse.Namespace, told: Progress) -> Acceptance:
    """Run all of it; return what the held-back answers say of the head."""
    path = ensure_embedded() if args.model == EMBEDDED_MODEL else Path(args.model)
    dtype = getattr(torch, args.dtype)
    net: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval().requires_grad_(False).to(args.device)
    tokenizer = AutoTokenizer.from_pretrained(path)
    answers = [answer for answer in read_answers(args.answers) if len(answer.answer_ids) >= 4]
    learn, judge = split(answers, args.held_back)
    if not learn or not judge:
        raise ValueError(f"answers: {len(learn)} to learn from and {len(judge)} to judge by; both are needed")
    config = Eagle3Config.of_target(
        net.config.get_text_config(), draft_vocab_size=args.draft_vocab, intermediate_size=args.intermediate_size
    )
    kept = FeatureFolder(args.features, fingerprint(args.model, dtype, config.aux_layers, args.answers, args.context))
    collect_features(net, tokenizer, answers, kept, config.aux_layers, args.context, told)
    vocabulary = draft_vocabulary([answers[n] for n in learn], args.draft_vocab, config.vocab_size)
    torch.manual_seed(args.seed)
    head = new_head(net, config, vocabulary).to(args.device)
    embedding = net.get_input_embeddings().weight.float()
    recipe = Recipe(
        epochs=args.epochs,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        depth=args.depth,
        seed=args.seed,
        mixed=args.precision == "bfloat16",
    )
    plan = [batch for epoch in range(recipe.epochs) for batch in batches(learn, recipe.batch_size, recipe.seed + epoch)]
    args.out.mkdir(parents=True, exist_ok=True)
    training = Training(head, recipe, args.out, len(plan))
    if training.resume():
        told.console.print(f"going on at update {training.done} of {len(plan)}")
    judged = [kept.read(number) for number in judge[: args.judge]]

    def report(loss: float | None) -> Acceptance:
        found = replay(head, embedding, judged, args.num_drafts)
        training.history.append({"update": training.done, "length": found.length})
        rates = ", ".join(f"{rate:.0%}" for rate in found.rates)
        said = "" if loss is None else f" loss {loss:.3f}"
        told.console.print(f"update {training.done}:{said} {found.length:.3f} tokens a step, right by depth: {rates}")
        training.save(dtype)
        if args.plot:
            draw(training.history, args.num_drafts, args.plot)
        return found

    found = report(None)
    last_s, mean = time.monotonic(), math.nan
    task = told.add_task("updates", total=len(plan), completed=training.done)
    for batch in plan[training.done :]:
        loss = training.update(embedding, [kept.read(number) for number in batch])
        mean = loss if math.isnan(mean) else 0.95 * mean + 0.05 * loss
        training.history.append({"update": training.done, "loss": loss})
        told.advance(task)
        if time.monotonic() - last_s > args.report_s:
            found = report(mean)
            last_s = time.monotonic()
    return report(None if math.isnan(mean) else mean) if training.done else found


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.training.train_eagle3",
        description="Train an EAGLE3 draft head for a target on the target's own answers.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--answers", type=Path, required=True, metavar="FILE.jsonl", help="from training.answers")
    add("--out", type=Path, required=True, metavar="DIR", help="the head, its checkpoint and its history")
    add("--features", type=Path, metavar="DIR", help="where the target's hidden states are kept (default OUT/features)")
    add("--model", default=EMBEDDED_MODEL, help="the target: a Hugging Face directory (default: the embedded model)")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the target, and of the head's file")
    add("--device", default="cpu")
    add("--draft-vocab", type=int, default=4096, help="tokens that the head can say (default 4096)")
    add("--intermediate-size", type=int, default=0, help="of the head's MLP (default: the target's)")
    add("--context", type=int, default=512, help="last tokens of a prompt that the head sees (default 512)")
    add("--epochs", type=int, default=3)
    add("--batch-size", type=int, default=8, help="answers an update (default 8)")
    add("--learning-rate", type=float, default=4e-4)
    add("--depth", type=int, default=5, help="drafts deep that the loss looks (default 5)")
    add("--precision", default="bfloat16", choices=("bfloat16", "float32"), help="of the products of the training")
    add("--num-drafts", type=int, default=3, help="K of the reported acceptance length (default 3)")
    add("--held-back", type=float, default=0.05, help="share of answers to judge by (default 0.05)")
    add("--judge", type=int, default=64, help="at most so many of them at a report (default 64)")
    add("--report-s", type=float, default=120.0, help="seconds between reports and checkpoints (default 120)")
    add("--seed", type=int, default=0)
    add("--plot", type=Path, metavar="FILE.png")
    return parser


def main() -> int:
    """Train; 2 when what was given does not fit."""
    args = build_parser().parse_args()
    args.features = args.features or args.out / "features"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns) as told:
            found = train(args, told)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: {found.length:.3f} tokens a step with {args.num_drafts} drafts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
