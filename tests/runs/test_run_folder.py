"""Identity of a run folder, and rewinding to the last finished step."""

import pytest

from harbortrainer.errors import UserError
from harbortrainer.runs.checkpoints import rewind
from harbortrainer.runs.durable import append_line, read_lines, write_lines
from harbortrainer.runs.folder import RunFolder, first_difference

CONFIG = 'max_steps = 3\n[model]\nname = "a"\n[[orchestrator.train.source]]\nratio = 1.0\n'


def create(tmp_path, text=CONFIG, *, resume=False, name="run"):
    return RunFolder.create(tmp_path, name, config_text=text, resume=resume)


def test_new_run_creates_folders_and_config(tmp_path):
    run = create(tmp_path)
    assert run.config_file.read_text() == CONFIG
    assert run.trials.is_dir()


def test_existing_folder_is_refused_without_resume(tmp_path):
    create(tmp_path)
    with pytest.raises(UserError, match="not empty; add --resume"):
        create(tmp_path)


def test_resume_opens_own_folder(tmp_path):
    create(tmp_path)
    assert create(tmp_path, resume=True).path == tmp_path / "run"


def test_file_has_the_keys_that_a_resume_changed(tmp_path):
    create(tmp_path).release()
    longer = CONFIG.replace("max_steps = 3", "max_steps = 30")
    assert create(tmp_path, longer, resume=True).config_file.read_text() == longer


def test_resume_with_other_config_names_file_and_key(tmp_path):
    create(tmp_path)
    with pytest.raises(UserError, match=r"config\.toml: this folder belongs to another run: model\.name was 'a'"):
        create(tmp_path, CONFIG.replace('"a"', '"b"'), resume=True)


def test_resume_without_run_is_refused(tmp_path):
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
def test_mutable_keys_may_change_at_resume(text):
    assert first_difference(CONFIG, text) is None


def test_nested_source_key_is_part_of_identity():
    assert first_difference(CONFIG, CONFIG.replace("1.0", "2.0")) == (
        "orchestrator.train.source.0.ratio was 1.0 and is 2.0"
    )


def test_rewind_removes_unfinished_steps(tmp_path):
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


def test_run_without_results_removes_its_folder(tmp_path):
    run = create(tmp_path)
    run.discard_if_empty()
    assert not run.path.exists()


def test_run_with_results_keeps_its_folder(tmp_path):
    run = create(tmp_path)
    append_line(run.metrics_file, {"step": 0})
    run.discard_if_empty()
    assert run.path.exists()
