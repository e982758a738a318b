"""Harbor tasks as verifiers tasks.

- `HarborTaskset` reads a folder of Harbor tasks, or a task set that is downloaded once. A task's key is the hash of its
  content.
- `HarborTask` takes the reward from the record that the harness put on the trace.
- Each task in a request is signed with the run's key, if there is one (`request_check`).

Invariant: a trace whose outcome does not train never gets a reward, not even 0. `finalize` raises, even if an earlier
error was swallowed.
"""

import copy
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.runtimes import Runtime
from verifiers.v1.task import Task, TaskData
from verifiers.v1.taskset import Taskset
from verifiers.v1.trace import Trace

from harbortrainer.environment.plugin_config import HarborTasksetConfig
from harbortrainer.environment.request_check import Client, ModelServer, Permit, RunKey
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
    permit: Permit | None = None
    """The run's signature in a request; None in a trace."""

    @property
    def signed_fields(self) -> dict[str, object]:
        """The fields that decide which trial is run."""
        return self.model_dump(mode="json", include={"name", "path", "task_key", "n_steps"})

    def signed(self, permit: Permit | None) -> "HarborTaskData":
        """Return a copy with this signature."""
        return self.model_copy(update={"permit": permit})


class HarborTask(Task[HarborTaskData, HarborState]):
    """One Harbor task and the scoring of its trial."""

    attempts: Attempts | None = None
    """Failed attempts of the running episode, see `for_episode`."""
    loaded_here: bool = False
    """Whether this process loaded the task; false for a task of a request."""
    folder: Path | None = None
    """The task's folder on this machine, if it may differ from the path in its data."""

    @property
    def key(self) -> str:
        return self.data.task_key

    @property
    def hash(self) -> str:
        """Content hash of the data without the signature, so that it is the same at both ends of a request."""
        return super().hash if self.data.permit is None else self.without_permit().hash

    def for_episode(self) -> "HarborTask":
        """Return a copy that counts the attempts of one episode."""
        task = copy.copy(self)
        task.attempts = Attempts()
        return task

    def without_permit(self) -> "HarborTask":
        """Return a copy without the signature, which must not reach a trace."""
        task = copy.copy(self)
        task.data = self.data.signed(None)
        return task

    async def setup(self, trace: Trace, runtime: Runtime) -> None:
        """Tell the harness the task's folder, and share the episode's attempts with it."""
        harbor_state(trace).folder = self.folder
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
        key = RunKey.of_process()
        for index, ref in enumerate(self.selection.tasks):
            data = _data(ref, index)
            task = HarborTask(data.signed(key.permit(data.signed_fields) if key else None), self.config.task)
            task.loaded_here = True
            yield task

    def measured_rewards(self) -> dict[str, float]:
        """Return mean rewards measured before the run, by content key; empty without `difficulty`."""
        if self.config.difficulty is None:
            return {}
        return {key: rate.mean_reward for key, rate in read_rates(self.config.difficulty).tasks.items()}


def request_data(task: Task, key: RunKey, client: Client) -> dict[str, Any]:
    """Return the data of a task for a request, as JSON; signed for this model server if the task is Harbor's."""
    data = task.data
    if isinstance(data, HarborTaskData):
        server = ModelServer(base_url=client.base_url, api_key_var=client.api_key_var)
        data = data.signed(key.permit(data.signed_fields, [server]))
    return data.model_dump(mode="json")


def _data(ref: TaskRef, index: int) -> HarborTaskData:
    return HarborTaskData(
        idx=index,
        name=ref.name,
        prompt=ref.instruction,
        path=str(ref.path),
        task_key=ref.key,
        n_steps=ref.n_steps,
    )
