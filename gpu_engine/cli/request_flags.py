"""The flags of a request, and the request that they make: every field of the API has one.

The invariant: a flag that is not given leaves its field unset, so that the server's default applies; `--help` names it.
Only the server checks values; its error names the wrong one.

Not responsible for: the grammar (see grammar_flags.py), sending the request (see client.py).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any, NamedTuple, TextIO

from google.protobuf import json_format

from gpu_engine.cli.grammar_flags import add_grammar_flags, build_grammar
from gpu_engine.cli.inputs import json_of, read_stdin, read_text, text
from lockstep_client.wire import engine_pb2 as pb


class _Value(NamedTuple):
    """A flag with one value."""

    part: str
    """The message of the request that holds the field; "" is the request itself."""
    field: str
    flag: str
    kind: Any
    help: str


class _Switch(NamedTuple):
    """A flag without a value, which sets a field."""

    part: str
    field: str
    flag: str
    value: bool
    help: str


def stopping(value: str) -> int:
    """Return the value of --early-stopping. Raises ArgumentTypeError."""
    names = {"heuristic": pb.EARLY_STOPPING_HEURISTIC, "true": pb.EARLY_STOPPING_TRUE, "never": pb.EARLY_STOPPING_NEVER}
    if value not in names:
        raise argparse.ArgumentTypeError(f"{value!r} is not one of {', '.join(names)}")
    return names[value]


def nonce(value: str) -> bytes:
    """Return the bytes of --receipt-nonce. Raises ArgumentTypeError."""
    try:
        return bytes.fromhex(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is not an even number of hexadecimal digits") from None


_SAMPLING: list[_Value | _Switch] = [
    _Value("sampling", "max_tokens", "--max-tokens", int, "most tokens of the answer (default: what fits)"),
    _Value("sampling", "min_tokens", "--min-tokens", int, "fewest tokens of the answer (default: 0)"),
    _Value("sampling", "temperature", "--temperature", float, "0: the most likely token each time (default: 1)"),
    _Value(
        "sampling",
        "top_p",
        "--top-p",
        float,
        "sample from the smallest set of tokens with this probability (default: 1)",
    ),
    _Value("sampling", "top_k", "--top-k", int, "sample from the k most likely tokens; 0: from all (default: 0)"),
    _Value("sampling", "min_p", "--min-p", float, "drop tokens below this share of the most likely one's (default: 0)"),
    _Value("sampling", "seed", "--seed", int, "the same seed gives the same answer (default: drawn at random)"),
    _Value("sampling", "n", "--n", int, "number of answers to the prompt (default: 1)"),
    _Value(
        "sampling",
        "repetition_penalty",
        "--repetition-penalty",
        float,
        "above 1: tokens of the prompt and the answer become less likely (default: 1)",
    ),
    _Value(
        "sampling",
        "presence_penalty",
        "--presence-penalty",
        float,
        "subtracted once from the logit of a token of the answer (default: 0)",
    ),
    _Value(
        "sampling",
        "frequency_penalty",
        "--frequency-penalty",
        float,
        "subtracted from the logit for each occurrence in the answer (default: 0)",
    ),
    _Value(
        "beam_search",
        "beam_width",
        "--beam-width",
        int,
        "beam search with so many beams; --n are shown (default: none)",
    ),
    _Value(
        "beam_search",
        "length_penalty",
        "--length-penalty",
        float,
        "of a beam search: sums are divided by the length to this power (default: 1)",
    ),
    _Value(
        "beam_search",
        "early_stopping",
        "--early-stopping",
        stopping,
        "of a beam search: heuristic, true or never, as transformers has them (default: heuristic)",
    ),
    _Value(
        "sampling",
        "repetition_max_pattern_size",
        "--repetition-max-pattern-size",
        int,
        "end an answer that repeats a pattern of at most so many tokens; 0: never (default: the server's)",
    ),
    _Value(
        "sampling",
        "repetition_min_pattern_size",
        "--repetition-min-pattern-size",
        int,
        "tokens of the shortest pattern that counts as repeated (default: the server's)",
    ),
    _Value(
        "sampling",
        "repetition_min_count",
        "--repetition-min-count",
        int,
        "how many patterns in a row end an answer (default: the server's)",
    ),
    _Switch(
        "sampling",
        "grammar_exact",
        "--grammar-exact",
        True,
        "sample from the model's own distribution, given that the whole answer matches the grammar",
    ),
    _Value("sampling", "grammar_exact_tries", "--grammar-exact-tries", int, "the most tries of that (default: 1000)"),
    _Value(
        "sampling",
        "grammar_exact_ms",
        "--grammar-exact-ms",
        int,
        "no try begins later after the first token (default: 60000)",
    ),
    _Switch(
        "sampling",
        "grammar_exact_error",
        "--grammar-exact-error",
        True,
        "fail when no answer was accepted within that bound",
    ),
    _Value(
        "sampling",
        "grammar_exact_shared_tries",
        "--grammar-exact-shared-tries",
        int,
        "tries that only teach, and whose lessons later requests like this one begin with (default: 0)",
    ),
    _Switch(
        "sampling",
        "grammar_exact_any_spelling",
        "--grammar-exact-any-spelling",
        True,
        "allow every spelling of an exact answer's text in tokens",
    ),
    _Switch("sampling", "ignore_eos", "--ignore-eos", True, "continue after the end-of-sequence token"),
    _Switch("sampling", "include_stop_str_in_output", "--include-stop", True, "keep the text of --stop in the answer"),
    _Switch("sampling", "skip_special_tokens", "--keep-special-tokens", False, "keep special tokens in the answer"),
]
_RESPONSE: list[_Value | _Switch] = [
    _Value(
        "sampling", "logprobs", "--logprobs", int, "show log-probabilities, with this many alternatives (default: none)"
    ),
    _Switch("sampling", "masked_logprobs", "--masked-logprobs", True, "show them among the tokens that are allowed"),
    _Value(
        "response",
        "prompt_logprobs",
        "--prompt-logprobs",
        int,
        "the same for the prompt, which is then shown as well (default: none)",
    ),
    _Switch(
        "response", "per_field_logprobs", "--per-field-logprobs", True, "show the log-probability of each leaf of JSON"
    ),
    _Switch(
        "response",
        "token_origins",
        "--token-origins",
        True,
        "say of each token whether it was sampled, an accepted draft, or forced by the grammar",
    ),
    _Switch("response", "value_events", "--value-events", True, "with --output json: when each value begins and ends"),
    _Value("response", "items_of", "--items-of", text, "with --output json: each item of the array at a JSON Pointer"),
    _Value(
        "response",
        "receipt_nonce",
        "--receipt-nonce",
        nonce,
        "ask for a signed receipt; 16 to 64 secret bytes in hexadecimal digits, with which its digests can be checked",
    ),
    _Switch("response", "context_logits", "--context-logits", True, "return the logits at the prompt's tokens"),
    _Switch(
        "response", "generation_logits", "--generation-logits", True, "return the logits of each token of the answer"
    ),
    _Switch("response", "echo", "--echo", True, "begin with the prompt"),
    _Switch("response", "omit_token_ids", "--omit-token-ids", True, "with --output json: no token ids"),
    _Switch("response", "omit_text", "--omit-text", True, "with --output json: no text"),
    _Switch("response", "whole", "--whole", True, "show each answer at once, when it has ended"),
    _Switch("response", "cumulative", "--cumulative", True, "with --output json: each line has the answer so far"),
]
_REQUEST: list[_Value | _Switch] = [
    _Value("", "request_id", "--request-id", text, "a name for the request, for Abort and the log (default: made)"),
    _Value("", "client_id", "--client-id", text, "a name for a group of requests, for the log (default: none)"),
    _Value("", "priority", "--priority", int, "higher ones leave the waiting queue first (default: 0)"),
    _Value("", "max_queue_ms", "--max-queue-ms", int, "end after waiting so long for a slot (default: the server's)"),
    _Switch("", "never_preempt", "--never-preempt", True, "hold slot and pages to the end, if the server allows it"),
    _Value(
        "", "cache_salt", "--cache-salt", text, "prompts share cached prefixes only with equal salts (default: empty)"
    ),
    _Value("", "lora", "--lora", text, "name of a LoRA adapter of the server (default: none)"),
    _Value("", "prompt_adapter", "--prompt-adapter", text, "name of a prompt adapter of the server (default: none)"),
    _Value(
        "speculation",
        "num_draft_tokens",
        "--draft-tokens",
        int,
        "drafts per step, jump-forward tokens included; 0: no speculation (default: the server's)",
    ),
    _Switch(
        "speculation",
        "draft_index",
        "--no-draft-index",
        False,
        "draft from no earlier answer, and keep none of this one",
    ),
]
_CHAT: list[_Value | _Switch] = [
    _Switch("reasoning", "enabled", "--reasoning", True, "the answer may begin with a phase of free thought"),
    _Switch("reasoning", "enabled", "--no-reasoning", False, "the answer begins at once"),
    _Value("reasoning", "max_tokens", "--reasoning-tokens", int, "most tokens of that phase (default: no limit)"),
    _Value("reasoning", "effort", "--reasoning-effort", text, "handed to the chat template: low, medium, high"),
    _Value("reasoning", "begin", "--reasoning-begin", text, "the marker that begins the phase (default: the model's)"),
    _Value("reasoning", "end", "--reasoning-end", text, "the marker that ends it (default: the model's)"),
]
_CONTINUATION: list[_Value | _Switch] = [
    _Switch(
        "messages", "continue_final_message", "--continue-final-message", True, "go on with the assistant's last turn"
    ),
]
_LISTS: list[tuple[str, str, Any, str, str]] = [
    ("stop", "--stop", text, "TEXT", "end before this text; may be repeated"),
    ("stop_token_ids", "--stop-token-id", int, "ID", "end at this token; may be repeated"),
    ("bad_words", "--bad-word", text, "TEXT", "never generate this text; may be repeated"),
    ("bad_token_ids", "--bad-token-id", int, "ID", "never generate this token; may be repeated"),
]
_TOOL_CHOICES = {
    "auto": pb.TOOL_CHOICE_AUTO,
    "none": pb.TOOL_CHOICE_NONE,
    "required": pb.TOOL_CHOICE_REQUIRED,
}


def add_request_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for prompt, grammar, sampling, response and request."""
    prompt = parser.add_argument_group(
        "prompt", "One of --prompt, --chat, --messages and --token-ids; without any, the prompt is read from stdin."
    )
    prompt.add_argument("--prompt", type=text, metavar="TEXT", help="text that the answer continues")
    prompt.add_argument("--chat", type=text, metavar="TEXT", help="a user message, in the model's chat template")
    prompt.add_argument(
        "--messages", metavar="FILE", help="a conversation: a JSON list of objects with role and content"
    )
    prompt.add_argument("--token-ids", type=text, metavar="IDS", help="token ids, separated by commas")
    chat = add_chat_flags(parser, "With --chat or --messages.")
    _add(chat, _CONTINUATION)
    chat.add_argument("--tools", metavar="FILE", help="functions that the model may call: a JSON list in OpenAI's form")
    chat.add_argument(
        "--tool-choice", type=text, metavar="CHOICE", help="auto, none, required, or the name of a tool (default: auto)"
    )
    chat.add_argument("--no-parallel-tool-calls", action="store_true", help="at most one call in an answer")
    kind = add_grammar_flags(parser)
    kind.add_argument("--grammar-id", type=text, metavar="ID", help="the id of a grammar, from `lockstep compile`")
    add_sampling_flags(parser)
    response = parser.add_argument_group("response", "What is shown in addition to the text.")
    _add(response, _RESPONSE)
    for flag, rows in (("--tensor", "at the answer's tokens"), ("--context-tensor", "at the prompt's tokens as well")):
        response.add_argument(
            flag,
            type=text,
            metavar="NAME",
            action="append",
            default=[],
            help=f"return a tensor of the model {rows}: logits, hidden_states.L, or a module; may be repeated",
        )
    request = parser.add_argument_group("request")
    _add(request, _REQUEST)
    request.add_argument(
        "--processor",
        dest="logits_processors",
        type=_processor,
        metavar="NAME={...}",
        action="append",
        default=[],
        help="a logits processor of the server, with its arguments as a JSON object, or only NAME; may be repeated",
    )


