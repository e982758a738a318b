"""Hooks of this project at Harbor's trial events, and the removal of an agent's files before grading.

| event | hook |
|---|---|
| agent start | keep the image's files in /tests; start the model proxy, if the agent needs one |
| agent end | stop the proxy; list changed files; move the token lists out of Harbor's result |
| verification start | empty the folders in which the verifier's tests and rewards are; put the image's files back |
| before the sandbox is removed | add who opened the reward; examine it, if the agent may have caused a failure |

In shared mode Harbor grades inside the agent's sandbox. For a single-step task it clears nothing, so an agent that
writes /logs/verifier/reward.json would get that reward. The folders are emptied inside as root and, if mounted, on the
host; links are removed, never followed. A process that the agent left running can still write there; separate mode
excludes that.

Invariant: when `clear_verifier_folders` returns, the host's folder of the verifier is empty.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol

from harbortrainer.config.plugin import Leftovers
from harbortrainer.harbor_compat import count_chat_answers
from harbortrainer.sandbox.containers.downloads import remove
from harbortrainer.sandbox.errors_and_changes import ReportsChanges, SandboxChanges, SandboxError, WatchesReward
from harbortrainer.sandbox.post_mortem import ClearsFolders, Examinable, PostMortem
from harbortrainer.trials.deadlines import set_deadlines
from harbortrainer.trials.faults import TokensMissingError
from harbortrainer.trials.harbor_result import needs_examination, pop_turn_tokens
from harbortrainer.trials.record import TurnTokens

if TYPE_CHECKING:
    from harbor.environments.base import BaseEnvironment
    from harbor.trial.hooks import TrialHookEvent
    from harbor.trial.trial import Trial


class LeftoversError(SandboxError):
    """Files that the agent left in the verifier's folders could not be removed; the trial is not graded."""


async def clear_verifier_folders(
    environment: "BaseEnvironment", host_dir: Path, *, inside: bool, kill: bool = False
) -> None:
    """Empty /logs/verifier and /tests inside the sandbox, and `host_dir` on the host.

    Args:
        environment: The agent's sandbox.
        host_dir: The trial's verifier folder on the host.
        inside: Whether grading happens in this sandbox; false in separate mode.
        kill: Whether to kill the processes that the agent left running, if grading happens in this sandbox.

    Raises:
        LeftoversError: A file could not be removed.
    """
    if inside:
        await _raise_limits_and_clear(environment, kill=kill)
    left = await asyncio.to_thread(_clear_outside, host_dir)
    if left and isinstance(environment, Examinable):
        await environment.raise_limits(kill=True)
        left = await asyncio.to_thread(_clear_outside, host_dir)
    if left:
        raise LeftoversError(f"cannot remove {', '.join(left)} from {host_dir}")


async def _raise_limits_and_clear(environment: "BaseEnvironment", *, kill: bool) -> None:
    """Raise the limits for grading and empty the folders; kill the processes if they refill them."""
    if not isinstance(environment, Examinable):
        await _clear_inside(environment)
        return
    await environment.raise_limits(kill=kill)
    try:
        await _clear_inside(environment)
    except LeftoversError:
        await environment.raise_limits(kill=True)
        await _clear_inside(environment)


async def _clear_inside(environment: "BaseEnvironment") -> None:
    from harbor.models.trial.paths import EnvironmentPaths

    from harbortrainer.harbor_compat.open_environment import empty_folders

    paths = EnvironmentPaths.for_os(environment.os)
    folders = [paths.verifier_dir], [paths.tests_dir]
    if isinstance(environment, ClearsFolders):
        result = await environment.clear_folders(*folders)
    else:
        result = await empty_folders(environment, *folders)
    if result.return_code != 0:
        raise LeftoversError(f"cannot empty the verifier's folders: {result.stderr or result.stdout}")


def _clear_outside(folder: Path) -> list[str]:
    """Empty `folder` without following links. Returns the names of files that could not be removed."""
    if not folder.is_dir():
        return []
    for path in folder.iterdir():
        remove(path)
    return [path.name for path in folder.iterdir()]


