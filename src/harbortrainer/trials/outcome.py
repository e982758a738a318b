"""The table of outcomes, and the classification of a finished trial into one of them.

An outcome says which part caused the end of a trial, whether the trial trains, and how often it is retried.
`docs/outcomes.md` has the table for users. This module does no I/O and imports no Harbor.

Invariant: a failure is never a reward of 0. An outcome that trains has finite rewards within a bound; without them it
does not train. The only exception is `self_inflicted`, with reward 0: the agent provably broke its own sandbox while
the infrastructure was sound.

Exceptions are classified by type name, since Harbor records nothing else. A name in none of the sets below is
classified by the phase in which it was raised.
"""

import re
import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import Literal, NamedTuple, Self

from harbortrainer.config.plugin import REWARD_BOUND

CANCELLED = frozenset({"CancelledError", "KeyboardInterrupt"})
START_TIMEOUT = "EnvironmentStartTimeoutError"
"""Harbor's error for a sandbox that did not start within `build_timeout_sec`."""

# Raised by our sandbox, Harbor's environments and their clients. Neither graded nor trained on.
SANDBOX = frozenset(
    {
        "SandboxError",
        "SandboxRequestError",
        "ImageLacksError",
        "LeftoversError",
        "SandboxBuildError",
        "SandboxDiedError",
        "SandboxStartError",
        "SandboxTimeoutError",
        START_TIMEOUT,
        "EnvironmentBuildTimeoutError",
        "HealthcheckError",
        "DaytonaError",
        "DaytonaNotFoundError",
        "DaytonaRateLimitError",
        "DaytonaTimeoutError",
        "SandboxException",
        "SandboxNotFoundError",
        "SandboxTerminatedError",
        "NotFoundException",
        "AddTestsDirError",
        "DownloadVerifierDirError",
        "GKEExecStreamClosedError",
        "GKEPodNotFoundError",
        "MemoryLimitExceededError",
        "RuntimeRequestError",
        "SSHAccessError",
        "SandboxBuildFailedError",
        "SandboxLikelyOutOfMemoryError",
        "ServiceOperationsUnsupportedError",
        "VercelScopeError",
    }
)

VERIFIER = frozenset(
    {
        "VerifierTimeoutError",
        "VerifierOutputParseError",
        "RewardFileNotFoundError",
        "RewardFileEmptyError",
    }
)

# Raised by our client. Neither graded nor trained on.
ENGINE = frozenset({"ModelServerError", "TokensMissingError"})

# Raised by our client, LiteLLM, openai and httpx.
MODEL = ENGINE | frozenset(
    {
        "APIConnectionError",
        "APIError",
        "APIResponseValidationError",
        "APIStatusError",
        "APITimeoutError",
        "AuthenticationError",
        "BadGatewayError",
        "BadRequestError",
        "BudgetExceededError",
        "ConflictError",
        "ConnectError",
        "ConnectTimeout",
        "ContentPolicyViolationError",
        "InternalServerError",
        "NotFoundError",
        "PermissionDeniedError",
        "RateLimitError",
        "ReadError",
        "ReadTimeout",
        "RemoteProtocolError",
        "ServiceUnavailableError",
        "Timeout",
        "UnprocessableEntityError",
        "UnsupportedParamsError",
    }
)

# An installed agent's program failed. Harbor still runs the verifier. Since 0.25 it derives the type from the program's
# output. The output has the model's text, so the type proves nothing about the model server; the endpoint's calls do.
AGENT_EXIT = frozenset(
    {
        "NonZeroAgentExitCodeError",
        "AgentAuthenticationError",
        "AgentSafetyRefusalError",
        "ApiConnectionClosedError",
        "ApiConnectionError",
        "ApiError",
        "ApiInternalServerError",
        "ApiOverloadedError",
        "ApiProviderResourceNotFoundError",
        "ApiRateLimitError",
        "ApiResponseStalledError",
        "ApiUsageLimitError",
        "ModelNotFoundError",
        "NetworkConnectionError",
        "UnknownApiError",
        "UnsupportedModelParametersError",
    }
)

# Not retried: another attempt would fail the same way.
FINAL = frozenset(
    {
        "AgentMissingError",
        "ImageLacksError",
        "MissingExtraError",
        "NoLocksError",
        "PromptTooLongError",
        "ServiceOperationsUnsupportedError",
        "VercelScopeError",
    }
)


