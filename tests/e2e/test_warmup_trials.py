"""Warm-up and real trials: what is learned is what Terminus-2 shows, and solutions replay."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from harbortrainer.tasks.task_folder import load_folder
from harbortrainer.warmup.demonstrations import CONFIRMED
from harbortrainer.warmup.replay import play, replay
from tiny_policy import prompts

TASK = Path(__file__).parents[2] / "datasets/quickstart/train/sort-grape-bronze"
INSTRUCTION = (TASK / "instruction.md").read_text()
HOST = {"image": "host"}
SORTED = ["sort grape.txt > bronze.txt"]

pytestmark = pytest.mark.e2e


async def test_transcripts_equal_what_a_real_trial_shows(tmp_path: Path):
    turns = await play(TASK, [prompts.solved(SORTED), CONFIRMED], tmp_path, "local", HOST)
    assert turns is not None
    first, second = (shown for shown, _ in turns)
    assert first in {prompts.first_prompt(INSTRUCTION, pace) for pace in ("ready", "late")}
    assert second in {prompts.confirmation_prompt(SORTED, pace) for pace in ("ready", "late")}


async def test_a_solution_replays_to_a_transcript(tmp_path: Path):
    (found,) = await replay(load_folder(TASK), environment_type="local", environment_kwargs=HOST, work_dir=tmp_path)
    assert len(found) == 3
    assert "sort grape.txt > bronze.txt" in found[0][1]


async def test_a_wrong_solution_leaves_no_transcript(tmp_path: Path):
    answers = [prompts.solved(["cp grape.txt bronze.txt"]), CONFIRMED]
    assert await play(TASK, answers, tmp_path, "local", HOST) is None