type Event = str
"""Harbor's event name: start, environment-start, agent-start, agent-end, verification-start, end or cancel."""

_EXAMINATION_TIMEOUT_S = 180.0

type OnEvent = Callable[[Event], Awaitable[None]]


@dataclass
class Observed:
    """Data that the hooks collect while the trial runs."""

    turn_tokens: list[TurnTokens] = field(default_factory=list)
    """Sampled tokens, if the agent collects rollout_details."""
    defect: Exception | None = None
    """Exception of `on_event`: a bug of this project, which Harbor would record as a failed trial."""
    changes: list[SandboxChanges] = field(default_factory=list)
    """Changes in the agent's sandbox, per step."""
    post_mortem: PostMortem | None = None
    """Findings in the agent's sandbox, if the trial failed in a way that the agent may have caused."""


class ModelProxyProtocol(Protocol):
    """Model proxy for an agent inside its sandbox."""

    async def start_serving(self, environment: object) -> None:
        """Answer the agent that starts in this Harbor environment."""
        ...

    def stop_serving(self) -> None:
        """Refuse further requests: the agent's time is over."""
        ...


def add_hooks(
    trial: "Trial", on_event: OnEvent | None, leftovers: Leftovers = "keep", proxy: ModelProxyProtocol | None = None
) -> Observed:
    """Add the hooks to a trial.

    Args:
        trial: Harbor's trial.
        on_event: Awaited at every event, before the hooks of this module.
        leftovers: Whether processes that the agent left running are kept or killed before grading.
        proxy: Model proxy that serves while an agent runs.
    """
    from harbor.trial.hooks import TrialEvent

    hooks = _Hooks(trial, on_event, leftovers, proxy)
    for event in TrialEvent:
        trial.add_hook(event, hooks.forward_event)
    trial.add_hook(TrialEvent.AGENT_END, hooks.on_agent_end)
    trial.add_hook(TrialEvent.AGENT_START, hooks.on_agent_start)
    trial.add_hook(TrialEvent.VERIFICATION_START, hooks.on_verification_start)
    hooks.examine_before_stop()
    set_deadlines(trial.agent_environment)
    return hooks.observed


