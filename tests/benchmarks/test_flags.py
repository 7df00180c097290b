"""The flags of an engine that a harness starts, and the lists of every harness: a wrong part is one clear error."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from benchmarks.cost import safeguards
from benchmarks.faults import isolation, receipts, soak
from benchmarks.harness.flags import (
    add_engine_flags,
    engine_options,
    harness_parser,
    list_of,
    one_of,
    pair,
    real,
    some_of,
    whole,
)
from benchmarks.harness.server import ServerOptions
from benchmarks.quality import (
    acceptance,
    closing,
    exact,
    function_calls,
    lossless,
    pareto,
    quantisation,
    schemas,
    token_ids,
)
from benchmarks.speed import (
    agents,
    bench_adapters,
    bench_forward,
    bench_products,
    bench_step,
    builds,
    distributed,
    drafts,
    gateway,
    serve,
)

Read = Callable[[str], object]

DOC = """`python -m benchmarks weigh --data FILE`: what a token
weighs.

Invariant: none."""


def test_a_parser_is_named_and_described_by_the_first_sentence_of_its_module() -> None:
    parser = harness_parser(DOC, "examples: none")
    assert (parser.prog, parser.description) == ("python -m benchmarks weigh", "What a token\nweighs.")


def test_flags_become_the_options_of_the_same_meaning() -> None:
    parser = harness_parser(DOC, "")
    add_engine_flags(parser, "model", "threads", "k")
    parser.add_argument("--count", type=int)
    args = parser.parse_args(["--model", "DIR", "--threads", "3", "--k", "5", "--count", "9"])
    assert engine_options(args) == ServerOptions(model="DIR", num_threads=3, num_draft_tokens=5)
    assert engine_options(args, num_threads=1, device="cuda").num_threads == 1


def halved(text: str) -> int:
    """Return half of an even number. Raises ValueError."""
    half, odd = divmod(int(text), 2)
    if odd:
        raise ValueError("is odd")
    return half


@pytest.mark.parametrize(
    ("read", "text", "found"),
    [
        (list_of(whole(1)), "1,8,16", [1, 8, 16]),
        (list_of(whole(0, 15)), "0, 15", [0, 15]),
        (list_of(real(0)), "0,0.8", [0.0, 0.8]),
        (real(1, endless=True), "inf", math.inf),
        (list_of(pair("LANESxROWS")), "1x8,4x1", [(1, 8), (4, 1)]),
        (list_of(one_of("abc")), "c,a", ["c", "a"]),
        (list_of(halved), "4,6", [2, 3]),
        (some_of("abc"), "c,a", ["c", "a"]),
        (some_of("abc"), "", ["a", "b", "c"]),
    ],
)
def test_a_value_is_read_part_by_part(read: Read, text: str, found: object) -> None:
    parser = harness_parser(DOC, "")
    parser.add_argument("--given", type=read)
    parser.add_argument("--left-out", type=read, default=text)
    args = parser.parse_args(["--given", text])
    assert args.given == args.left_out == found


@pytest.mark.parametrize(
    ("read", "text", "error"),
    [
        (list_of(whole(1)), "1,x", "'x' is not a whole number of at least 1"),
        (list_of(whole(1)), "1,2.5", "'2.5' is not a whole number of at least 1"),
        (list_of(whole(1)), "8,0", "'0' is not a whole number of at least 1"),
        (list_of(whole(1)), "1,,2", "'' is not a whole number of at least 1"),
        (list_of(whole(1)), "", "'' is not a whole number of at least 1"),
        (list_of(whole(1, 15)), "1,16", "'16' is not a whole number from 1 to 15"),
        (list_of(whole(1, 15)), "0", "'0' is not a whole number from 1 to 15"),
        (list_of(real(0)), "0,warm", "'warm' is not a number of at least 0"),
        (list_of(real(0)), "0,-0.5", "'-0.5' is not a number of at least 0"),
        (list_of(real(0)), "nan", "'nan' is not a number of at least 0"),
        (list_of(real(0)), "inf", "'inf' is not a number of at least 0"),
        (real(1, endless=True), "nan", "'nan' is not a number of at least 1, or inf"),
        (list_of(pair("AxB")), "1x1,4", "'4' is not AxB, two whole numbers of at least 1"),
        (list_of(pair("AxB")), "1x2x3", "'1x2x3' is not AxB, two whole numbers of at least 1"),
        (list_of(pair("AxB")), "0x1", "'0x1' is not AxB, two whole numbers of at least 1"),
        (list_of(one_of("abc")), "a,d", "'d' is none of a, b, c"),
        (list_of(one_of("abc")), "a,", "'' is none of a, b, c"),
        (list_of(halved), "4,5", "'5': is odd"),
        (some_of("abc"), "d", "'d' is none of a, b, c"),
        (some_of("abc"), ",", "'' is none of a, b, c"),
    ],
)
def test_a_wrong_part_is_named_with_what_is_allowed(
    read: Read, text: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = harness_parser(DOC, "")
    parser.add_argument("--list", type=read)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--list", text])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: argument --list: {error}\n")


@pytest.mark.parametrize(
    ("run", "arguments", "part"),
    [
        (acceptance.build_parser().parse_args, "--variants ngram,grammar+masks", "grammar+masks"),
        (acceptance.build_parser().parse_args, "--variants ngram,+free", "+free"),
        (acceptance.build_parser().parse_args, "--groups extraction,nothing", "nothing"),
        (agents.main, "--concurrency 0", "0"),
        (bench_adapters.main, "--lanes 1,x", "x"),
        (bench_forward.main, "--rows 1,-8", "-8"),
        (bench_products.main, "--shapes 8x32,8x31", "8x31"),
        (bench_products.main, "--kinds q4,q3", "q3"),
        (bench_step.main, "--lanes 1,,16", ""),
        (bench_step.main, "--num-draft-tokens -1", "-1"),
        (builds.main, "--old DIR --concurrency 1,0", "0"),
        (closing.main, "--concurrency 0", "0"),
        (distributed.main, "--shapes 1x1,4", "4"),
        (distributed.main, "--ranks 1,two", "two"),
        (drafts.build_parser().parse_args, "--workloads chat,,tools", ""),
        (exact.main, "--grammars yes,maybe", "maybe"),
        (function_calls.main, "--choices auto,never", "never"),
        (function_calls.main, "--temperatures 0,warm", "warm"),
        (gateway.build_parser().parse_args, "--concurrency 1,eight", "eight"),
        (isolation.build_parser().parse_args, "--rate 0", "0"),
        (lossless.main, "--drafts 0,-1", "-1"),
        (pareto.build_parser().parse_args, "--drafts 3,16", "16"),
        (quantisation.main, "--quantizations int8,q5", "q5"),
        (quantisation.main, "--quantizations auto+kv-q4", "auto+kv-q4"),
        (receipts.parser().parse_args, "--kill-every 0", "0"),
        (safeguards.main, "--only verify,nothing", "nothing"),
        (schemas.main, "--data FILE --temperatures nan", "nan"),
        (serve.main, "--systems lockstep,nothing", "nothing"),
        (serve.main, "--workloads chat,nothing", "nothing"),
        (soak.main, "--fault-every 0", "0"),
        (soak.main, "--minutes -1", "-1"),
        (token_ids.main, "--record FILE --dtypes float16", "float16"),
    ],
)
def test_each_harness_names_its_flag_and_the_wrong_part(
    run: Callable[[list[str]], object], arguments: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = arguments.split()
    with pytest.raises(SystemExit) as ended:
        run(words)
    assert ended.value.code == 2
    assert f"error: argument {words[-2]}: {part!r}" in capsys.readouterr().err


def test_a_soak_without_limits_is_one_that_only_faults_can_fail() -> None:
    args = soak.build_parser().parse_args(["--growth-mib", "inf", "--max-slower", "inf"])
    assert args.growth_mib == args.max_slower == math.inf