type Blame = Literal["policy", "harness", "engine", "infrastructure", "task", "run"]
type Phase = Literal["environment_setup", "agent_setup", "agent", "verification"]


class Outcome(StrEnum):
    """Outcome of a trial, with its row of the table."""

    blame: Blame
    """The part that caused the end of the trial."""
    trains: bool
    """Whether the trial's reward goes to the learner."""
    flagged: bool
    """Whether the trial trains although it was cut short."""
    retries: int
    """Number of retries before the trial is dropped."""
    pause_s: float
    """Pause before the first retry, in seconds; doubles with each retry."""

    def __new__(
        cls, name: str, blame: Blame, use: Literal["trains", "flagged", "lost"], retries: int = 0, pause_s: float = 0.0
    ) -> Self:
        row = str.__new__(cls, name)
        row._value_ = name
        row.blame, row.retries, row.pause_s = blame, retries, pause_s
        row.trains, row.flagged = use != "lost", use == "flagged"
        return row

    completed = "completed", "policy", "trains"
    agent_timeout = "agent_timeout", "policy", "flagged"
    turn_limit = "turn_limit", "policy", "flagged"
    context_limit = "context_limit", "policy", "flagged"
    output_limit = "output_limit", "policy", "flagged"
    self_inflicted = "self_inflicted", "policy", "flagged"
    timeout_masked = "timeout_masked", "policy", "lost"
    tampered = "tampered", "policy", "lost"
    agent_error = "agent_error", "harness", "lost", 2
    model_error = "model_error", "engine", "lost", 2, 1.0
    sandbox_error = "sandbox_error", "infrastructure", "lost", 3, 1.0
    verifier_error = "verifier_error", "task", "lost", 1
    cancelled = "cancelled", "run", "lost"


# Stop conditions of the interception endpoint, in the spelling of both verifiers releases.
OUTCOME_OF_STOP: dict[str, Outcome] = {
    "max_turns": Outcome.turn_limit,
    "context_length": Outcome.context_limit,
    "max_input_tokens": Outcome.context_limit,
    "max_output_tokens": Outcome.output_limit,
    "max_total_tokens": Outcome.context_limit,
}

STOP_OF_LIMIT: dict[Outcome, str] = {
    Outcome.turn_limit: "max_turns",
    Outcome.context_limit: "max_total_tokens",
    Outcome.output_limit: "max_output_tokens",
}
"""Stop condition of the endpoint for each limit, also used if the agent enforced the limit itself. Both verifiers
releases mark a trace with one of these as truncated; 0.4 does not know `context_length`."""

LIMITS: dict[str, Outcome] = {
    "AgentTimeoutError": Outcome.agent_timeout,
    "ContextLengthExceededError": Outcome.context_limit,
    "ContextWindowExceededError": Outcome.context_limit,
    "OutputLengthExceededError": Outcome.output_limit,
    "OutputTokenExceededError": Outcome.output_limit,
}
"""Exceptions at a limit. The trial trains if it was graded."""

_BY_PHASE: dict[Phase, Outcome] = {
    "environment_setup": Outcome.sandbox_error,
    "agent_setup": Outcome.agent_error,
    "agent": Outcome.agent_error,
    "verification": Outcome.verifier_error,
}

_STOPPED = re.compile(r"rollout stopped: (\w+)")

# Worst outcome first, so that a cause comes before its consequences.
_WORST_FIRST = (
    Outcome.cancelled,
    Outcome.sandbox_error,
    Outcome.model_error,
    Outcome.agent_error,
    Outcome.verifier_error,
    Outcome.self_inflicted,
    Outcome.tampered,
    Outcome.timeout_masked,
    Outcome.agent_timeout,
    Outcome.context_limit,
    Outcome.output_limit,
    Outcome.turn_limit,
    Outcome.completed,
)


EXAMINED_OUTCOMES = frozenset({Outcome.agent_error, Outcome.sandbox_error, Outcome.verifier_error})
"""Failures that an agent can cause in its own sandbox, which is then examined."""


def all_finite(rewards: Mapping[str, float] | None) -> bool:
    """Whether there are rewards and all of them are finite numbers."""
    return bool(rewards) and all(_is_finite(value) for value in rewards.values())


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max  # an int can be larger than any float


class RewardRule(NamedTuple):
    """How a verifier's rewards become the one that is trained on; see `scalar_reward`."""

    bound: float = REWARD_BOUND
    key: str | None = None


