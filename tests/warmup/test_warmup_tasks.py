"""Which tasks a warm-up on `tasks` replays."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from harbortrainer.config.warmup_table import WarmupConfig
from harbortrainer.errors import UserError
from harbortrainer.warmup.solved_tasks import solved_tasks
from harbortrainer.warmup.warmup import warm_up

SAMPLES = Path(__file__).parents[2] / "datasets/harbor_tasks"


def test_a_task_of_several_steps_is_left_out_and_named(tmp_path):
    for name in ("incident-two-steps", "csv-clean"):
        (tmp_path / name).symlink_to(SAMPLES / name)
    lines: list[str] = []
    assert [task.name for task in solved_tasks(tmp_path, lines.append)] == ["csv-clean"]
    assert lines == ["warm-up: left out, since they have no solution/solve.sh: incident-two-steps"]


def test_nothing_but_tasks_of_several_steps_is_refused_before_a_model_is_loaded(tmp_path: Path):
    config = WarmupConfig(model="no/such-model", tasks=SAMPLES / "incident-two-steps")
    with pytest.raises(UserError, match=r"no task has a solution/solve\.sh"):
        warm_up(config, tmp_path / "policy")
    assert list(tmp_path.iterdir()) == []
