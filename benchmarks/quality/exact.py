"""`python -m benchmarks exact`: do answers have the model's distribution given their grammar, and what does it cost?

Every grammar here has a short list of texts. The wanted probability of a text is computed without any mask: the model's
own probability of each of its spellings in tokens, with the end of sequence, from the log-probabilities of prompts. The
answers of `sampling.grammar_exact` and of masked sampling are counted and compared with it.

Invariant: no figure of the wanted distribution comes from the code that is measured. Spellings whose beginning is 1e-8
times less probable than another spelling of the same bytes are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean

import grpc

from benchmarks.harness.client import GENERATE, Call, EngineClient
from benchmarks.harness.flags import add_engine_flags, engine_options, harness_parser, some_of, whole
from benchmarks.harness.measure import Answer
from benchmarks.harness.server import engine_address
from benchmarks.harness.tables import Progress, number, share, table
from lockstep_client.access import access_to
from lockstep_client.async_rpc import AsyncRpc
from lockstep_client.calls import Method
from protos.engine.v1 import engine_pb2 as pb

TOKENIZER = Method("GetTokenizerInfo", pb.GetTokenizerInfoRequest, pb.GetTokenizerInfoResponse)
SPACE = "\u0120"
"""The space, as byte-level tokenizers write it."""
LEAST_SHARE = 1e-8
SCORED_AT_ONCE = 64
"""Prompts that the server scores or has in its queue, which is bounded."""
SAMPLES = 200
"""Samples of the wanted distribution that show its noise."""

EXAMPLES = """
columns:
  P(grammar)   probability that an answer without a mask is one of the texts
  TV exact     total variation between the counted answers and the wanted distribution
  TV masked    the same for masked sampling
  noise        the largest total variation of 200 samples of as many answers from the wanted distribution itself
  tries        tries for each answer
  drawn        tokens that all tries drew, for each token of an answer
  steps        steps of the sequence for each answer, exact / masked
  given up     answers that were not accepted within --tries
  equal        exact answers that are the same without drafts, of those that were repeated

examples:
  python -m benchmarks exact
  python -m benchmarks exact --count 10000 --grammars yes,sentiment
  python -m benchmarks exact --model /models/tiny --dtype float32 --count 10000
"""


@dataclass(frozen=True, slots=True)
class Subject:
    """A grammar with a prompt, and all of its texts."""

    name: str
    prompt: str
    grammar: pb.Grammar
    texts: tuple[str, ...]


def _choice(name: str, prompt: str, *texts: str) -> Subject:
    return Subject(name, prompt, pb.Grammar(choice=pb.Choice(choices=texts)), texts)


def _regex(name: str, prompt: str, regex: str, texts: Iterable[str]) -> Subject:
    return Subject(name, prompt, pb.Grammar(regex=regex), tuple(texts))


def _schema(name: str, prompt: str, schema: object, values: Iterable[object]) -> Subject:
    grammar = pb.Grammar(json_schema=json.dumps(schema), whitespace=pb.WHITESPACE_COMPACT)
    return Subject(name, prompt, grammar, tuple(json.dumps(value, separators=(",", ":")) for value in values))


def _object(**properties: Sequence[object]) -> tuple[object, list[object]]:
    """Return the schema of an object with these members, each one of some values, and all such objects."""
    schema = {
        "type": "object",
        "properties": {name: {"enum": list(values)} for name, values in properties.items()},
        "required": list(properties),
        "additionalProperties": False,
    }
    rows = itertools.product(*properties.values())
    return schema, [dict(zip(properties, row, strict=True)) for row in rows]


FEELING = "Review: The film was far too long, but the music was lovely.\n"
SUBJECTS = (
    _choice("yes", "Question: Is the sea blue?\nAnswer:", " yes", " no", " maybe"),
    _choice("not", "Question: Is it raining?\nAnswer:", " no", " not now", " yes"),
    _choice("colour", "The colour of the grass is", " green", " red", " blue", " brown", " grey"),
    _choice("prefixes", "The first letters are", " a", " ab", " abc"),
    _choice("capital", "The capital of France is", " Paris", " Lyon", " London", " Rome", " Nice"),
    _regex("digit", "2 + 2 =", r" [0-9]", (f" {digit}" for digit in range(10))),
    _regex("two digits", "I am", r" [1-3][0-9]", (f" {digits}" for digits in range(10, 40))),
    _regex("letters", "A short word:", r" [abc]{2}", (f" {a}{b}" for a, b in itertools.product("abc", repeat=2))),
    _regex("repeat", "Ha ha", r"( ha){1,4}", (" ha" * count for count in range(1, 5))),
    _schema("boolean", "JSON of true or false: ", {"type": "boolean"}, [True, False]),
    _schema("integer", "A number from 0 to 12, as JSON: ", {"type": "integer", "minimum": 0, "maximum": 12}, range(13)),
    _schema("sentiment", FEELING + "The sentiment, as JSON: ", *_object(sentiment=["positive", "negative", "mixed"])),
    _schema("two fields", FEELING + "As JSON: ", *_object(good=[True, False], stars=[1, 2, 3])),
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The wanted distribution of a subject's texts."""

    probabilities: dict[str, float]
    log_mass: float
    """Logarithm of the probability of all texts together, without a mask."""


