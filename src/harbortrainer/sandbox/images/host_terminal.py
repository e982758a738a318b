"""tmux for images that have none: the host's, with its own loader and libraries, as a layer below the image's.

Terminus-2 works in tmux. Where an image has it, the image's is used. Where not, Harbor installs it over the network; a
sandbox without one finds this. Invariant: nothing of it is seen by other programs but the file `/usr/bin/tmux` and the
folder `FOLDER`; the variable that tmux needs to find its locale is taken from what runs in its windows.
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
_SETTINGS = "set-environment -gr LOCPATH\nsource-file -q /etc/tmux.conf\nsource-file -q ~/.tmux.conf\n"


async def layer(store: Store) -> str | None:
    """The folder of the layer; None where the host has no tmux that runs away from home."""
    found = await asyncio.to_thread(_host_tmux)
    if found is None:
        return None

    async def fill(scratch: Path) -> None:
        await asyncio.to_thread(_fill, scratch / "upper", found)

    return str(await store.folder("terminal", found.key, fill) / "upper")


@dataclass(frozen=True)
class _Tmux:
    program: Path
    loader: Path
    libraries: tuple[Path, ...]

    @property
    def key(self) -> str:
        info = self.program.stat()
        marks = f"{_SCRIPT}\0{_SETTINGS}\0{self}\0{info.st_size}\0{info.st_mtime_ns}"
        return hashlib.sha256(marks.encode()).hexdigest()[:32]


@cache
def _host_tmux() -> _Tmux | None:
    """The host's tmux; None when there is none, or none that is a dynamic program of glibc's."""
    program = shutil.which("tmux", path="/usr/bin:/usr/local/bin:/bin")
    if program is None:
        return None
    done = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
    libraries = tuple(Path(path) for path in _LIBRARY.findall(done.stdout))
    loaders = [path for path in libraries if path.name.startswith("ld-linux")]
    return _Tmux(Path(program), loaders[0], libraries) if loaders else None


def _fill(top: Path, tmux: _Tmux) -> None:
    home = top / FOLDER.lstrip("/")
    (home / "lib").mkdir(parents=True)
    for library in tmux.libraries:
        shutil.copy(library, home / "lib" / library.name)
    shutil.move(home / "lib" / tmux.loader.name, home / tmux.loader.name)
    shutil.copy(tmux.program, home / "tmux")
    for locale in _LOCALES:
        if Path(locale).is_dir():
            shutil.copytree(locale, home / "locale" / Path(locale).name)
    (home / "tmux.conf").write_text(_SETTINGS)
    script = top / "usr/bin/tmux"
    script.parent.mkdir(parents=True)
    script.write_text(_SCRIPT.format(folder=FOLDER, loader=tmux.loader.name))
    for path in (script, home / tmux.loader.name, home / "tmux"):
        path.chmod(0o755)
    for folder in (top, top / "usr", top / "usr/bin", top / "usr/lib"):
        folder.chmod(0o755)
