"""Trust in tasks by name. Only a trusted task may access this machine: its folders, its devices, its secrets.

The key `trusted_tasks` and the option `--trust` hold names or shell patterns. Invariant: no task is trusted by default.
"""

import json
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

HARNESS_TABLE = "env.agent.harness"
"""Table of the run file that has the key."""


def is_trusted(task: str, trusted: Iterable[str]) -> bool:
    """Return whether a task's name matches one of the names and patterns."""
    return any(fnmatchcase(task, pattern) for pattern in trusted)


def trust_remedy(tasks: Sequence[str], table: str = "") -> str:
    """Return what to do about tasks that access this machine.

    Args:
        tasks: Their names.
        table: The run file's table that has the key `trusted_tasks`; "" for a command without a run file.
    """
    options = " ".join(f"--trust {name}" for name in tasks)
    key = f"add `trusted_tasks = {json.dumps(list(tasks))}` to [{table}]" if table else f"pass `{options}`"
    return f"read these tasks; if you trust them, {key}, else exclude them by name"
