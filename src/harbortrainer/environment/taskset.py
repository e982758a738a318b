"""Harbor tasks as verifiers tasks.

- `HarborTaskset` reads a folder of Harbor tasks, or a task set that is downloaded once. A task's key is the hash of its
  content.
- `HarborTask` takes the reward from the record that the harness put on the trace.

Invariant: a trace whose outcome does not train never gets a reward, not even 0. `finalize` raises, even if an earlier
error was swallowed.
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

from harbortrainer.environment.plugin_config import HarborTasksetConfig
from harbortrainer.environment.rollout_state import Attempts, HarborState, discard_late_completions, harbor_state
from harbortrainer.tasks.measured_rates import read_rates
from harbortrainer.tasks.task_folder import TaskRef
from harbortrainer.tasks.task_selection import TaskSelection, select_tasks
from harbortrainer.trials.record import record_of

logger = logging.getLogger(__name__)


class HarborTaskData(TaskData):
    """One Harbor task, as sent to the environment server."""

    path: str
    """Absolute folder of the task, on the machine that runs the trial."""
    task_key: str
    """Hash of the task's content."""
    n_steps: int = 1
    """Number of steps; 1 for a single-step task."""


class HarborTask(Task[HarborTaskData, HarborState]):
    """One Harbor task and the scoring of its trial."""

    attempts: Attempts | None = None
    """Failed attempts of the running episode, see `for_episode`."""

    @property
    def key(self) -> str:
        return self.data.task_key

    def for_episode(self) -> "HarborTask":
        """Return a copy that counts the attempts of one episode."""
        task = copy.copy(self)
        task.attempts = Attempts()
        return task

    async def setup(self, trace: Trace, runtime: Runtime) -> None:
        """Share the episode's attempts with the harness."""
        if self.attempts is not None:
            harbor_state(trace).attempts = self.attempts

    @vf.stop
    async def note_call(self, trace: Trace) -> bool:
        """Record the arrival of a model call. A verifiers stop condition that never stops the rollout.

        verifiers records only finished calls, so this is the only record of an unanswered one.
        """
        harbor_state(trace).call_arrivals.append(time.time())
        return False

    async def finalize(self, trace: Trace, runtime: Runtime) -> None:
        """Raise if the trial's outcome does not train.

        Once a limit has stopped the trace, verifiers swallows errors of `launch`. A verifier that failed after the last
        turn would then look like a success without a reward, which sums to 0.
        """
        if (error := harbor_state(trace).failure) is not None:
            raise error
        discard_late_completions(trace, harbor_state(trace).phases)

    @vf.reward
    async def reward(self, trace: Trace) -> float:
        """Return the verifier's reward: the key `reward` of its dictionary, else the mean of all values."""
        record = record_of(trace)
        if record is None or record.reward is None:
            raise RuntimeError("a trainable trial has no reward")
        return record.reward


class HarborTaskset(Taskset[HarborTask, HarborTasksetConfig]):  # ty: ignore[invalid-type-arguments]
    """The Harbor tasks of one source, sorted by name."""

    selection: TaskSelection | None = None
    """The loaded tasks and their source; None before `load`."""

    def load(self) -> Iterable[HarborTask]:
        """Load the selected tasks. Raises `UserError` with file and key if a task cannot be read."""
        self.selection = select_tasks(self.config, report_progress=logger.info)
        for line in self.selection.left_out:
            logger.warning("left out: %s", line)
        for index, ref in enumerate(self.selection.tasks):
            yield HarborTask(_data(ref, index), self.config.task)

    def measured_rewards(self) -> dict[str, float]:
        """Return mean rewards measured before the run, by content key; empty without `difficulty`."""
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
