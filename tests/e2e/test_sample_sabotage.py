"""A trial or sample in the wrong place stops a run within three steps: real model, real trials, one fault a run."""

import json
import re
from pathlib import Path

import mini_run
import pytest
from sabotages import SAMPLES_OF_TRIALS
from test_reward_sabotage import PATIENCE_S, run_with_fault

pytestmark = pytest.mark.e2e

SAYS = re.compile(r"^stopped: task \S+, trial \S+: (?:its |this trial |token )", re.MULTILINE)
WITHIN = 3


def test_mixed_up_samples_stop_run_within_three_steps(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Each fault with --all-mutations, else the first: a run takes half a minute of CPU."""
    for fault in list(SAMPLES_OF_TRIALS)[: None if request.config.getoption("--all-mutations") else 1]:
        folder = tmp_path / fault.replace(" ", "-")
        with run_with_fault(fault, mini_run.write_run(folder, steps=4, evaluates=False)) as process:
            output = process.communicate(timeout=PATIENCE_S)[0]
        assert process.returncode == 1 and "Traceback" not in output, output
        assert SAYS.search(output) is not None, output
        metrics = folder / "outputs" / "mini" / "metrics.jsonl"
        steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []
        assert len(steps) < WITHIN, output
        assert not steps or fault in ("rollout exchanged", "groups trained again"), output