def add_chat_flags(parser: argparse.ArgumentParser, description: str | None = None) -> argparse._ArgumentGroup:
    """Add the flags of a conversation: system message, reasoning, the chat template. Return their group."""
    chat = parser.add_argument_group("conversation", description)
    chat.add_argument("--system", type=text, metavar="TEXT", help="the system message")
    chat.add_argument(
        "--template-arguments", type=text, metavar="JSON", help="variables for the chat template, as a JSON object"
    )
    _add(chat, _CHAT)
    return chat


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of sampling and stopping."""
    sampling = parser.add_argument_group("sampling")
    _add(sampling, _SAMPLING)
    for field, flag, kind, metavar, help_text in _LISTS:
        sampling.add_argument(flag, dest=field, type=kind, metavar=metavar, action="append", default=[], help=help_text)
    sampling.add_argument(
        "--logit-bias",
        type=_bias,
        metavar="ID=BIAS",
        action="append",
        default=[],
        help="added to the logit of a token, in [-100, 100]; may be repeated",
    )


def _add(group: argparse._ArgumentGroup, flags: list[_Value | _Switch]) -> None:
    for flag in flags:
        dest = _dest(flag)
        if isinstance(flag, _Switch):
            action = "store_true" if flag.value else "store_false"
            group.add_argument(flag.flag, dest=dest, action=action, default=None, help=flag.help)
        else:
            metavar = "TEXT" if flag.kind is text else flag.kind.__name__.upper()
            group.add_argument(flag.flag, dest=dest, type=flag.kind, metavar=metavar, help=flag.help)


def _dest(flag: _Value | _Switch) -> str:
    return f"{flag.part}_{flag.field}"


def _bias(value: str) -> tuple[int, float]:
    token, _, bias = value.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is not ID=BIAS") from None


def _processor(value: str) -> tuple[str, str]:
    name, _, arguments = text(value).partition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"{value!r} is not NAME or NAME={{...}}")
    return name, arguments


def seconds(value: str) -> float:
    """Return the value of a flag in seconds. Raises ArgumentTypeError."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number of seconds above 0")
    return number


