"""Reads Harbor's `TrialResult` into a `TrialRecord`.

In a multi-step trial everything, also what failed, stands in `step_results`; the top-level `agent_result` is None.
"""

from datetime import datetime
from typing import TYPE_CHECKING, Any

from harbortrainer.config.plugin import REWARD_BOUND
from harbortrainer.harbor_side import raised_by_the_agent
from harbortrainer.sandbox.post_mortem import PostMortem
from harbortrainer.trials.failure_message import why
from harbortrainer.trials.outcome import BREAKABLE, Outcome, Phase, classify, finite, scalar, worst
from harbortrainer.trials.record import (
    Failure,
    StepRecord,
    Timings,
    TokenCounts,
    TrialRecord,
    TurnTokens,
    only_finite,
)
from harbortrainer.trials.tokens import of_rollout_details
from harbortrainer.trials.trial_spec import TrialSpec

if TYPE_CHECKING:
    from harbor.models.agent.context import AgentContext
    from harbor.models.trial.result import ExceptionInfo, StepResult, TimingInfo, TrialResult


def record(
    result: "TrialResult", spec: TrialSpec, *, stop: str | None = None, post_mortem: PostMortem | None = None
) -> TrialRecord:
    """What is kept of a finished trial.

    Args:
        result: Harbor's.
        spec: What was run.
        stop: The condition on which the interception endpoint stopped the rollout.
        post_mortem: What was found in the sandbox of a trial that failed.
    """
    steps = result.step_results or []
    contexts = [part.agent_result for part in (steps or [result]) if part.agent_result is not None]
    rewards = result.verifier_result.rewards if result.verifier_result else None
    outcome = _outcome(result, rewards, stop, spec.reward_bound)
    own_doing = outcome in BREAKABLE and post_mortem is not None and post_mortem.blames_the_agent
    if own_doing:
        outcome = Outcome.self_inflicted
    failure = next((part.exception_info for part in [result, *steps] if part.exception_info), None)
    return TrialRecord(
        outcome=outcome,
        task=result.task_name,
        task_key=spec.task_key,
        environment_type=spec.environment_type,
        trial_name=result.trial_name,
        trial_dir=str((spec.trials_dir / result.trial_name).absolute()),
        rewards=only_finite(rewards),
        reward=0.0 if own_doing else scalar(rewards, spec.reward_bound) if outcome.trains else None,
        timings=_timings(result),
        turns=_count(contexts, "n_episodes"),
        parse_errors=_count(contexts, "parse_errors"),
        tokens=TokenCounts(
            prompt=sum(context.n_input_tokens or 0 for context in contexts),
            completion=sum(context.n_output_tokens or 0 for context in contexts),
        ),
        steps=[_own(_step(step, stop if step is steps[-1] else None, spec.reward_bound), own_doing) for step in steps],
        error=_failure(failure, outcome, rewards, spec.reward_bound),
        evidence=str(post_mortem or ""),
    )


def breakable(result: "TrialResult") -> bool:
    """Whether the trial, as it stands before its sandbox is taken down, failed in a way that an agent can bring about.

    False as long as nothing failed: in separate mode the agent's sandbox goes before the verifier runs.
    """
    parts = result.step_results or [result]
    failed = any(part.exception_info for part in [result, *parts])
    graded = any(part.verifier and part.verifier.finished_at for part in parts)
    began = any(part.agent_execution for part in parts)
    rewards = result.verifier_result.rewards if result.verifier_result else None
    return began and (failed or graded) and _outcome(result, rewards, None, REWARD_BOUND) in BREAKABLE


def _own(step: StepRecord, own_doing: bool) -> StepRecord:
    """The step in which the agent broke its sandbox says so."""
    blamed = own_doing and step.outcome in BREAKABLE
    return step.model_copy(update={"outcome": Outcome.self_inflicted}) if blamed else step


def take_turn_tokens(result: "TrialResult") -> list[TurnTokens]:
    """Move the token lists out of Harbor's result, which would be written as megabytes of JSON.

    Raises:
        TokensMissingError: They do not fit together.
    """
    taken = []
    for part in [result, *(result.step_results or [])]:
        if part.agent_result is not None and part.agent_result.rollout_details:
            details, part.agent_result.rollout_details = part.agent_result.rollout_details, None
            taken += of_rollout_details(details)
    return taken


