"""The OpenAPI document, made from the models of the bodies.

Invariant: a body's schema is the model that reads it, so that the document never disagrees with the server about a
field.

Not responsible for: the shapes of answers, which are OpenAI's (they are described as objects).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from http_gateway.wire.chat import ChatRequest
from http_gateway.wire.completions import CompletionRequest, DetokenizeRequest, TokenizeRequest
from http_gateway.wire.errors import MESSAGES_PATH
from http_gateway.wire.fields import Fields
from http_gateway.wire.messages import CountTokensRequest, MessagesRequest
from http_gateway.wire.responses import ResponsesRequest

_REF = "#/components/schemas/{model}"
_POSTS: tuple[tuple[str, str, type[Fields], bool], ...] = (
    ("/v1/chat/completions", "Answer a conversation", ChatRequest, True),
    ("/v1/completions", "Continue texts", CompletionRequest, True),
    ("/v1/responses", "Answer a conversation, in the shape of the Responses API", ResponsesRequest, True),
    (MESSAGES_PATH, "Answer a conversation, in the shape of Anthropic's API", MessagesRequest, True),
    (f"{MESSAGES_PATH}/count_tokens", "Count the tokens of a prompt of Anthropic's API", CountTokensRequest, False),
    ("/tokenize", "Turn text or a conversation into token ids", TokenizeRequest, False),
    ("/detokenize", "Turn token ids into text", DetokenizeRequest, False),
)
_GETS = (
    ("/v1/models", "List the models", "application/json"),
    ("/health", "200 if an engine serves", "application/json"),
    ("/version", "The versions of the gateway and its engines", "application/json"),
    ("/metrics", "Metrics in Prometheus' text format", "text/plain"),
    ("/openapi.json", "This document", "application/json"),
)
_ERRORS = {
    "400": "A field is wrong; the message names it",
    "401": "The API key is missing or unknown",
    "404": "The model is not served",
    "409": "The request id is in use",
    "413": "The body is too long",
    "422": "The grammar left no legal token",
    "429": "A queue or a limit is full; see Retry-After",
    "503": "No engine serves; see Retry-After",
    "504": "The engine did not answer in time",
}
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@cache
def document(version: str, *, keys: bool) -> dict[str, Any]:
    """Return the document.

    Args:
        version: of the gateway.
        keys: calls need an API key.
    """
    _, schemas = models_json_schema([(model, "validation") for _, _, model, _ in _POSTS], ref_template=_REF)
    paths: dict[str, Any] = {path: {"post": _post(text, model, streams)} for path, text, model, streams in _POSTS}
    for path, text, media in _GETS:
        paths[path] = {"get": {"summary": text, "responses": {"200": _answer(text, media), **_errors("401", "503")}}}
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{model}"] = {
        "get": {
            "summary": "Describe a model",
            "parameters": [name],
            "responses": {"200": _answer("The model", "application/json"), **_errors("401", "404")},
        }
    }
    components: dict[str, Any] = {"schemas": {**schemas["$defs"], "Error": _ERROR}}
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Lockstep", "version": version, "description": "OpenAI's HTTP API, and vLLM's extensions"},
        "paths": paths,
        "components": components,
    }
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        result["security"] = [{"key": []}]
    return result


def _post(text: str, model: type[Fields], streams: bool) -> dict[str, Any]:
    answer = _answer(text, "application/json")
    if streams:
        answer["content"]["text/event-stream"] = {}
    reference = {"$ref": _REF.format(model=model.__name__)}
    return {
        "summary": text,
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}},
        "responses": {"200": answer, **_errors(*_ERRORS)},
    }


def _answer(text: str, media: str) -> dict[str, Any]:
    schema = {"type": "object"} if media == "application/json" else {"type": "string"}
    return {"description": text, "content": {media: {"schema": schema}}}


def _errors(*statuses: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": _ERRORS[status], "content": content} for status in statuses}
