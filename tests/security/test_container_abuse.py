"""A policy that abuses its container is graded, or gets 0; its trial is never void. Real trials.

Exhausted processes and memory: test_container_limits. Full disks: test_container_disk.
"""

from pathlib import Path
from typing import Any

import pytest
from aiodocker import Docker
from attempts import LEAVES_LOOPS, LOOPS, Played, play
from fakes import DONE, keys

from harbortrainer.environment.rollout_state import Attempts, trace_error
from harbortrainer.runs.label import RUN_LABEL, RUN_VARIABLE
from harbortrainer.sandbox import docker_examination
from harbortrainer.sandbox.docker_examination import docker
from harbortrainer.trials import Outcome

pytestmark = [pytest.mark.docker, pytest.mark.e2e]

GRADES = "echo 0.25 > /logs/verifier/reward.txt"
GRADED = {
    "filled socket buffers": (
        "perl -MSocket -MIO::Handle -e 'for (1..1000) { socketpair(my $a, my $b, AF_UNIX, SOCK_STREAM, 0) or last; "
        "$a->blocking(0); push @held, $a, $b; 1 while syswrite $a, q(x) x 65536 } sleep 500' &"
    ),
    "its terminal killed": "pkill -9 tmux; kill -9 $PPID",
    "the verifier's folder filled again and again": "(while :; do touch /logs/verifier/$RANDOM; done) &",
    "a folder in it filled again and again": (
        "(while :; do mkdir -p /logs/verifier/d; touch /logs/verifier/d/$RANDOM; done) 2>/dev/null &"
    ),
    "a file where the tests go, again and again": "(while :; do rm -rf /tests; touch /tests; done) 2>/dev/null &",
    "a link where the tests go": "rm -rf /tests; ln -s /app /tests",
    **LOOPS,
    "every process traced": (
        "(perl -e 'while (1) { syscall(101, 0x4206, $_, 0, 0) for 2..3000 }') 2>/dev/null & disown"
    ),
    "a link there again and again": "(while :; do rm -rf /tests; ln -s /app /tests; done) &",
}
SLOW = {"every process traced": pytest.mark.long}
BROKEN = {
    "the shell removed": ("rm -f /bin/bash /usr/bin/bash", "removed"),
    "the shell replaced": ("printf '#!/bin/sh\\nexit 0\\n' > /b; chmod +x /b; mv /b /usr/bin/bash", "replaced"),
    "everything removed": ("rm -rf --no-preserve-root / 2>/dev/null", "the shell ended with code"),
    "everything removed but links to themselves": (LEAVES_LOOPS, "the shell ended with code"),
    "everything killed": ("kill -9 -1", "it ended from inside with code 137"),
    "the logs moved away": ("mv /logs /l; mkdir -p /logs/verifier", "/logs/verifier was moved to another place"),
    "the first process told to end": ("kill 1", "it ended from inside with code 143"),
}


async def attempt(folder: Path, command: str, kind: str, *, waits: float = 0.1) -> Played:
    """Run a trial with one command; `waits` is the time in seconds between the command and the end."""
    script = [keys(command, duration=1.5), keys("true", duration=waits), DONE, DONE]
    return await play(folder, script, test=GRADES, environment_type=kind)


def is_not_retried(trial: Played) -> bool:
    return trace_error(trial.record, Attempts()) is None


@pytest.mark.parametrize("case", [pytest.param(case, marks=SLOW.get(case, ())) for case in GRADED])
async def test_container_abuse_is_still_graded(tmp_path: Path, container: str, case: str):
    """On a busy machine a repeated attack may still remove the tests, which is self-inflicted."""
    trial = await attempt(tmp_path, GRADED[case], container)
    worth = (trial.record.outcome, trial.record.reward)
    if worth == (Outcome.self_inflicted, 0.0) and "again and again" in case:
        assert trial.record.evidence.startswith("inside: ")
    else:
        assert worth == (Outcome.completed, 0.25), trial.record
    assert is_not_retried(trial)


@pytest.mark.parametrize("case", BROKEN)
async def test_broken_container_is_self_inflicted(tmp_path: Path, container: str, case: str):
    command, sign = BROKEN[case]
    trial = await attempt(tmp_path, command, container)
    assert (trial.record.outcome, trial.record.reward) == (Outcome.self_inflicted, 0.0), trial.record
    assert is_not_retried(trial)
    assert sign in trial.record.evidence
    for check in ("the daemon answers (", "a fresh container starts and answers", "MB of memory left"):
        assert check in trial.record.evidence


async def test_agent_that_kills_everything_and_waits_is_self_inflicted(tmp_path: Path, container: str):
    trial = await attempt(tmp_path, "(sleep 1; kill -9 -1) & disown", container, waits=5.0)
    assert (trial.record.outcome, trial.record.reward) == (Outcome.self_inflicted, 0.0), trial.record
    assert "it ended from inside with code 137" in trial.record.evidence
    assert is_not_retried(trial)


async def overflow_event_history() -> None:
    """Overflow the daemon's event history, which keeps 256 events."""
    async with Docker() as client:
        for _ in range(300):
            await client.images.tag("debian:12-slim", repo="harbortrainer-forgets")
        await client.images.delete("harbortrainer-forgets")


async def test_uses_exit_events_that_daemon_has_forgotten(
    tmp_path: Path, container: str, monkeypatch: pytest.MonkeyPatch
):
    examine = docker_examination.examine

    async def examine_late(*args: Any) -> None:
        await overflow_event_history()
        await examine(*args)

    monkeypatch.setattr(docker_examination, "examine", examine_late)
    trial = await attempt(tmp_path, "kill -9 -1", container)
    assert (trial.record.outcome, trial.record.reward) == (Outcome.self_inflicted, 0.0), trial.record
    assert "it ended from inside with code 137" in trial.record.evidence


async def test_container_killed_from_outside_is_sandbox_error(
    tmp_path: Path, container: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(RUN_VARIABLE, run := "test-somebody-killed")
    killed: list[str] = []

    async def kill(body: dict) -> str:
        killed.extend((await docker("ps", "-q", "--filter", f"label={RUN_LABEL}={run}")).out.split())
        await docker("kill", *killed)
        return keys("true")

    trial = await play(tmp_path, [keys("true"), kill, DONE, DONE], environment_type=container)
    assert killed
    assert (trial.record.outcome, trial.record.reward) == (Outcome.sandbox_error, None), trial.record
    assert "nobody stopped it" not in trial.record.evidence
