"""A training run as a job of Harbor's: which of its trials can be opened there."""

import shutil
from pathlib import Path

from harbortrainer.commands.harbor_job import link_trials
from harbortrainer.runs.folder import RunFolder


def keep(run: RunFolder, *names: str) -> None:
    for name in names:
        (run.trials / name).mkdir(parents=True)
        (run.trials / name / "result.json").write_text("{}")


def links(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.path.iterdir() if path.is_symlink())


def test_the_kept_trials_that_the_run_lists_are_linked_and_no_others(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    keep(run, "a", "b", "lost")
    (run.trials / "torn").mkdir()
    assert sorted(link_trials(run, {"a", "b", "pruned", "torn"})) == links(run) == ["a", "b"]
    assert (run.path / "a" / "result.json").is_file()
    (run.trials / "b" / "result.json").unlink()
    assert link_trials(run, {"a", "b"}) == links(run) == ["a"]


class Removing(list[str]):
    """Names of trials; one that is looked up goes from the disk."""

    def __init__(self, run: RunFolder, goes: str, *names: str) -> None:
        super().__init__(names)
        self.folder = run.trials / goes

    def __contains__(self, name: object) -> bool:
        if name == self.folder.name:
            shutil.rmtree(self.folder)
        return super().__contains__(name)


def test_a_trial_that_is_removed_meanwhile_takes_no_other_with_it(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    keep(run, "a", "b", "c")
    assert sorted(link_trials(run, Removing(run, "b", "a", "b", "c"))) == links(run) == ["a", "c"]


def test_a_trial_that_is_called_like_a_file_of_the_run_replaces_nothing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    keep(run, "model")
    run.model.mkdir()
    link_trials(run, {"model"})
    assert not run.model.is_symlink()
