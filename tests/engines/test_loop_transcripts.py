"""The transcripts that the loop keeps: of trials that trained, that did not, and of a run that never made a step."""

import asyncio
from pathlib import Path

import pytest
from small_world import FAIL, Script, SmallRun, World

from harbortrainer.errors import RunStoppedError
from harbortrainer.runs.durable import read_lines
from harbortrainer.runs.progress import rewind
from harbortrainer.runs.transcript import Transcript
from harbortrainer.runs.transcript_files import FOLDER, PENDING, read
from harbortrainer.runs.trial_line import UNDECIDED, TrialLine
from harbortrainer.view.folder_kind import open_store
from harbortrainer.view.shown_trial import OPEN
from harbortrainer.view.trial_filter import TrialFilter


def kept(run: SmallRun, folder: str, name: str) -> list[tuple[TrialLine, Transcript | None]]:
    """The lines of a file with what is kept of each trial."""
    rows = read_lines(run.run.path / folder / f"{name}.jsonl")
    lines = [TrialLine.of_rollout(row, name) for row in rows]
    return [(line, read(run.run.path, line.place, line.trial) if line.place else None) for line in lines]


def test_every_trial_of_a_step_has_its_tokens_whether_it_trained_or_not(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, steps=3)
    asyncio.run(run.play())
    found = [one for step in (1, 2, 3) for one in kept(run, "rollouts", f"step_{step}")]
    fates = {line.not_trained for line, _ in found}
    assert {None, "failed", "no signal in its group", "too few survivors"} <= fates
    for line, transcript in found:
        if line.outcome == "cancelled":
            continue
        assert transcript is not None, line
        assert sum(len(turn.token_ids) for turn in transcript.turns()) == line.tokens.output
        if line.trained:
            assert min(turn.version or 0 for turn in transcript.turns()) == line.version


def test_a_run_that_stops_because_every_trial_fails_can_be_looked_into(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, steps=3, world=World((Script("lost", [FAIL] * 4),)))
    with pytest.raises(RunStoppedError, match="left no group with two survivors"):
        asyncio.run(run.play())
    assert not list(run.run.rollouts.iterdir())
    found = kept(run, FOLDER, PENDING)
    assert len(found) >= 24 and all(transcript is not None for _, transcript in found)
    run.run.config_file.write_text("")
    store = open_store(run.run.path)
    assert store.fates() == {UNDECIDED: len(found)}
    line = store.found(TrialFilter())[0][0]
    sheet = store.sheet(line.trial)
    assert sheet is not None and sheet.turns and line.step == OPEN
    rewind(run.run, 0)
    store.refresh()
    assert store.found(TrialFilter()) == ([], 0), "a resume plays them again"
