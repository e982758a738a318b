"""What was measured stays measured, and a resume measures the same thing."""

import gzip
from pathlib import Path

import pytest
from eval_folders import about, evaluation, row

from harbortrainer.errors import UserError
from harbortrainer.evaluation.eval_folder import ROWS, TRANSCRIPTS, EvalFolder
from harbortrainer.evaluation.measuring import PlannedTrial, attempts_left
from harbortrainer.runs.durable import read_lines
from harbortrainer.runs.transcript import Transcript
from harbortrainer.runs.transcript_files import read
from harbortrainer.runs.trial_line import TrialLine


def test_a_line_cut_by_a_kill_costs_that_trial_and_no_other(tmp_path: Path) -> None:
    folder = evaluation(tmp_path / "e", {"a": [1.0, 0.0], "b": [1.0, 1.0]})
    whole = (tmp_path / "e" / ROWS).read_text()
    for cut in range(len(whole)):
        (tmp_path / "e" / ROWS).write_text(whole[:cut])
        assert len(EvalFolder.read(tmp_path / "e").rows()) == whole[:cut].count("\n")
    again = EvalFolder.begin(tmp_path / "e", folder.about, resume=True)
    again.add(row("b", 1, 0.0))
    assert len(again.rows()) == 4
    again.release()


def test_a_transcript_cut_by_a_kill_costs_no_other(tmp_path: Path) -> None:
    folder = evaluation(tmp_path, {"a": [1.0]})
    folder.add(row("b", 0, 0.0), Transcript(trial="b__0").packed())
    with (tmp_path / TRANSCRIPTS).open("ab") as file:
        file.write(Transcript(trial="b__1").packed()[:9])
    again = EvalFolder.begin(tmp_path, folder.about, resume=True)
    again.add(row("b", 1, 0.0), Transcript(trial="b__1").packed())
    again.release()
    found = [TrialLine.of_attempt(line, TRANSCRIPTS) for line in read_lines(tmp_path / ROWS)]
    assert found[0].place is None, "of a trial that never began"
    kept = [read(tmp_path, one.place, one.trial) for one in found if one.place]
    assert [one.trial for one in kept if one] == ["b__0", "b__1"]
    assert gzip.decompress((tmp_path / TRANSCRIPTS).read_bytes()).count(b"\n") == 2


def test_of_two_trials_of_one_attempt_the_later_counts(tmp_path: Path) -> None:
    folder = evaluation(tmp_path, {"a": [None, 0.0]})
    assert folder.graded() == {("key-a", 1)}
    folder.add(row("a", 0, 1.0))
    assert folder.graded() == {("key-a", 0), ("key-a", 1)}
    assert [found.reward for found in folder.rows()] == [1.0, 0.0]


def test_what_is_in_no_figure_is_put_aside_and_what_counts_stays(tmp_path: Path) -> None:
    folder = evaluation(tmp_path, {"a": [1.0, None]})
    for name in ("a__0", "a__1", "a__killed", ".hidden"):
        (tmp_path / name).mkdir()
    folder.tidy()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [".hidden", "a__0", "log", "set_aside"]
    assert sorted(path.name for path in (tmp_path / "set_aside").iterdir()) == ["a__1", "a__killed"]


def test_attempts_go_round_the_tasks_and_graded_ones_are_left_out() -> None:
    left = attempts_left(["a", "b"], 2, {("a", 0)})
    assert left == [PlannedTrial(1, 0), PlannedTrial(0, 1), PlannedTrial(1, 1)]


def test_a_folder_that_is_there_is_not_written_into(tmp_path: Path) -> None:
    evaluation(tmp_path / "e", {"a": [1.0]})
    with pytest.raises(UserError, match="an evaluation is there already; add --resume"):
        EvalFolder.begin(tmp_path / "e", about(["a"], attempts=1), resume=False)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    for resume, told in ((False, "not empty"), (True, "no evaluation here")):
        with pytest.raises(UserError, match=told):
            EvalFolder.begin(tmp_path / "other", about(["a"]), resume=resume)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.txt"]


def test_a_resume_of_another_evaluation_is_refused_and_more_attempts_are_not(tmp_path: Path) -> None:
    evaluation(tmp_path, {"a": [1.0, 0.0], "b": [1.0, 0.0]})
    for other, told in (
        (about(["a", "b"], policy="other"), "identity.model was 'm' and is 'other'"),
        (about(["a"]), "tasks.b was 'key-b' and is 'not set'"),
        (about(["a", "b"], environment="docker"), "environment_type was 'local' and is 'docker'"),
        (about(["a", "b"], attempts=1), "resume it with -k 2 or more"),
    ):
        with pytest.raises(UserError, match=told):
            EvalFolder.checked(tmp_path, other, resume=True)
    EvalFolder.begin(tmp_path, about(["a", "b"], attempts=4), resume=True).release()
    assert EvalFolder.read(tmp_path).about.attempts == 4


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    folder = EvalFolder.begin(tmp_path / "e", about(["a"]), resume=False)
    with pytest.raises(UserError, match="another run is writing into this folder"):
        EvalFolder.begin(tmp_path / "e", about(["a"]), resume=True)
    folder.release()
    EvalFolder.begin(tmp_path / "e", about(["a"]), resume=True).release()


def test_an_evaluation_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    evaluation(tmp_path, {"a": [1.0]})
    (tmp_path / ROWS).write_text('{"task": "a"}\n')
    with pytest.raises(UserError, match=r"trials\.jsonl: line 1: Field required; take that line out"):
        EvalFolder.read(tmp_path).rows()
    (tmp_path / "evaluation.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        EvalFolder.read(tmp_path)
