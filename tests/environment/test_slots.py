"""`n_parallel_envs` caps concurrent trials over all processes."""

import asyncio
import errno
import fcntl
import itertools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from patience import HANG_S, wait_until

from harbortrainer.environment import harness
from harbortrainer.environment.harness import Slots, slot
from harbortrainer.runs.locks import NoLocksError

pytestmark = pytest.mark.process  # holders of slots are processes

HOLDER = """
import asyncio, sys
from pathlib import Path
from harbortrainer.environment.harness import slot

async def main():
    async with slot(Path(sys.argv[1]), 1):
        print("held", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_at_most_n_run_concurrently_and_all_run(tmp_path: Path) -> None:
    running, most, done = 0, 0, 0

    async def work() -> None:
        nonlocal running, most, done
        async with slot(tmp_path, 3):
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            running -= 1
            done += 1

    await asyncio.gather(*(work() for _ in range(12)))
    assert (most, done) == (3, 12)


async def test_no_cap_never_waits(tmp_path: Path) -> None:
    async with slot(tmp_path, None), slot(tmp_path, None):
        assert not (tmp_path / ".slots").exists()


async def test_killed_process_frees_its_slot(tmp_path: Path) -> None:
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert holder.stdout is not None
    assert (await holder.stdout.readline()).strip() == b"held"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            async with slot(tmp_path, 1):
                pass
    os.kill(holder.pid, signal.SIGKILL)
    async with asyncio.timeout(HANG_S), slot(tmp_path, 1):
        pass
    await holder.wait()


async def test_cancelled_waiter_leaves_queue(tmp_path: Path) -> None:
    async with slot(tmp_path, 1):
        waiter = asyncio.create_task(slot(tmp_path, 1).__aenter__())
        await asyncio.sleep(0.1)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
    async with asyncio.timeout(HANG_S), slot(tmp_path, 1):
        pass


async def test_child_process_does_not_keep_slot(tmp_path: Path) -> None:
    async with slot(tmp_path, 1):
        child = await asyncio.create_subprocess_exec("sleep", "600", close_fds=False)
    try:
        async with asyncio.timeout(HANG_S), slot(tmp_path, 1):
            pass
    finally:
        child.kill()
        await child.wait()


def hold_and_release(folder: Path, log: Path, n: int, tasks: int, rounds: int) -> None:
    """Take slots in this process, and write when each was taken and released: seconds of the machine's clock."""

    async def one() -> None:
        for _ in range(rounds):
            async with slot(folder, n):
                with log.open("a") as file:
                    file.write(f"{time.monotonic()} 1\n")
                await asyncio.sleep(0.01)
                with log.open("a") as file:
                    file.write(f"{time.monotonic()} -1\n")

    async def all_tasks() -> None:
        await asyncio.gather(*(one() for _ in range(tasks)))

    asyncio.run(all_tasks())


def events_of(log: Path) -> list[tuple[float, int]]:
    return [(float(moment), int(change)) for moment, change in map(str.split, log.read_text().splitlines())]


def test_processes_never_exceed_cap_also_after_a_kill(tmp_path: Path) -> None:
    n, tasks, rounds, fork = 5, 6, 8, multiprocessing.get_context("fork")  # importing the plugin takes seconds
    logs = [tmp_path / f"log-{number}" for number in range(3)]
    processes = [fork.Process(target=hold_and_release, args=(tmp_path, log, n, tasks, rounds)) for log in logs]
    for process in processes:
        process.start()
    wait_until(lambda: logs[0].exists() and len(logs[0].read_text().splitlines()) > tasks)
    killed = time.monotonic()
    processes[0].kill()
    processes[0].join()
    released = time.monotonic()
    for process in processes[1:]:
        process.join(HANG_S)
        assert process.exitcode == 0
    events = [event for log in logs for event in events_of(log)]
    events += [(killed, -1)] * sum(change for _, change in events_of(logs[0]))
    events.sort()
    running = list(itertools.accumulate(change for _, change in events))
    assert max(running) <= n and running[-1] == 0
    later = [count for (moment, _), count in zip(events, running, strict=True) if moment > released]
    assert max(later) == n, "the killed process's slots are used again"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The slot files that were opened."""
    files: list[str] = []

    def open_and_note(self: Slots, number: int) -> int:
        files.append(f"slot-{number}")
        return own(self, number)

    own = Slots._open
    monkeypatch.setattr(Slots, "_open", open_and_note)
    yield files


async def test_taking_all_slots_opens_each_once(tmp_path: Path, opened: list[str]) -> None:
    taken, done = 0, asyncio.Event()

    async def one() -> None:
        nonlocal taken
        async with slot(tmp_path, 300):
            taken += 1
            await done.wait()

    holders = [asyncio.create_task(one()) for _ in range(300)]
    async with asyncio.timeout(HANG_S):
        while taken < 300:  # noqa: ASYNC110 - an event per taker would be another test
            await asyncio.sleep(0)
    done.set()
    await asyncio.gather(*holders)
    assert len(opened) == len(set(opened)) == 300


async def test_poll_tries_few_of_many_slots(tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_MOST_S", 60.0)  # or a busy machine ends a poll earlier
    others, ours = Slots(tmp_path, 100), Slots(tmp_path, 100)
    async with AsyncExitStack() as held:
        numbers = [await held.enter_async_context(others.hold()) for _ in range(99)]
        (free,) = set(range(100)) - set(numbers)
        opened.clear()
        polls = 0
        while (found := ours._poll()) is None:
            polls += 1
        os.close(found[1])
    assert found[0] == free and polls == (len(opened) - 1) // harness._TRIES < 100 / harness._TRIES


async def test_own_slots_are_not_tried(tmp_path: Path, opened: list[str]) -> None:
    slots = Slots(tmp_path, 100)
    async with AsyncExitStack() as held:
        holds = [slots.hold() for _ in range(100)]
        numbers = [await hold.__aenter__() for hold in holds]
        for hold in holds[:50] + holds[51:]:
            held.push_async_exit(hold)
        await holds[50].__aexit__(None, None, None)
        opened.clear()
        assert await held.enter_async_context(slots.hold()) == numbers[50]
    assert opened == [f"slot-{numbers[50]}"]


async def test_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(file: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(NoLocksError, match=r"\.slots: this file system has no file locks; .* not n_parallel_envs"):
        async with slot(tmp_path, 1):
            pass
