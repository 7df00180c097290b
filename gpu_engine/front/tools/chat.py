"""Renders a conversation as text, with the model's chat template.

A template that supports functions gets them as `tools`, in the form of OpenAI's API, which these templates read.
For any other template, the functions become part of the system message, a call becomes text of the turn that makes
it, and a result becomes a user turn.
Invariant: the text depends only on the request and the template.
Not responsible for: tokenising the text (see front/prompt.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from gpu_engine.api.conversation import Chat, InputKind, Reasoning, Tool, ToolCall, Tools, Turn
from gpu_engine.api.errors import InvalidRequest
from gpu_engine.api.ports import Tokenizer
from gpu_engine.front.tools.formats import ToolFormat, reasoning_markers, template_text, tool_format
from gpu_engine.front.tools.literals import spelled_members

STANDARD_ROLES = frozenset({"system", "user", "assistant"})


def render(chat: Chat, tokenizer: Tokenizer) -> str:
    """Return the text of a conversation, up to where the answer begins. Raises InvalidRequest."""
    tools, reasoning = chat.tools, chat.reasoning
    form = tool_format(tokenizer.chat_template)
    if form is None:
        raise InvalidRequest("messages", "this model has no chat template; send text or token_ids")
    source = template_text(tokenizer.chat_template)
    if not form.native:
        turns: Sequence[Turn] = _as_text(chat.turns, tools, form, knows_tool_role="tool" in source)
    elif form.literals is not None and "tool_calls" not in source:
        # Some templates of LFM 2 show functions and results, and no calls.
        turns = _as_text(chat.turns, None, form, knows_tool_role=True)
    else:
        turns = chat.turns
    for i, turn in enumerate(chat.turns if form.native else ()):
        _check_role(turn.role, source, i)
    for i, turn in enumerate(chat.turns):
        if turn.role != "tool":
            _check_role(turn.role, source, i)
    options: dict[str, Any] = {**chat.template_arguments, **_reasoning_options(reasoning, source)}
    if tools is not None and form.native:
        options["tools"] = [_function(tool, form) for tool in tools.tools]
    if chat.continue_final_message:
        options["continue_final_message"] = True
    try:
        text = _apply(tokenizer, turns, options, parsed=True)
    except TypeError:
        # Some templates join the arguments of a call to a text.
        text = _apply(tokenizer, turns, options, parsed=False)
    markers = reasoning_markers(tokenizer.chat_template)
    if reasoning and reasoning.enabled is False and markers and text.rstrip().endswith(markers.begin):
        return f"{text.rstrip()}\n\n{markers.end}\n\n"  # the template begins the reasoning in any case
    return text


def _reasoning_options(reasoning: Reasoning | None, source: str) -> dict[str, Any]:
    """Return what a request says about reasoning as variables of the template. Raises InvalidRequest."""
    options: dict[str, Any] = {}
    if reasoning is not None and reasoning.enabled is not None:
        options = {name: reasoning.enabled for name in ("enable_thinking", "thinking") if name in source}
    if reasoning is not None and reasoning.effort:
        if "reasoning_effort" not in source:
            raise InvalidRequest("reasoning.effort", "the model's chat template does not read reasoning_effort")
        options["reasoning_effort"] = reasoning.effort
    return options


def _apply(tokenizer: Tokenizer, turns: Sequence[Turn], options: dict[str, Any], *, parsed: bool) -> str:
    conversation = [_message(turn, parsed=parsed) for turn in turns]
    begins = not options.get("continue_final_message")
    try:
        text = str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=begins, **options))
        text.encode()  # no tokenizer reads what cannot be encoded
        return text
    except TemplateError as error:
        raise InvalidRequest("messages", f"the model's chat template raised an error: {error}") from error
    except TypeError as error:
        if parsed and any(turn.tool_calls for turn in turns):
            raise
        raise InvalidRequest("messages", f"the model's chat template raised an error: {error}") from error
    except UnicodeEncodeError as error:
        problem = (
            "JSON of the conversation or of its tools has a lone surrogate (\\ud800-\\udfff), which is not a character"
        )
        raise InvalidRequest("messages", problem) from error
    except ValueError as error:  # of continue_final_message
        raise InvalidRequest("messages", f"the model's chat template cannot be used: {error}") from error


def _check_role(role: str, source: str, index: int) -> None:
    if role not in STANDARD_ROLES and role not in source:
        raise InvalidRequest(f"messages.messages[{index}].role", f"{role!r} is not known to the model's chat template")


def _message(turn: Turn, *, parsed: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.name:
        message["name"] = turn.name
    if turn.tool_call_id:
        message["tool_call_id"] = turn.tool_call_id
    if turn.reasoning:
        message["reasoning_content"] = message["thinking"] = turn.reasoning
    if turn.tool_calls:
        message["tool_calls"] = [_call(call, parsed=parsed) for call in turn.tool_calls]
    return message


def _call(call: ToolCall, *, parsed: bool) -> dict[str, Any]:
    arguments = _parsed(call.arguments) if parsed else call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _parsed(arguments: str) -> Any:
    """Return the arguments of a call as an object; the text itself where it is no JSON."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _function(tool: Tool, form: ToolFormat) -> dict[str, Any]:
    """Return a tool in the form of OpenAI's API. How a custom tool is called is a part of its description."""
    if tool.input is InputKind.JSON:
        schema = json.loads(tool.source) if tool.source else {"type": "object", "properties": {}}
        return {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": schema},
        }
    what = {
        InputKind.TEXT: "any text",
        InputKind.LARK: f"a text of this Lark grammar: {tool.source}",
        InputKind.REGEX: f"a text of this regular expression: {tool.source}",
    }[tool.input]
    how = f"{form.begin_of(tool.name, raw=True)}INPUT{form.end_of(raw=True)}"
    description = f"{tool.description}\nIts input is no JSON but {what}. Call it as {how}".strip()
    no_parameters = {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {"name": tool.name, "description": description, "parameters": no_parameters},
    }


