"""From the wire to the parts of a request: every limit that the proto states is enforced here, and nowhere else.

Invariant: the values that `check` returns are within all limits; otherwise InvalidRequest names the field and the
limit. Pure: no tokenizer, no I/O, so it runs on the event loop (a request has a few kilobytes; a large prompt is only
measured).

Not responsible for: tokenisation and the limits that need it (see prompt.py).
"""

from __future__ import annotations

import math
import re
import secrets
import uuid
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from gpu_engine.api.adapters import Adapter, AdapterKind
from gpu_engine.api.conversation import Prompt, Tokens
from gpu_engine.api.errors import InvalidRequest
from gpu_engine.api.limits import Limits
from gpu_engine.api.output_tensors import WantedOutput
from gpu_engine.api.processors import MAX_PER_REQUEST, Processors, ProcessorUse
from gpu_engine.api.receipts import MAX_NONCE_BYTES, MIN_NONCE_BYTES, request_digest
from gpu_engine.api.request import (
    MAX_BACKTRACKS,
    MAX_HOLD_TOKENS,
    Backtracking,
    GrammarKind,
    GrammarSpec,
    Outputs,
    Params,
    ResponseParams,
    SamplingParams,
    Scheduling,
    Speculation,
    ValidatedRequest,
    WantedReceipt,
)
from gpu_engine.api.sampling_defaults import MAX_REPETITION, MAX_TEMPERATURE
from gpu_engine.front.beam_field import check_beams
from gpu_engine.front.exact_field import check_exact
from gpu_engine.front.grammar_field import check_grammar
from gpu_engine.front.outputs_field import check_outputs
from gpu_engine.front.tools.fields import chat_bytes, check_chat, check_reasoning, check_tools
from protos.engine.v1 import engine_pb2 as pb
from service_runtime.repetition import MAX_COUNT, MAX_PATTERN_SIZE, MIN_COUNT, RepetitionLimit

FindAdapter = Callable[[AdapterKind, str], Adapter]
"""Returns the loaded adapter of a name. Raises InvalidRequest."""

MAX_REQUEST_ID_BYTES = 128
MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 64
MAX_STRING_BYTES = 256
MAX_LOGPROBS = 20
MAX_PENALTY = 2.0
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_PRIORITY = 1000
MAX_SALT_BYTES = 256
MAX_CLIENT_ID_BYTES = 128
MAX_POINTER = 1024
"""The most bytes of `response.items_of`."""
_POINTER = re.compile(r"(?:/(?:[^~/]|~[01])*)*", re.DOTALL)
MAX_ARGUMENTS_BYTES = 64 << 10
"""The most bytes of one logits processor's arguments."""


def check(
    request: pb.GenerateRequest,
    limits: Limits,
    running: Collection[str],
    known: Callable[[str], GrammarSpec] | None = None,
    find_adapter: FindAdapter | None = None,
) -> ValidatedRequest:
    """Check everything except limits that need the tokenizer.

    `running` has the request ids in use, `known` returns the grammar of an id, and `find_adapter` the adapter of a
    name. Raises InvalidRequest, UnknownGrammar or NotSupported.
    """
    request_id = _request_id(request.request_id, running)
    grammar = _grammar(request, known)
    lora = _adapter("lora", AdapterKind.LORA, request.lora, find_adapter)
    prompt_adapter = _adapter("prompt_adapter", AdapterKind.PROMPT, request.prompt_adapter, find_adapter)
    speculation = _speculation(request, limits)
    prompt = check_prompt(request, limits)
    n = _integer(request.sampling, "n", 1, low=1, high=limits.max_n)
    max_tokens = _integer(request.sampling, "max_tokens", 1, low=1) if request.sampling.HasField("max_tokens") else None
    sampling = _sampling(request, max_tokens, limits)
    bad_words = _strings(request.sampling.bad_words, "sampling.bad_words", MAX_BAD_WORDS)
    outputs = _outputs(request, grammar, limits)
    if (exact := check_exact(request, grammar, sampling, outputs, limits)) is not None:
        # Only the server may have set a limit of repetition, which would end the tries.
        sampling = replace(sampling, grammar_exact=exact, repetition=None)
    params = Params(
        sampling=sampling,
        grammar=grammar,
        backtracking=_backtracking(request, grammar, outputs.tensors, limits),
        speculation=speculation,
        scheduling=_scheduling(request, limits),
        outputs=outputs,
        response=_response(request),
        logits_processors=_logits_processors(request, request_id, limits.logits_processors),
        lora=lora,
        prompt_adapter=prompt_adapter,
        beams=check_beams(request, limits),
    )
    return ValidatedRequest(
        request_id=request_id,
        prompt=prompt,
        n=n,
        params=params,
        max_tokens=max_tokens,
        bad_words=bad_words,
        reasoning=check_reasoning(request),
    )


