"""A container whose processes or memory are exhausted is still graded. Real trials.

The verifier gives 0.25 if /app/answer is missing, to distinguish a real grade from a `self_inflicted` 0.
"""

from pathlib import Path

import pytest
from attempts import Played, play
from fakes import DONE, keys

from harbortrainer.environment.rollout_state import Attempts, trace_error
from harbortrainer.trials import Outcome

pytestmark = [pytest.mark.docker, pytest.mark.e2e, pytest.mark.long]

PIDS, MEMORY_MB = 100, 128
BY_COMPOSE = "services: {main: {environment: {SIDE: '1'}}}\n"
SMALL_TMP = "services: {main: {tmpfs: ['/tmp:size=1m']}}\n"
GRADES = (
    "seq 3000 > /tests/room && cat /tests/room | sort | tail -n1 > /dev/null && perl -e '$held = q(x) x (16 << 20)' && "
    "echo 0.25 > /logs/verifier/reward.txt"
)
MANY = f"for i in {{1..{2 * PIDS}}}; do sleep 500 & done"
HOLDS = "perl -e 'push @held, q(x) x (1 << 20) while @held < {}; sleep 500'"
GRADED = {
    "a fork bomb": "bomb() { bomb | bomb & }; bomb",
    "processes without end": MANY,
    "a memory hog": f"{HOLDS.format(MEMORY_MB - 12)} &",
    "one that never has enough": f"(while :; do {HOLDS.format(4 * MEMORY_MB)}; done) 2>/dev/null &",
    "many small ones": f"for i in {{1..40}}; do (while :; do {HOLDS.format(8)}; done) & done 2>/dev/null",
    "memory of no process": (
        "perl -e '$file = syscall(319, my $name = q(a), 0); open(my $held, q(>&=), $file); "
        "1 while syswrite $held, q(x) x (1 << 20); sleep 500' &"
    ),
    "full shared memory": "dd if=/dev/zero of=/dev/shm/big bs=1M",
}


async def attempt(folder: Path, command: str, kind: str, *, test: str = GRADES, compose: str = "") -> Played:
    task = {
        # One core, so that a fork bomb leaves the other to parallel tests.
        "extra": f"[environment]\nmemory_mb = {MEMORY_MB}\ncpus = 1\n",
        "compose": compose,
        "agent_timeout_s": 60,
        "verifier_timeout_s": 120,
    }
    script = [keys(command, duration=1.5), keys("true", duration=0.1), DONE, DONE]
    return await play(folder, script, test=test, task=task, environment_type=kind, environment_kwargs={"pids": PIDS})


def is_not_retried(trial: Played) -> bool:
    return trace_error(trial.record, Attempts()) is None


def is_graded_correctly(trial: Played) -> bool:
    """Whether it got the real grade, also after a timeout: the terminal may lack resources too."""
    ended = trial.record.outcome in (Outcome.completed, Outcome.agent_timeout)
    return ended and trial.record.reward == 0.25 and is_not_retried(trial)


@pytest.mark.parametrize("case", GRADED)
async def test_exhausted_limit_is_still_graded(tmp_path: Path, container: str, case: str):
    trial = await attempt(tmp_path, GRADED[case], container)
    assert is_graded_correctly(trial), trial.record


@pytest.mark.parametrize("case", ["processes without end", "a memory hog"])
async def test_exhausted_limit_is_still_graded_under_compose(tmp_path: Path, container: str, case: str):
    trial = await attempt(tmp_path, GRADED[case], container, compose=BY_COMPOSE)
    assert is_graded_correctly(trial), trial.record


async def test_verifier_restarts_if_leftovers_take_its_processes(tmp_path: Path, container: str):
    """A leftover process waits for the verifier and takes its processes first."""
    waits = "until [ -e /tests/test.sh ]; do sleep 0.1; done; for i in {1..70}; do sleep 500 & done; : > /app/taken"
    needs = "until [[ -e /app/taken ]]; do :; done; for i in {1..40}; do sleep 30 & done; kill %{1..40}; " + GRADES
    trial = await attempt(tmp_path, f"({waits}; sleep 500) & disown", container, test=needs)
    assert is_graded_correctly(trial), trial.record


async def test_service_keeps_running_while_graded(tmp_path: Path, container: str):
    finds = f"kill -0 $(cat /app/pid) && {GRADES}"
    trial = await attempt(tmp_path, "sleep 500 & echo $! > /app/pid", container, test=finds)
    assert is_graded_correctly(trial), trial.record


@pytest.mark.parametrize("compose", ["", BY_COMPOSE])
async def test_verifier_without_reward_is_verifier_error_despite_leftovers(
    tmp_path: Path, container: str, compose: str
):
    trial = await attempt(tmp_path, "sleep 500 &", container, test="true", compose=compose)
    assert trial.record.outcome is Outcome.verifier_error
    assert not trial.record.evidence.startswith("inside: ")


async def test_full_tmpfs_is_self_inflicted(tmp_path: Path, container: str):
    trial = await attempt(
        tmp_path, "cat /dev/zero > /tmp/big", container, test=f"seq 3000 > /tmp/room && {GRADES}", compose=SMALL_TMP
    )
    assert (trial.record.outcome, trial.record.reward) == (Outcome.self_inflicted, 0.0), trial.record
    assert "/tmp was full" in trial.record.evidence
    assert "a fresh container starts and answers" in trial.record.evidence
    assert is_not_retried(trial)
