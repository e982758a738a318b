"""Every shipped task is trainable: the oracle reaches the top reward, and `nop` does not."""

from pathlib import Path

import pytest
from image_setup import needs_images

from harbortrainer.tasks.task_check import check_tasks
from harbortrainer.tasks.task_folder import load_folder

DATASETS = Path(__file__).parents[2] / "datasets"


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("folder", "image"),
    [
        ("harbor_tasks", "host"),
        pytest.param("harbor_tasks", "build", marks=needs_images),
        ("quickstart/train", "host"),
        ("quickstart/heldout", "host"),
    ],
)
async def test_oracle_gets_top_reward_and_nop_does_not(folder: str, image: str) -> None:
    tasks = load_folder(DATASETS / folder)
    verdicts = await check_tasks(tasks, concurrency=4, environment_kwargs={"image": image})
    assert [v.task for v in verdicts] == [task.name for task in tasks]
    assert [v for v in verdicts if v.problem] == []


def test_sample_tasks_cover_every_kind() -> None:
    tasks = load_folder(DATASETS / "harbor_tasks")
    assert len(tasks) >= 10
    assert any(task.n_steps > 1 for task in tasks)
    configs = [(task.path / "task.toml").read_text() for task in tasks]
    assert any('environment_mode = "separate"' in config for config in configs)
