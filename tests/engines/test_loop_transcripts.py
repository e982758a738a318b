"""Transcripts of trained and untrained trials, and of a run that stopped before its first step."""

import asyncio
from pathlib import Path

import pytest
from scripted_run import FAIL, FakeComponents, ScriptedRun, ScriptedTask

from harbortrainer.errors import RunStoppedError
from harbortrainer.runs.checkpoints import rewind
from harbortrainer.runs.transcript import Transcript
from harbortrainer.runs.transcript_files import FOLDER, PENDING, read_transcript, transcript_place
from harbortrainer.runs.trial_row import UNDECIDED, TrialRow, read_rows
from harbortrainer.view.queries import TrialFilter
from harbortrainer.view.run_folders import open_store

pytestmark = pytest.mark.torch  # the weight update


def rows_with_transcripts(run: ScriptedRun, folder: str, name: str) -> list[tuple[TrialRow, Transcript | None]]:
    """Return the rows of a file, each with its trial's transcript if there is one."""
    rows, path = read_rows(run.folder.path / folder / f"{name}.jsonl"), run.folder.path
    return [
        (row, read_transcript(path, transcript_place(name, row.transcript), row.trial) if row.transcript else None)
        for row in rows
    ]


def test_transcripts_have_tokens_of_every_trial(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path, steps=3)
    asyncio.run(run.train())
    found = [pair for step in (1, 2, 3) for pair in rows_with_transcripts(run, "rollouts", f"step_{step}")]
    reasons = {row.not_trained for row, _ in found}
    assert {None, "failed", "no signal in its group", "too few survivors"} <= reasons
    for row, transcript in found:
        if row.outcome == "cancelled":
            continue
        assert transcript is not None, row
        assert sum(len(turn.token_ids) for turn in transcript.turns()) == row.tokens.output
        if row.trained:
            assert min(turn.version or 0 for turn in transcript.turns()) == row.version


def test_stopped_run_has_pending_transcripts(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path, steps=3, components=FakeComponents((ScriptedTask("lost", [FAIL] * 4),)))
    with pytest.raises(RunStoppedError, match="left no group with two trainable trials"):
        asyncio.run(run.train())
    assert not list(run.folder.rollouts.iterdir())
    found = rows_with_transcripts(run, FOLDER, PENDING)
    assert len(found) >= 24 and all(transcript is not None for _, transcript in found)
    run.folder.config_file.write_text("")
    store = open_store(run.folder.path)
    assert store.training_counts() == {UNDECIDED: len(found)}
    row = store.find(TrialFilter())[0][0]
    detail = store.detail(row.trial)
    assert detail is not None and detail.turns and row.step is None
    rewind(run.folder, 0)
    store.refresh()
    assert store.find(TrialFilter()) == ([], 0), "a resume runs them again"
