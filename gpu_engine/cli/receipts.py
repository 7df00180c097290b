"""The commands for receipts: `receipts key`, `receipts verify` and `replay`.

The invariant: the exit status says the result, as that of diff does: 0 equal or valid, 1 different or not valid, 2 no
result, because the usage was wrong or no server answered. These commands do not load the model's libraries.

Not responsible for: what differs and why (see receipt_differences.py), files with receipts (see receipted.py).
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from gpu_engine.api.receipts import keyed, prompt_digest, request_digest
from gpu_engine.api.signed_statements import MissingExtra, StatementRefused, checked_claims, jwk_of, read_key
from gpu_engine.cli.access_flags import access_of
from gpu_engine.cli.asking import OK, USAGE, model_info, refused, responses_of, usage
from gpu_engine.cli.inputs import read_text
from gpu_engine.cli.receipt_differences import Difference, differences
from gpu_engine.cli.receipted import Receipted
from lockstep_client.access import Access
from lockstep_client.async_rpc import AsyncRpc
from lockstep_client.wire import engine_pb2 as pb

AnyRequest = TypeVar("AnyRequest")
"""A GenerateRequest of any generated code."""
DIFFERENT = 1
HTTP_TIMEOUT_S = 600.0


def run_receipts(flags: argparse.Namespace) -> int:
    """Show a key, or verify receipts."""
    try:
        if flags.action == "key":
            return _key(flags)
        if flags.file is None:
            raise ValueError("FILE: verify needs a file with receipts")
        given = Receipted.read(flags.file, flags.request)
        if flags.key is not None:
            return _verify(given, read_text("--key", flags.key))
        return _asked(flags, lambda client: _verify_with_key_of(client, given))
    except (ValueError, MissingExtra) as error:
        return usage(error)


def _key(flags: argparse.Namespace) -> int:
    if flags.file is not None:
        print(json.dumps(jwk_of(read_key(read_text("FILE", flags.file))), sort_keys=True))
        return OK

    async def question(client: AsyncRpc) -> int:
        print(await _key_of(client))
        return OK

    return _asked(flags, question)


async def _key_of(client: AsyncRpc) -> str:
    """Return the public key of a server. Raises ValueError if it has none."""
    if key := (await model_info(client)).receipt_key:
        return key
    raise ValueError("the server signs no receipts (its setting receipt_key)")


async def _verify_with_key_of(client: AsyncRpc, given: Receipted) -> int:
    return _verify(given, await _key_of(client))


def _verify(given: Receipted, key_text: str) -> int:
    key, status = read_key(key_text), OK
    for receipt in given.receipts:
        try:
            claims = checked_claims(receipt, key)
        except StatementRefused as error:
            print(f"the receipt {error}")
            status = DIFFERENT
            continue
        print(described(claims))
        if given.request is None:
            print("the signature is valid; without --request no digest was checked")
            continue
        problems = mismatches(claims, given.request, given.nonce)
        if not problems:
            print("the signature is valid, and the request's digests are equal")
        for problem in problems:
            print(problem)
            status = DIFFERENT
    return status


def mismatches(claims: dict[str, Any], request: pb.GenerateRequest, nonce: bytes) -> list[str]:
    """Return what the claims say of another request, as far as that shows without a tokenizer."""
    if claims["nonce"] != keyed(nonce, "nonce", ""):
        return ["nonce: the receipt was made with another one"]
    found = []
    if claims["request"] != request_digest(nonce, request):
        found.append("request: the receipt is of another request")
    ids = request.token_ids.ids
    if request.WhichOneof("prompt") == "token_ids" and claims["prompt"]["digest"] != prompt_digest(nonce, ids):
        found.append("prompt: the receipt is of other tokens")
    if request.sampling.HasField("seed") and claims["sequence"] == 0:
        seed = str(request.sampling.seed)
        if claims["sampling"]["seed"] != seed:
            found.append(f"sampling.seed: the receipt has {claims['sampling']['seed']}, the request {seed}")
    return found


def described(claims: dict[str, Any]) -> str:
    """Return a line about a receipt."""
    model, engine, answer = claims["model"], claims["engine"], claims["answer"]
    return (
        f"{answer['tokens']} tokens ({answer['finish']}) of {model['type']} {model['weights'][:12]}, "
        f"{engine['name']} {engine['version']}, {engine['numerics']}, seed {claims['sampling']['seed']}"
    )


def run_replay(flags: argparse.Namespace) -> int:
    """Send the request of each receipt again, and say whether the receipts are equal."""
    try:
        given = Receipted.read(flags.receipt, flags.request, is_body=flags.http is not None)
        assert given.nonce
        key = None if flags.key is None else read_text("--key", flags.key)
        if given.body is not None:
            return _replay_http(flags, given, key)
    except (ValueError, MissingExtra) as error:
        return usage(error)

    async def question(client: AsyncRpc) -> int:
        assert given.request is not None
        own = await _key_of(client)
        status = OK
        for receipt in given.receipts:
            claims = checked_claims(receipt, read_key(key or own))
            now = ""
            async for response in responses_of(client, replayed(given.request, claims), flags.timeout):
                now = response.receipt or now
            if not now:
                raise ValueError("the server's answer has no receipt: it was aborted")
            status = max(status, report(differences(claims, checked_claims(now, read_key(own))), claims))
        return status

    return _asked(flags, question)


def replayed(request: AnyRequest, claims: dict[str, Any]) -> AnyRequest:
    """Return the request that generates the answer of a receipt again: one sequence, with the receipt's seed."""
    again: Any = copy.deepcopy(request)
    again.ClearField("request_id")
    again.sampling.ClearField("n")
    again.sampling.seed = int(claims["sampling"]["seed"])
    again.response.whole = True
    again.response.cumulative = False
    result: AnyRequest = again
    return result


