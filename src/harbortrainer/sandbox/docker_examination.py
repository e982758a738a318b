"""Post-mortem of a container: what is wrong inside, and whether the daemon is sound.

If a container exited and the daemon logged no kill or stop from outside, it was ended from inside. A container that
still runs gets the same probe as a fresh container of its image.
"""

import asyncio
import json
import os
import re
import shlex
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from tempfile import SpooledTemporaryFile
from typing import IO

from harbortrainer.runs.label import RUN_LABEL, RUN_VARIABLE
from harbortrainer.sandbox.containers.container_exit import DIE_ACTION, EXIT_EVENT_WAIT_S, EXTERNAL_ACTIONS, ExitEvents
from harbortrainer.sandbox.containers.usage import exhausted_limit
from harbortrainer.sandbox.inside.processes import read
from harbortrainer.sandbox.post_mortem import PROBE, PROBE_TIMEOUT_S, SHELLS, PostMortem, probe_problem
from harbortrainer.sandbox.uploaded_tests import Uploads, is_intact, upload_size

_START_S = 60.0
_ARCHIVE_SLACK_B, _SPOOL_MAX_B = 64 << 20, 8 << 20
_FULL_B = 64 << 10
# Free blocks, block size, free inodes and all inodes of the filesystems that a verifier writes to.
_STATFS = "stat -f -c '%a %S %d %c %n' / /tmp /dev/shm"
_STATFS_LINE = re.compile(r"^(\d{1,18}) (\d{1,18}) (\d{1,18}) (\d{1,18}) (/\S*)$", re.ASCII | re.MULTILINE)


@dataclass(frozen=True)
class DockerOutput:
    """Exit code and output of a docker command."""

    code: int
    raw: bytes
    err: str

    @property
    def out(self) -> str:
        """Standard output, decoded."""
        return self.raw.decode(errors="replace")


async def docker(*arguments: str, seconds: float = PROBE_TIMEOUT_S) -> DockerOutput:
    """Run a docker command. The code is -1 if it does not end within `seconds`."""
    process = await asyncio.create_subprocess_exec(
        "docker",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), seconds)
    except TimeoutError:
        process.kill()
        await process.wait()
        return DockerOutput(-1, b"", f"docker {arguments[0]} did not end within {seconds:.0f} s")
    return DockerOutput(process.returncode or 0, out, err.decode(errors="replace"))


type CopyOut = Callable[[str, IO[bytes], int], Awaitable[bool]]
"""Archive a container's folder into a file; false if that fails or exceeds the given number of bytes."""


async def uploads_intact(label: str, target: str, uploaded: Uploads) -> bool:
    """Whether the labelled container's folder still holds the uploads unchanged. Starts no process inside."""
    for container in await containers(label):
        return await archive_intact(partial(_copy_out, container), target, uploaded)
    return True  # the container is gone; the next command reports that


async def archive_intact(copy_out: CopyOut, target: str, uploaded: Uploads) -> bool:
    """Whether a folder that `copy_out` archives still holds the uploads unchanged."""
    with SpooledTemporaryFile(_SPOOL_MAX_B) as archive:
        if not await copy_out(target, archive, upload_size(uploaded) + _ARCHIVE_SLACK_B):
            return False
        archive.seek(0)
        return await asyncio.to_thread(is_intact, archive, target, uploaded)