class Scorer:
    """Computes wanted distributions from the log-probabilities of prompts.

    Args:
        rpc: to the engine.
        vocabulary: the text of each token that is ASCII, by id.
        ends: ids that end an answer.
    """

    def __init__(self, rpc: AsyncRpc, vocabulary: dict[int, str], ends: Sequence[int]) -> None:
        self._rpc, self._ends = rpc, ends
        self._free = asyncio.Semaphore(SCORED_AT_ONCE)
        self._tokens: dict[str, list[int]] = defaultdict(list)
        for token, text in vocabulary.items():
            self._tokens[text].append(token)

    @classmethod
    async def of(cls, rpc: AsyncRpc) -> Scorer:
        """Return a scorer with the engine's own vocabulary, which must be a byte-level one."""
        answer = await rpc.unary(TOKENIZER, pb.GetTokenizerInfoRequest(), 60)
        added = {token["id"] for token in json.loads(answer.tokenizer_str).get("added_tokens", [])}
        texts = {id_: text.replace(SPACE, " ") for id_, text in enumerate(answer.encoded_vocab) if text}
        plain = {id_: text for id_, text in texts.items() if text.isascii() and id_ not in added}
        return cls(rpc, plain, tuple(answer.stop_token_ids))

    async def wanted(self, subject: Subject, scored: Callable[[], None]) -> Wanted:
        """Return the distribution; `scored` is called after each length of spellings."""
        spellings: dict[tuple[int, ...], tuple[str, float]] = {(): ("", 0.0)}
        best: dict[str, float] = {"": 0.0}
        found: dict[str, list[float]] = {text: [] for text in subject.texts}
        while spellings:
            longer = [
                (ids, text, token, piece, log_p)
                for ids, (text, log_p) in spellings.items()
                for token, piece in self._next(subject, text)
            ]
            values = await asyncio.gather(*(self._score(subject.prompt, (*ids, t)) for ids, _, t, _, _ in longer))
            spellings = {}
            for (ids, text, token, piece, log_p), value in zip(longer, values, strict=True):
                if token in self._ends:
                    found[text].append(log_p + value)
                    continue
                whole = text + piece
                best[whole] = max(best.get(whole, -math.inf), log_p + value)
                spellings[*ids, token] = (whole, log_p + value)
            spellings = {
                ids: (text, log_p)
                for ids, (text, log_p) in spellings.items()
                if log_p >= best[text] + math.log(LEAST_SHARE)
            }
            scored()
        masses = {text: _log_sum(values) for text, values in found.items()}
        total = _log_sum(masses.values())
        return Wanted({text: math.exp(mass - total) for text, mass in masses.items()}, total)

    def _next(self, subject: Subject, text: str) -> list[tuple[int, str]]:
        """Return the tokens, with their texts, that may follow a beginning of some text."""
        rests = {each[len(text) :] for each in subject.texts if each.startswith(text)}
        pieces = {rest[:count] for rest in rests for count in range(1, len(rest) + 1)}
        tokens = [(token, piece) for piece in sorted(pieces) for token in self._tokens.get(piece, ())]
        return tokens + [(end, "") for end in self._ends if "" in rests]

    async def _score(self, prompt: str, ids: Sequence[int]) -> float:
        """Return the log-probability of the last of `ids`, which follow the prompt."""
        before = await self._prompt_ids(prompt)
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[*before, *ids]),
            sampling=pb.SamplingParams(max_tokens=1),
            response=pb.ResponseOptions(prompt_logprobs=0),
        )
        async with self._free:
            async for response in self._rpc.stream(GENERATE, request, 600):
                if response.prompt_logprobs:
                    return float(response.prompt_logprobs[-1].logprob)
        raise RuntimeError("the server returned no log-probabilities of the prompt")

    async def _prompt_ids(self, prompt: str) -> list[int]:
        tokenize = Method("Tokenize", pb.TokenizeRequest, pb.TokenizeResponse)
        return list((await self._rpc.unary(tokenize, pb.TokenizeRequest(text=prompt), 60)).token_ids)