def report(found: list[Difference], claims: dict[str, Any]) -> int:
    """Print what differs; return the exit status."""
    if not found:
        print(f"equal: {described(claims)}")
        return OK
    print(f"different: {described(claims)}")
    for difference in found:
        print(f"  {difference}")
    return DIFFERENT


def _asked(flags: argparse.Namespace, question: Callable[[AsyncRpc], Awaitable[int]]) -> int:
    """Return the exit status of a question to a server."""

    async def run(access: Access) -> int:
        try:
            async with AsyncRpc(access) as client:
                return await question(client)
        except grpc.aio.AioRpcError as error:
            refused(access.address, error)
            return USAGE

    try:
        return asyncio.run(run(access_of(flags)))
    except StatementRefused as error:
        print(f"the receipt {error}")
        return DIFFERENT
    except (ValueError, MissingExtra) as error:
        return usage(error)


def _replay_http(flags: argparse.Namespace, given: Receipted, key: str | None) -> int:
    if key is None:
        raise ValueError("--key: is required with --http")
    public, status = read_key(key), OK
    for receipt in given.receipts:
        try:
            claims = checked_claims(receipt, public)
        except StatementRefused as error:
            print(f"the receipt {error}")
            return DIFFERENT
        seed = int(claims["sampling"]["seed"])
        body = {**(given.body or {}), "n": 1, "seed": seed, "stream": False}
        body.pop("stream_options", None)
        path = "chat/completions" if "messages" in body else "completions"
        choice = _post(f"{flags.http.rstrip('/')}/v1/{path}", body, flags.token_file)["choices"][0]
        if "receipt" not in choice:
            raise ValueError("the server's answer has no receipt")
        status = max(status, report(differences(claims, checked_claims(choice["receipt"], public)), claims))
    return status


def _post(url: str, body: dict[str, Any], token_file: str | None) -> Any:
    headers = {"Content-Type": "application/json"}
    if token_file:
        headers["Authorization"] = f"Bearer {read_text('--token-file', token_file).split()[0]}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise ValueError(f"{url}: {error.code} {error.read(2000).decode(errors='replace')}") from None
    except OSError as error:
        raise ValueError(f"{url}: {error}") from None
