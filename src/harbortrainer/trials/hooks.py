"""What this project does inside Harbor's trial, at Harbor's own events.

After the agent: its token lists are taken out of the result. Before the verifier: the agent's leftovers go.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harbortrainer.trials import grading
from harbortrainer.trials.faults import TokensMissingError
from harbortrainer.trials.record import TurnTokens

if TYPE_CHECKING:
    from harbor.trial.hooks import TrialHookEvent
    from harbor.trial.trial import Trial

type Event = str
"""start, environment-start, agent-start, agent-end, verification-start, end, cancel: Harbor's own names."""

type OnEvent = Callable[[Event], Awaitable[None]]


@dataclass
class Seen:
    """What the hooks saw while the trial ran."""

    turn_tokens: list[TurnTokens] = field(default_factory=list)
    """What the agent sampled, if it collects rollout_details."""
    defect: Exception | None = None
    """What `on_event` raised. Harbor records it like a failure of the trial; it is a defect of ours."""


def add(trial: "Trial", on_event: OnEvent | None) -> Seen:
    """Add the hooks; `on_event` is awaited before ours."""
    from harbor.trial.hooks import TrialEvent

    from harbortrainer.trials.harbor_result import take_turn_tokens

    seen = Seen()

    async def tell(event: "TrialHookEvent") -> None:
        try:
            if on_event is not None:
                await on_event(event.event.value)
        except Exception as error:
            seen.defect = error
            raise

    async def take(event: "TrialHookEvent") -> None:
        del event
        turns = take_turn_tokens(trial.result)
        _refuse_lost_answers(trial, turns)
        seen.turn_tokens.extend(turns)

    async def clear(event: "TrialHookEvent") -> None:
        del event
        await grading.clear(trial.agent_environment, trial.paths.verifier_dir, inside=_graded_inside(trial))

    for event in TrialEvent:
        trial.add_hook(event, tell)
    trial.add_hook(TrialEvent.AGENT_END, take)
    trial.add_hook(TrialEvent.VERIFICATION_START, clear)
    return seen


def _refuse_lost_answers(trial: "Trial", turns: list[TurnTokens]) -> None:
    """Harbor's own rollout_details leave out an answer that was cut, a turn without ids, and some of a summary.

    Raises:
        TokensMissingError: The chat of a stock Terminus-2 holds another number of answers than there are turns.
    """
    chat = getattr(trial.agent, "_chat", None)
    collects = trial.config.agent.kwargs.get("collect_rollout_details", False)
    if chat is None or not collects or hasattr(trial.agent, "turn_tokens"):
        return
    answers = sum(message["role"] == "assistant" for message in chat.messages)
    if answers != len(turns):
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
