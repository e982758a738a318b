"""Harbor tasks as verifiers tasks.

Contract: `HarborTaskset` reads a folder of Harbor tasks, or a set that is fetched once; a task's key is the hash of its
content. `HarborTask` turns the record that the harness left on the trace into the reward. Invariant: a trace whose
outcome does not train never ends with a reward, not even 0: `finalize` raises, whatever swallowed the error
before.
"""

import copy
import logging
import time
from collections.abc import Iterable

import verifiers.v1 as vf
from verifiers.v1.runtimes import Runtime
from verifiers.v1.task import Task, TaskData
from verifiers.v1.taskset import Taskset
from verifiers.v1.trace import Trace

from harbortrainer.environment.attempts import Attempts, HarborState, live
from harbortrainer.environment.late_answers import forget_late_answers
from harbortrainer.environment.plugin_config import HarborTasksetConfig
from harbortrainer.tasks.measured_rates import read_rates
from harbortrainer.tasks.played_tasks import PlayedTasks, played_tasks
from harbortrainer.tasks.task_folder import TaskRef
from harbortrainer.trials.record import record_of

logger = logging.getLogger(__name__)


class HarborTaskData(TaskData):
    """One Harbor task as it travels to the env server."""

    path: str
    """Folder of the task, absolute; the machine that runs the trial must see it there."""
    task_key: str
    """Hash of the task's content."""
    n_steps: int = 1
    """Number of steps, 1 for a plain task."""


class HarborTask(Task[HarborTaskData, HarborState]):
    """One Harbor task and how its trial is scored."""

    attempts: Attempts | None = None
    """The attempts of the running episode, see `for_episode`."""

    @property
    def key(self) -> str:
        return self.data.task_key

    def for_episode(self) -> "HarborTask":
        """A copy that counts the attempts of one episode."""
        task = copy.copy(self)
        task.attempts = Attempts()
        return task

    async def setup(self, trace: Trace, runtime: Runtime) -> None:
        """Hand the episode's attempts to the harness."""
        if self.attempts is not None:
            live(trace).attempts = self.attempts

    @vf.stop
    async def note_call(self, trace: Trace) -> bool:
        """Asked before each model call: note that it is under way. Stops nothing.

        verifiers records a call when it is over; one that is never answered is seen here alone.
        """
        live(trace).asked.append(time.time())
        return False

    async def finalize(self, trace: Trace, runtime: Runtime) -> None:
        """Raise when the trial's outcome does not train.

        verifiers swallows what `launch` raises once a limit has stopped the trace, so a verifier that failed
        after the last turn would otherwise come back as a success without a reward, which sums up to 0.
        """
        if (error := live(trace).failure) is not None:
            raise error
        forget_late_answers(trace, live(trace).phases)

    @vf.reward
    async def reward(self, trace: Trace) -> float:
        """The verifier's reward: the key `reward` of its dictionary, else the mean of the values."""
        record = record_of(trace)
        if record is None or record.reward is None:
            raise RuntimeError("a trial that trains has no reward")
        return record.reward


class HarborTaskset(Taskset[HarborTask, HarborTasksetConfig]):  # ty: ignore[invalid-type-arguments]
    """The Harbor tasks of a source, in the order of their names."""

    played: PlayedTasks | None = None
    """What was loaded, and from where."""

    def load(self) -> Iterable[HarborTask]:
        """The chosen tasks. Raises `UserError` naming the file and the key when a task cannot be read."""
        self.played = played_tasks(self.config, tell=logger.info)
        for line in self.played.left_out:
            logger.warning("left out: %s", line)
        for index, ref in enumerate(self.played.tasks):
            yield HarborTask(_data(ref, index), self.config.task)

    def measured(self) -> dict[str, float]:
        """Mean rewards from before the run, by content key; empty without `difficulty`."""
        if self.config.difficulty is None:
            return {}
        return {key: rate.mean_reward for key, rate in read_rates(self.config.difficulty).tasks.items()}


def _data(ref: TaskRef, index: int) -> HarborTaskData:
    return HarborTaskData(
        idx=index,
        name=ref.name,
        prompt=ref.instruction,
        path=str(ref.path),
        task_key=ref.key,
        n_steps=ref.n_steps,
    )
