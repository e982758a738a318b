"""An agent that leaves a state in which the verifier cannot run or waits for ever gets 0; an honest one never does.

Real trials with the oracle agent, whose solution leaves that state, in a local sandbox and in a container.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes import DONE, SOLVED, WRITES_ONE, ScriptedModel, keys, make_task
from ordinary_user import as_nobody
from patience import HANG_S

from harbortrainer.runs.label import RUN_LABEL, RUN_VARIABLE
from harbortrainer.sandbox.containers.container_exit import wait_removed
from harbortrainer.sandbox.docker_examination import docker
from harbortrainer.trials import ModelEndpoint, Outcome, TrialRecord, TrialSpec, run_trial
from harbortrainer.trials.hooks import Event

pytestmark = pytest.mark.e2e

READS = f"cat /app/answer; {SOLVED}"
PIPE = "rm -f /app/answer; mkfifo /app/answer"
PIPE_HELD = f"{PIPE}; sleep 500 <> /app/answer &"
BAD = {
    "no working folder": ("cd /; rm -rf /app", "'/app'|\"/app\""),
    "a file as working folder": ("cd /; rm -rf /app; touch /app", "not a directory"),
    "a link to itself as working folder": ("cd /; rm -rf /app; ln -s /app /app", "too many levels of symbolic links"),
    "a pipe as answer": (PIPE, "waited for the pipe '/app/answer'"),
    "a pipe as answer that a process holds open": (PIPE_HELD, "waited for the pipe '/app/answer'"),
    "a link to a pipe as answer": (
        "mkfifo /tmp/pipe; ln -s ../tmp/pipe /app/answer",
        "waited for the pipe '/app/answer'",
    ),
    "a pipe as user table": ("rm /etc/passwd; mkfifo /etc/passwd", "the shell"),
}


async def play(
    folder: Path,
    kind: str,
    solution: str,
    test: str = READS,
    *,
    agent: str = "oracle",
    extra: str = "",
    verifier_s: float = 5,
    **more: Any,
) -> TrialRecord:
    """Run one trial; `extra` are lines of task.toml."""
    task = make_task(folder / "task", test=test, verifier_timeout_s=verifier_s, extra=extra)
    (task / "solution" / "solve.sh").write_text(f"#!/bin/bash\n{solution}\n")
    spec = TrialSpec(task_dir=task, trials_dir=folder / "trials", agent=agent, environment_type=kind)
    return await run_trial(spec, **more)


@pytest.mark.parametrize("case", BAD)
async def test_agent_that_stops_its_verifier_gets_zero(tmp_path: Path, environment_type: str, case: str):
    solution, sign = BAD[case]
    record = await play(tmp_path, environment_type, solution)
    assert (record.outcome, record.reward) == (Outcome.self_inflicted, 0.0), record.evidence
    assert any(part in record.evidence.lower() for part in sign.split("|")), record.evidence


_AS_USER = """
import asyncio, sys, tempfile
from pathlib import Path
sys.path[:0] = sys.argv[1:]
from test_bad_endings import BAD, play

async def main():
    for name in [name for name in BAD if name.startswith("a pipe as answer")]:
        with tempfile.TemporaryDirectory() as folder:
            record = await play(Path(folder), "local", BAD[name][0])
            print(record.outcome, record.reward, record.evidence.replace(chr(10), " "))

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_pipe_as_answer_gets_an_ordinary_users_trial_zero():
    folders = str(Path(__file__).parent), str(Path(__file__).parents[1])
    command, variables = as_nobody([sys.executable, "-c", _AS_USER, *folders])
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, cwd="/", check=False)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert all(line.startswith("self_inflicted 0.0 ") and "waited for the pipe '/app/answer'" in line for line in lines)


@pytest.mark.long
async def test_leased_answer_gets_zero_in_a_container(tmp_path: Path, container: str):
    """The kernel ends a lease after 45 s; four of them outlast a slow examination."""
    files = [f"/app/answer{number}" for number in range(4)]
    lease = (
        f"for file in {' '.join(files)}; do echo x > $file; done\n"
        "perl -e '$SIG{IO} = q(IGNORE); for (@ARGV) { open my $file, q(<), $_ or die; fcntl($file, 1024, 1) or die; "
        f"push @held, $file }} sleep 500' {' '.join(files)} &\n"
        f"until [ $(grep -c LEASE /proc/locks) = {len(files)} ]; do sleep 0.1; done"
    )
    record = await play(tmp_path, container, lease, f"cat {' '.join(files)}; {SOLVED}", verifier_s=30)
    assert (record.outcome, record.reward) == (Outcome.self_inflicted, 0.0), record.evidence
    assert "waited to open '/app/answer" in record.evidence
    assert "on which another process holds a lease" in record.evidence


@pytest.mark.parametrize("agent", ["oracle", "nop"])
async def test_honest_trial_is_graded(tmp_path: Path, environment_type: str, agent: str):
    record = await play(tmp_path, environment_type, "touch /app/answer", SOLVED, agent=agent)
    assert (record.outcome, record.reward) == (Outcome.completed, float(agent == "oracle")), record


async def test_answered_pipe_is_graded(tmp_path: Path, environment_type: str):
    """The task is a pipe: the agent's service answers on it."""
    service = "mkfifo /app/pipe; while echo pong > /app/pipe; do sleep 0.01; done 2> /dev/null &"
    test = "grep -q pong < /app/pipe && echo 1 > /logs/verifier/reward.txt"
    record = await play(tmp_path, environment_type, service, test)
    assert (record.outcome, record.reward) == (Outcome.completed, 1.0), record.evidence