def build_request(flags: argparse.Namespace, stdin: TextIO = sys.stdin) -> pb.GenerateRequest:
    """Return the request. Raises ValueError that names the flag."""
    request = pb.GenerateRequest()
    _fill_prompt(request, flags, stdin)
    fill_options(request, flags)
    _fill_tools(request, flags)
    return request


def fill_options(request: pb.GenerateRequest, flags: argparse.Namespace) -> None:
    """Set everything but the prompt, as far as `flags` has it. Raises ValueError that names the flag."""
    for flag in (*_SAMPLING, *_RESPONSE, *_REQUEST, *_CHAT, *_CONTINUATION):
        value = getattr(flags, _dest(flag), None)
        if value is not None:
            _set(getattr(request, flag.part) if flag.part else request, flag.field, value, flag.flag)
    for field, flag_name, *_ in _LISTS:
        try:
            getattr(request.sampling, field).extend(getattr(flags, field))
        except ValueError as error:
            raise ValueError(f"{flag_name}: {error}") from None
    for token, bias in flags.logit_bias:
        try:
            request.sampling.logit_bias[token] = bias
        except ValueError as error:
            raise ValueError(f"--logit-bias: {error}") from None
    for names, context in ((getattr(flags, "tensor", ()), False), (getattr(flags, "context_tensor", ()), True)):
        for name in names:
            request.response.additional_outputs.add(name=name, context=context)
    for name, arguments in getattr(flags, "logits_processors", ()):
        request.logits_processors.add(name=name, arguments=arguments)
    if request.response.HasField("prompt_logprobs"):
        request.response.echo = True  # prompt log-probabilities are printed with the prompt's text
    grammar = build_grammar(flags)
    if grammar is not None:
        request.grammar.CopyFrom(grammar)


