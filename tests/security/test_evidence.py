"""Who is blamed: the agent only with a sign inside its sandbox and a sound infrastructure. Real trials, `local`."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from attempts import play
from dying_environment import DyingEnvironment
from fakes import DONE, SOLVED, keys

from harbortrainer.sandbox import local, nursery_client
from harbortrainer.sandbox.guest import Guest
from harbortrainer.sandbox.sandbox_errors import SandboxStartError
from harbortrainer.trials import Outcome, TrialRecord

pytestmark = pytest.mark.e2e

NO_SHELL = keys("rm -f /bin/bash", duration=0.3)


class KilledFromOutside(DyingEnvironment):
    """The sandbox's first process is killed from outside."""

    async def die(self) -> None:
        for monitor in children(nursery_client.shared().pid):
            for first in children(monitor):
                os.kill(first, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """The processes that a process started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class NoFreshOne(local.LocalEnvironment):
    """The machine cannot start another sandbox any more."""

    async def _fresh(self) -> Guest:
        raise SandboxStartError("no room for another sandbox")


async def test_a_broken_sandbox_on_a_machine_that_is_not_sound_is_a_sandbox_error(tmp_path: Path):
    # Its terminal lives on without the file, as long as the line to it does.
    broken = keys("rm -f /bin/bash; tmux detach-client -s terminus-2", duration=0.3)
    trial = await play(tmp_path, [broken, DONE], environment_type="test_evidence:NoFreshOne")
    assert (trial.record.outcome, trial.record.reward) == (Outcome.sandbox_error, None)
    assert "a fresh sandbox does not start: no room" in trial.record.evidence
    assert "No such file or directory: '/bin/bash'" in trial.record.evidence


async def test_a_sandbox_that_was_killed_from_outside_is_a_sandbox_error(tmp_path: Path):
    script = [keys("true"), keys("true"), DONE]
    trial = await play(tmp_path, script, environment_type="test_evidence:KilledFromOutside")
    assert (trial.record.outcome, trial.record.reward) == (Outcome.sandbox_error, None)
    assert trial.record.evidence.startswith("sound: ")


async def test_a_broken_verifier_is_the_tasks_fault_in_a_sandbox_that_is_whole(tmp_path: Path):
    trial = await play(tmp_path, [keys("touch /tmp/x"), DONE, DONE], test="true")
    assert trial.record.outcome is Outcome.verifier_error
    assert trial.record.evidence == "sound: a fresh sandbox starts and answers"


async def test_a_defect_of_the_harness_is_an_agent_error(tmp_path: Path):
    trial = await play(tmp_path, [DONE], agent="defective_agent:Defective")
    assert (trial.record.outcome, trial.record.reward) == (Outcome.agent_error, None)


async def test_a_limit_that_was_only_reached_blames_nobody(tmp_path: Path):
    """A disk that was full once, and a task whose verifier writes nothing: that is the task."""
    fill = "dd if=/dev/zero of=/big bs=1M; rm /big"
    limits = {"disk_mb": 32}
    trial = await play(tmp_path, [keys(fill, duration=1), DONE, DONE], test="true", environment_kwargs=limits)
    assert trial.record.outcome is Outcome.verifier_error


async def test_in_a_step_it_is_the_trials_and_what_was_solved_before_is_worth_nothing(tmp_path: Path):
    async def solves_then_breaks(body: dict[str, Any]) -> str:
        if "Step second" in body["messages"][0]["content"]:
            return NO_SHELL
        return keys("mkdir -p /app; touch /app/answer", complete=True)

    steps = {"first": SOLVED, "second": SOLVED}
    trial = await play(tmp_path, [solves_then_breaks] * 9, task={"steps": steps})
    assert (trial.record.outcome, trial.record.reward) == (Outcome.self_inflicted, 0.0), trial.record
    assert [step.outcome for step in trial.record.steps] == [Outcome.completed, Outcome.self_inflicted]
    assert trial.record.steps[0].rewards == {"reward": 1.0}


def test_a_record_without_evidence_cannot_blame_the_agent():
    with pytest.raises(ValueError, match="self_inflicted"):
        TrialRecord(outcome=Outcome.self_inflicted, task="t", reward=0.0)
    with pytest.raises(ValueError, match="self_inflicted"):
        TrialRecord(outcome=Outcome.self_inflicted, task="t", reward=1.0, evidence="inside: x. sound: y")
