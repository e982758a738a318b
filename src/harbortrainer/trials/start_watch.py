"""The launcher's view of the starts at providers (`sandbox_starts`): it reports holds, and ends a run without starts.

Invariant: the states of an active run are not emptied.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from harbortrainer.errors import RunStoppedError
from harbortrainer.runs.locks import NoLocksError, try_lock
from harbortrainer.trials.sandbox_starts import IN_USE, STARTS, read_state

_REPORT_S = 2.0


def _state_files(folders: Sequence[Path]) -> list[Path]:
    return [path for folder in folders for path in sorted((folder / STARTS).glob("*.json"))]


def forget_starts(folders: Sequence[Path]) -> None:
    """Empty the states that no active run uses, so that a provider which failed in an ended run gets its time again."""
    for folder in folders:
        with contextlib.suppress(OSError, NoLocksError), (folder / STARTS / IN_USE).open("a") as mark:
            if try_lock(mark):
                for path in _state_files([folder]):
                    os.truncate(path, 0)  # not deleted: a gate may have opened it


class GivenUp(NamedTuple):
    """What a provider that is given up did."""

    what: str
    do: str
    """The user's remedy."""
    denied: bool
    """Whether it denied access, so that the same start would fail again."""


def given_up(folders: Sequence[Path]) -> GivenUp | None:
    """Return what a provider that is given up did; None if there is no such provider."""
    for path in _state_files(folders):
        state = read_state(path)
        if not state.given_up or state.failing_since is None:
            continue
        if state.denied_since is not None:
            do = "check the provider's key, its permissions and the account's payment"
            return GivenUp(f"{path.stem} denies every start of a sandbox, the last with {state.fault}", do, True)
        minutes = (state.ended - state.failing_since) / 60
        what = f"no sandbox of {path.stem} started for {minutes:.0f} min, the last failed with {state.fault}"
        return GivenUp(what, "check the provider's status and the account's quota", False)
    return None


async def watch_starts(folders: Sequence[Path], show: Callable[[str], None]) -> NoReturn:
    """Print a line when the starts at a provider are held, and when they go on. Forgets the starts of ended runs.

    Raises:
        RunStoppedError: A provider is given up.
    """
    forget_starts(folders)
    held: set[Path] = set()
    while True:
        if (found := given_up(folders)) is not None:
            raise RunStoppedError(found.what, do=f"{found.do}, then continue with --resume")
        for path in _state_files(folders):
            state = read_state(path)
            if state.holds and path not in held:
                held.add(path)
                show(f"holding new sandboxes of {path.stem}: {state}")
            elif not state.holds and path in held:
                held.remove(path)
                show(f"sandboxes of {path.stem} start again")
        await asyncio.sleep(_REPORT_S)