def _log_sum(values: Iterable[float]) -> float:
    values = list(values)
    largest = max(values, default=-math.inf)
    return largest if largest == -math.inf else largest + math.log(math.fsum(math.exp(v - largest) for v in values))


def distance(answers: Sequence[str], wanted: Wanted) -> float:
    """Return the total variation between the frequencies of some texts and a distribution; NaN without a text."""
    if not answers:
        return math.nan
    found = Counter(answers)
    every = found.keys() | wanted.probabilities.keys()
    return sum(abs(found[text] / len(answers) - wanted.probabilities.get(text, 0.0)) for text in every) / 2


def noise(wanted: Wanted, count: int) -> float:
    """Return the largest total variation of some samples of `count` texts from the distribution itself."""
    draw, texts = random.Random(count), list(wanted.probabilities)
    weights = list(wanted.probabilities.values())
    return max(distance(draw.choices(texts, weights, k=count), wanted) for _ in range(SAMPLES)) if count else math.nan


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured of a subject."""

    subject: Subject
    wanted: Wanted
    exact: tuple[Answer, ...]
    masked: tuple[Answer, ...]
    repeated: tuple[Answer, ...]
    """The first exact answers once more, without drafts."""

    @property
    def accepted(self) -> list[str]:
        """Texts of the exact answers."""
        return [answer.text for answer in self.exact if answer.finish == "stop"]

    @property
    def is_exact(self) -> bool:
        """The exact answers are within the noise, and do not depend on drafts."""
        return distance(self.accepted, self.wanted) <= noise(self.wanted, len(self.accepted)) and self.equal == len(
            self.repeated
        )

    @property
    def equal(self) -> int:
        """Repeated answers with the tokens of the first ones."""
        return sum(one.token_ids == other.token_ids for one, other in zip(self.exact, self.repeated, strict=False))

    def row(self) -> list[str]:
        """Return the line of the table."""
        times = [answer.times for answer in self.exact if answer.times is not None]
        kept = sum(len(answer.token_ids) for answer in self.exact)
        drawn = sum(each.exact_tokens for each in times)
        steps = [mean(answer.steps for answer in answers) for answers in (self.exact, self.masked)]
        masked = [answer.text for answer in self.masked if answer.finish == "stop"]
        return [
            self.subject.name,
            str(len(self.subject.texts)),
            f"{math.exp(self.wanted.log_mass):.1e}",
            number(distance(self.accepted, self.wanted), 4),
            number(noise(self.wanted, len(self.accepted)), 4),
            number(distance(masked, self.wanted), 4),
            number(mean(each.exact_tries for each in times), 2) if times else "-",
            number(drawn / kept, 2) if kept else "-",
            f"{steps[0]:.1f} / {steps[1]:.1f}",
            share((len(self.exact) - len(self.accepted)) / len(self.exact)),
            f"{self.equal} of {len(self.repeated)}",
        ]


HEADER = (
    *("grammar", "texts", "P(grammar)", "TV exact", "noise", "TV masked", "tries", "drawn", "steps", "given up"),
    "equal",
)


def _calls(
    subject: Subject, count: int, args: argparse.Namespace, *, exact: bool, drafts: int | None = None
) -> list[Call]:
    calls = []
    for seed in range(count):
        sampling = pb.SamplingParams(max_tokens=32, seed=seed, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
        sampling.repetition_penalty, sampling.grammar_exact = 1.0, exact
        if exact:
            sampling.grammar_exact_tries, sampling.grammar_exact_shared_tries = args.tries, args.shared_tries
            sampling.grammar_exact_any_spelling = args.any_spelling
        request = pb.GenerateRequest(text=subject.prompt, grammar=subject.grammar, sampling=sampling)
        if drafts is not None:
            request.speculation.num_draft_tokens = drafts
        calls.append(Call(f"{subject.name} {seed}", request))
    return calls


async def measure(address: str, subjects: Sequence[Subject], args: argparse.Namespace) -> list[Outcome]:
    """Compute the wanted distribution of each subject, and ask for its answers."""
    client, rpc = EngineClient(address), AsyncRpc(access_to(address, False, None, ()))
    repeats = min(args.repeats, args.count)
    progress = Progress(len(subjects) * (args.count + args.masked + repeats))
    outcomes = []
    try:
        scorer = await Scorer.of(rpc)
        for subject in subjects:
            wanted = await scorer.wanted(subject, partial(progress.step, f"{subject.name}: spellings", 0))
            step = partial(progress.step, subject.name)
            answers = []
            for calls in (
                _calls(subject, args.count, args, exact=True),
                _calls(subject, args.masked, args, exact=False),
                _calls(subject, repeats, args, exact=True, drafts=0),
            ):
                answers.append((await client.run(calls, args.batch, step)).answers)
            outcomes.append(Outcome(subject, wanted, *answers))
    finally:
        progress.close()
        await rpc.aclose()
        await client.close()
    return outcomes


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("--model", default="embedded", help="model of the engine, with a byte-level tokenizer (default 'embedded')")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    add("--quantization", default="auto", help="as the engine's setting (default auto)")
    add_engine_flags(parser, "threads", "grammar-backend")
    add("--address", metavar="HOST:PORT", help="use a running server instead of starting one")
    add("--count", type=whole(1), default=1000, help="answers of each grammar (default 1000)")
    add("--masked", type=whole(1), help="answers of masked sampling (default: as --count)")
    add("--repeats", type=whole(0), default=50, help="answers that are asked for again without drafts (default 50)")
    add("--tries", type=whole(1), default=1000, help="most tries of an answer (default 1000)")
    add("--shared-tries", type=whole(0), default=0, help="tries that only teach, once for each grammar (default 0)")
    add(
        "--any-spelling", action="store_true", help="allow every spelling of a text in tokens, as the wanted one counts"
    )
    add("--batch", type=whole(1), default=16, help="requests at once (default 16)")
    names = [each.name for each in SUBJECTS]
    add("--grammars", type=some_of(names), default="", help=f"some of {', '.join(names)} (default: all)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; 1 when exact answers are outside the noise or depend on drafts, 2 when it cannot run."""
    args = build_parser().parse_args(argv)
    args.masked = args.count if args.masked is None else args.masked
    options = engine_options(args, max_batch_size=args.batch)
    try:
        with engine_address(args.address, options) as address:
            chosen = [each for each in SUBJECTS if each.name in args.grammars]
            outcomes = asyncio.run(measure(address, chosen, args))
    except (RuntimeError, grpc.aio.AioRpcError) as failure:
        reason = failure.details() if isinstance(failure, grpc.aio.AioRpcError) else failure
        print(f"cannot run: {reason}", file=sys.stderr)
        return 2
    asked = f"{args.count} exact and {args.masked} masked answers of each grammar"
    extras = f", {args.shared_tries} shared tries" * (args.shared_tries > 0) + ", any spelling" * args.any_spelling
    print(f"{args.model}, {args.threads} threads, {asked}, temperature 1{extras}\n")
    print(table(HEADER, [outcome.row() for outcome in outcomes]))
    failed = [outcome.subject.name for outcome in outcomes if not outcome.is_exact]
    if failed:
        print(f"\nFAILED: outside the noise, or other answers without drafts: {', '.join(failed)}")
    return 1 if failed else 0
