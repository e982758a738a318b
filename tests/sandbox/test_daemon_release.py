"""A daemon that waits for a pipe in a container is released; other files there are not opened."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import HANG_S

from harbortrainer.sandbox.containers import daemon_release

pytestmark = pytest.mark.process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The root of a container with a link to a pipe as /etc/passwd."""
    (tmp_path / "etc").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "etc" / "passwd").symlink_to("/pipe")  # absolute: below the container's root
    (tmp_path / "etc" / "group").write_text("root:x:0:\n")
    return tmp_path


@pytest.fixture
def inside(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process whose root is the folder."""
    script = f"import os, time; os.chroot({str(folder)!r}); print('in', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "in\n"
    yield process
    process.kill()
    process.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may open the root of another user's process")
async def test_reader_of_a_pipe_is_released(folder: Path, inside: subprocess.Popen[str]):
    before = (folder / "etc" / "group").stat()
    releasing = asyncio.create_task(daemon_release.keep_released(inside.pid))
    async with asyncio.timeout(HANG_S):
        assert await asyncio.to_thread((folder / "pipe").read_text) == ""
    releasing.cancel()
    assert (folder / "etc" / "group").stat() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may open the root of another user's process")
async def test_release_ends_with_the_container(inside: subprocess.Popen[str]):
    inside.kill()
    inside.wait()
    await daemon_release.keep_released(inside.pid)