HONEST = {
    "a verifier that hangs beside an agent's service on a pipe": (
        "mkfifo /app/pipe; while cat /app/pipe; do :; done > /dev/null &\ntouch /app/answer",
        "sleep 60",
        "",
    ),
    "a verifier that waits for its own pipe": ("touch /app/answer", "mkfifo /tmp/own; cat /tmp/own", ""),
    "a verifier that waits for its own child": ("touch /app/answer", "echo $(sleep 60)", ""),
}


@pytest.mark.parametrize("case", HONEST)
async def test_broken_verifier_does_not_blame_the_agent(tmp_path: Path, environment_type: str, case: str):
    solution, test, extra = HONEST[case]
    record = await play(tmp_path, environment_type, solution, test, extra=extra)
    assert (record.outcome, record.reward) == (Outcome.verifier_error, None), record.evidence
    assert "inside: " not in record.evidence


@pytest.mark.parametrize("agent", ["oracle", "nop"])
async def test_workdir_that_image_lacks_does_not_blame_the_agent(tmp_path: Path, environment_type: str, agent: str):
    extra = '[environment]\nworkdir = "/nowhere"'
    record = await play(tmp_path, environment_type, "true", agent=agent, extra=extra)
    assert record.outcome in (Outcome.verifier_error, Outcome.sandbox_error), record


async def test_removed_workdir_of_task_gets_zero(tmp_path: Path, environment_type: str):
    record = await play(tmp_path, environment_type, "cd /; rm -rf /srv", extra='[environment]\nworkdir = "/srv"')
    assert (record.outcome, record.reward) == (Outcome.self_inflicted, 0.0), record.evidence


@pytest.mark.parametrize("phase", ["agent-end", "verification-start"])
async def test_cancelled_trial_ends_whatever_the_agent_left(
    tmp_path: Path, environment_type: str, phase: Event, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(RUN_VARIABLE, run := f"test-cancelled-{phase}")
    solution = (
        "rm -f /etc/passwd /etc/group; mkfifo /etc/passwd /etc/group /logs/agent/pipe; truncate -s 1T /logs/agent/big; "
        "ln -s /logs/agent/l /logs/agent/l; cd /logs/artifacts; seq 2000 | xargs mkfifo"
    )
    reached = asyncio.Event()

    async def note(event: Event) -> None:
        if event == phase:
            reached.set()

    trial = asyncio.create_task(play(tmp_path, environment_type, solution, "sleep 60", on_event=note))
    async with asyncio.timeout(HANG_S):
        await reached.wait()
    trial.cancel()
    done, _ = await asyncio.wait({trial}, timeout=HANG_S / 2)
    assert done
    assert trial.cancelled() or trial.result().outcome is Outcome.cancelled
    if environment_type == "docker":
        await wait_removed()
        assert (await docker("ps", "-aq", "--filter", f"label={RUN_LABEL}={run}")).out == ""


def links(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_symlink()]


@pytest.mark.parametrize("agent", [{}, {"agent": "terminus-2"}])
async def test_links_in_mounted_log_folders_are_not_followed(tmp_path: Path, container: str, agent: dict[str, Any]):
    """The harness writes trajectory.json on this machine, as its user: Harbor's terminus-2 after each turn."""
    (mine := tmp_path / "mine").write_text("of this machine")
    plant = f"cd /logs/agent; ln -s {mine} trajectory.json; ln -s {mine} terminus_2.log; ln -s {tmp_path} folder"
    task = make_task(tmp_path / "task", test=f"grep -q session /logs/agent/trajectory.json && {WRITES_ONE}")
    async with ScriptedModel([keys(plant, duration=0.5), DONE, DONE]).serve() as model:
        endpoint = ModelEndpoint(name="scripted", base_url=model.url)
        spec = TrialSpec(
            task_dir=task, trials_dir=tmp_path / "trials", model=endpoint, environment_type=container, **agent
        )
        record = await run_trial(spec)
    assert (record.outcome, record.reward) == (Outcome.completed, 1.0), record.evidence
    assert mine.read_text() == "of this machine"
    assert record.trial_dir is not None
    assert links(Path(record.trial_dir)) == []
    assert (Path(record.trial_dir) / "agent" / "trajectory.json").read_text().startswith("{")


@pytest.mark.parametrize("name", ["reward.txt", "reward.json"])
async def test_pipe_as_reward_file_does_not_block_the_harness(tmp_path: Path, container: str, name: str):
    """A process that the agent left running replaces the file while the verifier runs."""
    path = f"/logs/verifier/{name}"
    solution = f"(while :; do [ -e /tests/test.sh ] && rm -f {path} && mkfifo {path}; sleep 0.1; done) &\nsleep 0.2"
    async with asyncio.timeout(HANG_S):
        record = await play(tmp_path, container, solution, "sleep 2; true")
    assert record.reward in (None, 0.0), record.evidence


async def test_oracle_writes_no_exit_code_through_a_link(tmp_path: Path, container: str):
    (mine := tmp_path / "mine").write_text("of this machine")
    record = await play(tmp_path, container, f"ln -s {mine} /logs/agent/exit-code.txt; exit 3", SOLVED)
    assert (record.outcome, record.reward) == (Outcome.completed, 0.0), record.evidence
    assert mine.read_text() == "of this machine"
    assert record.trial_dir is not None
    assert (Path(record.trial_dir) / "agent" / "exit-code.txt").read_text() == "3"
