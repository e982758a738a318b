"""The verifiers environment: one seat, the policy, playing one Harbor task per episode.

Contract: an episode is one trial, retried as a whole when its outcome says so. `start` pays for the import of
Harbor and LiteLLM (about 16 s of CPU) once per process and before the first task, off the event loop.
"""

import asyncio
import importlib
import os

from verifiers.v1.agent import Agents
from verifiers.v1.env import Env
from verifiers.v1.task import Task

from harbortrainer.environment.config import HarborEnvConfig, HarborHarnessConfig
from harbortrainer.environment.taskset import HarborTask


class HarborEnvironment(Env[HarborEnvConfig]):
    """Harbor's trials as episodes."""

    async def start(self) -> None:
        """Import what a trial needs before the first one is asked for."""
        harness = self.config.agent.harness
        agent = harness.agent if isinstance(harness, HarborHarnessConfig) else ""
        await asyncio.to_thread(warm, agent)

    async def run(self, task: Task, agents: Agents) -> None:
        """One episode: the policy plays the task."""
        await agents.agent.run(task.for_episode() if isinstance(task, HarborTask) else task)


def warm(agent: str = "") -> None:
    """Import Harbor, LiteLLM and the agent's module into this process."""
    # Without a network LiteLLM would try to download its price list, again and again.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    for module in ("litellm", "harbor.trial.trial", agent.partition(":")[0] if ":" in agent else ""):
        if module:
            importlib.import_module(module)
