"""A run that is killed while a group plays another trial in place of a failed one, and its resume."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
from patience import HANG_S
from scripted_run import FAIL, GROUP, FakeComponents, ScriptedRun, ScriptedTask
from verifiers.v1.episode import WireEpisode

from harbortrainer.runs.checkpoints import latest, rewind
from harbortrainer.runs.trial_row import read_rows

pytestmark = pytest.mark.torch  # the weight update

TASKS = [ScriptedTask(f"task-{number}", [1.0, FAIL, 0.0, 1.0, 0.0]) for number in range(16)]
"""The second trial of each group fails; the fifth is played in its place."""
RESUMED = 100
"""Number of each task's first trial after the resume."""


class StopsInRefill(FakeComponents):
    """A source whose trials never return that are played in place of failed ones, from the third on."""

    def __init__(self, tasks: Sequence[ScriptedTask]) -> None:
        super().__init__(tasks)
        self.failed_in: set[asyncio.Task[object] | None] = set()
        self.refills = 0

    async def run(self, index: int, *, seed: int | None = None) -> WireEpisode:
        if asyncio.current_task() in self.failed_in:
            self.refills += 1
            if self.refills > 2:
                await asyncio.Event().wait()
        episode = await super().run(index, seed=seed)
        if not episode.ok:
            self.failed_in.add(asyncio.current_task())
        return episode


async def train_until_refill(run: ScriptedRun, components: StopsInRefill) -> None:
    """Train two steps; then stop, while trials are in flight that are played in place of failed ones."""
    training = asyncio.create_task(run.train())
    async with asyncio.timeout(HANG_S):
        while not ((run.folder.checkpoints / "step_2").exists() and components.refills > 2):  # noqa: ASYNC110 - a folder
            await asyncio.sleep(0.01)
    training.cancel()
    await asyncio.gather(training, return_exceptions=True)


def test_group_stopped_in_a_refill_is_played_again_whole(tmp_path: Path) -> None:
    stopped = StopsInRefill(TASKS)
    run = ScriptedRun(tmp_path, steps=4, components=stopped)
    asyncio.run(train_until_refill(run, stopped))
    rewind(run.folder, 2)
    _, progress = latest(run.folder.checkpoints) or pytest.fail("there is no checkpoint")
    assert progress.schedule is not None
    unfinished = {TASKS[index].name for _, index in progress.schedule["again"]}

    run.components = FakeComponents(TASKS)
    run.components.version = progress.step
    run.components.started = defaultdict(lambda: RESUMED)
    asyncio.run(run.train(progress))
    groups: dict[str, set[int]] = defaultdict(set)
    for row in [*read_rows(run.folder.rollouts_file(3)), *read_rows(run.folder.rollouts_file(4))]:
        groups[row.task].add(int(row.trial.rpartition("-")[2]) - RESUMED)
    assert groups.keys() == unfinished
    whole = set(range(GROUP))
    assert all(trials in (whole, whole | {GROUP}) for trials in groups.values())
    lines = [json.loads(line) for line in run.folder.metrics_file.read_text().splitlines()]
    refills = [line["batch/refills"] for line in lines[2:]]
    assert sum(refills) == sum(trials > whole for trials in groups.values()) >= 2, "each start has refills of its own"