def _outcome(result: "TrialResult", rewards: dict[str, Any] | None, stop: str | None, bound: float) -> Outcome:
    steps = result.step_results or []
    own = _classify(result, rewards, stop, bound) if result.exception_info or not steps else None
    of_steps = [_step(step, stop if step is steps[-1] else None, bound).outcome for step in steps]
    outcome = worst([*of_steps, *([own] if own else [])])
    # Each step may have rewards while what Harbor makes of them has not.
    return Outcome.verifier_error if outcome.trains and scalar(rewards, bound) is None else outcome


def _step(step: "StepResult", stop: str | None, bound: float) -> StepRecord:
    rewards = step.verifier_result.rewards if step.verifier_result else None
    outcome = _classify(step, rewards, stop, bound)
    turns = _turns(step.agent_result)
    return StepRecord(name=step.step_name, outcome=outcome, rewards=only_finite(rewards), turns=turns)


def _turns(context: "AgentContext | None") -> int | None:
    """Answers that an agent got. Terminus-2 counts one that it asked for in vain, too."""
    told = (context.metadata or {}).get("n_episodes") if context is not None else None
    return 0 if told is not None and context is not None and not context.n_output_tokens else told


def _classify(
    part: "TrialResult | StepResult", rewards: dict[str, Any] | None, stop: str | None, bound: float
) -> Outcome:
    info = part.exception_info
    metadata = (part.agent_result.metadata if part.agent_result else None) or {}
    ending = metadata.get("ending")
    return classify(
        rewards=rewards,
        exception=info.exception_type if info else None,
        message=info.exception_message if info else "",
        phase=_phase(part, info) if info else "agent",
        ending=Outcome(ending) if ending else None,
        stop=stop,
        bound=bound,
    )


def _phase(part: "TrialResult | StepResult", info: "ExceptionInfo") -> Phase:
    if raised_by_the_agent(info.exception_traceback):
        return "agent"
    if part.agent_execution is not None:
        return "verification"
    return "agent_setup" if getattr(part, "agent_setup", None) else "environment_setup"


def _failure(
    info: "ExceptionInfo | None", outcome: Outcome, rewards: dict[str, Any] | None, bound: float
) -> Failure | None:
    if info is not None:
        return Failure(type=info.exception_type, message=why(_message(info)))
    if outcome is Outcome.verifier_error:
        if not finite(rewards):
            return Failure(type="RewardNotFiniteError", message=why(f"the verifier gave {rewards}"))
        beyond = f"the verifier gave {rewards}; a reward further from zero than {bound:g} (reward_bound) is a mistake"
        return Failure(type="RewardOutOfBoundError", message=why(beyond))
    return None


def _message(info: "ExceptionInfo") -> str:
    """What the exception says, and what caused it: Harbor's own often say no more than what was being done."""
    first, caused, _ = info.exception_traceback.partition("\n\nThe above exception was the direct cause")
    root = first.rstrip().rpartition("\n")[2] if caused else ""
    return f"{info.exception_message} (caused by {root})" if root else info.exception_message


def _timings(result: "TrialResult") -> Timings:
    parts = result.step_results or [result]
    return Timings(
        environment_setup=_seconds(result.environment_setup),
        agent_setup=_seconds(result.agent_setup),
        agent_execution=_total([part.agent_execution for part in parts]),
        model=_model_seconds([part.agent_result for part in parts]),
        verifier=_total([part.verifier for part in parts]),
        total=_between(result.started_at, result.finished_at),
    )


def _model_seconds(contexts: "list[AgentContext | None]") -> float | None:
    metadata = [context.metadata for context in contexts if context is not None and context.metadata]
    known = [
        entry["model_s"] if "model_s" in entry else sum(entry["api_request_times_msec"]) / 1000
        for entry in metadata
        if "model_s" in entry or "api_request_times_msec" in entry
    ]
    return sum(known) if known else None


def _total(timings: "list[TimingInfo | None]") -> float | None:
    known = [seconds for timing in timings if (seconds := _seconds(timing)) is not None]
    return sum(known) if known else None


def _seconds(timing: "TimingInfo | None") -> float | None:
    return _between(timing.started_at, timing.finished_at) if timing else None


def _between(start: datetime | None, end: datetime | None) -> float | None:
    return (end - start).total_seconds() if start and end else None


def _count(contexts: "list[AgentContext]", key: str) -> int:
    return sum((context.metadata or {}).get(key) or 0 for context in contexts)
