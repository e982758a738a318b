"""Cleanup before and after a run: ends the processes and sandboxes that the run, or its killed predecessor, left.

Processes have the run's label in their environment (`HARBORTRAINER_RUN`); sandboxes have it in a label. Local sandboxes
end with the process that started them. Sandboxes of a remote type without an `inventory` end with the provider's
timeout. Harbor ends a sandbox with its trial, so this is for trials whose process was killed.

Invariant: only processes and sandboxes with this run's label are ended. The caller holds the run folder's lock, or has
found it free.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from harbortrainer.config.environment_table import environment_entry
from harbortrainer.runs.label import LABEL_FILE, OWNER_VARIABLE, RUN_VARIABLE, run_label
from harbortrainer.sandbox.inventory import InventoryError, find_sandboxes, has_inventory, inventory, resolve_kinds
from harbortrainer.trials.provider_faults import UNSTOPPED

PROCESS_GRACE_S = 10.0
WARNING = "warning"
"""Begins a message about sandboxes that may still run."""


def clean_up(
    run: str, kinds: Sequence[str], pythons: Sequence[Path] = (), *, owner: str = "", trials: Sequence[Path] = ()
) -> list[str]:
    """End the processes and sandboxes of a run, or of one of its environment servers.

    Args:
        run: The run's label.
        kinds: Environment types of the run.
        pythons: Interpreters that may have the providers' packages, before this process's own.
        owner: The environment server whose processes and sandboxes to end; empty for all of the run.
        trials: Folders of the run's trials, whose files that name unstopped sandboxes are removed. Other runs may
            share the folders.

    Returns:
        Messages for the user, one line each, also on sandboxes that cannot be found at their provider; empty if there
        was nothing to end.
    """
    processes = end_processes(run, owner=owner)
    lines = [f"cleaned up: {processes} processes"] if processes else []
    return lines + end_sandboxes(run, kinds, pythons, owner=owner, trials=trials)


def end_sandboxes(
    run: str, kinds: Sequence[str], pythons: Sequence[Path] = (), *, owner: str = "", trials: Sequence[Path] = ()
) -> list[str]:
    """End the containers and remote sandboxes of a run, or of one of its environment servers.

    Takes and returns the same as `clean_up`.
    """
    left = _unstopped(run, trials)
    kinds = [*kinds, *(stop["environment_type"] for stop in left.values())]
    found = [kind for kind in resolve_kinds(kinds) if not environment_entry(kind).needs_namespaces]
    lines = [line for kind in found if (line := _end(run, kind, pythons, owner))]
    if any(line.startswith(WARNING) for line in lines):
        return lines  # the next start tries again
    for file, stop in left.items():
        if not has_inventory(stop["environment_type"]):
            where = f"{stop['environment_type']} sandbox {stop['sandbox']}"
            lines.append(f"{WARNING}: {where} was not stopped ({stop['fault']}); end it at the provider")
        file.unlink(missing_ok=True)
    return lines


def _unstopped(run: str, trials: Sequence[Path]) -> dict[Path, dict[str, str]]:
    """Return the entries of a run's sandboxes that were not stopped, by their files."""
    left = {}
    for file in (file for one in trials for file in sorted((one / UNSTOPPED).glob("*.json"))):
        with contextlib.suppress(FileNotFoundError):  # stopped meanwhile
            stop = json.loads(file.read_text(encoding="utf-8"))
            left |= {file: stop} if stop["run"] == run else {}
    return left


def _end(run: str, kind: str, pythons: Sequence[Path], owner: str) -> str:
    if not has_inventory(kind):
        return ""
    try:
        found = [one for one in find_sandboxes(kind, run, pythons) if owner in ("", one.owner)]
        if found:
            inventory(kind, pythons).end([sandbox.id for sandbox in found])
    except InventoryError as error:
        return f"{WARNING}: {kind} sandboxes of killed trials may still run: {error}"
    return f"cleaned up: {len(found)} {kind} sandboxes" if found else ""


def clean_up_predecessor(
    folder: Path,
    kinds: Sequence[str],
    trials: Sequence[Path],
    pythons: Sequence[Path] = (),
    *,
    label_file: str = LABEL_FILE,
) -> list[str]:
    """End what an earlier process of the run in a folder left; see `clean_up`.

    Args:
        folder: The run's folder.
        kinds: Environment types of the run.
        trials: As for `clean_up`.
        pythons: As for `clean_up`.
        label_file: Path of the label file in the folder. Without the file there was no earlier process.
    """
    if not (folder / label_file).is_file():
        return []
    return clean_up(run_label(folder, label_file), kinds, pythons, trials=trials)


def end_processes(run: str, *, owner: str = "", grace_s: float = PROCESS_GRACE_S) -> int:
    """Terminate the processes with the run's label, and kill them after `grace_s` seconds; return their number."""
    found = processes_of(run, owner)
    for process in found:
        _ignore_errors(process.terminate)
    _, alive = psutil.wait_procs(found, timeout=grace_s)
    for process in alive:
        _ignore_errors(process.kill)
    psutil.wait_procs(alive, timeout=grace_s)
    return len(found)


def processes_of(run: str, owner: str = "") -> list[psutil.Process]:
    """Return the processes other than this one whose environment has the run's label, and the owner if one is given."""
    own = psutil.Process().pid
    marks = {f"{RUN_VARIABLE}={run}".encode()} | ({f"{OWNER_VARIABLE}={owner}".encode()} if owner else set())
    found = []
    for process in psutil.process_iter():
        if process.pid == own:
            continue
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            continue
        if marks <= set(environment.split(b"\0")):
            found.append(process)
    return found


def print_lines(lines: Sequence[str]) -> None:
    """Print messages to stderr."""
    for line in lines:
        print(line, file=sys.stderr)


def _ignore_errors(action: Callable[[], None]) -> None:
    try:
        action()
    except psutil.Error:
        return
