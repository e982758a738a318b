"""Malformed answers are reported to the model; the trial continues and is graded. Real trials."""

import json
from pathlib import Path

import pytest
from attempts import play
from fakes import DONE, keys

from harbortrainer.trials import Outcome

pytestmark = pytest.mark.e2e

SOLVE = keys("mkdir -p /app && touch /app/answer")


def typed(keystrokes: str, duration: str = "0.1") -> str:
    """Return an answer with these keystrokes, escapes included."""
    return (
        '{"analysis": "a \\ud83d", "plan": "p", "commands": [{"keystrokes": "'
        f'{keystrokes}", "duration": {duration}}}]}}'
    )


BAD = {
    "NUL": (typed("touch /app/x\\u0000\\n"), "NUL character"),
    "half of a pair": (typed("echo \\ud800\\n"), "half of a surrogate pair"),
    "the other half": (typed("echo \\udc00\\n"), "half of a surrogate pair"),
    "a wait without end": (typed("true\\n", "1e999"), "not a finite number"),
    "a wait that is no number": (typed("true\\n", "NaN"), "not a finite number"),
    "a number of 5000 digits": (typed("true\\n", "1" * 5000), "cannot be read"),
    "nesting without end": ('{"analysis": ' + "[" * 100_000, "ERROR"),
}


@pytest.mark.parametrize("case", BAD)
async def test_malformed_answer_is_reported_to_model_and_trial_continues(tmp_path: Path, case: str):
    answer, message = BAD[case]
    trial = await play(tmp_path, [answer, SOLVE, DONE, DONE])
    assert (trial.record.outcome, trial.record.reward) == (Outcome.completed, 1.0), trial.record.error
    assert trial.record.parse_errors == 1
    assert message in trial.prompts[1]


async def test_invalid_character_outside_commands_is_replaced(tmp_path: Path):
    trial = await play(tmp_path, [typed("mkdir -p /app; touch /app/answer\\n"), DONE, DONE])
    assert (trial.record.outcome, trial.record.reward) == (Outcome.completed, 1.0), trial.record.error
    assert trial.record.parse_errors == 0
    assert trial.record.trial_dir is not None
    written = json.loads((Path(trial.record.trial_dir) / "agent" / "trajectory.json").read_text())
    assert "\ufffd" in json.dumps(written, ensure_ascii=False)


@pytest.mark.docker
async def test_malformed_answers_in_container(tmp_path: Path, container: str):
    script = [BAD["NUL"][0], BAD["half of a pair"][0], SOLVE, DONE, DONE]
    trial = await play(tmp_path, script, environment_type=container)
    assert (trial.record.outcome, trial.record.reward) == (Outcome.completed, 1.0), trial.record.error
    assert trial.record.parse_errors == 2
