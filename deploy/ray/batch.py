"""A batch job over a file of prompts with Ray Data: engines of its own, a schema, progress, and resumption.

    python -m deploy.ray.batch prompts.jsonl answers.jsonl --schema schema.json --set model=/models/Qwen3-0.6B

A line of the file is {"id", "prompt"} or {"id", "messages"}. A line of the answers is {"id", "text", "finish_reason",
"completion_tokens"}, in the order in which answers come. Records that failed are {"id", "error"} in the file
`answers.jsonl.failed`.

The invariant: only this process writes the answers, and an answer is on the disk before it counts. However the job
ended, a run after it sends the records without an answer, and each id has one line.

Not responsible for: the engines (see serve_app.py for what serves requests).
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import ray
import ray.data

from lockstep_client import AsyncClient, CallError, Unavailable

DEFAULT_SLOTS = 8
LOCAL_STORE_BYTES = 100 << 20
STARTS = 3
"""How often an engine starts for one record, before that record has failed."""
CLOSE_AFTER_S = 10.0
"""Longer than the attempts of a client take: then no call uses a lost engine any more."""
BLOCKS_AT_ONCE = 2
"""Blocks that an engine answers at a time: the next one fills the slots that the end of one leaves empty."""


class AnswersFile:
    """The file of answers, open for only this process. A context manager."""

    def __init__(self, path: Path) -> None:
        """Open or make the file; a line that a kill has cut is removed.

        Raises BlockingIOError when another job writes it, and ValueError for a line that is no answer.
        """
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.keys = self._read(path)
            """Of the records that have an answer; see `key_of`."""
        except BaseException:
            self._file.close()
            raise

    def _read(self, path: Path) -> set[str]:
        keys, whole = set[str](), 0
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                keys.add(json.dumps(json.loads(line)["id"]))
            except (ValueError, TypeError, KeyError):
                raise ValueError(f"{path}, line {number}: is no answer of this job") from None
            whole += len(line)
        self._file.truncate(whole)
        return keys

    def append(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Write answers of records that have none; return when they are on the disk."""
        for answer in answers:
            key = json.dumps(answer["id"])
            if key not in self.keys:
                self.keys.add(key)
                self._file.write(json.dumps(answer).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> AnswersFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


class Engine:
    """An actor with its own engine, which answers blocks of records. A lost engine is replaced by a new one."""

    def __init__(self, settings: Mapping[str, Any], schema: object, options: Mapping[str, Any]) -> None:
        self._settings, self._schema, self._options = dict(settings), schema, dict(options)
        self._client: AsyncClient | None = None
        self._starting = asyncio.Lock()
        self._closing: list[asyncio.Task[None]] = []
        """Of lost engines."""

    async def __call__(self, block: pyarrow.Table) -> pyarrow.Table:
        """Return an answer, as JSON, for each line of the block."""
        lines = block.column("text").to_pylist()
        answers = await asyncio.gather(*(self._answer(json.loads(line)) for line in lines))
        return pyarrow.table({"answer": pyarrow.array([json.dumps(answer) for answer in answers], pyarrow.string())})

    async def _engine(self, lost: AsyncClient | None) -> AsyncClient:
        """Return a client of an engine that is not `lost`. Raises EmbeddedServerError with the end of its log."""
        async with self._starting:
            if self._client is None or self._client is lost:
                if self._client is not None:
                    self._closing.append(asyncio.create_task(_close(self._client)))
                self._client = None
                client = AsyncClient.embedded(**self._settings)
                await client.start()
                self._client = client
            return self._client

    async def _answer(self, record: Mapping[str, Any]) -> dict[str, Any]:
        client, problem = await self._engine(None), ""
        for _ in range(STARTS):
            try:
                return await self._ask(client, record)
            except Unavailable as error:
                problem = str(error)
                client = await self._engine(lost=client)
            except (CallError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
                break
        return {"id": record["id"], "error": problem}

    async def _ask(self, client: AsyncClient, record: Mapping[str, Any]) -> dict[str, Any]:
        if "messages" in record:
            answer = await client.chat(record["messages"], schema=self._schema, **self._options)
        else:
            answer = await client.generate(record["prompt"], schema=self._schema, **self._options)
        return {
            "id": record["id"],
            "text": answer.text,
            "finish_reason": answer.finish_reason.name.lower(),
            "completion_tokens": answer.usage.completion_tokens if answer.usage else 0,
        }


async def _close(lost: AsyncClient) -> None:
    await asyncio.sleep(CLOSE_AFTER_S)
    await lost.aclose()


def key_of(line: str) -> str:
    """Return the id of a record as JSON. Raises ValueError that begins with the line."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{line[:80]!r}: is no JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("id"), str | int):
        raise ValueError(f"{line[:80]!r}: is no object with an id, a string or an integer")
    if ("prompt" in record) == ("messages" in record):
        raise ValueError(f"{line[:80]!r}: needs exactly one of prompt and messages")
    return json.dumps(record["id"])


def _checked(row: Mapping[str, Any]) -> dict[str, str]:
    try:
        return {"key": key_of(row["text"]), "problem": ""}
    except ValueError as error:
        return {"key": "", "problem": str(error)}


def keys_of(records: ray.data.Dataset) -> set[str]:
    """Return the keys of the records. Raises ValueError for a wrong record, and for an id that two have."""
    seen = set[str]()
    for row in records.map(_checked).iter_rows():
        if row["problem"]:
            raise ValueError(row["problem"])
        if row["key"] in seen:
            raise ValueError(f"two records have the id {row['key']}")
        seen.add(row["key"])
    return seen


def without(records: ray.data.Dataset, keys: set[str]) -> ray.data.Dataset:
    """Return the records with other keys."""
    shared = ray.put(keys)

    def left(block: pyarrow.Table) -> pyarrow.Table:
        answered = ray.get(shared)
        wanted = [key_of(line) not in answered for line in block.column("text").to_pylist()]
        return block.filter(pyarrow.array(wanted, pyarrow.bool_()))

    return records.map_batches(left, batch_size=None, batch_format="pyarrow")


def answers_of(
    records: ray.data.Dataset,
    settings: Mapping[str, Any],
    *,
    schema: object,
    options: Mapping[str, Any],
    engines: int,
    engine_cpus: float,
    engine_gpus: float,
) -> Iterator[list[dict[str, Any]]]:
    """Yield the answers of a block of records as soon as the last of them is there; see `run` for the arguments."""
    slots = int(settings["max_batch_size"])
    results = records.repartition(target_num_rows_per_block=slots).map_batches(
        Engine,
        fn_constructor_args=(settings, schema, options),
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=engines, max_concurrent_calls_per_actor=BLOCKS_AT_ONCE),
        num_cpus=engine_cpus,
        num_gpus=engine_gpus or None,
    )
    for block in results.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        yield [json.loads(text) for text in block.column("answer").to_pylist()]


def run(
    source: Path,
    output: Path,
    settings: Mapping[str, Any],
    *,
    schema: object = None,
    options: Mapping[str, Any] | None = None,
    engines: int = 1,
    engine_cpus: float = 1.0,
    engine_gpus: float = 0.0,
) -> tuple[int, int, int]:
    """Answer the records of `source` that have no answer in `output` yet; report progress on stderr.

    Args:
        source: JSON lines, which every node of the cluster reads.
        output: the answers; made if it is missing.
        settings: of the engine, by name.
        schema: a JSON Schema that every answer follows; None: none.
        options: of the client's `generate` and `chat`.
        engines: actors, each with an engine.
        engine_cpus: what Ray reserves for one.
        engine_gpus: as `engine_cpus`.

    Returns (records answered now, records that failed now, records that had an answer). Raises ValueError for a wrong
    record, TypeError for a wrong option, and BlockingIOError when another job writes `output`.
    """
    settings = {"max_batch_size": DEFAULT_SLOTS} | dict(settings)
    records = ray.data.read_text(str(source))
    wanted, answered, failed, began_s = keys_of(records), 0, 0, time.monotonic()
    with AnswersFile(output) as answers, Path(f"{output}.failed").open("w", encoding="utf-8") as failures:
        before = len(wanted & answers.keys)
        if before == len(wanted):
            return 0, 0, before
        needs = {"engines": engines, "engine_cpus": engine_cpus, "engine_gpus": engine_gpus}
        left = without(records, answers.keys) if before else records
        for block in answers_of(left, settings, schema=schema, options=options or {}, **needs):
            good = [answer for answer in block if "error" not in answer]
            answers.append(good)
            wrong = [answer for answer in block if "error" in answer]
            failures.writelines(json.dumps(answer) + "\n" for answer in wrong)
            failures.flush()
            answered, failed = answered + len(good), failed + len(wrong)
            pace = (answered + failed) / (time.monotonic() - began_s)
            progress = f"{before + answered} of {len(wanted)} records, {failed} failed, {pace:.1f} a second"
            print(progress, file=sys.stderr, flush=True)
    return answered, failed, before


def main() -> int:
    """Run the job; the exit status is 1 where a record failed, and 2 for wrong input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="records: JSON lines")
    parser.add_argument("output", type=Path, help="where the answers go: JSON lines")
    parser.add_argument("--schema", type=Path, help="a JSON Schema that every answer follows")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the engine")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON", help="such as max_tokens=128")
    parser.add_argument("--engines", type=int, default=1, help="engines at once (default: 1)")
    parser.add_argument("--engine-cpus", type=float, default=1.0, help="CPUs that Ray reserves for one")
    parser.add_argument("--engine-gpus", type=float, default=0.0, help="GPUs that Ray reserves for one")
    parser.add_argument("--local-cpus", type=int, help="start a Ray of only this machine, with so many CPUs")
    flags = parser.parse_args()
    if flags.local_cpus:
        ray.init(
            num_cpus=flags.local_cpus,
            object_store_memory=LOCAL_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
        )
    try:
        answered, failed, before = run(
            flags.source,
            flags.output,
            dict(item.split("=", 1) for item in flags.set),
            schema=json.loads(flags.schema.read_text(encoding="utf-8")) if flags.schema else None,
            options={name: json.loads(text) for name, text in (item.split("=", 1) for item in flags.option)},
            engines=flags.engines,
            engine_cpus=flags.engine_cpus,
            engine_gpus=flags.engine_gpus,
        )
    except BlockingIOError:
        print(f"{flags.output}: another job writes it", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{answered} answered, {failed} failed, {before} had an answer")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
