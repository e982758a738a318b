"""Where layers are kept between runs: a folder of folders, each named by the hash of what it was made from.

Invariant: a folder that exists under its key is complete. It is built beside it under a lock and renamed, so that two
processes never build the same one at once and a killed build leaves nothing that is used.
"""

import asyncio
import fcntl
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

_POLL_S = 0.05


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/harbortrainer/sandbox`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "harbortrainer" / "sandbox"


class Store:
    """The layers of one user. Root's and an ordinary user's are apart: the kernel marks them differently."""

    def __init__(self, folder: Path | None = None) -> None:
        self.flavour = "root" if os.geteuid() == 0 else "user"
        self.base = (folder or default_folder()).expanduser().resolve()
        self._folder = self.base / self.flavour

    async def folder(self, kind: str, key: str, build: Callable[[Path], Awaitable[None]]) -> Path:
        """The folder of that key; `build` fills an empty one when it is not there yet. Waits while another builds."""
        path = self._folder / kind / key
        if not _is_there(path):
            async with _locked(path.with_name(f".{key}.lock")):
                if not _is_there(path):
                    await self._fill(path, build)
        return path

    async def _fill(self, path: Path, build: Callable[[Path], Awaitable[None]]) -> None:
        scratch = _scratch(path)
        try:
            await build(scratch)
            shutil.rmtree(scratch / "work", ignore_errors=True)
            os.rename(scratch, path)  # noqa: PTH104
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise


def _scratch(path: Path) -> Path:
    """An empty folder beside `path`, whose lock we hold; what a killed build of it left goes."""
    for left in path.parent.glob(f".{path.name}.*.part"):
        shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
    scratch.chmod(0o755)
    return scratch


def _is_there(path: Path) -> bool:
    return path.is_dir()


@asynccontextmanager
async def _locked(path: Path) -> AsyncGenerator[None]:
    """Hold a lock file. Polled, not waited for, since a waiting thread each would starve the event loop's pool."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_POLL_S)
        yield
