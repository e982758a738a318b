"""The verifiers environment: one agent, the policy, that runs one Harbor task per episode.

Contract: an episode is one trial, retried as a whole if its outcome is retryable. `start` imports Harbor, LiteLLM and
the tokenizer libraries (seconds of CPU) once per process, before the first task and off the event loop.
"""

import asyncio
import contextlib
import functools
import importlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from verifiers.v1.agent import Agents
from verifiers.v1.clients import ModelContext
from verifiers.v1.env import Env, RunSlot
from verifiers.v1.episode import Episode
from verifiers.v1.task import Task

from harbortrainer.config.agent_table import is_class, needs_proxy
from harbortrainer.environment.harness import HarborHarness
from harbortrainer.environment.model_proxy.server import translate_example
from harbortrainer.environment.model_server import WorkerState
from harbortrainer.environment.plugin_config import HarborEnvConfig, HarborHarnessConfig, HarborTasksetConfig
from harbortrainer.environment.request_check import RUN_KEY_VARIABLE, RequestRefusedError, RunKey, check_unsigned
from harbortrainer.environment.rollout_state import HarborState
from harbortrainer.environment.taskset import HarborTask
from harbortrainer.environment.verifiers_compat import (
    PRIVATE_APIS,
    adapt_train_clients,
    ignore_call_errors,
    with_flat_sampling,
)
from harbortrainer.harbor_compat import keep_litellm_offline
from harbortrainer.runs.memory import collect_garbage_rarely, freeze_gc
from harbortrainer.runs.open_files import raise_open_files_limit
from harbortrainer.tasks.local_tasks import LocalTasks, OtherTaskError
from harbortrainer.tasks.task_store import fetch
from harbortrainer.trials.http_proxies import bypass_proxies

logger = logging.getLogger(__name__)

_STARTS = 8
"""Episodes that start in one turn of the event loop. The start of one blocks it for about 2 ms."""


class HarborEnvironment(Env[HarborEnvConfig]):
    """An environment whose episodes are Harbor trials."""

    _worker_state: WorkerState | None = None
    _run_key: RunKey | None = None
    _local_tasks = LocalTasks({})

    async def start(self) -> None:
        """Import the modules that a trial needs before the first request."""
        PRIVATE_APIS.check()
        raise_open_files_limit()
        adapt_train_clients()
        ignore_call_errors(lambda trace: isinstance(trace.state, HarborState) and trace.state.failure is None)
        self._run_key, self._local_tasks = RunKey.of_process(), LocalTasks.of_process()
        if self._run_key is not None:
            os.environ[self._run_key.sampler_variable] = self._run_key.sampler_key
        harness = self.config.agent.harness
        config = harness if isinstance(harness, HarborHarnessConfig) else HarborHarnessConfig()
        await _run_in_daemon_thread(
            lambda: import_trial_modules(config.agent, renders=config.capture == "interception")
        )

    async def run_slot(self, slot: RunSlot, ctx: ModelContext, *args: object, **kwargs: object) -> Episode:
        """Run one episode; further arguments differ between verifiers releases and are passed through.

        Raises:
            RequestRefusedError: The task comes from a request that is not the run's.
            OtherTaskError: The task is missing on this machine, or has other files than where it was loaded.
        """
        async with self._starts:
            await asyncio.sleep(0)
        if isinstance(slot.task, HarborTask):
            self._check_request(slot.task, ctx)
            slot.task = slot.task.without_permit()
            await self._find_folder(slot.task)
        bypass_proxies([ctx.client.base_url])
        return await super().run_slot(slot, with_flat_sampling(ctx), *args, **kwargs)  # ty: ignore[invalid-argument-type]

    @functools.cached_property
    def _starts(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(_STARTS)

    def _check_request(self, task: HarborTask, ctx: ModelContext) -> None:
        """Refuse a task of a request that is not the run's; tasks that this process loaded are its own."""
        if task.loaded_here:
            return
        try:
            if self._run_key is not None:
                self._run_key.check(task.data.signed_fields, task.data.permit, ctx.client)
            elif isinstance(self.config.taskset, HarborTasksetConfig):
                _warn_without_key()
                check_unsigned(Path(task.data.path), fetch(self.config.taskset.source).folder, ctx.client)
        except RequestRefusedError as error:
            logger.warning("%s", error)
            raise

    async def _find_folder(self, task: HarborTask) -> None:
        """Find the task of a request on this machine."""
        if task.loaded_here:
            return
        data = task.data
        try:
            task.folder = await asyncio.to_thread(self._local_tasks.find, data.name or "", data.path, data.task_key)
        except OtherTaskError as error:
            logger.warning("%s", error)
            raise

    async def run(self, task: Task, agents: Agents) -> None:
        """Run the task once with the policy."""
        harness = agents.agent.harness
        if isinstance(harness, HarborHarness):
            harness.worker_state = self._worker_state = self._worker_state or harness.worker_state
        await agents.agent.run(task.for_episode() if isinstance(task, HarborTask) else task)


@functools.cache
def _warn_without_key() -> None:
    """Warn once per process."""
    logger.warning(
        "this environment server has no run key: every local user can run its tasks; set %s as in docs/prime-rl.md",
        RUN_KEY_VARIABLE,
    )


async def _run_in_daemon_thread(work: Callable[[], None]) -> None:
    """Run `work` in a daemon thread; at exit a process waits for the threads of `asyncio.to_thread`.

    A server that is stopped while it imports would wait for the import, possibly forever. If the import
    garbage-collects the server's ZMQ context, the context waits for a socket that nothing closes any more.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def resolve(error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(error) if error else done.set_result(None)

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:  # noqa: BLE001 - raised again in the awaiting task
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing awaits the result
            loop.call_soon_threadsafe(resolve, error)

    threading.Thread(target=run, name="harbor-imports", daemon=True).start()
    await done


_TRIAL = ("litellm", "harbor.trial.trial", "harbortrainer.trials.trial_spec", "harbortrainer.trials.harbor_result")
_RENDERING = ("renderers.client", "tokenizers", "transformers.models.auto.tokenization_auto")


def import_trial_modules(agent: str = "", *, renders: bool = True) -> None:
    """Import the modules that the process's first trial needs.

    Args:
        agent: Harbor's name of the agent, or `module:Class`; "" for none.
        renders: Whether this process renders messages to tokens.
    """
    keep_litellm_offline()
    own = agent.partition(":")[0] if is_class(agent) else ""
    for module in (*_TRIAL, *(_RENDERING if renders else ()), *([own] if own else [])):
        importlib.import_module(module)
    if agent and needs_proxy(agent):
        translate_example()
    freeze_gc()
    collect_garbage_rarely()
