"""Before grading, what the agent left where grades are read is gone, in every environment type.

In shared mode Harbor grades inside the agent's sandbox and clears nothing for a single-step task: an agent
that writes /logs/verifier/reward.json itself gets that reward. The folders are emptied inside (as root) and,
where they are mounted, outside as well; links that the agent planted are removed, never followed. A process that
the agent left running can still write there: a task for which that matters grades in a sandbox of its own.

Invariant: when `clear` returns, the host's folder of the verifier is empty.
"""

import asyncio
import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from harbortrainer.sandbox.post_mortem import Examinable
from harbortrainer.sandbox.sandbox_errors import SandboxError

if TYPE_CHECKING:
    from harbor.environments.base import BaseEnvironment


class LeftoversError(SandboxError):
    """What the agent left in the verifier's folders could not be removed; nothing is graded."""


async def clear(environment: "BaseEnvironment", host_dir: Path, *, inside: bool, kill: bool = False) -> None:
    """Empty /logs/verifier and /tests inside the sandbox, and `host_dir` outside.

    Args:
        environment: The agent's sandbox.
        host_dir: The trial's folder of the verifier on the host.
        inside: Whether the sandbox is graded in; false when the verifier gets a sandbox of its own.
        kill: Whether what the agent left running in a sandbox that is graded in is killed in any case.

    Raises:
        LeftoversError: Something is left.
    """
    if inside:
        await _make_room_and_clear(environment, kill=kill)
    left = await asyncio.to_thread(_clear_outside, host_dir)
    if left and isinstance(environment, Examinable):
        await environment.make_room(kill=True)
        left = await asyncio.to_thread(_clear_outside, host_dir)
    if left:
        raise LeftoversError(f"cannot remove {', '.join(left)} from {host_dir}")


async def _make_room_and_clear(environment: "BaseEnvironment", *, kill: bool) -> None:
    """Make room for grading and empty the folders; what keeps filling them is killed."""
    if not isinstance(environment, Examinable):
        await _clear_inside(environment)
        return
    await environment.make_room(kill=kill)
    try:
        await _clear_inside(environment)
    except LeftoversError:
        await environment.make_room(kill=True)
        await _clear_inside(environment)


async def _clear_inside(environment: "BaseEnvironment") -> None:
    from harbor.models.trial.paths import EnvironmentPaths

    from harbortrainer.harbor_side.sandboxes import empty_folders
    from harbortrainer.sandbox.local import LocalEnvironment

    paths = EnvironmentPaths.for_os(environment.os)
    if isinstance(environment, LocalEnvironment):  # it does so without a process
        done = await environment.empty_dirs([paths.tests_dir], chmod=False)
        if done is None or done.return_code == 0:
            done = await environment.empty_dirs([paths.verifier_dir], chmod=True)
        if done is not None and done.return_code != 0:
            raise LeftoversError(f"cannot empty the verifier's folders: {done.stderr}")
        return
    result = await empty_folders(environment, [paths.verifier_dir], [paths.tests_dir])
    if result.return_code != 0:
        raise LeftoversError(f"cannot empty the verifier's folders: {result.stderr or result.stdout}")


def _clear_outside(folder: Path) -> list[str]:
    """Remove what is in `folder`, without following links; the names of what stays."""
    if not folder.is_dir():
        return []
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # not ours, or something else by now: it is looked at again below
                path.unlink(missing_ok=True)
    return [path.name for path in folder.iterdir()]
