"""Trust in tasks by name. Only a trusted task may access this machine: its folders, its devices, its secrets.

The key `trusted_tasks` and the option `--trust` hold names or shell patterns. Invariant: no task is trusted by default.
"""

import json
import shlex
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

_MAX_NAMED = 5
HARNESS_TABLE = "env.agent.harness"
"""Table of the run file that has the key."""


def is_trusted(task: str, trusted: Iterable[str]) -> bool:
    """Return whether a task's name is one of the names, or matches one of the patterns."""
    return any(task == pattern or fnmatchcase(task, pattern) for pattern in trusted)


def trust_remedy(tasks: Sequence[str], table: str = "") -> str:
    """Return what to do about tasks that access this machine.

    Args:
        tasks: Their names.
        table: The run file's table that has the key `trusted_tasks`; "" for a command without a run file.
    """
    named = [*tasks[:_MAX_NAMED], *["..."] * (len(tasks) > _MAX_NAMED)]
    options = " ".join(f"--trust {shlex.quote(name)}" for name in named)
    key = f"add `trusted_tasks = {json.dumps(named)}` to [{table}]" if table else f"pass `{options}`"
    return f"read these tasks; if you trust them, {key}, else exclude them by name"