def _sampling(request: pb.GenerateRequest, max_tokens: int | None, limits: Limits) -> SamplingParams:
    sampling = request.sampling
    # The model's repetition penalty would change the ranking of beams, so a beam search takes the API's defaults.
    own = {} if request.HasField("beam_search") else limits.sampling_defaults
    return SamplingParams(
        max_tokens=limits.max_model_len if max_tokens is None else max_tokens,
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        min_tokens=sampling.min_tokens,
        temperature=_number(sampling, "temperature", own.get("temperature", 1.0), low=0.0, high=MAX_TEMPERATURE),
        top_p=_number(sampling, "top_p", own.get("top_p", 1.0), low=0.0, high=1.0, open_low=True),
        top_k=max(_integer(sampling, "top_k", int(own.get("top_k", 0)), low=-1, high=2**31 - 1), 0),
        min_p=_number(sampling, "min_p", own.get("min_p", 0.0), low=0.0, high=1.0),
        repetition=_repetition(request, limits),
        repetition_penalty=_number(
            sampling,
            "repetition_penalty",
            own.get("repetition_penalty", 1.0),
            low=0.0,
            high=MAX_REPETITION,
            open_low=True,
        ),
        presence_penalty=_number(sampling, "presence_penalty", 0.0, low=-MAX_PENALTY, high=MAX_PENALTY),
        frequency_penalty=_number(sampling, "frequency_penalty", 0.0, low=-MAX_PENALTY, high=MAX_PENALTY),
        stop=_strings(sampling.stop, "sampling.stop", MAX_STOP_STRINGS),
        stop_token_ids=check_token_ids(sampling.stop_token_ids, "sampling.stop_token_ids", limits.vocab_size),
        bad_token_ids=_bad_token_ids(sampling, limits.vocab_size),
        logit_bias=_logit_bias(sampling, limits.vocab_size),
        ignore_eos=sampling.ignore_eos,
    )


def _scheduling(request: pb.GenerateRequest, limits: Limits) -> Scheduling:
    return Scheduling(
        priority=_priority(request.priority),
        max_queue_ms=_max_queue_ms(request, limits),
        never_preempt=_never_preempt(request, limits),
        cache_salt=_cache_salt(request.cache_salt),
        client_id=_client_id(request.client_id),
    )


def _outputs(request: pb.GenerateRequest, grammar: GrammarSpec | None, limits: Limits) -> Outputs:
    sampling, response = request.sampling, request.response
    return Outputs(
        logprobs=_integer(sampling, "logprobs", 0, low=0, high=MAX_LOGPROBS) if sampling.HasField("logprobs") else None,
        prompt_logprobs=_prompt_logprobs(response),
        masked_logprobs=_masked_logprobs(request),
        field_logprobs=_field_logprobs(response, grammar),
        token_origins=response.token_origins,
        value_events=_value_events(request, grammar),
        items_of=_items_of(request, grammar),
        receipt=_receipt(request, limits),
        tensors=check_outputs(request, limits),
    )