async def _copy_out(container: str, path: str, archive: IO[bytes], most: int) -> bool:
    process = await asyncio.create_subprocess_exec(
        *("docker", "cp", f"{container}:{path}", "-"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        while archive.tell() <= most and (chunk := await process.stdout.read(1 << 16)):
            archive.write(chunk)
        if archive.tell() > most:
            return False
        return await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def examine(found: PostMortem, label: str, events: ExitEvents | None, workdir: str | None = None) -> None:
    """Record what is wrong in the labelled container and, if something is, whether the daemon can start another.

    Args:
        found: The post-mortem to add to.
        label: The label of the trial's container.
        events: The daemon's events about the container's exit; None if nobody listened.
        workdir: The folder of the verifier's commands; None for the image's.
    """
    daemon = await docker("version", "--format", "{{.Server.Version}}")
    found.check(daemon.code == 0, f"the daemon answers ({daemon.out.strip() or daemon.err.strip()})")
    for container in await containers(label):
        inspected = await docker("inspect", container)
        if inspected.code == 0:
            (details,) = json.loads(inspected.out)
            if details["State"]["Running"]:
                await _examine_running(found, container, workdir)
                found.signs += await _exhausted_limits(container, label)
            else:
                await _examine_exit(found, container, details, events)
            if found.signs:
                await check_fresh_container(found, details["Image"], workdir)


async def _exhausted_limits(container: str, label: str) -> list[str]:
    """Describe the container's exhausted limits and full filesystems."""
    short = await exhausted_limit(label)
    result = await docker("exec", "-u", "0", container, "sh", "-c", _STATFS)
    return [*([short] if short else []), *full_filesystems(result.out)]


def full_filesystems(result: str) -> list[str]:
    """Describe the full filesystems in the output of `_STATFS`; other lines are ignored."""
    full = []
    for line in _STATFS_LINE.finditer(result):
        blocks, size, free, files = map(int, line.groups()[:4])
        if blocks * size < _FULL_B:
            full.append(f"{line[5]} was full")
        elif files and not free:
            full.append(f"{line[5]} was full of files")
    return full


async def containers(label: str) -> list[str]:
    """Return the ids of the labelled containers, running or not."""
    return (await docker("ps", "-aq", "--no-trunc", "--filter", f"label={label}")).out.split()


async def local_pid(label: str, details: dict | None) -> int:
    """Return the id of the labelled container's first process; 0 if it is not on this machine.

    Args:
        label: The label of the trial's container.
        details: The daemon's description of the container, if it is known.
    """
    found = [(details["Id"], str(details["State"]["Pid"]))] if details is not None else []
    for container in await containers(label) if details is None else []:
        found.append((container, (await docker("inspect", "--format", "{{.State.Pid}}", container)).out.strip()))
    return next((int(pid) for container, pid in found if pid.isdigit() and container in read(f"/proc/{pid}/cgroup")), 0)


async def details(label: str) -> dict:
    """Return the daemon's description of the labelled container; {} if there is none."""
    for container in await containers(label):
        inspected = await docker("inspect", container)
        if inspected.code == 0:
            return json.loads(inspected.out)[0]
    return {}


async def _examine_running(found: PostMortem, container: str, workdir: str | None) -> None:
    result = await docker("exec", "-u", "root", container, "bash", "-c", _probe(workdir))
    if wrong := probe_problem(result.code, result.out, result.err):
        found.signs.append(wrong)
    found.signs += await _changed_shells(container)


def _probe(workdir: str | None) -> str:
    return f"cd -P -- {shlex.quote(workdir)} || exit; {PROBE}" if workdir else PROBE


async def _examine_exit(found: PostMortem, container: str, details: dict, events: ExitEvents | None) -> None:
    state, limit = details["State"], details["HostConfig"]["Memory"]
    if state["OOMKilled"] and limit:
        found.signs.append(f"it reached its own memory limit ({limit >> 20} MB)")
    elif state["OOMKilled"]:
        found.check(False, "the machine's memory ran out")
    else:
        actions = await events.actions() if events is not None else set()
        if DIE_ACTION not in actions:
            actions = await _past_events(container, state["StartedAt"])
        if DIE_ACTION in actions and not actions & EXTERNAL_ACTIONS:
            when = state["FinishedAt"][:19]
            found.signs.append(f"it ended from inside with code {state['ExitCode']} at {when}: nobody stopped it")


async def _past_events(container: str, since: str) -> set[str]:
    """Return the event actions of a container up to one second from now, from the daemon's history.

    The daemon takes the end of the period in whole seconds.
    """
    until = str(int(time.time() + EXIT_EVENT_WAIT_S) + 1)
    arguments = ("--since", since, "--until", until, "--filter", f"container={container}", "--format", "{{.Action}}")
    result = await docker("events", *arguments)
    return {line.split(":")[0] for line in result.out.split("\n") if line}


async def _changed_shells(container: str) -> list[str]:
    result = await docker("diff", container)
    kinds = {"C": "replaced", "A": "replaced", "D": "removed"}
    changes = [line.split(" ", 1) for line in result.out.split("\n") if " " in line]
    return [f"{path} was {kinds.get(kind, 'changed')}" for kind, path in changes if path in SHELLS]


async def check_fresh_container(found: PostMortem, image: str, workdir: str | None = None) -> None:
    """Record whether the daemon can start a container of the image that passes the probe."""
    label = f"{RUN_LABEL}={os.environ.get(RUN_VARIABLE, 'none')}"
    arguments = ("--rm", "--network", "none", "--label", label, "-u", "root", "--entrypoint", "bash", image)
    result = await docker("run", *arguments, "-c", _probe(workdir), seconds=_START_S)
    wrong = probe_problem(result.code, result.out, result.err)
    found.check(not wrong, f"in a fresh container {wrong}" if wrong else "a fresh container starts and answers")
