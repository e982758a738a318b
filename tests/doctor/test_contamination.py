"""An evaluation on training tasks is refused, with the pairs of tasks."""

import shutil
from pathlib import Path

import pytest

from harbortrainer.doctor import task_checks
from harbortrainer.doctor.finding import Level
from harbortrainer.tasks.passed_checks import record_passed
from harbortrainer.tasks.task_folder import load_folder

SAMPLES = Path(__file__).parents[2] / "datasets/harbor_tasks"


@pytest.fixture
def found(plan):
    """Check a run with one taskset for training and one for evaluation."""

    def check(trained: dict, measured: dict, **run):
        def env(keys: dict) -> dict:
            taskset = {"id": "harbor_env"} | {key: str(value) for key, value in keys.items() if key == "tasks_dir"}
            return {"env": {"taskset": keys | taskset, "agent": {"harness": {"environment_type": "local"}}}}

        return list(
            task_checks.check_contamination(
                plan(sources=[env(trained)], orchestrator={"eval": {"source": [env(measured)]}}, **run)
            )
        )

    return check


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Five sample tasks, one of them renamed and with one more word."""
    folder = tmp_path / "held-out"
    for name in ("csv-clean", "json-to-env", "make-handbook", "sqlite-orders", "scrub-secrets"):
        shutil.copytree(SAMPLES / name, folder / name)
    (folder / "csv-clean").rename(folder / "table")
    instruction = folder / "table/instruction.md"
    instruction.write_text(instruction.read_text() + "Please.\n")
    return folder


def test_overlap_is_red_with_pairs_key_and_remedies(found, copied):
    (finding,) = found({"tasks_dir": SAMPLES}, {"tasks_dir": copied})
    assert finding.level is Level.RED
    assert finding.what.startswith("5 of 5 held-out tasks are trained on: json-to-env = json-to-env (the same content)")
    assert "2 more: `harbortrainer tasks overlap`" in finding.what
    assert finding.where == "run.toml: orchestrator.eval.source[0].env.taskset.tasks_dir"
    assert "may_overlap" in finding.do and "near_copy" in finding.do
    (finding,) = found({"tasks_dir": SAMPLES}, {"tasks_dir": copied, "include": ["table"]})
    assert "table = csv-clean (" in finding.what


def test_may_overlap_makes_overlap_yellow(found, copied):
    (finding,) = found({"tasks_dir": SAMPLES}, {"tasks_dir": copied, "may_overlap": True})
    assert finding.level is Level.YELLOW and "5 of 5" in finding.what
    (finding,) = found({"tasks_dir": SAMPLES, "exclude": ["j*", "m*", "s*", "c*"]}, {"tasks_dir": copied})
    assert finding.level is Level.GREEN


def test_warmup_on_held_out_solutions_is_red(found):
    sides = [{"tasks_dir": SAMPLES, "split": side, "eval_share": 0.3} for side in ("train", "eval")]
    good, finding = found(*sides, warmup={"model": "a/b", "tasks": str(SAMPLES)})
    assert good.level is Level.GREEN and finding.level is Level.RED
    assert finding.what.startswith("the warm-up teaches solutions of 3 of 3 held-out tasks: ")
    assert finding.where == "run.toml: warmup.tasks"
    assert len(found(*sides, warmup={"model": "a/b"})) == 1
    assert len(found(sides[0], sides[1] | {"may_overlap": True}, warmup={"model": "a/b", "tasks": str(SAMPLES)})) == 1


def test_split_has_no_overlap_and_an_empty_side_is_red(found):
    sides = [{"tasks_dir": SAMPLES, "split": side, "eval_share": 0.3} for side in ("train", "eval")]
    (finding,) = found(*sides)
    assert finding.level is Level.GREEN and "none of 3 held-out tasks" in finding.what
    (finding,) = found(sides[0], sides[1] | {"eval_share": 0.00001})
    assert finding.level is Level.RED and "none of the 13 tasks is on the 'eval' side" in finding.what
    assert finding.where == "run.toml: orchestrator.eval.source[0].env.taskset.split"


def test_only_checked_tasks_are_compared(found, copied, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained, measured = {"tasks_dir": SAMPLES, "include": ["s*"]}, {"tasks_dir": copied, "checked_only": True}
    (finding,) = found(trained, measured)
    assert finding.level is Level.RED and "none of these tasks passed the check" in finding.what
    assert finding.where == "run.toml: orchestrator.eval.source[0].env.taskset.checked_only"
    record_passed([task for task in load_folder(copied) if task.name in ("table", "json-to-env")])
    (finding,) = found(trained, measured)
    assert finding.level is Level.GREEN and "none of 2 held-out tasks" in finding.what


def test_unreadable_tasks_have_no_contamination_finding(found):
    assert found({"tasks_dir": SAMPLES}, {"tasks_dir": "nowhere"}) == []
