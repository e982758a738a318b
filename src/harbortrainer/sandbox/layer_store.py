"""Store of layers and images on the disk: folders, each named by a hash of its inputs.

Invariants:
- A folder under its key is complete. It is built beside the key under a lock, then renamed. So two processes never
  build the same one at once, and a killed build leaves nothing that is used.
- A folder in use is not removed until its user calls `release` or ends, however it ends.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

from harbortrainer.runs.locks import POLL_S, file_lock, try_lock


def default_folder() -> Path:
    """Return `$XDG_CACHE_HOME/harbortrainer/sandbox`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "harbortrainer" / "sandbox"


class Store:
    """The layers of root or of an ordinary user, kept apart because the kernel marks them differently."""

    def __init__(self, folder: Path | None = None) -> None:
        self.flavour = "root" if os.geteuid() == 0 else "user"
        self.base = (folder or default_folder()).expanduser().resolve()
        self.own = self.base / self.flavour
        self.grew = False
        """Whether this object has added a folder."""
        self._held: list[IO[str]] = []

    async def folder(
        self,
        kind: str,
        key: str,
        build: Callable[[Path], Awaitable[None]],
        *,
        is_intact: Callable[[Path], bool] = lambda folder: True,
    ) -> Path:
        """Return the folder of a key and mark it as in use; `build` fills a new one. Waits while another builds it.

        Args:
            is_intact: Whether an existing folder is still usable. If not, it is built again.
        """
        path = self.own / kind / key
        await self._hold(path)
        if not (path.is_dir() and is_intact(path)):
            async with file_lock(path.with_name(f".{key}.lock")):
                if not (path.is_dir() and is_intact(path)):
                    shutil.rmtree(path, ignore_errors=True)
                    await self._fill(path, build)
        os.utime(path)
        return path

    def release(self) -> None:
        """Release all folders that this object has returned."""
        while self._held:
            self._held.pop().close()

    @asynccontextmanager
    async def unused(self, kind: str, key: str) -> AsyncGenerator[bool]:
        """Yield whether a folder is unused; while it is, no one else gets it before the block ends."""
        path = self.own / kind / key
        with _use_file(path).open("a") as file:
            yield try_lock(file)

    def clear_unfinished(self) -> None:
        """Remove the remains of killed builds."""
        for left in self.own.glob("*/.*.part"):
            key = left.name.split(".")[1]
            with left.with_name(f".{key}.lock").open("a") as file:
                if try_lock(file):
                    shutil.rmtree(left, ignore_errors=True)

    def has_unfinished(self) -> bool:
        """Whether a build has not finished."""
        return any(self.own.glob("*/.*.part"))

    async def _hold(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _use_file(path).open("a")
        self._held.append(file)
        while True:
            if try_lock(file, shared=True):
                return
            await asyncio.sleep(POLL_S)  # it is being removed

    async def _fill(self, path: Path, build: Callable[[Path], Awaitable[None]]) -> None:
        scratch = _scratch(path)
        try:
            await build(scratch)
            shutil.rmtree(scratch / "work", ignore_errors=True)
            os.rename(scratch, path)  # noqa: PTH104
            self.grew = True
        except BaseException:  # a cancelled build leaves nothing either
            shutil.rmtree(scratch, ignore_errors=True)
            raise


def _use_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.use")


def _scratch(path: Path) -> Path:
    """Create an empty folder beside `path`, whose lock is held, and remove the remains of its killed builds."""
    for left in path.parent.glob(f".{path.name}.*.part"):
        shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
    scratch.chmod(0o755)
    return scratch