def _response(request: pb.GenerateRequest) -> ResponseParams:
    sampling = request.sampling
    return ResponseParams(
        omit_text=request.response.omit_text,
        echo=request.response.echo,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens if sampling.HasField("skip_special_tokens") else True,
    )


def _adapter(field: str, kind: AdapterKind, name: str, find: FindAdapter | None) -> Adapter | None:
    if not name:
        return None
    if find is None:
        raise InvalidRequest(field, "this service takes no adapters")
    return find(kind, name)


def _grammar(request: pb.GenerateRequest, known: Callable[[str], GrammarSpec] | None) -> GrammarSpec | None:
    grammar = None
    if request.HasField("grammar"):
        options_only = request.HasField("tools") or request.HasField("reasoning")
        grammar = check_grammar(request.grammar, known, options_only=options_only)
    if grammar and request.sampling.ignore_eos:
        raise InvalidRequest("sampling.ignore_eos", "is not allowed together with a grammar")
    if request.HasField("tools") and request.sampling.ignore_eos:
        raise InvalidRequest("sampling.ignore_eos", "is not allowed together with tools")
    return grammar


def given_id(request_id: str) -> str:
    """Return the id that the client gave, "" when it gave none. Raises InvalidRequest for a malformed id."""
    size = len(request_id.encode())
    if size > MAX_REQUEST_ID_BYTES:
        raise InvalidRequest("request_id", f"has {size} bytes, at most {MAX_REQUEST_ID_BYTES} are allowed")
    if not request_id.isprintable():
        raise InvalidRequest("request_id", "holds a control character")
    return request_id


def _request_id(request_id: str, running: Collection[str]) -> str:
    if not given_id(request_id):
        return uuid.uuid4().hex
    if request_id in running:
        raise InvalidRequest("request_id", f"{request_id!r} belongs to a request that is running")
    return request_id


def check_prompt(request: pb.GenerateRequest, limits: Limits) -> Prompt:
    """Return the prompt of a request, within the limits that need no tokenizer. Raises InvalidRequest."""
    if request.HasField("tools") and request.WhichOneof("prompt") != "messages":
        raise InvalidRequest("tools", "needs messages, because the chat template shows the functions")
    return _prompt(request, limits)


def _prompt(request: pb.GenerateRequest, limits: Limits) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            if not request.text:
                raise InvalidRequest("text", "is empty")
            _prompt_bytes("text", len(request.text.encode()), limits)
            return request.text
        case "token_ids":
            ids = request.token_ids.ids
            if not ids:
                raise InvalidRequest("token_ids.ids", "is empty")
            check_prompt_length("token_ids.ids", len(ids), limits.max_model_len)
            return Tokens(check_token_ids(ids, "token_ids.ids", limits.vocab_size))
        case "messages":
            chat = replace(check_chat(request.messages), tools=check_tools(request), reasoning=check_reasoning(request))
            _prompt_bytes("messages.messages", chat_bytes(chat), limits)
            return chat
        case _:
            raise InvalidRequest("prompt", "one of text, token_ids and messages is required")


def _field_logprobs(options: pb.ResponseOptions, grammar: GrammarSpec | None) -> bool:
    if options.per_field_logprobs:
        _needs_json("response.per_field_logprobs", grammar)
    return options.per_field_logprobs


def _needs_json(field: str, grammar: GrammarSpec | None) -> None:
    if grammar is None or grammar.kind not in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA):
        raise InvalidRequest(field, "needs a grammar of the kind json_object or json_schema")


def _value_events(request: pb.GenerateRequest, grammar: GrammarSpec | None) -> bool:
    if request.response.value_events:
        _needs_json_only("response.value_events", request, grammar)
    return request.response.value_events


