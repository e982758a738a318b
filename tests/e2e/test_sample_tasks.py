"""Every shipped task is trainable: the oracle reaches the top reward, and `nop` does not."""

from pathlib import Path

import pytest
from image_setup import needs_images

from harbortrainer.tasks.cheats import CHEATS
from harbortrainer.tasks.task_check import check_tasks
from harbortrainer.tasks.task_folder import load_folder

DATASETS = Path(__file__).parents[2] / "datasets"


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("folder", "image", "tools"),
    [
        ("harbor_tasks", "host", "agent"),
        ("harbor_tasks", "host", "image"),
        pytest.param("harbor_tasks", "build", "agent", marks=needs_images),
        pytest.param("harbor_tasks", "build", "image", marks=needs_images),
        ("quickstart/train", "host", "agent"),
        ("quickstart/heldout", "host", "agent"),
    ],
)
async def test_oracle_gets_top_reward_and_nop_does_not(folder: str, image: str, tools: str) -> None:
    tasks = load_folder(DATASETS / folder)
    kwargs = {"image": image, "verifier_tools": tools}
    verdicts = await check_tasks(tasks, concurrency=4, environment_kwargs=kwargs)
    assert [v.task for v in verdicts] == [task.name for task in tasks]
    assert [v for v in verdicts if v.problem] == []


@pytest.mark.long
@pytest.mark.e2e
async def test_no_cheat_works_on_sample_tasks() -> None:
    tasks = load_folder(DATASETS / "harbor_tasks")
    verdicts = await check_tasks(tasks, concurrency=4, cheats=tuple(CHEATS), environment_kwargs={"image": "host"})
    assert {verdict.task: verdict.forged for verdict in verdicts} == {task.name: {} for task in tasks}


def test_sample_tasks_cover_every_kind() -> None:
    tasks = load_folder(DATASETS / "harbor_tasks")
    assert len(tasks) >= 10
    assert any(task.n_steps > 1 for task in tasks)
    configs = [(task.path / "task.toml").read_text() for task in tasks]
    assert any('environment_mode = "separate"' in config for config in configs)