DEFAULT_KEY = "reward"
"""Name of the reward that is trained on, where a verifier gives several."""


def scalar_reward(
    rewards: Mapping[str, float] | None, bound: float = REWARD_BOUND, key: str | None = None
) -> float | None:
    """Return the reward for training: the one named `key`, else the one named "reward", else the mean of all.

    Args:
        rewards: The verifier's rewards.
        bound: Largest allowed absolute value of the result.
        key: The name of the reward to take; None for the rule above.

    Returns:
        None, never 0, if there are no rewards, one is not a finite number, `key` is missing, or the result exceeds the
        bound.

    Example:
        >>> scalar_reward({"speed": 1.0, "style": 0.5})
        0.75
    """
    if rewards is None or not all_finite(rewards):
        return None
    if (name := key or DEFAULT_KEY) in rewards:
        value = float(rewards[name])
    elif key is None:
        value = sum(map(float, rewards.values())) / len(rewards)
    else:
        return None
    return value if abs(value) <= bound else None


def classify(
    *,
    rewards: Mapping[str, float] | None,
    exception: str | None = None,
    message: str = "",
    phase: Phase = "agent",
    ending: Outcome | None = None,
    stop: str | None = None,
    bound: float = REWARD_BOUND,
    reward_key: str | None = None,
) -> Outcome:
    """Return the outcome of one trial, or of one step of it.

    Args:
        rewards: The verifier's rewards; None if there are none.
        exception: Type name of the exception that Harbor recorded, such as `NonZeroAgentExitCodeError`.
        message: The exception's message. Without effect if an installed agent's program printed it.
        phase: Phase of the trial in which it was raised.
        ending: Limit at which the agent reports that it ended.
        stop: Condition with which the interception endpoint stopped the rollout (`max_turns`, ...).
        bound: Largest allowed absolute value of the scalar reward.
        reward_key: The name of the scalar reward, as for `scalar_reward`.

    Returns:
        An outcome that trains only if all rewards are finite numbers and the scalar reward is within the bound.
    """
    refusal = None if exception in AGENT_EXIT else outcome_of_refusal(message)
    limit = ending or outcome_of_stop(stop) or refusal
    cause = _cause(exception, phase, limit) if exception else limit or Outcome.completed
    if cause.trains and scalar_reward(rewards, bound, reward_key) is None:
        return _without_reward(exception, cause)
    return cause


def worst(outcomes: list[Outcome]) -> Outcome:
    """Return the outcome of a multi-step trial: the worst one.

    Raises:
        ValueError: There are no outcomes.
    """
    return min(outcomes, key=_WORST_FIRST.index)


def _cause(exception: str, phase: Phase, limit: Outcome | None) -> Outcome:
    if exception in CANCELLED:
        return Outcome.cancelled
    if exception in SANDBOX:
        return Outcome.sandbox_error
    if exception in VERIFIER:
        return Outcome.verifier_error
    if phase in ("environment_setup", "verification"):
        return _BY_PHASE[phase]
    if exception in LIMITS:
        return LIMITS[exception]
    if limit is not None and (exception in MODEL or exception in AGENT_EXIT):
        return limit
    if exception in MODEL:
        return Outcome.model_error
    return _BY_PHASE[phase]


def _without_reward(exception: str | None, cause: Outcome) -> Outcome:
    """Return the outcome without a valid reward: the agent raised before the verifier ran, or the verifier failed."""
    if exception is not None and cause is not Outcome.agent_timeout:
        return Outcome.agent_error
    return Outcome.verifier_error


def outcome_of_stop(stop: str | None) -> Outcome | None:
    """Return the outcome of a stop condition: a limit, or `completed` for a condition of the task itself.

    Returns:
        None if there was no stop, or an error was its reason.
    """
    if stop is None or stop in ("", "None", "error"):
        return None
    return OUTCOME_OF_STOP.get(stop, Outcome.completed)


def outcome_of_refusal(message: str) -> Outcome | None:
    """Return the outcome of a refusal by the interception endpoint, None if `message` is no such refusal.

    Example:
        >>> outcome_of_refusal("400: rollout stopped: max_turns")
        <Outcome.turn_limit: 'turn_limit'>
    """
    found = _STOPPED.search(message)
    return outcome_of_stop(found.group(1)) if found else None