def _items_of(request: pb.GenerateRequest, grammar: GrammarSpec | None) -> str | None:
    field, response = "response.items_of", request.response
    if not response.HasField("items_of"):
        return None
    _needs_json_only(field, request, grammar)
    pointer = response.items_of
    if (size := len(pointer.encode())) > MAX_POINTER:
        raise InvalidRequest(field, f"has {size} bytes, at most {MAX_POINTER} are allowed")
    if not _POINTER.fullmatch(pointer):
        raise InvalidRequest(field, f"{pointer!r} is no JSON Pointer: it is empty, or each of its parts begins with /")
    return pointer


def _needs_json_only(field: str, request: pb.GenerateRequest, grammar: GrammarSpec | None) -> None:
    """Raise InvalidRequest unless the whole answer is one JSON value."""
    thinks = request.HasField("reasoning") and (request.reasoning.enabled or not request.reasoning.HasField("enabled"))
    for other, is_given in (("tools", request.HasField("tools")), ("reasoning", thinks)):
        if is_given:
            raise InvalidRequest(field, f"is not allowed together with {other}")
    _needs_json(field, grammar)


def _receipt(request: pb.GenerateRequest, limits: Limits) -> WantedReceipt | None:
    field, response = "response.receipt_nonce", request.response
    if not response.HasField("receipt_nonce"):
        return None
    nonce = response.receipt_nonce
    if not MIN_NONCE_BYTES <= len(nonce) <= MAX_NONCE_BYTES:
        raise InvalidRequest(field, f"has {len(nonce)} bytes, must have {MIN_NONCE_BYTES} to {MAX_NONCE_BYTES}")
    if request.logits_processors:
        raise InvalidRequest(field, "is not allowed together with logits_processors, whose code no receipt can name")
    if not limits.signs_receipts:
        raise InvalidRequest(field, "this server signs no receipts (its setting receipt_key)")
    return WantedReceipt(nonce, request_digest(nonce, request))


def _masked_logprobs(request: pb.GenerateRequest) -> bool:
    sampling = request.sampling
    if sampling.masked_logprobs and not (sampling.HasField("logprobs") or request.response.per_field_logprobs):
        raise InvalidRequest("sampling.masked_logprobs", "needs logprobs or per_field_logprobs")
    if sampling.masked_logprobs and request.logits_processors:
        raise InvalidRequest("sampling.masked_logprobs", "is not allowed together with logits_processors")
    return sampling.masked_logprobs


def _prompt_logprobs(options: pb.ResponseOptions) -> int | None:
    if not options.HasField("prompt_logprobs"):
        return None
    if options.prompt_logprobs > MAX_LOGPROBS:
        raise InvalidRequest(
            "response.prompt_logprobs", f"is {options.prompt_logprobs}, must be at most {MAX_LOGPROBS}"
        )
    return options.prompt_logprobs


def _priority(value: int) -> int:
    if abs(value) > MAX_PRIORITY:
        raise InvalidRequest("priority", f"is {value}, must be in [{-MAX_PRIORITY}, {MAX_PRIORITY}]")
    return value


def _max_queue_ms(request: pb.GenerateRequest, limits: Limits) -> int | None:
    if not request.HasField("max_queue_ms"):
        return limits.max_queue_ms or None
    if request.max_queue_ms < 1:
        raise InvalidRequest("max_queue_ms", "is 0, must be at least 1")
    return request.max_queue_ms


def _never_preempt(request: pb.GenerateRequest, limits: Limits) -> bool:
    if request.never_preempt and not limits.allow_never_preempt:
        raise InvalidRequest("never_preempt", "this server does not allow it (its setting allow_never_preempt)")
    return request.never_preempt


def _cache_salt(salt: str) -> str:
    if (size := len(salt.encode())) > MAX_SALT_BYTES:
        raise InvalidRequest("cache_salt", f"has {size} bytes, at most {MAX_SALT_BYTES} are allowed")
    return salt


def _client_id(client_id: str) -> str:
    if (size := len(client_id.encode())) > MAX_CLIENT_ID_BYTES:
        raise InvalidRequest("client_id", f"has {size} bytes, at most {MAX_CLIENT_ID_BYTES} are allowed")
    if not client_id.isprintable():
        raise InvalidRequest("client_id", "holds a control character")
    return client_id


