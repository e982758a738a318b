"""Whose network a local sandbox with a public one has: one of its own with a way out, or this machine's.

`environment_kwargs.network` says: `auto` (the default) takes its own where slirp4netns works, and the machine's where
it does not; `own` insists; `host` takes the machine's. On the machine's network trials at once share its ports, and
what runs in a sandbox reaches the machine's localhost.
"""

import asyncio
import functools
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, get_args

from harbortrainer.sandbox.inside.way_out import RESOLVER

PROGRAM = "slirp4netns"
type NetworkSetting = Literal["auto", "own", "host"]
INSTALL = f"install {PROGRAM} (Debian: sudo apt-get install --no-install-recommends {PROGRAM})"

_RESOLVERS = Path("/etc/resolv.conf")
_DEVICE = Path("/dev/net/tun")
_SOURCE = Path(__file__).resolve().parents[2]
_CODE = (
    "import sys; sys.path.insert(0, {source!r}); "
    "from harbortrainer.sandbox.inside import way_out; way_out.main({program!r})"
)
_SECONDS = 30.0
_TRIES = 3
_ASKING = ThreadPoolExecutor(max_workers=1, thread_name_prefix=PROGRAM)
"""One thread: sandboxes that start at once try it once, and those that wait take no thread that others need."""


def way_out(setting: object) -> str:
    """The program that carries what leaves a sandbox's own network; "" where the sandbox has the machine's.

    Raises:
        ValueError: The setting is none of the three, or insists on what does not work here.
    """
    settings = get_args(NetworkSetting.__value__)
    if setting not in settings:
        raise ValueError(f"network = {setting!r}: use one of {', '.join(settings)}")
    if setting == "host":
        return ""
    why = missing_for_own()
    if why and setting == "own":
        raise ValueError(f"network = 'own', and {why}: {remedy()}")
    return "" if why else shutil.which(PROGRAM) or ""


async def found_way_out(setting: object) -> str:
    """The same as `way_out`, and the event loop goes on while it is tried."""
    return await asyncio.get_running_loop().run_in_executor(_ASKING, way_out, setting)


def is_machines(setting: object) -> bool:
    """Whether sandboxes have this machine's network, where the task's is public."""
    return setting == "host" or (setting == "auto" and bool(missing_for_own()))


def resolvers(way_out: str) -> dict[str, str]:
    """The file that says who is asked for names: this machine's settings, by the way out if there is one."""
    try:
        lines = _RESOLVERS.read_text().splitlines()
    except OSError:
        lines = []
    if way_out:
        lines = [f"nameserver {RESOLVER}", *(line for line in lines if not line.startswith("nameserver"))]
    return {str(_RESOLVERS): "\n".join([*lines, ""])}


def remedy() -> str:
    """What to do where a sandbox cannot have a network of its own."""
    return INSTALL if shutil.which(PROGRAM) is None else f"let this user open {_DEVICE}, and make namespaces"


@functools.cache
def missing_for_own() -> str:
    """Why a sandbox cannot have a network of its own here, in words, found out by trying; "" where it can.

    It holds for the whole process, all of whose trials would share the machine's ports: one failure is not believed.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        return f"{PROGRAM} is not here"
    why = ""
    for _ in range(_TRIES):
        if not (why := _failure_of(program)):
            break
    return why


def _failure_of(program: str) -> str:
    """Why it made no way out just now; "" where it did."""
    command = [sys.executable, "-I", "-S", "-c", _CODE.format(source=str(_SOURCE), program=program)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"{PROGRAM} does not answer here"
    return done.stderr.strip().rpartition("\n")[2] or f"{PROGRAM} failed" if done.returncode else ""
