"""`n_parallel_envs` caps concurrent trials over all processes."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from patience import HANG_S

from harbortrainer.environment.harness import slot

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
