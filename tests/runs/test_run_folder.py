"""Whose folder it is, and bringing it back to the last finished step."""

import pytest

from harbortrainer.errors import UserError
from harbortrainer.runs.durable import append_line, read_lines, write_lines
from harbortrainer.runs.folder import RunFolder, first_difference
from harbortrainer.runs.progress import rewind

CONFIG = 'max_steps = 3\n[model]\nname = "a"\n[[orchestrator.train.source]]\nratio = 1.0\n'


def create(tmp_path, text=CONFIG, *, resume=False, name="run"):
    return RunFolder.create(tmp_path, name, config_text=text, resume=resume)


def test_a_new_run_makes_its_folders_and_keeps_its_config(tmp_path):
    run = create(tmp_path)
    assert run.config_file.read_text() == CONFIG
    assert run.trials.is_dir()


def test_a_folder_in_use_is_refused_without_resume(tmp_path):
    create(tmp_path)
    with pytest.raises(UserError, match="not empty; add --resume"):
        create(tmp_path)


def test_a_run_goes_on_in_its_own_folder(tmp_path):
    create(tmp_path)
    assert create(tmp_path, resume=True).path == tmp_path / "run"


def test_a_resume_in_another_runs_folder_names_the_file_and_the_key(tmp_path):
    create(tmp_path)
    with pytest.raises(UserError, match=r"config\.toml: this folder belongs to another run: model\.name was 'a'"):
        create(tmp_path, CONFIG.replace('"a"', '"b"'), resume=True)


def test_a_resume_of_nothing_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no run to resume here"):
        create(tmp_path, resume=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "text",
    [
        CONFIG.replace("max_steps = 3", "max_steps = 30"),
        CONFIG + "[ckpt]\ninterval = 1\n",
    ],
)
def test_what_does_not_change_the_policy_may_change(text):
    assert first_difference(CONFIG, text) is None


def test_a_key_inside_a_source_decides():
    assert first_difference(CONFIG, CONFIG.replace("1.0", "2.0")) == (
        "orchestrator.train.source.0.ratio was 1.0 and is 2.0"
    )


def test_rewind_forgets_what_came_after_the_last_finished_step(tmp_path):
    run = create(tmp_path)
    for step in (0, 1, 2):
        append_line(run.metrics_file, {"step": step})
    for path in (run.eval_file(0), run.rollouts_file(1), run.rollouts_file(2), run.eval_file(2)):
        write_lines(path, [{}])
    for name, finished in (("done", True), ("torn", False)):
        (run.trials / name).mkdir()
        if finished:
            (run.trials / name / "result.json").write_text("{}")
    rewind(run, 1)
    assert [row["step"] for row in read_lines(run.metrics_file)] == [0, 1]
    assert sorted(path.name for path in run.rollouts.iterdir()) == ["eval_step_0.jsonl", "step_1.jsonl"]
    assert [path.name for path in run.trials.iterdir()] == ["done"]


def test_a_run_that_did_nothing_leaves_no_folder(tmp_path):
    run = create(tmp_path)
    run.discard_if_empty()
    assert not run.path.exists()


def test_a_run_that_did_something_stays(tmp_path):
    run = create(tmp_path)
    append_line(run.metrics_file, {"step": 0})
    run.discard_if_empty()
    assert run.path.exists()
