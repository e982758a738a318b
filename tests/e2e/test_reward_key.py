"""The `reward_key` of a run decides which of a verifier's rewards is trained on."""

import pytest
from fakes import make_task

from harbortrainer.trials import Outcome, TrialRecord, TrialSpec, run_trial

pytestmark = pytest.mark.e2e

TEST = """echo '{"score": 0.25, "chars": 5000, "grader_failed": 0}' > /logs/verifier/reward.json"""


async def run(tmp_path, reward_key: str | None) -> TrialRecord:
    task = make_task(tmp_path / "task", test=TEST)
    return await run_trial(TrialSpec(task_dir=task, trials_dir=tmp_path / "trials", agent="nop", reward_key=reward_key))


async def test_named_reward_is_trained_on(tmp_path):
    record = await run(tmp_path, "score")
    assert (record.outcome, record.reward, record.reward_key) == (Outcome.completed, 0.25, "score")
    assert record.rewards == {"score": 0.25, "chars": 5000.0, "grader_failed": 0.0}


async def test_missing_reward_key_is_verifier_error(tmp_path):
    record = await run(tmp_path, "accuracy")
    assert (record.outcome, record.reward) == (Outcome.verifier_error, None)
    assert record.error is not None and "has no 'accuracy' (reward_key)" in record.error.message
