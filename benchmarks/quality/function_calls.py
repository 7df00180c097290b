"""`python -m benchmarks function_calls`: do calls of functions over the HTTP API parse and fit, with the same tokens?

Invariant: the same prompts with the same seeds run with drafts and without, for each backend and temperature. A call
whose arguments are not JSON or do not fit the function's schema, an answer that was cut off within a call, and a token
that differs between drafts on and off each fail the run.

Not responsible for: whether a call is the right one (bfcl-eval's own checker).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.comparison import first_difference
from benchmarks.harness.flags import add_engine_flags, engine_options, harness_parser, list_of, one_of, real, whole
from benchmarks.harness.gateway import start_gateway
from benchmarks.harness.server import start_engine
from benchmarks.harness.tables import Progress, number, table
from benchmarks.harness.tool_calls import ToolDataMissing, data_folder
from benchmarks.harness.validity import Judge, Verdict
from benchmarks.quality.function_prompts import FunctionPrompt, read_prompts

if TYPE_CHECKING:
    import openai

CHOICES = ("required", "named", "auto")

EXAMPLES = """
examples:
  python -m benchmarks function_calls --bfcl-python ~/peers/bin/python
  python -m benchmarks function_calls --bfcl-python ~/peers/bin/python --choices auto,named --count 50
  python -m benchmarks function_calls --bfcl-python ~/peers/bin/python --address 127.0.0.1:8000

reading the table:
  calls       calls of functions in all answers
  fit         calls of a function that was offered, whose arguments its schema allows
  no call     answers without a call, which only `auto` allows
  cut off     answers that ended at max_tokens
  accepted    drafts that became output
  equal       answers with the same tokens and end as without drafts

exit code: 0 every call fits and every answer is equal, 1 one is not or the server failed, 2 it could not run
"""

Task = tuple[FunctionPrompt, str]
"""A prompt, and the choice among its functions."""


@dataclass(frozen=True, slots=True)
class Called:
    """One answer."""

    name: str
    choice: str
    finish: str
    calls: tuple[tuple[str, str], ...] = ()
    """Name and arguments of each call."""
    token_ids: tuple[int, ...] = ()
    accepted: int = 0
    """Drafts that became output."""
    refusal: str = ""
    """Status and message of a request that failed; the other fields are empty then."""
    server_failed: bool = False
    """The failure is the server's fault: a status of 500 or more, or no answer."""


@dataclass(slots=True)
class Run:
    """The answers of one backend, temperature and number of drafts, judged."""

    backend: str
    temperature: float
    drafts: int
    answers: list[Called]
    wrong: list[str] = field(default_factory=list)
    """What is wrong with each call that does not fit."""
    unjudged: list[str] = field(default_factory=list)
    """Calls whose schema the judge itself cannot apply."""
    fit: int = 0
    equal: int | None = None
    differences: list[str] = field(default_factory=list)

    def row(self) -> list[str]:
        """Return the line of the table."""
        answered = [answer for answer in self.answers if not answer.refusal]
        return [
            self.backend,
            number(self.temperature),
            str(self.drafts),
            str(len(self.answers)),
            str(len(self.answers) - len(answered)),
            str(sum(len(answer.calls) for answer in answered)),
            str(self.fit),
            str(sum(not answer.calls for answer in answered)),
            str(sum(answer.finish == "length" for answer in answered)),
            str(sum(len(answer.token_ids) for answer in answered)),
            str(sum(answer.accepted for answer in answered)),
            "" if self.equal is None else f"{self.equal} of {len(self.answers)}",
        ]


HEADER = (
    *("backend", "T", "drafts", "prompts", "refused", "calls", "fit", "no call", "cut off"),
    *("tokens", "accepted", "equal"),
)


def judge_run(run: Run, prompts: Sequence[FunctionPrompt], judge: Judge) -> None:
    """Judge every call of a run."""
    schemas = {prompt.name: prompt.schemas() for prompt in prompts}
    for answer in run.answers:
        if answer.refusal:
            continue
        if answer.choice != "auto" and not answer.calls:
            run.wrong.append(f"{answer.name}: no call, but tool_choice is {answer.choice}")
        for at, (name, arguments) in enumerate(answer.calls):
            where = f"{answer.name}, call {at} of {name!r}"
            schema = schemas[answer.name].get(name)
            if schema is None:
                run.wrong.append(f"{where}: this function was not offered")
                continue
            judgement = judge.judge(schema, arguments)
            if judgement.verdict is Verdict.VALID:
                run.fit += 1
            elif judgement.verdict is Verdict.UNJUDGED:
                run.unjudged.append(f"{where}: {judgement.reason}")
            else:
                run.wrong.append(f"{where}: {judgement.reason}: {arguments[:300]}")


