"""The flags of an engine that a harness starts."""

from __future__ import annotations

from benchmarks.harness.flags import add_engine_flags, engine_options, harness_parser
from benchmarks.harness.server import ServerOptions

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