def _set(message: Any, field: str, value: Any, flag: str) -> None:
    try:
        setattr(message, field, value)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def _fill_prompt(request: pb.GenerateRequest, flags: argparse.Namespace, stdin: TextIO) -> None:
    names = ("prompt", "chat", "messages", "token_ids")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(flags, name) is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other")
    if flags.chat is None and flags.messages is None:
        _refuse_chat_flags(flags)
        if flags.token_ids is not None:
            request.token_ids.ids.extend(_token_ids(flags.token_ids))
        else:
            request.text = flags.prompt if flags.prompt is not None else read_stdin(stdin)
        return
    fill_conversation(request, flags, flags.chat)
    if flags.messages is not None:
        source = json_of("--messages", read_text("--messages", flags.messages))
        request.messages.MergeFrom(conversation("--messages", source))


def fill_conversation(request: pb.GenerateRequest, flags: argparse.Namespace, question: str | None) -> None:
    """Set the system message and the template's variables that `flags` has, and the user's question, if any."""
    if flags.system is not None:
        request.messages.messages.add(role="system", content=flags.system)
    if question is not None:
        request.messages.messages.add(role="user", content=question)
    if flags.template_arguments is not None:
        request.messages.template_arguments = flags.template_arguments


def _refuse_chat_flags(flags: argparse.Namespace) -> None:
    given = [("--system", flags.system), ("--tools", flags.tools), ("--template-arguments", flags.template_arguments)]
    given += [(flag.flag, getattr(flags, _dest(flag))) for flag in (*_CHAT, *_CONTINUATION)]
    for flag, value in given:
        if value is not None:
            raise ValueError(f"{flag} needs --chat or --messages")


