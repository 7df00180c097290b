"""A spawned grammar process ends before its directory; sync modes; a grammar process that sleeps."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.sidecar.process import GrammarProcess, end_task, resolved_sync, warn_of_sleepers
from service_runtime.private_directory import private_directory
from tests.waiting import eventually


@pytest.mark.parametrize("cancelled_before", [False, True])
async def test_a_start_that_fails_ends_the_process_before_its_directory_goes(
    tmp_path: Path, cancelled_before: bool
) -> None:
    made: list[GrammarProcess] = []
    seen: list[tuple[bool, bool]] = []

    def look() -> None:
        assert made[0].sidecar is not None
        seen.append((made[0].sidecar.pid is not None, made[0].directory.exists()))

    async def start() -> None:
        async with AsyncExitStack() as stack:
            directory = private_directory(stack, tmp_path, "engine-")
            background = await stack.enter_async_context(asyncio.TaskGroup())
            stack.callback(look)
            made.append(grammar := GrammarProcess(ServerConfig(grammar="spawn"), directory, background, stack))
            sidecar = grammar.sidecar
            assert sidecar is not None
            await eventually(lambda: sidecar.pid)
            stack.callback(look)
            (task,) = (task for task in asyncio.all_tasks() if task.get_name() == "sidecar")
            if cancelled_before:
                task.cancel()
                await asyncio.sleep(0)
            raise FileNotFoundError("model: nowhere")

    with pytest.raises(ExceptionGroup):
        await start()
    assert seen == [(True, True), (False, True)]
    assert not made[0].directory.exists()


async def test_every_grammar_process_that_sleeps_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    channel, attached = SimpleNamespace(grammar_parked=False), [0]
    watch = asyncio.create_task(warn_of_sleepers(lambda: attached[0], channel, every_s=0.001))

    def warnings() -> int:
        return caplog.text.count("Start it with --spin-us 1e+06")

    async with asyncio.timeout(20):
        for number, parked, expected in ((0, True, 0), (1, False, 0), (1, True, 1), (1, True, 1), (2, True, 2)):
            attached[0], channel.grammar_parked = number, parked
            await eventually(lambda: warnings() >= expected)  # noqa: B023 - ends before it changes
            await asyncio.sleep(0.01)
            assert warnings() == expected
    await end_task(watch)


async def test_one_that_wakes_a_moment_later_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    looks, looked = iter([True, False, True, True, False] * 20), [0]

    class Sleeper:
        @property
        def grammar_parked(self) -> bool:
            looked[0] += 1
            return next(looks)

    watch = asyncio.create_task(warn_of_sleepers(lambda: 1, Sleeper(), every_s=0.001))
    await eventually(lambda: looked[0] >= 50)
    assert "spin-us" not in caplog.text
    await end_task(watch)


@pytest.mark.parametrize(
    ("device", "asked", "grammar", "cores", "expected"),
    [
        ("cuda", "auto", "spawn", 3, "device_flag"),
        ("cuda:1", "auto", "spawn", 2, "host_callback"),
        ("cuda", "auto", "connect", 16, "host_callback"),
        ("cuda", "host_callback", "spawn", 16, "host_callback"),
        ("cuda", "device_flag", "connect", 1, "device_flag"),
        ("cpu", "auto", "spawn", 16, "auto"),
    ],
)
def test_flags_of_the_device_are_for_a_grammar_process_that_spins(
    device: str, asked: str, grammar: str, cores: int, expected: str
) -> None:
    server_config = ServerConfig(grammar=grammar, grammar_dir="/run/lockstep" if grammar == "connect" else "")
    assert resolved_sync(EngineConfig(device=device, sync=asked), server_config, cores) == expected
