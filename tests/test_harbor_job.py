"""Trials of a training run that are linked for Harbor's viewer."""

import shutil
from pathlib import Path

from harbortrainer.commands.local_run import link_trials
from harbortrainer.runs.folder import RunFolder


def keep(run: RunFolder, *names: str) -> None:
    for name in names:
        (run.trials / name).mkdir(parents=True)
        (run.trials / name / "result.json").write_text("{}")


def links(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.path.iterdir() if path.is_symlink())


def test_links_only_existing_trials_of_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    keep(run, "a", "b", "lost")
    (run.trials / "torn").mkdir()
    assert sorted(link_trials(run, {"a", "b", "pruned", "torn"})) == links(run) == ["a", "b"]
    assert (run.path / "a" / "result.json").is_file()
    (run.trials / "b" / "result.json").unlink()
    assert link_trials(run, {"a", "b"}) == links(run) == ["a"]


class Removing(list[str]):
    """Names of trials; the folder of one disappears when its name is looked up."""

    def __init__(self, run: RunFolder, removed: str, *names: str) -> None:
        super().__init__(names)
        self.folder = run.trials / removed

    def __contains__(self, name: object) -> bool:
        if name == self.folder.name:
            shutil.rmtree(self.folder)
        return super().__contains__(name)


def test_trial_removed_while_linking_is_skipped(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    keep(run, "a", "b", "c")
    assert sorted(link_trials(run, Removing(run, "b", "a", "b", "c"))) == links(run) == ["a", "c"]


def test_trial_named_like_run_folder_replaces_nothing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    keep(run, "model")
    run.model.mkdir()
    link_trials(run, {"model"})
    assert not run.model.is_symlink()