def _token_ids(value: str) -> list[int]:
    try:
        return [int(each) for each in value.split(",")]
    except ValueError:
        raise ValueError(f"--token-ids: {value!r} is no list of numbers") from None


def _fill_tools(request: pb.GenerateRequest, flags: argparse.Namespace) -> None:
    if flags.tools is None:
        if flags.tool_choice is not None or flags.no_parallel_tool_calls:
            raise ValueError("--tool-choice and --no-parallel-tool-calls need --tools")
        return
    request.tools.CopyFrom(tools_of("--tools", json_of("--tools", read_text("--tools", flags.tools))))
    if flags.no_parallel_tool_calls:
        request.tools.parallel = False
    if flags.tool_choice in _TOOL_CHOICES:
        request.tools.choice = _TOOL_CHOICES[flags.tool_choice]
    elif flags.tool_choice is not None:
        request.tools.choice, request.tools.name = pb.TOOL_CHOICE_NAMED, flags.tool_choice


def _tool(tool: Any) -> Any:
    """Return a tool in OpenAI's form converted to the API's form, or any other value unchanged."""
    if isinstance(tool, dict) and tool.get("type") == "function":
        tool = tool.get("function")
    if isinstance(tool, dict) and isinstance(tool.get("parameters"), dict):
        tool = tool | {"parameters": json.dumps(tool["parameters"])}
    return tool


def conversation(flag: str, turns: Any) -> pb.ChatMessages:
    """Return the messages of a JSON list. Raises ValueError that names the flag and the place."""
    if not isinstance(turns, list):
        raise ValueError(f"{flag}: must be a JSON list")
    try:
        return json_format.ParseDict({"messages": turns}, pb.ChatMessages())
    except json_format.ParseError as error:
        raise ValueError(f"{flag}: {error}") from None


def tools_of(flag: str, tools: Any) -> pb.Tools:
    """Return the tools of a JSON list. Raises ValueError that names the flag and the place."""
    if not isinstance(tools, list):
        raise ValueError(f"{flag}: must be a JSON list")
    try:
        return json_format.ParseDict({"tools": [_tool(tool) for tool in tools]}, pb.Tools())
    except json_format.ParseError as error:
        raise ValueError(f"{flag}: {error}") from None
