"""Faults in a task's files that explain why its trials fail. They are searched for only after a failed check.

- Shell scripts with Windows line endings, which fail on Linux with misleading messages ("cannot execute: required file
  not found"). A shell script is a `.sh` file or has a shell's shebang; only its first line is read.
- Patches with Windows line endings, which do not apply to files with Unix ones.
- A verifier that installs software although its sandbox has no network.

Only folders whose files reach a sandbox are searched.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from harbortrainer.sandbox.task_requirements import TaskRequirements
from harbortrainer.tasks.task_errors import read_text
from harbortrainer.tasks.verdict import Finding, bad, note

_FOLDERS = ("environment", "solution", "tests", "steps")
_SHELL_SHEBANG = re.compile(rb"^#!.*\b(?:ba|da|k|z)?sh\b")
_PATCHES = (".patch", ".diff")
_MAX_LINE, _MAX_READ, _MAX_NAMED = 1000, 1 << 16, 3
_PACKAGE_TOOL = r"(?:apt|apt-get|apk|dnf|yum|pip3?|npm|gem|cargo|conda)(?: -\S+)* (?:update|install|add|ci)"
_UV = r"uvx|uv (?:pip install|sync|add|run (?:-\S+ )*--with)"
_DOWNLOAD = r"(?:curl|wget)\b.* https?://(?!localhost|127\.)[^\s/]+"
_INSTALL = re.compile(rf"\b(?:{_PACKAGE_TOOL}|{_UV}|{_DOWNLOAD})")


def faults(requirements: TaskRequirements, *, verifier_lacks: bool) -> list[Finding]:
    """Return the faults of a task; empty for a Windows task.

    Args:
        requirements: The task.
        verifier_lacks: Whether its verifier printed that software is missing. If not, an installation without a network
            is only a note: the image may have the software.
    """
    environment = requirements.config.get("environment")
    if isinstance(environment, dict) and environment.get("os") == "windows":
        return []
    task = requirements.folder
    found: list[Finding] = []
    if installs := verifier_installs(requirements):
        what = f"the verifier has no network, but installs software ({installs}): do it in the Dockerfile"
        found.append(bad("verifier", what) if verifier_lacks else note("verifier", what))
    if scripts := _named(task, _is_windows_script):
        what = "Windows line endings, which Linux shells cannot run, in {}: remove them (sed -i 's/\\r$//' FILE)"
        found.append(bad("task", what.format(_listed(scripts))))
    if patches := _named(task, _is_windows_patch):
        what = "Windows line endings in patches, which do not apply to files with Unix ones: {}"
        found.append(bad("task", what.format(_listed(patches))))
    return found


def verifier_installs(requirements: TaskRequirements) -> str:
    """Return the first install command of a verifier that has no network; empty if there is none."""
    if "verifier" not in requirements.closed_phases():
        return ""
    task = requirements.folder
    for script in (task / "tests" / "test.sh", *sorted(task.glob("steps/*/tests/test.sh"))):
        try:
            lines = read_text(script).split("\n")
        except (OSError, ValueError):
            continue
        for line in lines:
            if not line.lstrip().startswith("#") and (found := _INSTALL.search(line)):
                return f"{script.relative_to(task)}: {found[0]}"
    return ""


def _named(task: Path, is_faulty: Callable[[Path], bool]) -> list[str]:
    """Return the faulty files as sorted paths within the task."""
    return [str(file.relative_to(task)) for file in sorted(_files(task)) if is_faulty(file)]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _files(task: Path) -> Iterator[Path]:
    for name in _FOLDERS:
        yield from (file for file in (task / name).rglob("*") if file.is_file() and not file.is_symlink())


def _is_windows_script(file: Path) -> bool:
    with file.open("rb") as opened:
        line = opened.readline(_MAX_LINE)
    return line.endswith(b"\r\n") and (file.suffix == ".sh" or _SHELL_SHEBANG.search(line) is not None)


def _is_windows_patch(file: Path) -> bool:
    if file.suffix not in _PATCHES:
        return False
    with file.open("rb") as opened:
        return b"\r\n" in opened.read(_MAX_READ)
