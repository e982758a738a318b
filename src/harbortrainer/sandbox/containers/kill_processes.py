"""Kill the processes that an agent left running in a container.

The kill runs in a second container of the same image that shares the first one's process namespace. It therefore works
even if the first has exhausted its limits or its shell was replaced. All processes are stopped before any is killed, so
that none can fork in between.

Invariant: processes of the container's own command (session 1) are not killed.
"""

import os

from harbortrainer.runs.label import RUN_LABEL, RUN_VARIABLE
from harbortrainer.sandbox.docker_examination import containers, docker

_SECONDS = 120.0
# Spares the container's own command (session 1) and this script. A process name in `stat` can hold any character.
_KILL = (
    "kill -STOP -1; for i in {1..50}; do n=0; for d in /proc/[0-9]*; do s=; IFS= read -r -d '' s < $d/stat; "
    "[[ $s ]] || continue; set -- ${s##*) }; "
    "[[ $1 == [ZX] || $4 == 1 || $4 == $$ ]] || { kill -9 ${d#/proc/} && n=1; }; done 2>/dev/null; "
    "[[ $n == 0 ]] && break; done; kill -CONT -1; true"
)


async def kill_leftovers(label: str) -> None:
    """Kill all processes in the labelled container that do not belong to its own command."""
    for container in await containers(label):
        image = (await docker("inspect", "--format", "{{.Image}}", container)).out.strip()
        run = f"{RUN_LABEL}={os.environ.get(RUN_VARIABLE, 'none')}"
        options = ("--rm", "--network", "none", "--label", run, "--pid", f"container:{container}", "-u", "0")
        result = await docker("run", *options, "--entrypoint", "bash", image, "-c", _KILL, seconds=_SECONDS)
        if result.code != 0:  # not every runtime can share a process namespace
            await docker("exec", "-u", "0", container, "bash", "-c", _KILL)