@dataclass
class _Hooks:
    """Hooks of one trial."""

    trial: "Trial"
    on_event: OnEvent | None
    leftovers: Leftovers
    proxy: ModelProxyProtocol | None
    observed: Observed = field(default_factory=Observed)
    started: bool = False
    """Whether an agent has started in the sandbox."""
    image_tests: TemporaryDirectory[str] | None = None
    """The files that the image has in the tests' folder."""

    async def forward_event(self, event: "TrialHookEvent") -> None:
        try:
            if self.on_event is not None:
                await self.on_event(event.event.value)
        except Exception as error:  # Harbor would swallow it; `run_trial` raises it again
            self.observed.defect = error
            raise

    async def on_agent_end(self, event: "TrialHookEvent") -> None:
        del event
        if self.proxy is not None:
            self.proxy.stop_serving()
        if (found := await self._changes()) is not None:
            self.observed.changes.append(found)
        turns = pop_turn_tokens(self.trial.result)
        _check_for_lost_answers(self.trial, turns)
        self.observed.turn_tokens.extend(turns)

    async def on_verification_start(self, event: "TrialHookEvent") -> None:
        del event
        inside, kill = _is_graded_in_agent_sandbox(self.trial), self.leftovers == "kill"
        host_dir, environment = self.trial.paths.verifier_dir, self.trial.agent_environment
        await clear_verifier_folders(environment, host_dir, inside=inside, kill=kill)
        if inside and self.image_tests is not None:
            await environment.upload_dir(self.image_tests.name, _tests_folder(environment))
        if self.observed.changes and (found := await self._changes()) is not None:
            self.observed.changes[-1] = found  # None in separate mode if the sandbox is gone

    async def on_agent_start(self, event: "TrialHookEvent") -> None:
        del event
        if not self.started and _is_graded_in_agent_sandbox(self.trial):
            self.image_tests = await _download_tests(self.trial.agent_environment)
        self.started = True
        if isinstance(self.trial.agent_environment, Examinable):
            await self.trial.agent_environment.restore_limits()
        if self.proxy is not None:
            await self.proxy.start_serving(self.trial.agent_environment)

    async def _changes(self) -> SandboxChanges | None:
        environment = self.trial.agent_environment
        return await environment.changes() if isinstance(environment, ReportsChanges) else None

    def examine_before_stop(self) -> None:
        """Wrap `stop` of the sandbox, since Harbor has no event between a failure and the sandbox's removal."""
        environment = self.trial.agent_environment
        stop = environment.stop

        async def examine_and_stop(delete: bool) -> None:
            try:
                if self.observed.post_mortem is None:
                    self.observed.post_mortem = await self._post_mortem()
                self._add_reward_openings()
            finally:
                await stop(delete)
            if self.image_tests is not None:
                self.image_tests.cleanup()

        setattr(environment, "stop", examine_and_stop)  # noqa: B010 - this object only, not its class

    def _add_reward_openings(self) -> None:
        """Add leftover processes that opened the reward to the changes, which were listed before grading."""
        environment, changes = self.trial.agent_environment, self.observed.changes
        if changes and isinstance(environment, WatchesReward) and (found := environment.reward_openings()):
            changes[-1] = replace(changes[-1], tools=[*changes[-1].tools, *found])

    async def _post_mortem(self) -> PostMortem | None:
        """Examine the sandbox; None if no failure is one that the agent may have caused."""
        environment = self.trial.agent_environment
        try:
            if isinstance(environment, Examinable) and needs_examination(self.trial.result):
                return await asyncio.wait_for(environment.post_mortem(), _EXAMINATION_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - any infrastructure error means an unsound sandbox
            return PostMortem(unsound=[f"the sandbox cannot be examined: {error!r}"])
        return None


def _tests_folder(environment: "BaseEnvironment") -> str:
    from harbor.models.trial.paths import EnvironmentPaths

    return str(EnvironmentPaths.for_os(environment.os).tests_dir)


async def _download_tests(environment: "BaseEnvironment") -> TemporaryDirectory[str] | None:
    """Download the files that the image has in the tests' folder; None if it has none."""
    folder = _tests_folder(environment)
    if not await environment.is_dir(folder, user="root"):
        return None
    files = TemporaryDirectory(ignore_cleanup_errors=True)
    await environment.download_dir(folder, files.name)
    if _has_entries(files.name):
        return files
    files.cleanup()
    return None


def _has_entries(folder: str) -> bool:
    return any(Path(folder).iterdir())


def _check_for_lost_answers(trial: "Trial", turns: list[TurnTokens]) -> None:
    """Check that every answer of Harbor's Terminus-2 has its tokens.

    Harbor's rollout_details omit cut answers, turns without ids, and parts of summaries.

    Raises:
        TokensMissingError: The chat has another number of answers than there are turns.
    """
    answers = count_chat_answers(trial.agent)
    collects = trial.config.agent.kwargs.get("collect_rollout_details", False)
    if not collects or hasattr(trial.agent, "turn_tokens"):
        return
    if answers is not None and answers != len(turns):
        raise TokensMissingError(f"the chat has {answers} answers, but rollout_details has {len(turns)} turns")


def _is_graded_in_agent_sandbox(trial: "Trial") -> bool:
    """Whether the current step is graded in the agent's sandbox."""
    from harbor.models.task.config import VerifierEnvironmentMode
    from harbor.models.task.verifier_mode import resolve_step_verifier_mode, resolve_task_verifier_mode

    task = trial.task.config
    if not task.steps:
        return resolve_task_verifier_mode(task) is VerifierEnvironmentMode.SHARED
    step = task.steps[len(trial.result.step_results or []) - 1]
    return resolve_step_verifier_mode(task, step) is VerifierEnvironmentMode.SHARED
