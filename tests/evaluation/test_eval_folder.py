"""An evaluation folder keeps its trials, and a resume has the same specification."""

import gzip
from pathlib import Path

import pytest
from eval_folders import eval_spec, evaluation, row

from harbortrainer.errors import UserError
from harbortrainer.evaluation.eval_folder import ROWS, TRANSCRIPTS, EvalFolder
from harbortrainer.evaluation.measuring import PlannedTrial, attempts_left
from harbortrainer.runs.transcript import Place, Transcript
from harbortrainer.runs.transcript_files import read_transcript
from harbortrainer.runs.trial_row import read_rows


def test_torn_row_loses_one_trial(tmp_path: Path) -> None:
    folder = evaluation(tmp_path / "e", {"a": [1.0, 0.0], "b": [1.0, 1.0]})
    whole = (tmp_path / "e" / ROWS).read_text()
    for cut in range(len(whole)):
        (tmp_path / "e" / ROWS).write_text(whole[:cut])
        assert len(EvalFolder.read(tmp_path / "e").rows()) == whole[:cut].count("\n")
    again = EvalFolder.begin(tmp_path / "e", folder.spec, resume=True)
    again.add(row("b", 1, 0.0))
    assert len(again.rows()) == 4
    again.release()


def test_torn_transcript_does_not_affect_others(tmp_path: Path) -> None:
    folder = evaluation(tmp_path, {"a": [1.0]})
    folder.add(row("b", 0, 0.0), Transcript(trial="b__0").packed())
    with (tmp_path / TRANSCRIPTS).open("ab") as file:
        file.write(Transcript(trial="b__1").packed()[:9])
    again = EvalFolder.begin(tmp_path, folder.spec, resume=True)
    again.add(row("b", 1, 0.0), Transcript(trial="b__1").packed())
    again.release()
    found = read_rows(tmp_path / ROWS)
    assert found[0].transcript is None, "of a trial that never began"
    kept = [
        read_transcript(tmp_path, Place(TRANSCRIPTS, *one.transcript), one.trial) for one in found if one.transcript
    ]
    assert [one.trial for one in kept if one] == ["b__0", "b__1"]
    assert gzip.decompress((tmp_path / TRANSCRIPTS).read_bytes()).count(b"\n") == 2


def test_later_trial_of_an_attempt_counts(tmp_path: Path) -> None:
    folder = evaluation(tmp_path, {"a": [None, 0.0]})
    assert folder.graded() == {("key-a", 1)}
    folder.add(row("a", 0, 1.0))
    assert folder.graded() == {("key-a", 0), ("key-a", 1)}
    assert [found.reward for found in folder.rows()] == [1.0, 0.0]


def test_uncounted_trial_folders_are_set_aside(tmp_path: Path) -> None:
    folder = evaluation(tmp_path, {"a": [1.0, None]})
    for name in ("a__0", "a__1", "a__killed", ".hidden"):
        (tmp_path / name).mkdir()
    folder.set_aside_uncounted()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [".hidden", "a__0", "log", "set_aside"]
    assert sorted(path.name for path in (tmp_path / "set_aside").iterdir()) == ["a__1", "a__killed"]


def test_attempts_alternate_between_tasks_and_skip_graded() -> None:
    left = attempts_left(["a", "b"], 2, {("a", 0)})
    assert left == [PlannedTrial(1, 0), PlannedTrial(0, 1), PlannedTrial(1, 1)]


def test_existing_folder_is_refused(tmp_path: Path) -> None:
    evaluation(tmp_path / "e", {"a": [1.0]})
    with pytest.raises(UserError, match="an evaluation already exists here; add --resume"):
        EvalFolder.begin(tmp_path / "e", eval_spec(["a"], attempts=1), resume=False)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    for resume, told in ((False, "not empty"), (True, "no evaluation here")):
        with pytest.raises(UserError, match=told):
            EvalFolder.begin(tmp_path / "other", eval_spec(["a"]), resume=resume)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.txt"]


def test_resume_refuses_other_evaluation_but_allows_more_attempts(tmp_path: Path) -> None:
    evaluation(tmp_path, {"a": [1.0, 0.0], "b": [1.0, 0.0]})
    for other, told in (
        (eval_spec(["a", "b"], policy="other"), "identity.model was 'm' and is 'other'"),
        (eval_spec(["a"]), "tasks.b was 'key-b' and is 'not set'"),
        (eval_spec(["a", "b"], environment="docker"), "environment_type was 'local' and is 'docker'"),
        (eval_spec(["a", "b"], attempts=1), "resume it with -k 2 or more"),
    ):
        with pytest.raises(UserError, match=told):
            EvalFolder.checked(tmp_path, other, resume=True)
    EvalFolder.begin(tmp_path, eval_spec(["a", "b"], attempts=4), resume=True).release()
    assert EvalFolder.read(tmp_path).spec.attempts == 4


def test_refuses_second_process(tmp_path: Path) -> None:
    folder = EvalFolder.begin(tmp_path / "e", eval_spec(["a"]), resume=False)
    with pytest.raises(UserError, match="another run is using this folder"):
        EvalFolder.begin(tmp_path / "e", eval_spec(["a"]), resume=True)
    folder.release()
    EvalFolder.begin(tmp_path / "e", eval_spec(["a"]), resume=True).release()


def test_reports_unreadable_evaluation(tmp_path: Path) -> None:
    evaluation(tmp_path, {"a": [1.0]})
    (tmp_path / ROWS).write_text('{"task": "a"}\n')
    with pytest.raises(UserError, match=r"trials\.jsonl: line 1: Field required; remove that line"):
        EvalFolder.read(tmp_path).rows()
    (tmp_path / "evaluation.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        EvalFolder.read(tmp_path)
