"""Good trials of a Prime-RL run in the layout of newer releases."""

from collections import Counter
from pathlib import Path

import pytest
from prime_rl_runs import arrived, converted, episode, seal, write_step_run

from harbortrainer.errors import UserError
from harbortrainer.runs.good_trials import good_trials, require_rollout_files


def found(run: Path) -> tuple[dict[str, int | None], Counter[str]]:
    left_out: Counter[str] = Counter()
    return {one.row.trial: one.row.step for one in good_trials(run, min_reward=1.0, left_out=left_out)}, left_out


@pytest.mark.parametrize("sealed", [False, True])
def test_stream_gives_the_good_trials_of_training(tmp_path: Path, sealed: bool) -> None:
    old = write_step_run(tmp_path / "old", "org/policy")
    run = converted(old, tmp_path / "new")
    if sealed:
        seal(run.chunk(0))
    expected = {"a": 1, "c": 1}, {"with a reward under 1": 1, "without a reward": 1}
    assert found(old) == found(run.path) == expected


def test_line_in_progress_is_left_out(tmp_path: Path) -> None:
    run = converted(write_step_run(tmp_path / "old", "org/policy"), tmp_path / "new")
    run.add([arrived(episode("f"), "train", 2)], chunk=1)
    with run.chunk(1).open("a") as chunk:
        chunk.write('{"id": "being wri')
    assert found(run.path)[0] == {"a": 1, "c": 1, "f": 2}


def test_folder_without_episodes_has_no_trials(tmp_path: Path) -> None:
    (tmp_path / "monitors/file/traces/stream").mkdir(parents=True)
    with pytest.raises(UserError, match="this run has no trials"):
        require_rollout_files(tmp_path)
