"""Files that the image has in /tests are there when the verifier runs, as the image has them."""

import pytest
from fakes import make_task

from harbortrainer.trials import Outcome, TrialSpec, run_trial

pytestmark = pytest.mark.e2e

DOCKERFILE = """\
FROM debian:12-slim
WORKDIR /app
RUN mkdir -p /tests/data && echo right > /tests/data/expected && ln -s data/expected /tests/link
"""
CHEAT = """#!/bin/bash
echo wrong > /tests/data/expected; rm /tests/link; ln -s /app /tests/link; touch /tests/planted /tests/data/planted
"""
TEST = """
ls /tests /tests/data > /logs/verifier/files
test "$(cat /tests/link)" = right && echo 1 > /logs/verifier/reward.txt
"""


async def test_files_of_image_in_tests_are_restored_before_grading(tmp_path, environment_type):
    task = make_task(tmp_path / "task", test=TEST, dockerfile=DOCKERFILE)
    (task / "solution" / "solve.sh").write_text(CHEAT)
    spec = TrialSpec(task_dir=task, trials_dir=tmp_path / "trials", agent="oracle", environment_type=environment_type)
    record = await run_trial(spec)
    assert (record.outcome, record.reward) == (Outcome.completed, 1.0), record.error
    (files,) = (tmp_path / "trials").glob("*/verifier/files")
    assert set(files.read_text().split()) == {"/tests:", "/tests/data:", "data", "expected", "link", "test.sh"}
