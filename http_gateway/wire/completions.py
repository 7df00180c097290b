"""The body of `/v1/completions`.

Not responsible for: fields that chat has, too (see sampling.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, Tag

from http_gateway.wire.chat import Message, Tool
from http_gateway.wire.fields import Fields, Refusal
from http_gateway.wire.sampling import SHARED_REFUSALS, SamplingFields, TokenIds, Unsigned

MAX_PROMPTS = 512


def _form(value: Any) -> str:
    if isinstance(value, str):
        return "text"
    first = value[0] if isinstance(value, list) and value else ""
    return "ids" if isinstance(first, int) else "lists of ids" if isinstance(first, list) else "texts"


Prompts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[TokenIds, Field(min_length=1), Tag("ids")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), Tag("texts")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS), Tag("lists of ids")],
    Discriminator(_form),
]


class CompletionRequest(SamplingFields):
    """The body of `/v1/completions`."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        **SHARED_REFUSALS,
        "suffix": Refusal("a text is only continued at its end", ("",)),
        "tools": Refusal("use /v1/chat/completions"),
        "messages": Refusal("use /v1/chat/completions"),
    }

    prompt: Prompts
    echo: bool | None = None
    logprobs: Unsigned | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return each prompt, as text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [token for token in self.prompt if isinstance(token, int)]
        return [ids] if ids else [prompt for prompt in self.prompt if not isinstance(prompt, int)]


class TokenizeRequest(Fields):
    """The body of `/tokenize`: a prompt, or a conversation."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        "add_generation_prompt": Refusal("a conversation always ends with it", (True,)),
        "chat_template": Refusal("the model's own chat template is used"),
    }

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(Fields):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool | None = None
