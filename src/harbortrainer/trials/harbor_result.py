"""Conversion of Harbor's `TrialResult` to a `TrialRecord`, and summaries of failure messages.

- In a multi-step trial all results, also failures, are in `step_results`; the top-level `agent_result` is None.
- A failure message names the failed build step or command. A long message keeps a short beginning, which has the
  failed action, and its end, which has the cause.

The summaries are pure functions of the message.
"""

import re
from datetime import datetime
from typing import TYPE_CHECKING, Any

from harbortrainer.harbor_compat import raised_by_agent
from harbortrainer.sandbox.build_log import shorten_instructions, whole_beginning, whole_end
from harbortrainer.sandbox.post_mortem import PostMortem
from harbortrainer.trials.outcome import (
    EXAMINED_OUTCOMES,
    Outcome,
    Phase,
    RewardRule,
    all_finite,
    classify,
    outcome_of_refusal,
    outcome_of_stop,
    scalar_reward,
    worst,
)
from harbortrainer.trials.record import (
    Failure,
    StepRecord,
    Timings,
    TokenCounts,
    TrialRecord,
    TurnTokens,
    only_finite,
)
from harbortrainer.trials.tokens import turns_from_rollout_details
from harbortrainer.trials.trial_spec import TrialSpec

if TYPE_CHECKING:
    from harbor.models.agent.context import AgentContext
    from harbor.models.trial.result import ExceptionInfo, StepResult, TimingInfo, TrialResult

MAX_CHARS = 2000
_HEAD_CHARS = 400
_GAP = "\n[...]\n"

_COMPOSE = re.compile(
    r"Docker compose command failed for environment .*?\. Command: (?P<command>.*?)\. Return code: (?P<code>-?\d+)\. "
    r"Stdout: (?P<out>.*)\. Stderr: (?P<err>.*?)\. ?",
    re.DOTALL,
)
_BUILDAH = re.compile(r'building at STEP "(?P<step>.+?)":')
_UNBUILT = "the Dockerfile cannot be built: "
_DONE = {"build": "the image cannot be built", "up": "the containers do not start"}
_INSTRUCTIONS = (
    re.compile(r"^ ?> \[[^\]]*\d+/\d+\] (?P<step>.+):$", re.MULTILINE),  # BuildKit, where it failed
    re.compile(r"^Step \d+/\d+ : (?P<step>.+)$", re.MULTILINE),  # Docker's first builder, each as it comes
)


def summarize_failure(message: str) -> str:
    """Return the failure message for a record, at most 2000 characters plus a gap mark.

    Example:
        >>> summarize_failure("x" * 5000) == "x" * 400 + "\\n[...]\\n" + "x" * 1600
        True
    """
    found = _COMPOSE.fullmatch(message.strip() + " ") or _COMPOSE.match(message)
    summary = _summarize_build(message) if found is None else _summarize_compose(found, message[found.end() :])
    return shorten_middle(summary)


def summarize_in_one_line(message: str) -> str:
    """Return a message on one line, at most 500 characters plus a gap mark."""
    return " ".join(shorten_middle(message.strip(), limit=500, head=120).split())


def shorten_middle(text: str, *, limit: int = MAX_CHARS, head: int = _HEAD_CHARS) -> str:
    """Return the text, or its beginning and end in whole words if it is longer than `limit` characters."""
    return text if len(text) <= limit else whole_beginning(text, head) + _GAP + whole_end(text, limit - head)


def _summarize_build(message: str) -> str:
    """Put the failed Dockerfile instruction first, if the message is from the local sandbox's image builder."""
    steps = [match["step"] for pattern in (_BUILDAH, *_INSTRUCTIONS) for match in pattern.finditer(message)]
    if not steps or not message.startswith(_UNBUILT):
        return message
    return f"the image cannot be built at `{steps[-1]}`: {message.removeprefix(_UNBUILT)}"


