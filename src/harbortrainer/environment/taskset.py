"""Harbor tasks as verifiers tasks.

Contract: `HarborTaskset` reads a folder of Harbor tasks; a task's key is the hash of its content.
`HarborTask` turns the record that the harness left on the trace into the reward. Invariant: a trace whose
outcome does not train never ends with a reward, not even 0: `finalize` raises, whatever swallowed the error
before.
"""

import copy
import hashlib
from collections.abc import Iterable

import verifiers.v1 as vf
from verifiers.v1.runtimes import Runtime
from verifiers.v1.task import Task, TaskData
from verifiers.v1.taskset import Taskset
from verifiers.v1.trace import Trace

from harbortrainer.environment.config import HarborTasksetConfig
from harbortrainer.environment.phases import forget_late_answers
from harbortrainer.environment.retries import Attempts
from harbortrainer.environment.scoring import record_of
from harbortrainer.environment.state import HarborState, live
from harbortrainer.errors import UserError
from harbortrainer.tasks.checked import passed
from harbortrainer.tasks.source import TaskRef, load_folder


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
    """The Harbor tasks of a folder, in the order of their names."""

    def load(self) -> Iterable[HarborTask]:
        """The chosen tasks. Raises `UserError` naming the file and the key when a task cannot be read."""
        config = self.config
        refs = load_folder(config.tasks_dir, config.include, config.exclude)
        if config.checked_only:
            refs = _checked(refs, config)
        for index, ref in enumerate(ref for ref in refs if _in_split(ref, config)):
            yield HarborTask(_data(ref, index), config.task)


def _data(ref: TaskRef, index: int) -> HarborTaskData:
    return HarborTaskData(
        idx=index,
        name=ref.name,
        prompt=ref.instruction,
        path=str(ref.path),
        task_key=ref.key,
        n_steps=ref.n_steps,
    )


def _checked(refs: list[TaskRef], config: HarborTasksetConfig) -> list[TaskRef]:
    good = passed()
    chosen = [ref for ref in refs if ref.key in good]
    if not chosen:
        do = f"run `harbortrainer tasks check {config.tasks_dir}`, or leave out checked_only"
        raise UserError("none of these tasks passed the check as it is now", where=str(config.tasks_dir), do=do)
    return chosen


def _in_split(ref: TaskRef, config: HarborTasksetConfig) -> bool:
    """A task's side depends on its name alone, so a growing folder moves no task to the other side."""
    if config.split == "all":
        return True
    draw = int.from_bytes(hashlib.sha256(ref.name.encode()).digest()[:8]) / 2**64
    return (draw < config.eval_share) == (config.split == "eval")
