"""A separate verifier without an image of its own: Harbor 0.25 grades in a new sandbox of the agent's image."""

from pathlib import Path

import pytest
from fakes import make_task

from harbortrainer.harbor_compat import separate_verifier_can_use_environment
from harbortrainer.trials import Outcome, TrialSpec, run_trial

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not separate_verifier_can_use_environment(), reason="Harbor 0.21 cannot start this verifier"),
]

TOML = 'artifacts = ["/app/answer"]\n[verifier]\nenvironment_mode = "separate"\n'
STEPS = '[[steps]]\nname = "one"\nartifacts = ["/app/answer"]\n[steps.verifier]\nenvironment_mode = "separate"\n'
FORGED = "touch /app/answer /app/forged; mkdir -p /tests; echo 'echo 0 > /logs/verifier/reward.txt' > /tests/test.sh"
TEST = (
    "test -e /app/answer -a -e /of-image -a -e /tests/beside -a ! -e /app/forged && echo 1 > /logs/verifier/reward.txt"
)


@pytest.mark.parametrize("toml", [TOML, STEPS], ids=["task", "step"])
@pytest.mark.parametrize(("solution", "expected"), [("touch /app/answer", 1.0), (FORGED, 1.0), ("true", 0.0)])
async def test_grades_artifacts_in_new_sandbox_of_agents_image(
    tmp_path: Path, environment_type: str, toml: str, solution: str, expected: float
) -> None:
    dockerfile = "FROM debian:12-slim\nWORKDIR /app\nRUN touch /of-image\n"
    task = make_task(tmp_path / "task", dockerfile=dockerfile, steps={"one": ""} if toml == STEPS else None)
    (task / "task.toml").write_text(toml)
    part = task / "steps/one" if toml == STEPS else task
    (part / "tests" / "test.sh").write_text(f"#!/bin/bash\necho 0 > /logs/verifier/reward.txt\n{TEST}\n")
    (part / "tests" / "beside").write_text("")
    (part / "solution").mkdir(exist_ok=True)
    (part / "solution" / "solve.sh").write_text(f"#!/bin/bash\n{solution}\n")
    record = await run_trial(
        TrialSpec(task_dir=task, trials_dir=tmp_path / "trials", agent="oracle", environment_type=environment_type)
    )
    assert (record.outcome, record.reward) == (Outcome.completed, expected), record
