"""Post-mortem and changed files of a local sandbox.

Only processes in a sandbox can change its files or exhaust its limits, so either is a sign that the agent broke it. Its
init process cannot be killed from inside. If it has ended, the agent is to blame only if the kernel killed it at the
sandbox's memory limit. A helper or init process that was killed from outside leaves no sign.
"""

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from harbortrainer.sandbox.errors_and_changes import SandboxChanges, SandboxError
from harbortrainer.sandbox.inside.messages import ERROR_PREFIX, NOT_EXECUTABLE, NOT_FOUND, Command
from harbortrainer.sandbox.post_mortem import PROBE, PROBE_TIMEOUT_S, SHELLS, PostMortem, probe_problem
from harbortrainer.sandbox.running_sandbox import CommandResult, RunningSandbox

_MAX_FILE_B = 64 << 20


async def changes(sandbox: RunningSandbox) -> SandboxChanges | None:
    """Return the changes since the agent started; None if the sandbox has ended."""
    try:
        found = await sandbox.changes()
    except SandboxError:
        return None
    return None if found is None else SandboxChanges.from_message(found)


@dataclass(frozen=True)
class FailedStart:
    """A command of the verifier that the sandbox could not start."""

    command: Command
    reason: str


def failed_start(command: Command, done: CommandResult) -> FailedStart | None:
    """Return why a command could not be started; None if it was."""
    if done.code not in (NOT_FOUND, NOT_EXECUTABLE) or not done.stderr.startswith(ERROR_PREFIX):
        return None
    reason = done.stderr.removeprefix(ERROR_PREFIX).decode(errors="replace").strip()
    return FailedStart(command, f"the verifier could not be started: {reason}")


async def examine(
    found: PostMortem,
    sandbox: RunningSandbox,
    fresh: Callable[[], Awaitable[RunningSandbox]],
    failed: FailedStart | None = None,
) -> None:
    """Record what is wrong in a sandbox, and whether a fresh one of the same kind works.

    Args:
        found: The post-mortem to add to.
        sandbox: The sandbox to examine.
        fresh: Starts a sandbox of the same kind.
        failed: The first command of the verifier, if it could not be started. A sign if a fresh sandbox starts it.
    """
    shells: dict[str, bytes | None] = {}
    wrong = ""
    if not sandbox.ended:
        wrong = await _probe(sandbox)
        shells = await _read_shells(sandbox)
    # After the probe, which the sandbox answers after it has reported what a killed command waited for.
    found.signs += [note.text for note in sandbox.notes if note.is_evidence]
    found.signs += [wrong] if wrong else []
    try:
        other = await fresh()
    except SandboxError as error:
        found.check(False, f"a fresh sandbox does not start: {error}")
        return
    try:
        if not sandbox.ended:
            found.signs += _differences(shells, await _read_shells(other))
        if failed is not None and await _starts(other, failed.command):
            found.signs.append(failed.reason)
        wrong = await _probe(other)
        found.check(not wrong, (wrong and f"in a fresh sandbox {wrong}") or "a fresh sandbox starts and answers")
    finally:
        await other.stop()


async def _probe(sandbox: RunningSandbox) -> str:
    """Describe what is wrong with the sandbox's shell or folders; "" for nothing."""
    try:
        done = await sandbox.run(Command(["/bin/bash", "-c", PROBE]), seconds=PROBE_TIMEOUT_S)
    except TimeoutError:
        return f"the shell did not answer within {PROBE_TIMEOUT_S:.0f} s"
    except SandboxError as error:
        return f"the shell cannot be started: {error}"
    return probe_problem(done.code, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


async def _starts(sandbox: RunningSandbox, command: Command) -> bool:
    """Whether a shell starts as this command does: as its user, in its folder, with its variables."""
    try:
        done = await sandbox.run(replace(command, argv=["/bin/bash", "-c", "true"]), seconds=PROBE_TIMEOUT_S)
    except (SandboxError, TimeoutError):
        return False
    return done.code == 0


async def _read_shells(sandbox: RunningSandbox) -> dict[str, bytes | None]:
    """Return the content of each shell's file; None for a missing one."""
    return {path: await read(sandbox, path) for path in SHELLS}


async def read(sandbox: RunningSandbox, path: str) -> bytes | None:
    """Return the content of a file in a sandbox; None if it cannot be read."""
    with os.fdopen(os.memfd_create("file", os.MFD_CLOEXEC), "r+b") as content:
        command = Command(["send", path, str(_MAX_FILE_B)], call=True)
        try:
            done = await sandbox.run(command, stdout=content.fileno(), seconds=PROBE_TIMEOUT_S)
        except (SandboxError, TimeoutError):
            return None
        content.seek(0)
        return content.read() if done.code == 0 else None


def _differences(here: dict[str, bytes | None], fresh: dict[str, bytes | None]) -> list[str]:
    changed = [path for path in here if here[path] != fresh.get(path)]
    return [f"{path} was {'removed' if here[path] is None else 'replaced'}" for path in changed]