def compare_runs(reference: Run, run: Run) -> None:
    """Compare the tokens of a run with those of the run without drafts."""
    run.equal = 0
    for one, other in zip(reference.answers, run.answers, strict=True):
        found = first_difference(one.token_ids, other.token_ids)
        if found is not None:
            position, expected, got = found
            run.differences.append(f"{one.name}: at token {position} {expected} became {got}")
        elif (one.finish, one.calls, one.refusal) != (other.finish, other.calls, other.refusal):
            run.differences.append(f"{one.name}: {_end(one)} became {_end(other)}")
        else:
            run.equal += 1


def _end(answer: Called) -> str:
    return answer.refusal or f"{answer.finish} with {answer.calls}"


def tasks_of(prompts: Sequence[FunctionPrompt], choices: Sequence[str]) -> list[Task]:
    """Return each prompt with the next of the choices."""
    return [(prompt, choices[i % len(choices)]) for i, prompt in enumerate(prompts)]


def body(task: Task, *, seed: int, temperature: float, drafts: int, max_tokens: int) -> dict[str, Any]:
    """Return the fields of a chat request. A named choice names the last function."""
    prompt, choice = task
    named = {"type": "function", "function": {"name": prompt.tools[-1]["function"]["name"]}}
    return {
        "messages": list(prompt.messages),
        "tools": list(prompt.tools),
        "tool_choice": named if choice == "named" else choice,
        "temperature": temperature,
        "seed": seed,
        "max_tokens": max_tokens,
        "extra_body": {
            "return_token_ids": True,
            "telemetry": True,
            "speculation": {"num_draft_tokens": drafts},
        },
    }


async def ask(client: openai.AsyncOpenAI, model: str, task: Task, fields: dict[str, Any]) -> Called:
    """Return the answer of one request; a refusal is an answer as well."""
    import openai

    prompt, choice = task
    try:
        answer: Any = await client.chat.completions.create(model=model, **fields)
    except openai.APIStatusError as error:
        message = error.body.get("message", "") if isinstance(error.body, dict) else str(error)
        reason = f"{error.status_code}: {message}"
        return Called(prompt.name, choice, "", refusal=reason, server_failed=error.status_code >= 500)
    except openai.APIConnectionError as error:
        return Called(prompt.name, choice, "", refusal=f"no answer: {error}", server_failed=True)
    (given,) = answer.choices
    return Called(
        prompt.name,
        choice,
        given.finish_reason,
        tuple((call.function.name, call.function.arguments) for call in given.message.tool_calls or ()),
        tuple(given.token_ids),
        given.telemetry["accepted_draft_tokens"],
    )


async def ask_all(
    address: str, tasks: Sequence[Task], settings: Sequence[tuple[float, int]], max_tokens: int, concurrency: int,
    progress: Progress,
) -> list[list[Called]]:  # fmt: skip
    """Return the answers of all tasks, in order, for each (temperature, drafts)."""
    import openai

    gate = asyncio.Semaphore(concurrency)
    async with openai.AsyncOpenAI(
        base_url=f"http://{address}/v1", api_key="unused", max_retries=0, timeout=600
    ) as client:
        model = (await client.models.list()).data[0].id

        async def one(at: int, temperature: float, drafts: int) -> Called:
            fields = body(tasks[at], seed=at, temperature=temperature, drafts=drafts, max_tokens=max_tokens)
            async with gate:
                answer = await ask(client, model, tasks[at], fields)
            progress.step(f"T={temperature:g}, {drafts} drafts")
            return answer

        return [list(await asyncio.gather(*(one(at, *each) for at in range(len(tasks))))) for each in settings]