def _summarize_compose(found: re.Match[str], rest: str) -> str:
    """Return Compose's action, the failed Dockerfile instruction and Compose's output."""
    verb = next(iter(_arguments(found["command"])), "compose")
    parts = [part.strip() for part in (found["out"], found["err"])]
    wrote = shorten_instructions("\n".join(part for part in parts if part not in ("", "None")))
    steps = [match["step"] for pattern in _INSTRUCTIONS for match in pattern.finditer(wrote)]
    at = f" at `{steps[-1]}`" if steps and verb in _DONE else ""
    return f"{_DONE.get(verb, f'docker compose {verb} failed')}{at} (code {found['code']}): {wrote}{rest}"


def _arguments(command: str) -> list[str]:
    """Return the arguments after Compose's `-f` options."""
    return re.sub(r"^.*?(?: -f \S+)+ ", "", command, count=1).split()


def record_from_result(
    result: "TrialResult", spec: TrialSpec, *, stop: str | None = None, post_mortem: PostMortem | None = None
) -> TrialRecord:
    """Return the record of a finished trial.

    Args:
        result: Harbor's result.
        spec: The spec of the trial.
        stop: The condition with which the interception endpoint stopped the rollout.
        post_mortem: Findings in the sandbox of a failed trial.
    """
    steps = result.step_results or []
    contexts = [part.agent_result for part in (steps or [result]) if part.agent_result is not None]
    rewards = result.verifier_result.rewards if result.verifier_result else None
    rule = RewardRule(spec.reward_bound, spec.reward_key)
    outcome = _outcome(result, rewards, stop, rule)
    self_inflicted = outcome in EXAMINED_OUTCOMES and post_mortem is not None and post_mortem.agent_at_fault
    if self_inflicted:
        outcome = Outcome.self_inflicted
    records = [_step(step, _stop_in(step, steps, stop), rule) for step in steps]
    failure = next((part.exception_info for part in [result, *steps] if part.exception_info), None)
    return TrialRecord(
        outcome=outcome,
        task=result.task_name,
        task_key=spec.task_key,
        environment_type=spec.environment_type,
        trial_name=result.trial_name,
        trial_dir=str((spec.trials_dir / result.trial_name).absolute()),
        rewards=only_finite(rewards),
        reward_key=rule.key,
        reward=0.0 if self_inflicted else scalar_reward(rewards, *rule) if outcome.trains else None,
        timings=_timings(result),
        turns=_count(contexts, "n_episodes"),
        parse_errors=_count(contexts, "parse_errors"),
        tokens=TokenCounts(
            prompt=sum(context.n_input_tokens or 0 for context in contexts),
            completion=sum(context.n_output_tokens or 0 for context in contexts),
        ),
        steps=[_blame_agent(record) for record in records] if self_inflicted else records,
        error=_failure(failure, outcome, rewards, rule),
        evidence=str(post_mortem or ""),
    )


def needs_examination(result: "TrialResult") -> bool:
    """Whether the trial has failed in a way that its agent may have caused. Called before the sandbox is removed.

    False if nothing has failed yet: in separate mode the agent's sandbox is removed before the verifier runs.
    """
    parts = result.step_results or [result]
    failed = any(part.exception_info for part in [result, *parts])
    graded = any(part.verifier and part.verifier.finished_at for part in parts)
    agent_ran = any(part.agent_execution for part in parts)
    rewards = result.verifier_result.rewards if result.verifier_result else None
    return agent_ran and (failed or graded) and _outcome(result, rewards, None, RewardRule()) in EXAMINED_OUTCOMES


def _blame_agent(step: StepRecord) -> StepRecord:
    """Return the step as `self_inflicted` if it failed."""
    failed = step.outcome in EXAMINED_OUTCOMES
    return step.model_copy(update={"outcome": Outcome.self_inflicted}) if failed else step


