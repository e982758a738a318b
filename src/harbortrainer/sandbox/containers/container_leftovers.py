"""The end of what an agent left running in a container.

It is brought about from a second container of the same image, which sees the first one's processes and has room of its
own: where the first is full nothing could be started inside, and what became of the shell there does not matter. All
are stopped at once before any is killed, so that none forks away.
Invariant: what the container's own command started stays (its session is 1).
"""

import os

from harbortrainer.runs.label import RUN_LABEL, RUN_VARIABLE
from harbortrainer.sandbox.docker_examination import containers, docker

_SECONDS = 120.0
# Neither those of the container's own command (session 1) nor this one's. A name of a process can hold anything.
_KILL = (
    "kill -STOP -1; for i in {1..50}; do n=0; for d in /proc/[0-9]*; do s=; IFS= read -r -d '' s < $d/stat; "
    "[[ $s ]] || continue; set -- ${s##*) }; "
    "[[ $1 == [ZX] || $4 == 1 || $4 == $$ ]] || { kill -9 ${d#/proc/} && n=1; }; done 2>/dev/null; "
    "[[ $n == 0 ]] && break; done; kill -CONT -1; true"
)


async def kill_leftovers(label: str) -> None:
    """Kill what is in the labelled container and does not belong to its own command."""
    for container in await containers(label):
        image = (await docker("inspect", "--format", "{{.Image}}", container)).out.strip()
        run = f"{RUN_LABEL}={os.environ.get(RUN_VARIABLE, 'none')}"
        beside = ("--rm", "--network", "none", "--label", run, "--pid", f"container:{container}", "-u", "0")
        said = await docker("run", *beside, "--entrypoint", "bash", image, "-c", _KILL, seconds=_SECONDS)
        if said.code != 0:  # not every runtime lets containers share their processes
            await docker("exec", "-u", "0", container, "bash", "-c", _KILL)
