"""What this project does inside Harbor's trial, at Harbor's own events.

Before the agent: its way to the model is opened, where it needs one. After the agent: its token lists are taken out of
the result. Before the verifier: the agent's leftovers go. Before the agent's sandbox is taken down: if the trial failed
in a way that an agent can bring about, the sandbox is examined.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from harbortrainer.config.plugin import Leftovers
from harbortrainer.harbor_side import answers_in_chat
from harbortrainer.sandbox.post_mortem import Examinable, PostMortem
from harbortrainer.sandbox.sandbox_changes import SandboxChanges, TellsChanges
from harbortrainer.trials import grading
from harbortrainer.trials.faults import TokensMissingError
from harbortrainer.trials.harbor_result import breakable, take_turn_tokens
from harbortrainer.trials.record import TurnTokens

if TYPE_CHECKING:
    from harbor.trial.hooks import TrialHookEvent
    from harbor.trial.trial import Trial

type Event = str
"""start, environment-start, agent-start, agent-end, verification-start, end, cancel: Harbor's own names."""

_EXAMINATION_S = 180.0

type OnEvent = Callable[[Event], Awaitable[None]]


@dataclass
class Observed:
    """What the hooks saw while the trial ran."""

    turn_tokens: list[TurnTokens] = field(default_factory=list)
    """What the agent sampled, if it collects rollout_details."""
    defect: Exception | None = None
    """What `on_event` raised. Harbor records it like a failure of the trial; it is a defect of ours."""
    changes: list[SandboxChanges] = field(default_factory=list)
    """What was changed in the agent's sandbox, of each step."""
    post_mortem: PostMortem | None = None
    """What is wrong in the agent's sandbox, when the trial failed in a way that the agent can have brought about."""


class Door(Protocol):
    """The way from an agent inside its sandbox to the model."""

    async def open(self, environment: object) -> None:
        """An agent begins in this environment of Harbor's."""
        ...

    def shut(self) -> None:
        """Its time is over."""
        ...


def add(trial: "Trial", on_event: OnEvent | None, leftovers: Leftovers = "keep", door: Door | None = None) -> Observed:
    """Add the hooks; `on_event` is awaited before ours.

    Args:
        leftovers: What becomes of the processes that the agent left running, when grading begins.
        door: Open while an agent is at work.
    """
    from harbor.trial.hooks import TrialEvent

    hooks = _Hooks(trial, on_event, leftovers, door)
    for event in TrialEvent:
        trial.add_hook(event, hooks.tell)
    trial.add_hook(TrialEvent.AGENT_END, hooks.take)
    trial.add_hook(TrialEvent.AGENT_START, hooks.begin)
    trial.add_hook(TrialEvent.VERIFICATION_START, hooks.clear)
    hooks.examine_before_the_end()
    return hooks.seen


@dataclass
class _Hooks:
    """Those of one trial."""

    trial: "Trial"
    on_event: OnEvent | None
    leftovers: Leftovers
    door: Door | None
    seen: Observed = field(default_factory=Observed)

    async def tell(self, event: "TrialHookEvent") -> None:
        try:
            if self.on_event is not None:
                await self.on_event(event.event.value)
        except Exception as error:  # Harbor would swallow it; `run_trial` raises it again
            self.seen.defect = error
            raise

    async def take(self, event: "TrialHookEvent") -> None:
        del event
        if self.door is not None:
            self.door.shut()
        if (found := await self._changes()) is not None:
            self.seen.changes.append(found)
        turns = take_turn_tokens(self.trial.result)
        _refuse_lost_answers(self.trial, turns)
        self.seen.turn_tokens.extend(turns)

    async def clear(self, event: "TrialHookEvent") -> None:
        del event
        inside, kill = _graded_inside(self.trial), self.leftovers == "kill"
        await grading.clear(self.trial.agent_environment, self.trial.paths.verifier_dir, inside=inside, kill=kill)
        if self.seen.changes and (found := await self._changes()) is not None:
            self.seen.changes[-1] = found  # by now: in separate mode the sandbox may be gone

    async def begin(self, event: "TrialHookEvent") -> None:
        del event
        if isinstance(self.trial.agent_environment, Examinable):
            await self.trial.agent_environment.room_is_over()
        if self.door is not None:
            await self.door.open(self.trial.agent_environment)

    async def _changes(self) -> SandboxChanges | None:
        environment = self.trial.agent_environment
        return await environment.changes() if isinstance(environment, TellsChanges) else None

    def examine_before_the_end(self) -> None:
        """Harbor has no event between a failure and the end of the sandbox."""
        environment = self.trial.agent_environment
        stop = environment.stop

        async def examine_and_stop(delete: bool) -> None:
            try:
                if self.seen.post_mortem is None:
                    self.seen.post_mortem = await self._post_mortem()
            finally:
                await stop(delete)

        setattr(environment, "stop", examine_and_stop)  # noqa: B010 - of this object alone

    async def _post_mortem(self) -> PostMortem | None:
        """None where nothing failed that an agent can bring about."""
        environment = self.trial.agent_environment
        try:
            if isinstance(environment, Examinable) and breakable(self.trial.result):
                return await asyncio.wait_for(environment.post_mortem(), _EXAMINATION_S)
        except Exception as error:  # noqa: BLE001 - whatever the infrastructure raises: then it is not sound
            return PostMortem(unsound=[f"the sandbox cannot be examined: {error!r}"])
        return None


def _refuse_lost_answers(trial: "Trial", turns: list[TurnTokens]) -> None:
    """Harbor's own rollout_details leave out an answer that was cut, a turn without ids, and some of a summary.

    Raises:
        TokensMissingError: The chat of a stock Terminus-2 holds another number of answers than there are turns.
    """
    answers = answers_in_chat(trial.agent)
    collects = trial.config.agent.kwargs.get("collect_rollout_details", False)
    if not collects or hasattr(trial.agent, "turn_tokens"):
        return
    if answers is not None and answers != len(turns):
        raise TokensMissingError(f"{answers} answers in the chat, but {len(turns)} turns in rollout_details")


def _graded_inside(trial: "Trial") -> bool:
    """Whether the step that is being graded now is graded in the agent's sandbox."""
    from harbor.models.task.config import VerifierEnvironmentMode
    from harbor.models.task.verifier_mode import resolve_step_verifier_mode, resolve_task_verifier_mode

    task = trial.task.config
    if not task.steps:
        return resolve_task_verifier_mode(task) is VerifierEnvironmentMode.SHARED
    step = task.steps[len(trial.result.step_results or []) - 1]
    return resolve_step_verifier_mode(task, step) is VerifierEnvironmentMode.SHARED
