"""Warm-up and real trials: what is learned is what Terminus-2 shows, and solutions replay."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from harbortrainer.tasks.source import load_folder
from harbortrainer.warmup import transcripts
from harbortrainer.warmup.replay import play, replay

TASK = Path(__file__).parents[2] / "datasets/quickstart/train/sort-grape-bronze"
INSTRUCTION = (TASK / "instruction.md").read_text()
SORTED = ["sort grape.txt > bronze.txt"]

pytestmark = pytest.mark.e2e


async def test_transcripts_equal_what_a_real_trial_shows(tmp_path: Path):
    turns = await play(TASK, [transcripts.solved(SORTED), transcripts.CONFIRMED], tmp_path, "local")
    assert turns is not None
    first, second = (shown for shown, _ in turns)
    assert first in {transcripts.first_prompt(INSTRUCTION, pace) for pace in ("ready", "late")}
    assert second in {transcripts.confirmation_prompt(SORTED, pace) for pace in ("ready", "late")}


async def test_a_solution_replays_to_a_transcript(tmp_path: Path):
    (found,) = await replay(load_folder(TASK), environment_type="local", work_dir=tmp_path)
    assert len(found.turns) == 3
    assert "sort grape.txt > bronze.txt" in found.turns[0][1]


async def test_a_wrong_solution_leaves_no_transcript(tmp_path: Path):
    answers = [transcripts.solved(["cp grape.txt bronze.txt"]), transcripts.CONFIRMED]
    assert await play(TASK, answers, tmp_path, "local") is None
