"""Play attempts to forge a reward, or to void a trial, in each kind of sandbox, and print a table.

    python benchmarks/attacks.py                                  all that this machine has (about 10 minutes)
    python benchmarks/attacks.py --settings "host root" --names   some settings, with the names of what succeeded

The attempts are in tests/reward_attacks.py. Each is a real trial of an agent that does not solve its task:

- forged: the trial trains with reward 1, where the verifier gives 0.25
- unnamed: forged, and the record names no changed tool
- void: the trial has no reward and would be retried, or did not end within a minute

The protected settings are `verifier_tools = "image"` with `leftovers = "kill"`, and in Docker `leftovers = "kill"`.
"""

import argparse
import asyncio
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from fakes import make_task  # ty: ignore[import-not-found] (the tests' own)
from ordinary_user import as_nobody  # ty: ignore[import-not-found]
from reward_attacks import (  # ty: ignore[import-not-found]
    DOCKERFILE,
    LEFTOVERS,
    LEFTOVERS_TEST,
    SETUP,
    TEST,
    TOOLS,
    VOID_TEST,
    VOIDS,
    build_libraries,
    leftover,
)

from harbortrainer.trials import TrialRecord, TrialSpec, run_trial

_LONGEST_S = 60
_SEPARATE = '[verifier]\nenvironment_mode = "separate"\ntimeout_sec = 10\n'


@dataclass(frozen=True)
class Setting:
    """Where and how the trials are played."""

    kind: str = "local"
    kwargs: dict[str, object] = field(default_factory=dict)
    leftovers: Literal["keep", "kill"] = "keep"
    separate: bool = False
    user: bool = False
    """Whether an ordinary user plays them."""


HOST: dict[str, object] = {"image": "host"}
IMAGE: dict[str, object] = {"image": "build"}
PROTECTED: dict[str, object] = {"verifier_tools": "image"}
SETTINGS = {
    "local, host root": Setting(kwargs=HOST),
    "local, host root, protected": Setting(kwargs=HOST | PROTECTED, leftovers="kill"),
    "local, image root": Setting(kwargs=IMAGE),
    "local, image root, protected": Setting(kwargs=IMAGE | PROTECTED, leftovers="kill"),
    "local, ordinary user": Setting(kwargs=HOST, user=True),
    "local, ordinary user, protected": Setting(kwargs=HOST | PROTECTED, leftovers="kill", user=True),
    "local, separate verifier": Setting(kwargs=HOST, separate=True),
    "Docker": Setting("docker"),
    "Docker, protected": Setting("docker", leftovers="kill"),
}


@dataclass(frozen=True)
class Attempt:
    """One attempt: its set, its name, what the agent runs, and the verifier's script."""

    group: str
    name: str
    solution: str
    test: str


ATTEMPTS = [
    *(Attempt("tools", name, SETUP + text, TEST) for name, text in TOOLS.items()),
    *(Attempt("leftovers", name, leftover(text), LEFTOVERS_TEST) for name, text in LEFTOVERS.items()),
    *(Attempt("voids", name, text, VOID_TEST) for name, text in VOIDS.items()),
]


async def play(attempt: Attempt, setting: Setting, folder: Path, libraries: Path) -> str:
    """Play one attempt. Returns `forged`, `unnamed`, `void`, or "" if it failed."""
    task = make_task(folder / "task", test=attempt.test, dockerfile=DOCKERFILE, verifier_timeout_s=10)
    (task / "solution" / "solve.sh").write_text(f"#!/bin/bash\n{attempt.solution}\n")
    shutil.copytree(libraries, task / "solution", dirs_exist_ok=True)
    if setting.separate:
        (task / "task.toml").write_text(f'artifacts = ["/app/answer"]\n{_SEPARATE}[agent]\ntimeout_sec = 20\n')
        (task / "tests" / "Dockerfile").write_text(f"{DOCKERFILE}COPY test.sh /tests/test.sh\n")
    spec = TrialSpec(
        task_dir=task,
        trials_dir=folder / "trials",
        agent="oracle",
        environment_type=setting.kind,
        environment_kwargs=setting.kwargs,
        leftovers=setting.leftovers,
    )
    try:
        return judge(await asyncio.wait_for(run_trial(spec), _LONGEST_S))
    except TimeoutError:
        return "void"


def judge(record: TrialRecord) -> str:
    """Judge the record of an attempt, as `play` returns it."""
    if not record.outcome.trains:
        return "void"
    if record.reward != 1.0:
        return ""
    return "forged" if record.changed_tools else "unnamed"


async def play_all(setting: Setting, at_once: int) -> dict[str, str]:
    """Play all attempts. Returns the result by the attempt's set and name."""
    gate, results = asyncio.Semaphore(at_once), {}

    async def play_one(number: int, attempt: Attempt) -> None:
        async with gate:
            (place := folder / str(number)).mkdir()
            results[f"{attempt.group}: {attempt.name}"] = await play(attempt, setting, place, libraries)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as top:
        folder = Path(top)
        (libraries := folder / "libraries").mkdir()
        build_libraries(libraries)
        await asyncio.gather(*(play_one(number, attempt) for number, attempt in enumerate(ATTEMPTS)))
    return results


def play_as_user(name: str, at_once: int) -> dict[str, str]:
    """Play a setting as `nobody`, in a process of its own."""
    arguments = ["attacks.py", "--inner", name, "--at", str(at_once)]
    script = f"import runpy, sys; sys.argv = {arguments!r}; runpy.run_path({__file__!r}, run_name='__main__')"
    command, variables = as_nobody([sys.executable, "-c", script])
    variables |= {"PATH": os.defpath, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True, cwd="/")
    return json.loads(done.stdout.splitlines()[-1])


def count(results: dict[str, str], group: str, *kinds: str) -> int:
    """Count the attempts of a set with one of the results."""
    return sum(result in kinds for name, result in results.items() if name.startswith(f"{group}:"))


def row(name: str, found: dict[str, str]) -> str:
    """Return a setting's row of the table in Markdown."""
    cells = [
        count(found, "tools", "forged", "unnamed"),
        count(found, "tools", "unnamed"),
        count(found, "leftovers", "forged", "unnamed"),
        count(found, "leftovers", "unnamed"),
        sum(result == "void" for result in found.values()),
    ]
    return f"| {name} | {' | '.join(map(str, cells))} |"


def head() -> str:
    """Return the first lines of the table."""
    forged = (
        f"forged by {len(TOOLS)} changes of tools | of these unnamed "
        f"| forged by {len(LEFTOVERS)} leftover processes | of these unnamed"
    )
    return f"| setting | {forged} | void, of all {len(ATTEMPTS)} |\n|---|---|---|---|---|---|"


def main() -> None:
    """Play the settings and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default="", help="only settings whose name has this text")
    parser.add_argument("--at", type=int, default=3, help="trials at once")
    parser.add_argument("--names", action="store_true", help="print the names of what succeeded")
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    if options.inner:
        print(json.dumps(asyncio.run(play_all(SETTINGS[options.inner], options.at))))
        return
    rows = [head()]
    for name, setting in SETTINGS.items():
        if options.settings in name and not (setting.user and os.geteuid() != 0):
            played = play_as_user(name, options.at) if setting.user else asyncio.run(play_all(setting, options.at))
            rows.append(row(name, played))
            succeeded = [f"  {result}: {attempt}" for attempt, result in sorted(played.items()) if result]
            print(name, *(succeeded if options.names else ()), sep="\n", flush=True)
    print(*rows, sep="\n")


if __name__ == "__main__":
    main()
