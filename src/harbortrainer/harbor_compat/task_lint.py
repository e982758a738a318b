"""Findings of `harbor lint` on one task; none with a Harbor before 0.25.

Harbor's own selection of rules decides: its defaults, the `[metadata.harbor.lint]` of the task, and that of its set.
Invariant: no Compose runs. Harbor would run it on the task's file with all variables of this process.
"""

import os
from importlib.util import find_spec
from pathlib import Path

from harbortrainer.harbor_compat import WRITTEN_FOR, keep_litellm_offline
from harbortrainer.private_apis import PrivateApi

LINT = PrivateApi(
    library="harbor",
    written_for=WRITTEN_FOR,
    used_by="harbortrainer.harbor_compat.task_lint",
    places=("harbor.cli.lint:_selected_rules(root, cli_config)",),
)


def has_lint() -> bool:
    """Whether the installed Harbor has `harbor lint`."""
    return find_spec("harbor.lint") is not None


def lint_findings(task: Path) -> list[str]:
    """Return one line per finding: `FILE:LINE [RULE] message`, with the file's path in the task. Blocks.

    If the task's files or its selection of rules cannot be read, the only line says so.

    Args:
        task: The task's folder.
    """
    if not has_lint():
        return []
    keep_litellm_offline()
    LINT.check()
    from harbor.cli.lint import _selected_rules  # ty: ignore[import-not-found]
    from harbor.lint import lint_task  # ty: ignore[import-not-found]
    from harbor.lint.models import COMPOSE_RULES, LintConfig  # ty: ignore[import-not-found]

    root = task.resolve()
    try:
        rules = _selected_rules(root, LintConfig())
        found = lint_task(root, selected_rules=rules - COMPOSE_RULES if _uses_compose(root) else rules)
    except Exception as error:  # noqa: BLE001 - the task's files can be anything
        return [f"harbor lint cannot read this task or its selection of rules ({type(error).__name__})"]
    return [f"{_place(finding.path, finding.line, root)} [{finding.rule}] {finding.message}" for finding in found]


def _uses_compose(root: Path) -> bool:
    patterns = ("environment", "tests", "steps/*/tests")
    return any(any(root.glob(f"{folder}/docker-compose.yaml")) for folder in patterns)


def _place(file: str, line: int | None, root: Path) -> str:
    return os.path.relpath(file, root) + (f":{line}" if line is not None else "")
