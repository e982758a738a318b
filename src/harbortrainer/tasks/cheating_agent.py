"""A Harbor agent that runs a cheat, a shell script, in every step of a task."""

from pathlib import Path
from typing import override

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

from harbortrainer.harbor_compat.prior_context import ignore_trajectories

TIMEOUT_S = 60


class CheatingAgent(BaseAgent):
    """Runs a cheat without a model; keyword arguments that Harbor adds are ignored.

    Args:
        script: The shell script.
    """

    def __init__(self, logs_dir: Path, *, script: str, **others: object) -> None:
        super().__init__(logs_dir=logs_dir)
        self._script = script

    @staticmethod
    @override
    def name() -> str:
        return "cheat"

    @override
    def version(self) -> str:
        return "1"

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        """Install nothing."""

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        await environment.exec(self._script, timeout_sec=TIMEOUT_S)


ignore_trajectories(CheatingAgent)
