"""An evaluation that measures what is trained on is refused, with the pairs, before anything slow."""

import shutil
from pathlib import Path

import pytest

from harbortrainer.doctor import contamination
from harbortrainer.doctor.finding import Level

SAMPLES = Path(__file__).parents[2] / "datasets/harbor_tasks"


@pytest.fixture
def found(plan):
    """What the check says of a run that trains on one taskset and measures with another."""

    def look(trained: dict, measured: dict):
        def env(keys: dict) -> dict:
            taskset = {"id": "harbor_env"} | {key: str(value) for key, value in keys.items() if key == "tasks_dir"}
            return {"env": {"taskset": keys | taskset, "agent": {"harness": {"environment_type": "local"}}}}

        return list(
            contamination.check(plan(sources=[env(trained)], orchestrator={"eval": {"source": [env(measured)]}}))
        )

    return look


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """One sample under another name with a word more, and four others as they are."""
    folder = tmp_path / "held-out"
    for name in ("csv-clean", "json-to-env", "make-handbook", "sqlite-orders", "scrub-secrets"):
        shutil.copytree(SAMPLES / name, folder / name)
    (folder / "csv-clean").rename(folder / "table")
    told = folder / "table/instruction.md"
    told.write_text(told.read_text() + "Please.\n")
    return folder


def test_an_overlap_is_refused_with_its_pairs_the_key_and_the_ways_out(found, copied):
    (finding,) = found({"tasks_dir": SAMPLES}, {"tasks_dir": copied})
    assert finding.level is Level.RED
    assert finding.what.startswith("5 of 5 held-out tasks are trained on: json-to-env = json-to-env (the same content)")
    assert "2 more: `harbortrainer tasks overlap`" in finding.what
    assert finding.where == "run.toml: orchestrator.eval.source[0].env.taskset.tasks_dir"
    assert "may_overlap" in finding.do and "near_copy" in finding.do
    (finding,) = found({"tasks_dir": SAMPLES}, {"tasks_dir": copied, "include": ["table"]})
    assert "table = csv-clean (" in finding.what


def test_the_user_can_mean_it(found, copied):
    (finding,) = found({"tasks_dir": SAMPLES}, {"tasks_dir": copied, "may_overlap": True})
    assert finding.level is Level.YELLOW and "5 of 5" in finding.what
    (finding,) = found({"tasks_dir": SAMPLES, "exclude": ["j*", "m*", "s*", "c*"]}, {"tasks_dir": copied})
    assert finding.level is Level.GREEN


def test_the_sides_of_a_split_do_not_overlap_and_an_empty_one_is_told(found):
    sides = [{"tasks_dir": SAMPLES, "split": side, "eval_share": 0.3} for side in ("train", "eval")]
    (finding,) = found(*sides)
    assert finding.level is Level.GREEN and "none of 3 held-out tasks" in finding.what
    (finding,) = found(sides[0], sides[1] | {"eval_share": 0.00001})
    assert finding.level is Level.RED and "none of the 13 tasks is on the side 'eval'" in finding.what
    assert finding.where == "run.toml: orchestrator.eval.source[0].env.taskset.split"


def test_tasks_that_cannot_be_read_are_told_elsewhere(found):
    assert found({"tasks_dir": SAMPLES}, {"tasks_dir": "nowhere"}) == []