def _logits_processors(
    request: pb.GenerateRequest, request_id: str, processors: Processors
) -> tuple[ProcessorUse, ...]:
    given, field = request.logits_processors, "logits_processors"
    if len(given) > MAX_PER_REQUEST:
        raise InvalidRequest(field, f"has {len(given)} processors, at most {MAX_PER_REQUEST} are allowed")
    ids = {"request_id": request_id, "client_id": request.client_id}
    for i, each in enumerate(given):
        if (size := len(each.arguments.encode())) > MAX_ARGUMENTS_BYTES:
            most = f"at most {MAX_ARGUMENTS_BYTES} are allowed"
            raise InvalidRequest(f"{field}[{i}].arguments", f"has {size} bytes, {most}")
    return tuple(processors.use(f"{field}[{i}]", each.name, each.arguments, **ids) for i, each in enumerate(given))


def _prompt_bytes(field: str, size: int, limits: Limits) -> None:
    if size > limits.max_prompt_bytes:
        raise InvalidRequest(
            field, f"has {size} bytes, at most {limits.max_prompt_bytes} (max_prompt_bytes) are allowed"
        )


def check_prompt_length(field: str, length: int, max_model_len: int) -> None:
    """Raise InvalidRequest, with both numbers, unless one more token fits after a prompt of `length` tokens."""
    if length + 1 > max_model_len:
        raise InvalidRequest(
            field,
            f"has {length} tokens, at most {max_model_len - 1} fit (max_model_len {max_model_len}, one for the answer)",
        )


def _speculation(request: pb.GenerateRequest, limits: Limits) -> Speculation:
    """Return the most drafts and jump-forward tokens of a step; a number in the request is for both."""
    given = request.speculation
    draft_index = not given.HasField("draft_index") or given.draft_index
    if request.HasField("beam_search"):
        return Speculation(0, 0, draft_index)
    if not given.HasField("num_draft_tokens"):
        return Speculation(limits.num_draft_tokens, limits.jump_forward_tokens, draft_index)
    value = given.num_draft_tokens
    if value > limits.num_draft_tokens:
        raise InvalidRequest(
            "speculation.num_draft_tokens", f"is {value}, at most {limits.num_draft_tokens} are allowed"
        )
    return Speculation(value, value, draft_index)


def _integer(sampling: pb.SamplingParams, name: str, default: int, *, low: int, high: int = 2**32 - 1) -> int:
    if not sampling.HasField(name):
        return default
    value = int(getattr(sampling, name))
    if not low <= value <= high:
        limit = f"at least {low}" if value < low else f"at most {high}"
        raise InvalidRequest(f"sampling.{name}", f"is {value}, must be {limit}")
    return value


def _repetition(request: pb.GenerateRequest, limits: Limits) -> RepetitionLimit | None:
    """Return how often the answer may repeat a pattern; None: always."""
    sampling, own = request.sampling, limits.repetition
    name = "repetition_max_pattern_size"
    longest = _integer(sampling, name, own.max_pattern_size, low=0, high=MAX_PATTERN_SIZE)
    shortest = _integer(
        sampling,
        "repetition_min_pattern_size",
        min(own.min_pattern_size, longest or own.min_pattern_size),
        low=1,
        high=longest or MAX_PATTERN_SIZE,
    )
    count = _integer(sampling, "repetition_min_count", own.min_count, low=MIN_COUNT, high=MAX_COUNT)
    if longest and request.HasField("beam_search"):
        if sampling.HasField(name):
            raise InvalidRequest(f"sampling.{name}", "is not allowed together with beam_search")
        return None
    return RepetitionLimit(longest, shortest, count, sampling.min_tokens) if longest else None


