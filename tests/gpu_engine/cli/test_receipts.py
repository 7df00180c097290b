"""`lockstep generate --receipt`, `lockstep receipts` and `lockstep replay`: what they print, and their exit status."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpu_engine.api.receipts import TokenChain
from gpu_engine.api.request import Request, TokenEvent
from gpu_engine.api.signed_statements import Signer
from gpu_engine.cli import commands as cli
from gpu_engine.cli.receipt_differences import differences
from tests.fakes import answers_with
from tests.gpu_engine.fake_servers import serving
from tests.receipt_keys import new_key

EQUAL, DIFFERENT, NO_RESULT = 0, 1, 2


class Says:
    """The script of an engine that says `text`."""

    text = "hello"

    def __call__(self, request: Request) -> Iterable[TokenEvent]:
        return answers_with(self.text)(request)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    async def run(*arguments: str) -> tuple[int, str, str]:
        status = await asyncio.to_thread(cli.main, arguments)
        return status, *capsys.readouterr()

    return run


async def test_an_answer_is_replayed_and_the_first_other_token_is_named(
    tmp_path: Path, run: Callable[..., Any]
) -> None:
    key, says, bundle = str(new_key(tmp_path / "key.pem")), Says(), tmp_path / "answer.json"
    async with serving(says, listen=f"unix:{tmp_path}/s", receipt_key=key) as server:
        to = ("--server", server.address)
        prompt = ("--prompt", "a secret", "--max-tokens", "20", "--n", "2")
        assert (await run("generate", *to, *prompt, "--receipt", str(bundle)))[:2] == (0, "[0] hello\n[1] hello\n")
        assert len(json.loads(bundle.read_text())["receipts"]) == 2
        status, out, err = await run("replay", str(bundle), *to)
        assert (status, out.count("equal: 6 tokens (STOP) of fake"), err) == (EQUAL, 2, "")

        says.text = "help"
        status, out, _ = await run("replay", str(bundle), *to)
        lines = [line.strip() for line in out.splitlines()[:3]]
        assert status == DIFFERENT
        assert lines[0].startswith("different: 6 tokens (STOP) of fake")
        assert lines[1] == "answer.tokens: was 6, is 5 (the answer has another length)"
        assert lines[2] == (
            "answer: was equal for 3 tokens, is another token at place 3 (nothing that the receipts name explains it)"
        )

        status, jwk, _ = await run("receipts", "key", *to)
        (tmp_path / "jwk").write_text(jwk)
        assert (await run("receipts", "verify", str(bundle), *to))[0] == EQUAL
        assert (status, json.loads(jwk)) == (EQUAL, Signer.of_file(Path(key)).jwk)
        assert (await run("receipts", "key", key))[:2] == (EQUAL, jwk)

        # A file with only the receipt, and the request in another one.
        content = json.loads(bundle.read_text())
        receipt, request = tmp_path / "receipt.txt", tmp_path / "request.json"
        receipt.write_text(content["receipts"][0] + "\n")
        request.write_text(json.dumps(content["request"]))
        says.text = "hello"
        named = ("--request", str(request), "--key", str(tmp_path / "jwk"))
        assert (await run("replay", str(receipt), *named, *to))[0] == EQUAL
        status, _, err = await run("replay", str(receipt), *to)
        assert (status, "the request is required" in err) == (NO_RESULT, True)
    status, _, err = await run("replay", str(bundle), *to)
    assert (status, "UNAVAILABLE" in err) == (NO_RESULT, True)


async def test_a_receipt_is_verified_without_a_server(tmp_path: Path, run: Callable[..., Any]) -> None:
    key, bundle = str(new_key(tmp_path / "key.pem")), tmp_path / "answer.json"
    other = str(new_key(tmp_path / "other.pem"))
    async with serving(Says(), listen=f"unix:{tmp_path}/s", receipt_key=key) as server:
        prompt = ("--token-ids", "1,2", "--seed", "5", "--stop", "zz", "--receipt", str(bundle))
        assert (await run("generate", "--server", server.address, *prompt))[0] == 0
    content = json.loads(bundle.read_text())
    verify = ("receipts", "verify", str(bundle), "--key")
    status, out, _ = await run(*verify, key)
    assert status == EQUAL
    assert out.endswith("the signature is valid, and the request's digests are equal\n")
    assert (await run(*verify, other))[0] == DIFFERENT

    def with_request(**changes: Any) -> None:
        changed = copy.deepcopy(content)
        for part, value in changes.items():
            changed["request"][part] = value
        bundle.write_text(json.dumps(changed))

    for changes, problem in (
        ({"tokenIds": {"ids": [1, 3]}}, "prompt: the receipt is of other tokens"),
        ({"sampling": {"seed": 6, "stop": ["zz"]}}, "sampling.seed: the receipt has 5, the request 6"),
        ({"sampling": {"seed": 5, "stop": ["zy"]}}, "request: the receipt is of another request"),
        ({"response": {"receiptNonce": "MDEyMzQ1Njc4OWFiY2RlZg=="}}, "nonce: the receipt was made with another one"),
    ):
        with_request(**changes)
        status, out, _ = await run(*verify, key)
        assert (status, out.splitlines()[-1]) == (DIFFERENT, problem)
    first = content["receipts"][0]
    bundle.write_text(json.dumps({**content, "receipts": [first[:-3] + "AAA"]}))
    status, out, _ = await run(*verify, key)
    assert (status, out.startswith("the receipt ")) == (DIFFERENT, True)
    for wrong in ("{", "{}", "", '{"receipts": ["a"], "request": {"txet": "a"}}'):
        bundle.write_text(wrong)
        assert (await run(*verify, key))[0] == NO_RESULT
    assert (await run("receipts", "verify"))[0] == NO_RESULT
    assert (await run(*verify, str(tmp_path / "none")))[0] == NO_RESULT


async def test_a_server_without_a_key_signs_and_replays_nothing(tmp_path: Path, run: Callable[..., Any]) -> None:
    key, bundle = str(new_key(tmp_path / "key.pem")), str(tmp_path / "answer.json")
    async with serving(Says(), listen=f"unix:{tmp_path}/s", receipt_key=key) as server:
        assert (await run("generate", "--server", server.address, "--prompt", "x", "--receipt", bundle))[0] == 0
    async with serving(Says(), listen=f"unix:{tmp_path}/t") as server:
        to = ("--server", server.address)
        for arguments in (("replay", bundle), ("receipts", "key")):
            status, out, err = await run(*arguments, *to)
            assert (status, out, "its setting receipt_key" in err) == (NO_RESULT, "", True)
    other = str(new_key(tmp_path / "other.pem"))
    async with serving(Says(), listen=f"unix:{tmp_path}/u", receipt_key=other) as server:
        status, out, _ = await run("replay", bundle, "--server", server.address)
        assert (status, "was signed with the key" in out) == (DIFFERENT, True)
        assert (await run("replay", bundle, "--key", key, "--server", server.address))[0] == EQUAL


def claims(*tokens: int) -> dict[str, Any]:
    chain = TokenChain(b"0123456789abcdef")
    chain.push(tokens)
    return {
        "version": 1, "issued": 5, "nonce": "n",
        "model": {"type": "llama", "weights": "w", "tokenizer": "t"},
        "engine": {"name": "e", "version": "1", "numerics": "cpu"},
        "request": "r",
        "prompt": {"tokens": 2, "digest": "p"},
        "grammar": {"digest": "g", "backend": "b", "version": "1", "defaults": "d"},
        "sampling": {"seed": "1", "temperature": 1.0, "repetition": None},
        "backtracking": None,
        "adapters": [],
        "sequence": 0,
        "answer": {"finish": "STOP", "tokens": len(tokens), "links": chain.links, "end": chain.end},
    }  # fmt: skip


def paths(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    inner = {name: value for name, value in values.items() if isinstance(value, dict)}
    own = [prefix + name for name in values if name not in inner]
    return own + [path for name, value in inner.items() for path in paths(value, f"{prefix}{name}.")]


@pytest.mark.parametrize("path", paths(claims(1)))
def test_every_claim_that_differs_is_named_with_a_reason(path: str) -> None:
    was, now = claims(1, 2), claims(1, 2)
    assert differences(was, now) == []
    *outer, name = path.split(".")
    (now[outer[0]] if outer else now)[name] = "ffffffff" * 2 if name == "links" else "other"
    found = [each.field for each in differences(was, now)]
    expected = {"issued": [], "sequence": [], "answer.links": ["answer"], "answer.end": ["answer"]}
    assert found == expected.get(path, [path])
    assert all("not known here" not in each.why for each in differences(was, now))


def test_what_may_explain_other_tokens_is_named_with_them() -> None:
    was, now = claims(1, 2, 3), claims(1, 9, 3)
    now["engine"]["numerics"], now["grammar"] = "cuda", None
    *others, answer = differences(was, now)
    assert {each.field for each in others} >= {"engine.numerics", "grammar.digest"}
    assert (answer.field, answer.was, answer.now) == ("answer", "equal for 1 tokens", "another token at place 1")
    assert answer.why.startswith("engine.numerics, grammar")
    assert answer.why.endswith("may explain it")
