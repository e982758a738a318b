"""The post-mortem of a local sandbox: nothing but what runs in it can change its files or use up its limits.

Its first process cannot be killed from inside. When it has ended, that is the agent's doing only if the kernel ended it
at the sandbox's own limit of memory; a helper or a first process that was killed from outside leaves no sign.
"""

import os
from collections.abc import Awaitable, Callable
from functools import partial

from harbortrainer.sandbox.guest import Guest
from harbortrainer.sandbox.inside.messages import Command
from harbortrainer.sandbox.post_mortem import ASK, ASK_S, SHELLS, PostMortem, answered
from harbortrainer.sandbox.sandbox_errors import SandboxError
from harbortrainer.sandbox.uploaded_tests import Uploads, changed

_MOST_BYTES = 64 << 20


async def examine(found: PostMortem, guest: Guest, uploaded: Uploads, fresh: Callable[[], Awaitable[Guest]]) -> None:
    """Note what is wrong in a sandbox, and whether a fresh one of the same kind works.

    Args:
        found: Where it is noted.
        guest: The sandbox.
        uploaded: What was put there for grading.
        fresh: Starts another.
    """
    found.signs += [note.text for note in guest.notes if note.sign]
    shells: dict[str, bytes | None] = {}
    if not guest.ended:
        if wrong := await _ask(guest):
            found.signs.append(wrong)
        shells = await _shells(guest)
        found.signs += await changed(uploaded, partial(read, guest))
    try:
        other = await fresh()
    except SandboxError as error:
        found.check(False, f"a fresh sandbox does not start: {error}")
        return
    try:
        if not guest.ended:
            found.signs += _differences(shells, await _shells(other))
        wrong = await _ask(other)
        found.check(not wrong, (wrong and f"in a fresh sandbox {wrong}") or "a fresh sandbox starts and answers")
    finally:
        await other.stop()


async def _ask(guest: Guest) -> str:
    """What is wrong with the sandbox's shell and folders; "" when nothing is."""
    try:
        done = await guest.run(Command(["/bin/bash", "-c", ASK]), seconds=ASK_S)
    except TimeoutError:
        return f"the shell did not answer within {ASK_S:.0f} s"
    except SandboxError as error:
        return f"the shell cannot be asked: {error}"
    return answered(done.code, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


async def _shells(guest: Guest) -> dict[str, bytes | None]:
    """The shells' files; None for one that is not there."""
    return {path: await read(guest, path) for path in SHELLS}


async def read(guest: Guest, path: str) -> bytes | None:
    """A file in a sandbox; None when it cannot be read."""
    with os.fdopen(os.memfd_create("file", os.MFD_CLOEXEC), "r+b") as content:
        command = Command(["send", path, str(_MOST_BYTES)], call=True)
        try:
            done = await guest.run(command, stdout=content.fileno(), seconds=ASK_S)
        except (SandboxError, TimeoutError):
            return None
        content.seek(0)
        return content.read() if done.code == 0 else None


def _differences(here: dict[str, bytes | None], fresh: dict[str, bytes | None]) -> list[str]:
    changed = [path for path in here if here[path] != fresh.get(path)]
    return [f"{path} was {'removed' if here[path] is None else 'replaced'}" for path in changed]