def _as_text(turns: Sequence[Turn], tools: Tools | None, form: ToolFormat, *, knows_tool_role: bool) -> list[Turn]:
    """Return the conversation without functions, calls and results: they become text of it."""
    names = {call.id: call.name for turn in turns for call in turn.tool_calls}
    out = []
    for turn in turns:
        if turn.tool_calls:
            spelled = (_spelled(call, i, tools, form) for i, call in enumerate(turn.tool_calls))
            calls = form.first + form.separator.join(spelled) + form.last
            content = "\n".join(text for text in (turn.content, calls) if text)
            out.append(Turn(turn.role, content, turn.name, reasoning=turn.reasoning))
        elif turn.role == "tool" and not knows_tool_role:
            name = names.get(turn.tool_call_id) or turn.name or "the function"
            out.append(Turn("user", f"Result of {name}: {turn.content}"))
        else:
            out.append(turn)
    if tools is None:
        return out
    guide = _guide(tools, form)
    if out and out[0].role == "system":
        return [Turn("system", f"{out[0].content}\n\n{guide}", out[0].name), *out[1:]]
    return [Turn("system", guide), *out]


def _spelled(call: ToolCall, number: int, tools: Tools | None, form: ToolFormat) -> str:
    raw = any(tool.raw and tool.name == call.name for tool in tools.tools) if tools else False
    return _around(
        form, call.name, call.arguments if raw else _spelled_arguments(call.arguments, form), number, raw=raw
    )


def _around(form: ToolFormat, name: str, arguments: str, number: int, *, raw: bool) -> str:
    at = f"{number}{form.number_end}" if form.number_end else ""
    return form.begin_of(name, raw=raw) + at + arguments + form.end_of(raw=raw)


def _spelled_arguments(arguments: str, form: ToolFormat) -> str:
    """Return the JSON of arguments as the format writes them."""
    if form.literals is not None:
        return spelled_members(arguments, form.literals)
    given = _parsed(arguments)
    if form.argument is None or not isinstance(given, dict):
        return arguments
    texts = []
    for name, value in given.items():
        is_text = isinstance(value, str)
        begin = form.argument.begin_of(name, text=is_text)
        texts.append(begin + (value if is_text else json.dumps(value, ensure_ascii=False)) + form.argument.end)
    return "".join(texts)


def _guide(tools: Tools, form: ToolFormat) -> str:
    functions = "\n".join(json.dumps(_function(tool, form)["function"], ensure_ascii=False) for tool in tools.tools)
    if form.literals is None and form.argument is None:
        arguments, what = "ARGUMENTS", "where ARGUMENTS is a JSON object that matches its parameters"
    else:
        arguments, what = _spelled_arguments('{"PARAMETER": "VALUE"}', form), "with each of its parameters"
    example = form.first + _around(form, "NAME", arguments, 0, raw=False) + form.last
    return f"You may call these functions:\n{functions}\nTo call one, answer with {example} {what}."
