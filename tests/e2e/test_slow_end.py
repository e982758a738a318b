"""A finished run whose session does not close in time still exits and writes its result files."""

import json
import subprocess
import sys
from pathlib import Path

import mini_run
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PATIENCE_S = 600
SLOW_CLOSE = """
import sys
from harbortrainer.engines.local.session import Session
from mini_run import main
close = Session.close
Session.close = lambda session: close(session) and False  # as if a server or the sampler did not end in time
sys.exit(main(sys.argv[1:]))
"""


def test_finished_run_is_a_harbor_job_even_if_closing_times_out(tmp_path: Path):
    config = mini_run.write_run(tmp_path, steps=1, keep="all", evaluates=False)
    process = subprocess.run(
        [sys.executable, "-c", SLOW_CLOSE, str(config)],
        env=mini_run.ENVIRONMENT, timeout=PATIENCE_S, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    run = tmp_path / "outputs" / "mini"
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    job = json.loads((run / "result.json").read_text())
    assert job["finished_at"] and job["n_total_trials"] > 0
