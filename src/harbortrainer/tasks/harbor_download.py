"""Harbor's clients in a process of their own, which dies with this one.

Loading tasks may happen inside an event loop, and must not import Harbor; git must not ask for a password, and what a
killed download leaves must lie where the next one removes it. Invariant: what goes wrong out there is one `UserError`
without passwords; only a defect of ours or of Harbor's keeps its stack trace.
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
"""Git asks nobody for a password, and gives a host that sends nothing a minute."""

OFFLINE = (
    "Name or service not known|Could not resolve host|ConnectError|Temporary failure in name|Network is unreachable|"
    "Connection refused|Couldn't connect|Failed to connect|Connection timed out"
)
NOT_THERE = "not our ref|unadvertised object|couldn't find remote ref|Could not resolve ref|No exact matching"


def pin(source: TaskSource, scratch: Path) -> str:
    """The commit or version that a source of kind `git` or `registry` means now. Raises as `download`."""
    return _ask(source, "", scratch)


def download(source: TaskSource, target: Path, scratch: Path) -> None:
    """Fetch a source of kind `git`, which must be pinned, or `registry`.

    Args:
        source: What to fetch.
        target: Folder that is made, a folder a task.
        scratch: A folder for what is temporary.

    Raises:
        UserError: Why not, in one line.
    """
    _ask(source, str(target), scratch)


def _ask(source: TaskSource, target: str, scratch: Path) -> str:
    answer = ask_child(source, target, scratch)
    if "failed" in answer:
        raise _told(source, answer["failed"])
    return answer["at"]


def ask_child(source: TaskSource, target: str, scratch: Path) -> dict[str, str]:
    """What `carry_out` answers in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "harbortrainer.tasks.harbor_download"],
        input=json.dumps({"source": asdict(source), "target": target}),
        capture_output=True,
        text=True,
        errors="replace",
        env={**QUIET_GIT, **os.environ, "TMPDIR": str(scratch.resolve())},
        check=False,
    )
    said = done.stdout.rpartition("{")
    if done.returncode != 0 or not said[1]:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        if last.startswith(("harbor.", "postgrest.")):
            return {"failed": last.partition(": ")[2]}
        raise RuntimeError(f"fetching {source} failed (exit code {done.returncode}):\n{done.stderr[-4000:]}")
    answer: dict[str, str] = json.loads("{" + said[2])
    return answer


def _told(source: TaskSource, said: str) -> UserError:
    """What went wrong out there as one line with what to do about it."""
    what = re.sub(r"://[^/@\s]+@", "://***@", " ".join(said.split()))[:300]
    where, reason = str(source), f"cannot be fetched: {what}"
    if re.search(OFFLINE, said):
        return UserError(f"cannot be reached: {what}", where=where, do="look at the network, or fetch it elsewhere")
    if source.kind == "registry":
        return UserError(reason, where=where, do="correct name or version")
    if re.search(NOT_THERE, said):
        return UserError(f"no commit {source.at!r} there", where=where, do="write all digits of one that is there")
    if re.search("folder|director", said):
        return UserError(reason, where=where, do="name the one that holds the tasks: URL@COMMIT#FOLDER")
    return UserError(reason, where=where, do="correct the URL")


def main() -> None:
    """The child: reads an order from stdin, answers in JSON on the last line of stdout."""
    if sys.platform == "linux":
        from harbortrainer.sandbox.inside.kernel import die_with_parent

        die_with_parent()
    order = json.loads(sys.stdin.read())
    print("\n" + json.dumps(carry_out(TaskSource(**order["source"]), order["target"])), flush=True)


def carry_out(source: TaskSource, target: str) -> dict[str, str]:
    """Fetch a source into `target`, or find what it means now where that is empty; `at`, or why it `failed`."""
    import httpx

    from harbortrainer.harbor_side.task_downloads import download as fetch
    from harbortrainer.harbor_side.task_downloads import pin as resolve

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
    except ExceptionGroup as group:  # Harbor downloads the tasks of a package side by side.
        return {"failed": str(group.exceptions[0])}


def _cause(error: BaseException) -> str:
    """Harbor says "Error getting dataset" whatever the reason; the reason is what it caught."""
    cause = error.__cause__ or error.__context__
    return "" if cause is None else f"({type(cause).__name__}: {cause})"


if __name__ == "__main__":
    main()
