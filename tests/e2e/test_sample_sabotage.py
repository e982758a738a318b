"""A trial or sample in the wrong place stops a run within three steps: real model, real trials, one fault a run."""

import json
import re

import pytest
from sabotages import SAMPLES_OF_TRIALS
from test_reward_sabotage import FaultyRun, play_each

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SAYS = re.compile(r"^stopped: task \S+, trial \S+: (?:its |this trial |token )", re.MULTILINE)
WITHIN = 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FaultyRun]:
    return play_each(SAMPLES_OF_TRIALS, tmp_path_factory.mktemp("runs"), steps=4)


@pytest.mark.parametrize("fault", SAMPLES_OF_TRIALS)
def test_mixed_up_samples_stop_run_within_three_steps(runs: dict[str, FaultyRun], fault: str) -> None:
    run = runs[fault]
    assert run.code == 1 and "Traceback" not in run.output, run.output
    assert SAYS.search(run.output) is not None, run.output
    metrics = run.folder / "metrics.jsonl"
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []
    assert len(steps) < WITHIN, run.output
    assert not steps or fault in ("rollout exchanged", "groups trained again"), run.output
