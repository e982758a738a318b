"""The agent is blamed only with a sign inside its sandbox and sound infrastructure. Real trials, `local`."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from attempts import play
from dying_environment import DyingEnvironment
from fakes import DONE, SOLVED, keys

from harbortrainer.sandbox import fork_server_client, local
from harbortrainer.sandbox.errors_and_changes import SandboxStartError
from harbortrainer.sandbox.running_sandbox import RunningSandbox
from harbortrainer.trials import Outcome, TrialRecord

pytestmark = pytest.mark.e2e

NO_SHELL = keys("rm -f /bin/bash", duration=0.3)


class KilledFromOutside(DyingEnvironment):
    """The sandbox's first process is killed from outside."""

    async def die(self) -> None:
        for monitor in children(fork_server_client.shared().pid):
            for first in children(monitor):
                os.kill(first, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class NoFreshOne(local.LocalEnvironment):
    """A machine that cannot start another sandbox."""

    async def _start_fresh(self) -> RunningSandbox:
        raise SandboxStartError("no room for another sandbox")


async def test_broken_sandbox_on_unsound_machine_is_sandbox_error(tmp_path: Path):
    # In control mode the terminal keeps working without the file.
    broken = keys("rm -f /bin/bash; tmux detach-client -s terminus-2", duration=0.3)
    trial = await play(tmp_path, [broken, DONE], environment_type="test_evidence:NoFreshOne")
    assert (trial.record.outcome, trial.record.reward) == (Outcome.sandbox_error, None)
    assert "a fresh sandbox does not start: no room" in trial.record.evidence
    assert "No such file or directory: '/bin/bash'" in trial.record.evidence


async def test_sandbox_killed_from_outside_is_sandbox_error(tmp_path: Path):
    script = [keys("true"), keys("true"), DONE]
    trial = await play(tmp_path, script, environment_type="test_evidence:KilledFromOutside")
    assert (trial.record.outcome, trial.record.reward) == (Outcome.sandbox_error, None)
    assert trial.record.evidence.startswith("sound: ")


async def test_broken_verifier_in_intact_sandbox_is_verifier_error(tmp_path: Path):
    trial = await play(tmp_path, [keys("touch /tmp/x"), DONE, DONE], test="true")
    assert trial.record.outcome is Outcome.verifier_error
    assert trial.record.evidence == "sound: a fresh sandbox starts and answers"


async def test_harness_defect_is_agent_error(tmp_path: Path):
    trial = await play(tmp_path, [DONE], agent="defective_agent:Defective")
    assert (trial.record.outcome, trial.record.reward) == (Outcome.agent_error, None)


async def test_reached_limit_alone_does_not_blame_agent(tmp_path: Path):
    """The disk was full once, but the verifier writes no reward: the task is to blame."""
    fill = "dd if=/dev/zero of=/big bs=1M; rm /big"
    limits = {"disk_mb": 32}
    trial = await play(tmp_path, [keys(fill, duration=1), DONE, DONE], test="true", environment_kwargs=limits)
    assert trial.record.outcome is Outcome.verifier_error


async def test_self_inflicted_step_voids_rewards_of_earlier_steps(tmp_path: Path):
    async def solves_then_breaks(body: dict[str, Any]) -> str:
        if "Step second" in body["messages"][0]["content"]:
            return NO_SHELL
        return keys("mkdir -p /app; touch /app/answer", complete=True)

    steps = {"first": SOLVED, "second": SOLVED}
    trial = await play(tmp_path, [solves_then_breaks] * 9, task={"steps": steps})
    assert (trial.record.outcome, trial.record.reward) == (Outcome.self_inflicted, 0.0), trial.record
    assert [step.outcome for step in trial.record.steps] == [Outcome.completed, Outcome.self_inflicted]
    assert trial.record.steps[0].rewards == {"reward": 1.0}


def test_self_inflicted_record_requires_evidence():
    with pytest.raises(ValueError, match="self_inflicted"):
        TrialRecord(outcome=Outcome.self_inflicted, task="t", reward=0.0)
    with pytest.raises(ValueError, match="self_inflicted"):
        TrialRecord(outcome=Outcome.self_inflicted, task="t", reward=1.0, evidence="inside: x. sound: y")