def _backtracking(
    request: pb.GenerateRequest, grammar: GrammarSpec | None, tensors: tuple[WantedOutput, ...], limits: Limits
) -> Backtracking | None:
    """Return how a verified answer may go back; None: it may not."""
    own, wanted = limits.backtracking, request.grammar
    values = {}
    for name, default, most in (
        ("max_backtracks", own.max_backtracks, MAX_BACKTRACKS),
        ("hold_tokens", own.hold_tokens, MAX_HOLD_TOKENS),
    ):
        values[name] = getattr(wanted, name) if wanted.HasField(name) else default
        if values[name] > most:
            raise InvalidRequest(f"grammar.{name}", f"is {values[name]}, must be in [0, {most}]")
        if wanted.HasField(name) and (grammar is None or not grammar.verify):
            raise InvalidRequest(f"grammar.{name}", "needs grammar.unenforced = UNENFORCED_VERIFY")
    # Rows of tensors are computed for tokens that would be taken back, and reserved pages are never given back early.
    stays = request.HasField("beam_search") or request.never_preempt or tensors
    if grammar is None or not grammar.verify or stays or not all(values.values()):
        return None
    return Backtracking(**values)


def _number(
    sampling: pb.SamplingParams, name: str, default: float, *, low: float, high: float, open_low: bool = False
) -> float:
    if not sampling.HasField(name):
        return default
    value = float(getattr(sampling, name))
    if not math.isfinite(value):
        raise InvalidRequest(f"sampling.{name}", f"is {value}, must be a finite number")
    if not low <= value <= high or (open_low and value == low):
        raise InvalidRequest(
            f"sampling.{name}", f"is {value:g}, must be in {'(' if open_low else '['}{low:g}, {high:g}]"
        )
    return value


def _strings(values: Iterable[str], field: str, most: int) -> tuple[str, ...]:
    strings = tuple(values)
    if len(strings) > most:
        raise InvalidRequest(field, f"has {len(strings)} strings, at most {most} are allowed")
    for i, string in enumerate(strings):
        if not string:
            raise InvalidRequest(f"{field}[{i}]", "is empty")
        if (size := len(string.encode())) > MAX_STRING_BYTES:
            raise InvalidRequest(f"{field}[{i}]", f"has {size} bytes, at most {MAX_STRING_BYTES} are allowed")
    return tuple(dict.fromkeys(strings))


def check_token_ids(values: Iterable[int], field: str, vocab_size: int) -> tuple[int, ...]:
    """Return the ids. Raises InvalidRequest, with the place of the first id that is not a token."""
    ids = tuple(values)
    if ids and max(ids) >= vocab_size:
        i, bad = next((i, token) for i, token in enumerate(ids) if token >= vocab_size)
        raise InvalidRequest(f"{field}[{i}]", f"is {bad}, token ids are in [0, {vocab_size})")
    return ids


def _logit_bias(sampling: pb.SamplingParams, vocab_size: int) -> tuple[tuple[int, float], ...]:
    field = "sampling.logit_bias"
    if (count := len(sampling.logit_bias)) > MAX_BIASES:
        raise InvalidRequest(field, f"has {count} tokens, at most {MAX_BIASES} are allowed")
    biases = sorted(sampling.logit_bias.items())
    for token, bias in biases:
        if token >= vocab_size:
            raise InvalidRequest(field, f"has the token {token}, token ids are in [0, {vocab_size})")
        if not -MAX_BIAS <= bias <= MAX_BIAS:  # also refuses NaN
            raise InvalidRequest(f"{field}[{token}]", f"is {bias:g}, must be in [{-MAX_BIAS:g}, {MAX_BIAS:g}]")
    return tuple((token, bias) for token, bias in biases if bias)


def _bad_token_ids(sampling: pb.SamplingParams, vocab_size: int) -> tuple[int, ...]:
    field = "sampling.bad_token_ids"
    ids = tuple(dict.fromkeys(check_token_ids(sampling.bad_token_ids, field, vocab_size)))
    if len(ids) >= vocab_size:
        raise InvalidRequest(field, f"forbids all {vocab_size} tokens")
    return ids