def pop_turn_tokens(result: "TrialResult") -> list[TurnTokens]:
    """Remove the token lists from Harbor's result and return them; Harbor would write megabytes of JSON.

    Raises:
        TokensMissingError: The lists are incomplete.
    """
    turns = []
    for part in [result, *(result.step_results or [])]:
        if part.agent_result is not None and part.agent_result.rollout_details:
            details, part.agent_result.rollout_details = part.agent_result.rollout_details, None
            turns += turns_from_rollout_details(details)
    return turns


def _outcome(result: "TrialResult", rewards: dict[str, Any] | None, stop: str | None, rule: RewardRule) -> Outcome:
    steps = result.step_results or []
    own = _classify(result, rewards, stop, rule) if result.exception_info or not steps else None
    step_outcomes = [_step(step, _stop_in(step, steps, stop), rule).outcome for step in steps]
    outcome = worst([*step_outcomes, *([own] if own else [])])
    # Each step may have rewards although Harbor's combination of them is none.
    return Outcome.verifier_error if outcome.trains and scalar_reward(rewards, *rule) is None else outcome


def _stop_in(step: "StepResult", steps: "list[StepResult]", stop: str | None) -> str | None:
    """Return the trial's stop condition if it ended this step: the last one, or one whose error names it."""
    message = step.exception_info.exception_message if step.exception_info else ""
    named = stop is not None and outcome_of_refusal(message) is outcome_of_stop(stop)
    return stop if step is steps[-1] or named else None


def _step(step: "StepResult", stop: str | None, rule: RewardRule) -> StepRecord:
    rewards = step.verifier_result.rewards if step.verifier_result else None
    outcome = _classify(step, rewards, stop, rule)
    turns = _turns(step.agent_result)
    return StepRecord(name=step.step_name, outcome=outcome, rewards=only_finite(rewards), turns=turns)


def _turns(context: "AgentContext | None") -> int | None:
    """Return the number of answers the agent got. Terminus-2 also counts an unanswered first request."""
    count = (context.metadata or {}).get("n_episodes") if context is not None else None
    return 0 if count is not None and context is not None and not context.n_output_tokens else count


def _classify(
    part: "TrialResult | StepResult", rewards: dict[str, Any] | None, stop: str | None, rule: RewardRule
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
        bound=rule.bound,
        reward_key=rule.key,
    )


def _phase(part: "TrialResult | StepResult", info: "ExceptionInfo") -> Phase:
    if raised_by_agent(info.exception_traceback):
        return "agent"
    if part.agent_execution is not None:
        return "verification"
    return "agent_setup" if getattr(part, "agent_setup", None) else "environment_setup"


def _failure(
    info: "ExceptionInfo | None", outcome: Outcome, rewards: dict[str, Any] | None, rule: RewardRule
) -> Failure | None:
    if info is not None:
        return Failure(type=info.exception_type, message=summarize_failure(_message(info)))
    if outcome is Outcome.verifier_error:
        if not all_finite(rewards):
            return Failure(type="RewardNotFiniteError", message=summarize_failure(f"the verifier gave {rewards}"))
        if rule.key is not None and rule.key not in (rewards or {}):
            message = f"the verifier gave {rewards}, which has no {rule.key!r} (reward_key)"
            return Failure(type="RewardKeyError", message=summarize_failure(message))
        bound = f"{rule.bound:g} (reward_bound)"
        message = f"the verifier gave {rewards}; the largest allowed absolute value is {bound}"
        return Failure(type="RewardOutOfBoundError", message=summarize_failure(message))
    return None


def _message(info: "ExceptionInfo") -> str:
    """Return the exception's message and its cause, unless the message has it.

    Harbor's own messages often name only the failed action.
    """
    first, caused, _ = info.exception_traceback.partition("\n\nThe above exception was the direct cause")
    root = first.rstrip().rpartition("\n")[2] if caused else ""
    words = root.partition(": ")[2] or root.rpartition(".")[2]
    return info.exception_message if words in info.exception_message else f"{info.exception_message} (caused by {root})"


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
