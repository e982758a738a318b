"""The checkpoint that a Prime-RL run continues from, with the folders that a killed run leaves."""

import json
from pathlib import Path

import pytest

from harbortrainer.config.reader import read
from harbortrainer.engines.prime_rl.start import LOG, start
from harbortrainer.errors import UserError

pytestmark = pytest.mark.process
CHECKPOINTS = "[ckpt]\ninterval = 1"
PRINT_ARGUMENTS = "import sys, json; print(json.dumps(sys.argv[1:])); sys.exit(3)"
ORCHESTRATOR, METADATA, SHARD = "orchestrator/progress.pt", "trainer/.metadata", "trainer/__0_0.distcp"


def write_parts(checkpoints: Path, step: int, *parts: str) -> None:
    for part in parts:
        file = checkpoints / f"step_{step}" / part
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """The checkpoints of a run whose trainer was killed while it wrote its part of step 3."""
    folder = tmp_path / "outputs/r/checkpoints"
    for step in (1, 2):
        write_parts(folder, step, ORCHESTRATOR, SHARD, METADATA)
    write_parts(folder, 3, ORCHESTRATOR, SHARD)
    for step in (4, 5):
        write_parts(folder, step, ORCHESTRATOR)
    return folder


@pytest.fixture
def launch(run_file, stand_in, tmp_path):
    """Start a failing `rl` and return the arguments of each attempt, after those of the run file."""
    checkout = stand_in(PRINT_ARGUMENTS)

    def run(more: str = CHECKPOINTS, overrides: tuple[str, ...] = (), **options) -> list[list[str]]:
        assert start(read(run_file(more), overrides), checkout, overrides, **options) == 3
        lines = (tmp_path / "outputs/r" / LOG).read_text().splitlines()
        return [json.loads(line)[2:] for line in lines]

    return run


def test_resume_continues_from_newest_step_that_both_completed(checkpoints, launch, capfd) -> None:
    assert launch(resume=True) == [["--resume.step", "2"]]
    out, err = capfd.readouterr()
    assert "--resume.step 2" in next(line for line in out.splitlines() if line.startswith("the same without"))
    assert err.splitlines()[:4] == [
        f"passed over step 5: {checkpoints}/step_5/{METADATA} missing",
        f"passed over step 4: {checkpoints}/step_4/{METADATA} missing",
        f"passed over step 3: {checkpoints}/step_3/{METADATA} missing",
        "continuing from step 2, the newest that trainer and orchestrator both completed",
    ]


def test_restart_continues_from_newest_step_that_both_completed(checkpoints, launch, capfd) -> None:
    assert launch(restarts=2) == [[], ["--resume.step", "2"], ["--resume.step", "2"]]
    assert "restarting (2 of 2 restarts left)\npassed over step 5" in capfd.readouterr().err


def test_steps_are_compared_as_numbers_and_need_the_orchestrators_part(checkpoints, launch) -> None:
    write_parts(checkpoints, 10, ORCHESTRATOR, SHARD, METADATA)
    write_parts(checkpoints, 11, SHARD, METADATA)
    write_parts(checkpoints, 12, "orchestrator/progress.pt.abc.tmp", SHARD, METADATA)
    assert launch(resume=True) == [["--resume.step", "10"]]


def test_trainer_may_have_its_checkpoints_elsewhere(checkpoints, launch, tmp_path) -> None:
    for table in ("ckpt", "trainer.ckpt"):
        write_parts(tmp_path / table / "checkpoints", 4, SHARD, METADATA)
        file = f'[{table}]\ninterval = 1\noutput_dir = "{tmp_path}/{table}"'
        assert launch(file, resume=True)[-1] == ["--resume.step", "4"]


def test_resume_without_completed_checkpoint_is_refused(tmp_path, launch) -> None:
    folder = tmp_path / "outputs/r/checkpoints"
    write_parts(folder, 1, ORCHESTRATOR, SHARD)
    with pytest.raises(UserError, match=r"no completed checkpoint in common.*--clean") as error:
        launch(resume=True)
    assert error.value.where == str(folder)
    assert (folder / "step_1").is_dir() and not (tmp_path / "outputs/r" / LOG).exists()


def test_restart_without_completed_checkpoint_starts_from_step_1(tmp_path, launch, capfd) -> None:
    folder = tmp_path / "outputs/r/checkpoints"
    write_parts(folder, 1, ORCHESTRATOR, SHARD)
    assert launch(restarts=1) == [[], ["--resume"]]
    assert [path.name for path in folder.iterdir()] == ["incomplete_step_1"], "Prime-RL would load step_1"
    assert "starting from step 1" in capfd.readouterr().err


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("more", ["", "clean = true\n"])
def test_step_that_the_user_names_is_kept(checkpoints, launch, more) -> None:
    assert launch(more + CHECKPOINTS, ("--resume.step", "1")) == [["--resume.step", "1", "--resume"]]
    later = [f"abandoned_step_{step}" for step in (2, 3, 4, 5)]
    assert names(checkpoints) == [*later, "step_1"], "clean applies to a new run only"


def test_later_resume_takes_the_continued_history(checkpoints, launch, capfd) -> None:
    write_parts(checkpoints, 50, ORCHESTRATOR, SHARD, METADATA)
    launch(overrides=("--resume.step", "1"))
    line = ": step_2, step_3, step_4, step_5, step_50 to abandoned_step_..."
    assert line in capfd.readouterr().err
    write_parts(checkpoints, 2, ORCHESTRATOR, SHARD, METADATA)
    assert launch(resume=True)[-1] == ["--resume.step", "2"]
    launch(overrides=("--resume.step", "1"))
    assert {"abandoned_step_2", "abandoned_step_2_2"} < set(names(checkpoints)), "nothing is lost"


def test_resume_from_a_folder_abandons_the_later_checkpoints(checkpoints, launch, tmp_path) -> None:
    write_parts(tmp_path / "other", 3, ORCHESTRATOR, SHARD, METADATA)
    launch(overrides=("--resume.dir", str(tmp_path / "other/step_3")))
    assert names(checkpoints) == ["abandoned_step_4", "abandoned_step_5", "step_1", "step_2", "step_3"]


@pytest.mark.parametrize("step", ["3", "7"])
def test_incomplete_named_step_abandons_nothing(checkpoints, launch, step) -> None:
    before = names(checkpoints)
    launch(overrides=("--resume.step", step))
    assert names(checkpoints) == before


def test_slurm_job_chooses_when_it_starts(checkpoints, launch, capfd) -> None:
    assert launch(f"{CHECKPOINTS}\n[slurm]", resume=True) == [["--resume"]]
    assert "passed over" not in capfd.readouterr().err
