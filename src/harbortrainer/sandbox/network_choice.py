"""The network of a local sandbox whose task has `network_mode = "public"`.

`environment_kwargs.network` selects it:
- `auto`, the default: a network of its own if slirp4netns works here, else this machine's.
- `own`: a network of its own, or an error.
- `host`: this machine's. Concurrent trials then share its ports and reach its localhost.
"""

import asyncio
import functools
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, get_args

from harbortrainer.sandbox.inside.slirp_network import RESOLVER

PROGRAM = "slirp4netns"
type NetworkSetting = Literal["auto", "own", "host"]
INSTALL = f"install {PROGRAM} (Debian: sudo apt-get install --no-install-recommends {PROGRAM})"

_RESOLVERS = Path("/etc/resolv.conf")
_DEVICE = Path("/dev/net/tun")
_SOURCE = Path(__file__).resolve().parents[2]
_CODE = (
    "import sys; sys.path.insert(0, {source!r}); "
    "from harbortrainer.sandbox.inside import slirp_network; slirp_network.main({program!r})"
)
_TIMEOUT_S = 30.0
_TRIES = 3
_EXECUTOR = ThreadPoolExecutor(max_workers=1, thread_name_prefix=PROGRAM)
"""One thread, so that sandboxes that start together test slirp4netns once and block no other thread pool."""


def slirp4netns_path(setting: object) -> str:
    """Return the path of slirp4netns for a sandbox's own network; "" if the sandbox uses this machine's.

    Raises:
        ValueError: The setting is unknown, or it is `own` and slirp4netns does not work here.
    """
    settings = get_args(NetworkSetting.__value__)
    if setting not in settings:
        raise ValueError(f"network = {setting!r}: use one of {', '.join(settings)}")
    if setting == "host":
        return ""
    problem = slirp_problem()
    if problem and setting == "own":
        raise ValueError(f"network = 'own' is not possible: {problem}. To fix it: {remedy()}")
    return "" if problem else shutil.which(PROGRAM) or ""


async def slirp4netns_path_async(setting: object) -> str:
    """Call `slirp4netns_path` in a thread."""
    return await asyncio.get_running_loop().run_in_executor(_EXECUTOR, slirp4netns_path, setting)


def is_host_network(setting: object) -> bool:
    """Whether sandboxes of public tasks use this machine's network."""
    return setting == "host" or (setting == "auto" and bool(slirp_problem()))


def resolvers(slirp4netns_path: str) -> dict[str, str]:
    """Return path and content of resolv.conf: this machine's, with slirp4netns as name server if it is used."""
    try:
        lines = _RESOLVERS.read_text().splitlines()
    except OSError:
        lines = []
    if slirp4netns_path:
        lines = [f"nameserver {RESOLVER}", *(line for line in lines if not line.startswith("nameserver"))]
    return {str(_RESOLVERS): "\n".join([*lines, ""])}


def remedy() -> str:
    """Return what to do if sandboxes cannot have a network of their own."""
    return INSTALL if shutil.which(PROGRAM) is None else f"let this user open {_DEVICE} and create namespaces"


@functools.cache
def slirp_problem() -> str:
    """Test slirp4netns; return why sandboxes cannot have a network of their own, or "".

    The result is cached for the process, and `auto` would then share the machine's ports. So a failure is retried.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        return f"{PROGRAM} is not installed"
    problem = ""
    for _ in range(_TRIES):
        if not (problem := _start_failure(program)):
            break
    return problem


def _start_failure(program: str) -> str:
    """Start slirp4netns once; return why it failed, or ""."""
    command = [sys.executable, "-I", "-S", "-c", _CODE.format(source=str(_SOURCE), program=program)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{PROGRAM} did not start within {_TIMEOUT_S:.0f} s"
    return done.stderr.strip().rpartition("\n")[2] or f"{PROGRAM} failed" if done.returncode else ""
