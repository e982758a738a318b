"""tmux for images that lack it: the host's tmux with its loader and libraries, as a layer below the image's.

Terminus-2 needs tmux. An image's own tmux takes precedence. Harbor would install a missing one over the network, which
a sandbox without a network cannot do.

Invariant: other programs see only `/usr/bin/tmux` and the folder `FOLDER`. The variable for tmux's locale is not
passed to programs in its windows.
"""

import asyncio
import hashlib
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from harbortrainer.sandbox.layer_store import Store

FOLDER = "/usr/lib/harbortrainer-tmux"
_LOCALES = ("/usr/lib/locale/C.utf8", "/usr/lib/locale/C.UTF-8")
_LIBRARY = re.compile(r"^\s*(?:\S+ => )?(/\S+) \(0x", re.MULTILINE)
_SCRIPT = """\
#!/bin/sh
export LOCPATH={folder}/locale
exec {folder}/{loader} --library-path {folder}/lib --argv0 tmux {folder}/tmux -f {folder}/tmux.conf "$@"
"""
_TMUX_CONF = "set-environment -gr LOCPATH\nsource-file -q /etc/tmux.conf\nsource-file -q ~/.tmux.conf\n"


async def layer(store: Store) -> str | None:
    """Return the folder of the layer; None if the host has no tmux that can be copied."""
    found = await asyncio.to_thread(_host_tmux)
    if found is None:
        return None

    async def fill(scratch: Path) -> None:
        await asyncio.to_thread(_build_layer, scratch / "upper", found)

    return str(await store.folder("terminal", found.key, fill) / "upper")


@dataclass(frozen=True)
class _Tmux:
    program: Path
    loader: Path
    libraries: tuple[Path, ...]

    @property
    def key(self) -> str:
        info = self.program.stat()
        marks = f"{_SCRIPT}\0{_TMUX_CONF}\0{self}\0{info.st_size}\0{info.st_mtime_ns}"
        return hashlib.sha256(marks.encode()).hexdigest()[:32]


@cache
def _host_tmux() -> _Tmux | None:
    """Find the host's tmux; None if it is missing or not dynamically linked to glibc."""
    program = shutil.which("tmux", path="/usr/bin:/usr/local/bin:/bin")
    if program is None:
        return None
    result = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
    libraries = tuple(Path(path) for path in _LIBRARY.findall(result.stdout))
    loaders = [path for path in libraries if path.name.startswith("ld-linux")]
    return _Tmux(Path(program), loaders[0], libraries) if loaders else None


def _build_layer(top: Path, tmux: _Tmux) -> None:
    home = top / FOLDER.lstrip("/")
    (home / "lib").mkdir(parents=True)
    for library in tmux.libraries:
        shutil.copy(library, home / "lib" / library.name)
    shutil.move(home / "lib" / tmux.loader.name, home / tmux.loader.name)
    shutil.copy(tmux.program, home / "tmux")
    for locale in _LOCALES:
        if Path(locale).is_dir():
            shutil.copytree(locale, home / "locale" / Path(locale).name)
    (home / "tmux.conf").write_text(_TMUX_CONF)
    script = top / "usr/bin/tmux"
    script.parent.mkdir(parents=True)
    script.write_text(_SCRIPT.format(folder=FOLDER, loader=tmux.loader.name))
    for path in (script, home / tmux.loader.name, home / "tmux"):
        path.chmod(0o755)
    for folder in (top, top / "usr", top / "usr/bin", top / "usr/lib"):
        folder.chmod(0o755)
