"""The verifiers environment: one seat, the policy, playing one Harbor task per episode.

Contract: an episode is one trial, retried as a whole when its outcome says so. `start` pays for the imports of
Harbor, LiteLLM and what makes tokens (seconds of CPU) once per process and before the first task, off the event loop.
"""

import asyncio
import contextlib
import importlib
import threading
from collections.abc import Callable

from verifiers.v1.agent import Agents
from verifiers.v1.clients import ModelContext
from verifiers.v1.env import Env, RunSlot
from verifiers.v1.episode import Episode
from verifiers.v1.task import Task

from harbortrainer.config.agent_table import is_class
from harbortrainer.environment.harness import HarborHarness
from harbortrainer.environment.plugin_config import HarborEnvConfig, HarborHarnessConfig
from harbortrainer.environment.taskset import HarborTask
from harbortrainer.environment.verifiers_side import COUPLINGS, relayed, salt_the_prefix_cache
from harbortrainer.environment.worker_memory import WorkerMemory
from harbortrainer.harbor_side import keep_litellm_offline
from harbortrainer.runs.memory import leave_imports_alone


class HarborEnvironment(Env[HarborEnvConfig]):
    """Harbor's trials as episodes."""

    _memory: WorkerMemory | None = None

    async def start(self) -> None:
        """Import what a trial needs before the first one is asked for."""
        COUPLINGS.check()
        salt_the_prefix_cache()
        harness = self.config.agent.harness
        ours = harness if isinstance(harness, HarborHarnessConfig) else HarborHarnessConfig()
        await _beside(lambda: warm(ours.agent, renders=ours.capture == "interception"))

    async def run_slot(self, slot: RunSlot, ctx: ModelContext, *args: object, **kwargs: object) -> Episode:
        """One episode, with the further arguments of the installed release."""
        return await super().run_slot(slot, relayed(ctx), *args, **kwargs)  # ty: ignore[invalid-argument-type]

    async def run(self, task: Task, agents: Agents) -> None:
        """One episode: the policy plays the task."""
        harness = agents.agent.harness
        if isinstance(harness, HarborHarness):
            harness.memory = self._memory = self._memory or harness.memory
        await agents.agent.run(task.for_episode() if isinstance(task, HarborTask) else task)


async def _beside(work: Callable[[], None]) -> None:
    """Run `work` in a thread that a process does not wait for at its end, unlike those of `asyncio.to_thread`.

    A server that is stopped while it imports would wait for the import, and can wait for ever: when the import
    collects the server's ZMQ context as garbage, the context waits for a socket that nobody closes any more.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def tell(error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(error) if error else done.set_result(None)

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:  # noqa: BLE001 - it goes to whoever awaits
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, error)

    threading.Thread(target=run, name="harbor-imports", daemon=True).start()
    await done


_TRIAL = ("litellm", "harbor.trial.trial", "harbortrainer.trials.harbor_config", "harbortrainer.trials.harbor_result")
_RENDERING = ("renderers.client", "tokenizers", "transformers.models.auto.tokenization_auto")


def warm(agent: str = "", *, renders: bool = True) -> None:
    """Import into this process what its first trial needs.

    Args:
        agent: Harbor's name, or `module:Class`.
        renders: Whether model calls are turned into tokens here.
    """
    keep_litellm_offline()
    own = agent.partition(":")[0] if is_class(agent) else ""
    for module in (*_TRIAL, *(_RENDERING if renders else ()), *([own] if own else [])):
        importlib.import_module(module)
    leave_imports_alone()
