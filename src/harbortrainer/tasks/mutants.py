"""A Harbor agent that runs a task's solution and then spoils its results. No mutant should get the top reward.

A mutant that changes nothing ends as an agent's error, so it has no reward and means nothing.
"""

from pathlib import Path
from typing import override

from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from harbor.models.task.task import Task
from harbor.utils.env import resolve_env_vars

from harbortrainer.tasks.cheating_agent import CheatingAgent
from harbortrainer.tasks.cheats import MUTANTS


class MutantAgent(CheatingAgent):
    """Runs the solution of a task with one step, and spoils it.

    Args:
        task_dir: The task's folder.
        mutant: Name of the script in `MUTANTS`.
    """

    def __init__(self, logs_dir: Path, *, task_dir: str, mutant: str, **others: object) -> None:
        super().__init__(logs_dir, script=MUTANTS[mutant], **others)
        self._task = Task(Path(task_dir))

    @staticmethod
    @override
    def name() -> str:
        return "mutant"

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Run the mutant. Raises `RuntimeError` if it changed nothing."""
        await environment.upload_dir(source_dir=self._task.paths.solution_dir, target_dir="/solution")
        variables = resolve_env_vars(self._task.config.solution.env or {})
        result = await environment.exec(self._script, env={"DEBIAN_FRONTEND": "noninteractive", **variables})
        if result.return_code:
            raise RuntimeError("the mutant changed nothing")
