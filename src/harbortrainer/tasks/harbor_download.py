"""Downloads by Harbor's clients, in a child process that dies with this one.

A child process because tasks may be loaded inside an event loop, without importing Harbor. git must not prompt for a
password. What a killed download leaves must lie where the next download removes it. Invariant: a failed download is one
`UserError` without passwords; only a bug in this project or Harbor keeps its stack trace.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from harbortrainer.config.task_source import TaskSource
from harbortrainer.errors import UserError

QUIET_GIT = {
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "true",
    "GIT_SSH_COMMAND": "ssh -o BatchMode=yes",
    "GIT_HTTP_LOW_SPEED_LIMIT": "1000",
    "GIT_HTTP_LOW_SPEED_TIME": "60",
}
"""Environment for git: no prompts, and a timeout of one minute for a silent host."""

OFFLINE_ERROR = (
    "Name or service not known|Could not resolve host|ConnectError|Temporary failure in name|Network is unreachable|"
    "Connection refused|Couldn't connect|Failed to connect|Connection timed out"
)
MISSING_REVISION = "not our ref|unadvertised object|couldn't find remote ref|Could not resolve ref|No exact matching"


def pin(source: TaskSource, scratch: Path) -> str:
    """Return the current commit or version of a source of kind `git` or `registry`. Raises as `download`."""
    return _request(source, "", scratch)


def download(source: TaskSource, target: Path, scratch: Path) -> None:
    """Fetch a source of kind `git`, which must be pinned, or `registry`.

    Args:
        source: The source.
        target: Folder to create; it gets one sub-folder per task.
        scratch: Folder for temporary files.

    Raises:
        UserError: The download failed; the message is one line.
    """
    _request(source, str(target), scratch)


def _request(source: TaskSource, target: str, scratch: Path) -> str:
    answer = run_child(source, target, scratch)
    if "failed" in answer:
        raise _user_error(source, answer["failed"])
    return answer["at"]


def run_child(source: TaskSource, target: str, scratch: Path) -> dict[str, str]:
    """Run `execute` in a child process and return its result."""
    done = subprocess.run(
        [sys.executable, "-m", "harbortrainer.tasks.harbor_download"],
        input=json.dumps({"source": asdict(source), "target": target}),
        capture_output=True,
        text=True,
        errors="replace",
        env={**QUIET_GIT, **os.environ, "TMPDIR": str(scratch.resolve())},
        check=False,
    )
    output = done.stdout.rpartition("{")
    if done.returncode != 0 or not output[1]:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        if last.startswith(("harbor.", "postgrest.")):
            return {"failed": last.partition(": ")[2]}
        raise RuntimeError(f"fetching {source} failed (exit code {done.returncode}):\n{done.stderr[-4000:]}")
    answer: dict[str, str] = json.loads("{" + output[2])
    return answer


def _user_error(source: TaskSource, failure: str) -> UserError:
    """Turn a failed download into one line with a remedy."""
    what = re.sub(r"://[^/@\s]+@", "://***@", " ".join(failure.split()))[:300]
    where, reason = str(source), f"cannot be fetched: {what}"
    if re.search(OFFLINE_ERROR, failure):
        return UserError(
            f"cannot be reached: {what}", where=where, do="check the network, or fetch it on another machine"
        )
    if source.kind == "registry":
        return UserError(reason, where=where, do="correct the name or the version")
    if re.search(MISSING_REVISION, failure):
        return UserError(f"has no commit {source.at!r}", where=where, do="give the full hash of an existing commit")
    if re.search("folder|director", failure):
        return UserError(reason, where=where, do="name the tasks' folder: URL@COMMIT#FOLDER, or URL@COMMIT#. for all")
    return UserError(reason, where=where, do="correct the URL")


def main() -> None:
    """Run in the child process: read a request from stdin, write the result as JSON on the last line of stdout."""
    if sys.platform == "linux":
        from harbortrainer.sandbox.inside.syscalls import die_with_parent

        die_with_parent()
    request = json.loads(sys.stdin.read())
    print("\n" + json.dumps(execute(TaskSource(**request["source"]), request["target"])), flush=True)


def execute(source: TaskSource, target: str) -> dict[str, str]:
    """Fetch a source into `target`, or resolve its current version if `target` is empty.

    Returns:
        The version as `at`, or the error message as `failed`.
    """
    import httpx

    from harbortrainer.harbor_compat.task_downloads import download as fetch
    from harbortrainer.harbor_compat.task_downloads import pin as resolve

    try:
        if target:
            asyncio.run(fetch(source, Path(target)))
        return {"at": source.at if target else asyncio.run(resolve(source))}
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or b"").decode(errors="replace").strip().splitlines()
        fatal = [line for line in lines if line.startswith(("fatal:", "error:", "ERROR:"))]
        return {"failed": (fatal or lines or [f"git ended with {error.returncode}"])[0]}
    except (ValueError, OSError, httpx.HTTPError) as error:
        return {"failed": f"{error} {_cause(error)}".strip()}
    except ExceptionGroup as group:  # Harbor downloads the tasks of a package concurrently.
        return {"failed": str(group.exceptions[0])}


def _cause(error: BaseException) -> str:
    """Describe the exception behind Harbor's generic "Error getting dataset"; empty if there is none."""
    cause = error.__cause__ or error.__context__
    return "" if cause is None else f"({type(cause).__name__}: {cause})"


if __name__ == "__main__":
    main()
