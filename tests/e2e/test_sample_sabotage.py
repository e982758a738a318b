"""A trial or sample in the wrong place stops a run within three steps: real model, real trials, one fault a run."""

import json
import re
from pathlib import Path

import mini_run
import pytest
from sabotages import SAMPLES_OF_TRIALS
from test_reward_sabotage import PATIENCE_S, run_with_fault

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SAYS = re.compile(r"^stopped: task \S+, trial \S+: (?:its |this trial |token )", re.MULTILINE)
WITHIN = 3


@pytest.mark.parametrize("fault", SAMPLES_OF_TRIALS)
def test_mixed_up_samples_stop_run_within_three_steps(tmp_path: Path, fault: str) -> None:
    with run_with_fault(fault, mini_run.write_run(tmp_path, steps=4, evaluates=False)) as process:
        output = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 1 and "Traceback" not in output, output
    assert SAYS.search(output) is not None, output
    metrics = tmp_path / "outputs" / "mini" / "metrics.jsonl"
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []
    assert len(steps) < WITHIN, output
    assert not steps or fault in ("rollout exchanged", "groups trained again"), output