def report(runs: Sequence[Run], top: int = 12) -> bool:
    """Print the table, refusals by reason, and everything that is wrong; return whether the run failed."""
    print(table(HEADER, [run.row() for run in runs]))
    refusals = Counter(f"{run.backend}: {answer.refusal}" for run in runs for answer in run.answers if answer.refusal)
    for reason, times in refusals.most_common(top):
        print(f"refused {times}x {reason[:300]}")
    failed = False
    for run in runs:
        label = f"{run.backend}, T={run.temperature:g}, {run.drafts} drafts"
        cut = [f"{a.name}: cut off at max_tokens: {a.calls[-1:]}" for a in run.answers if a.finish == "length"]
        # Free text may be cut off; a call may not.
        cut = [line for line, a in zip(cut, (a for a in run.answers if a.finish == "length"), strict=True) if a.calls]
        faults = [f"{a.name}: {a.refusal}" for a in run.answers if a.server_failed]
        for kind, lines in (("WRONG", run.wrong), ("CUT", cut), ("DIFFERS", run.differences), ("FAULT", faults)):
            failed |= bool(lines)
            for line in lines[:top]:
                print(f"{kind} {label}: {line}")
        for line in run.unjudged[:top]:
            print(f"unjudged {label}: {line}")
    if not any(run.fit for run in runs):
        print("FAILED: not one call fits, so nothing was shown")
        failed = True
    if any(run.drafts for run in runs) and not any(a.accepted for run in runs for a in run.answers):
        print("FAILED: no draft was accepted, so equal tokens show nothing")
        failed = True
    return failed


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add(
        "--bfcl-python",
        type=Path,
        default=Path(sys.executable),
        metavar="PYTHON",
        help="Python of the environment that has bfcl-eval, whose data the prompts are made from (default: this one)",
    )
    add("--count", type=whole(1), default=200, help="prompts, taken evenly from ten categories (default 200)")
    add(
        "--choices",
        type=list_of(one_of(CHOICES)),
        default="required",
        help=f"tool_choice of the prompts in turn: {', '.join(CHOICES)}",
    )
    add("--temperatures", type=list_of(real(0)), default="0,0.8", help="comma-separated (default 0,0.8)")
    add(
        "--drafts",
        type=list_of(whole(0)),
        default="0,7",
        help="drafts a step, comma-separated; the first is the reference (default 0,7)",
    )
    add("--max-tokens", type=whole(1), default=256)
    add("--concurrency", type=whole(1), default=8)
    add(
        "--backends",
        type=list_of(one_of(("llguidance", "xgrammar"))),
        default="llguidance,xgrammar",
        help="comma-separated (default llguidance,xgrammar)",
    )
    add("--address", metavar="HOST:PORT", help="use a running gateway, with the backend that its engine has")
    add_engine_flags(parser, "model", "device", "threads")
    add("--max-model-len", type=whole(1), default=4096, help="tokens of a prompt and its answer (default 4096)")
    add("--flags", default="", metavar="FLAGS", help="further flags for the engine, as one string")
    return parser


@contextmanager
def gateway_address(args: argparse.Namespace, backend: str, drafts: int) -> Iterator[str]:
    """Yield the running gateway's address, or that of a gateway and an engine that end with the context.

    Raises:
        ServerFailed: one of them did not start.

    """
    if args.address is not None:
        yield args.address
        return
    options = engine_options(
        args,
        num_draft_tokens=drafts,
        max_batch_size=max(16, args.concurrency),
        grammar_backend=backend,
        # Prompts with many functions have more tokens than the default allows.
        extra=("--max-model-len", str(args.max_model_len), *args.flags.split()),
    )
    with ExitStack() as stack:
        yield stack.enter_context(start_gateway(stack.enter_context(start_engine(options))))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.drafts[0] != 0:
        parser.error("--drafts: the first must be 0, the reference")
    try:
        prompts = read_prompts(data_folder(args.bfcl_python), args.count)
    except ToolDataMissing as missing:
        parser.error(f"--bfcl-python: {missing}")
    backends = ["the engine's"] if args.address else args.backends
    settings = [(temperature, each) for temperature in args.temperatures for each in args.drafts]
    tasks = tasks_of(prompts, args.choices)
    judge = Judge()
    progress = Progress(len(tasks) * len(settings) * len(backends))
    runs: list[Run] = []
    try:
        for backend in backends:
            with gateway_address(args, backend, max(args.drafts)) as address:
                asked = ask_all(address, tasks, settings, args.max_tokens, args.concurrency, progress)
                answered = asyncio.run(asked)
            these = [Run(backend, *setting, answers) for setting, answers in zip(settings, answered, strict=True)]
            for at, run in enumerate(these):
                judge_run(run, prompts, judge)
                if run.drafts:
                    compare_runs(these[at - at % len(args.drafts)], run)
            runs += these
    finally:
        progress.close()
    return int(report(runs))
