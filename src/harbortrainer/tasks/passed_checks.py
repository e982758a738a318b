"""Record of the tasks that passed `harbortrainer tasks check` in a working directory, by content key.

Invariant: a task that was changed after its check has another key, and counts as unchecked.
"""

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from harbortrainer.runs.durable import write_whole
from harbortrainer.runs.locks import waiting_lock
from harbortrainer.tasks.task_folder import TaskRef, has_solution

if TYPE_CHECKING:
    from harbortrainer.config.plugin import Leftovers
    from harbortrainer.tasks.verdict import Verdict

CHECKED_FILE = Path("outputs") / "checked_tasks.json"
"""File in which `harbortrainer tasks check` records the tasks that passed; relative to the working directory."""
_KILLED, _AUDITED = "+kill", "+audit"


def checked_as(environment_type: str, leftovers: "Leftovers", *, audited: bool = False) -> str:
    """Return the name under which a passed task is recorded.

    A check with killed leftovers stands apart, and so does an audit without a bad or weak finding.
    """
    return f"{environment_type}{'' if leftovers == 'keep' else _KILLED}{_AUDITED if audited else ''}"


def audited_keys() -> set[str]:
    """Return the keys of the tasks that passed an audit here, in any type of environment."""
    return {key for key, types in passed_environments().items() if any(kind.endswith(_AUDITED) for kind in types)}


def needs_no_service(task: TaskRef) -> bool:
    """Whether the task's oracle got the top reward here although its leftover processes were killed."""
    passed = passed_environments().get(task.key, [])
    return has_solution(task.path) and any(_KILLED in kind for kind in passed)


def passed_keys() -> set[str]:
    """Return the keys of the tasks that passed the check here, in any type of environment."""
    return set(passed_environments())


def record_passed(tasks: Iterable["TaskRef | Verdict"], environment_type: str = "local") -> None:
    """Record that tasks passed the check."""
    for task in tasks:
        _record(task.key, {environment_type}, set())


def record_verdict(verdict: "Verdict", leftovers: "Leftovers", *, audited: bool) -> None:
    """Record whether a task passed; a bad verdict withdraws an earlier pass, and a weak one of an audit its audit.

    Args:
        verdict: The verdict; one that is not decided changes nothing.
        leftovers: Whether leftover processes were killed.
        audited: Whether the check was an audit.
    """
    passed, clean = (checked_as(verdict.environment, leftovers, audited=audit) for audit in (False, True))
    if not verdict.problem:
        record_passed([verdict], passed)
        if audited:
            _record(verdict.key, set() if verdict.doubts else {clean}, {clean})
    elif verdict.is_decided:
        _record(verdict.key, set(), {passed, clean})


def _record(key: str, add: Collection[str], remove: Collection[str]) -> None:
    with waiting_lock(CHECKED_FILE.with_name(f".{CHECKED_FILE.name}.lock")):  # shards of a set are checked at once
        known = passed_environments()
        before = known.pop(key, [])
        after = sorted(set(before) - set(remove) | set(add))
        if after != before:
            known |= {key: after} if after else {}
            write_whole(CHECKED_FILE, json.dumps(known, indent=1, sort_keys=True) + "\n")


def passed_environments() -> dict[str, list[str]]:
    """Return the environment types in which each task passed, by task key."""
    try:
        known = json.loads(CHECKED_FILE.read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return known if isinstance(known, dict) else {key: ["local"] for key in known}
