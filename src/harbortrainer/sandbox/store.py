"""Where layers are kept between runs: a folder of folders, each named by the hash of what it was made from.

Invariant: a folder that exists under its key is complete. It is built beside it under a lock and renamed, so that two
processes never build the same one at once and a killed build leaves nothing that is used.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


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

    def folder(self, kind: str, key: str, build: Callable[[Path], None]) -> Path:
        """The folder of that key; `build` fills an empty one when it is not there yet. Blocks while another builds."""
        path = self._folder / kind / key
        if path.is_dir():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock(path):
            if path.is_dir():
                return path
            scratch = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=path.parent))
            try:
                scratch.chmod(0o755)
                build(scratch)
                scratch.rename(path)
            except BaseException:
                shutil.rmtree(scratch, ignore_errors=True)
                raise
        return path

    def make_opaque(self, folder: Path) -> None:
        """Mark a folder of a layer so that nothing of the layers below shows through it."""
        prefix = "trusted" if self.flavour == "root" else "user"
        os.setxattr(folder, f"{prefix}.overlay.opaque", b"y")

    @contextmanager
    def _lock(self, path: Path) -> Iterator[None]:
        with path.with_name(f".{path.name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
