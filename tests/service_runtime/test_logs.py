"""Log lines of both processes: their two formats, their request ids, and the lines that one forwards."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from service_runtime.logs import REQUEST_ID, ForwardedFormatter, JsonFormatter, RequestIdFilter, TextFormatter, level_of


def record(message: str, *arguments: object, **fields: object) -> logging.LogRecord:
    logger = logging.getLogger("gpu_engine.test")
    return logger.makeRecord(logger.name, logging.INFO, __file__, 1, message, arguments, None, extra=fields)


def test_a_json_line_is_one_object_with_its_fields() -> None:
    line = JsonFormatter().format(record('said "%s"', "a\n\u2028", fields={"status": "OK", "n": 2}, request_id="r-1"))
    assert len(line.splitlines()) == 1
    fields = json.loads(line)
    assert fields.pop("time").endswith("+00:00")
    assert fields == {
        "level": "info",
        "logger": "gpu_engine.test",
        "message": 'said "a\n\u2028"',
        "status": "OK",
        "n": 2,
        "request_id": "r-1",
    }


def test_a_json_line_has_its_traceback_inside() -> None:
    line = record("broke")
    try:
        raise ZeroDivisionError("why")
    except ZeroDivisionError:
        line.exc_info = sys.exc_info()
    assert json.loads(JsonFormatter().format(line))["exception"].endswith("ZeroDivisionError: why")


def test_a_text_line_ends_with_its_fields_and_no_value_can_pretend_to_be_one() -> None:
    line = TextFormatter().format(record("generate", fields={"status": "OK"}, request_id="a status=LIES\n2026"))
    assert line.endswith(' INFO gpu_engine.test: generate status=OK request_id="a status=LIES\\n2026"')
    assert TextFormatter().format(record("ready")).endswith(" INFO gpu_engine.test: ready")


async def test_a_line_is_about_the_request_of_its_task_and_of_the_tasks_that_this_starts() -> None:
    def noted(**fields: str) -> str:
        line = record("x", **fields)
        RequestIdFilter().filter(line)
        return str(vars(line)["request_id"])

    async def work(request_id: str) -> list[str]:
        REQUEST_ID.set(request_id)
        await asyncio.sleep(0)
        return [noted(), await asyncio.create_task(child()), noted(request_id="explicit")]

    async def child() -> str:
        return noted()

    assert await asyncio.gather(work("a"), work("b")) == [["a", "a", "explicit"], ["b", "b", "explicit"]]
    assert noted() == ""


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("2026-01-01 10:00:00,000 INFO grammar_service.server: ready", logging.INFO),
        ('{"time": "now", "level": "error", "message": "x"}', logging.ERROR),
        ('{"level": "loud"}', None),
        ("{not json", None),
        ("Traceback (most recent call last):", None),
        ("", None),
    ],
)
def test_the_level_of_a_line_of_the_grammar_process(line: str, level: int | None) -> None:
    assert level_of(line) == level


def test_a_forwarded_line_is_passed_on_and_a_traceback_becomes_an_object() -> None:
    formatter = ForwardedFormatter(JsonFormatter())
    assert formatter.format(record("%s", '{"level": "info"}', formatted=True)) == '{"level": "info"}'
    assert json.loads(formatter.format(record("%s", "Fatal error", formatted=False)))["message"] == "Fatal error"


PROGRAM = """
import logging, sys
from service_runtime.logs import configure
configure("info", sys.argv[1], forwarded_loggers=["grammar_service"])
logging.getLogger("gpu_engine.x").info("ours")
forwarded = logging.getLogger("grammar_service")
forwarded.info("%s", '{"level": "info", "message": "theirs"}', extra={"formatted": True})
forwarded.warning("%s", "Segmentation fault", extra={"formatted": False})
"""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_whole_process_logs_in_one_format(root: Path, log_format: str) -> None:
    command = [sys.executable, "-c", PROGRAM, log_format]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=True)
    lines = done.stderr.splitlines()
    if log_format == "json":
        assert [json.loads(line)["message"] for line in lines] == ["ours", "theirs", "Segmentation fault"]
    else:
        assert lines[0].endswith(" INFO gpu_engine.x: ours")
        assert lines[1:] == ['{"level": "info", "message": "theirs"}', "Segmentation fault"]
