"""Token ids and log-probabilities of chat completions and of Harbor's rollout_details.

Invariant: returned tokens have a prompt and one valid log-probability (finite, not above 0) per sampled id. Anything
else is an error.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from harbortrainer.trials.faults import TokensMissingError
from harbortrainer.trials.record import TurnTokens

if TYPE_CHECKING:
    from harbor.models.agent.rollout_detail import RolloutDetail


_ROUNDING = 1e-3  # tolerance above 0 for log-probabilities summed in low precision


class _Message(BaseModel):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Logprob(BaseModel):
    logprob: float


class _Logprobs(BaseModel):
    content: list[_Logprob] | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Cached(BaseModel):
    cached_tokens: int | None = None


class CompletionUsage(BaseModel):
    """Token counts reported by the server."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None


class ChatCompletion(BaseModel):
    """The fields read from a reply of /v1/chat/completions; ids as vLLM and the embedded sampler return them."""

    choices: list[_Choice] = Field(min_length=1)
    model: str | None = None
    prompt_token_ids: list[int] | None = None
    usage: CompletionUsage | None = None


def turns_from_rollout_details(details: "Sequence[RolloutDetail]") -> list[TurnTokens]:
    """Read Harbor's rollout_details: parallel lists, to which Harbor appends only the values that a turn has.

    Args:
        details: One entry per chat history; see `harbor.models.agent.rollout_detail`.

    Raises:
        TokensMissingError: The lists differ in length, so that turns are misaligned, or a turn is invalid.
    """
    turns = []
    for detail in details:
        prompts, answers = detail.get("prompt_token_ids") or [], detail.get("completion_token_ids") or []
        logprobs = detail.get("logprobs") or []
        lengths = [len(prompts), len(answers), len(logprobs)]
        if len(set(lengths)) != 1:
            raise TokensMissingError(f"the lists in rollout_details differ in length: {lengths} turns")
        turns += [_checked(*turn, cut=False) for turn in zip(prompts, answers, logprobs, strict=True)]
    return turns


def to_rollout_details(turns: list[TurnTokens]) -> "list[RolloutDetail] | None":
    """Return the turns as rollout_details of one chat history, None if there are no turns."""
    if not turns:
        return None
    return [
        {
            "prompt_token_ids": [turn.prompt_ids for turn in turns],
            "completion_token_ids": [turn.completion_ids for turn in turns],
            "logprobs": [turn.logprobs for turn in turns],
        }
    ]


def turn_tokens(completion: ChatCompletion, *, cut: bool) -> TurnTokens:
    """Return the tokens of one call that was sent with `return_token_ids` and `logprobs`.

    Args:
        completion: The server's reply.
        cut: Whether the answer was cut at its length.

    Raises:
        TokensMissingError: Ids or log-probabilities are missing, invalid, or differ in number.
    """
    choice = completion.choices[0]
    prompt = completion.prompt_token_ids or choice.prompt_token_ids
    sampled = choice.logprobs.content if choice.logprobs else None
    if not prompt or choice.token_ids is None or sampled is None:
        raise TokensMissingError("the model server returned no token ids or log-probabilities")
    return _checked(prompt, choice.token_ids, [entry.logprob for entry in sampled], cut=cut)


def find_turn_fault(prompt: Sequence[int], completion: Sequence[int], logprobs: Sequence[float]) -> str:
    """Describe what is missing or invalid in a call's tokens; "" if nothing is."""
    if not prompt:
        return "the turn has no prompt"
    if min(prompt) < 0:
        return "a negative token id"
    return find_completion_fault(completion, logprobs)


def find_completion_fault(completion: Sequence[int], logprobs: Sequence[float]) -> str:
    """Describe what is invalid in a sampled answer's ids and log-probabilities; "" if nothing is."""
    if len(logprobs) != len(completion):
        return f"{len(completion)} sampled tokens but {len(logprobs)} log-probabilities"
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in logprobs):
        return "a log-probability is not a finite number"
    if max(logprobs, default=0.0) > _ROUNDING:
        return f"a log-probability of {max(logprobs):g}, above 0"
    return "a negative token id" if min(completion, default=0) < 0 else ""


def _checked(prompt: list[int], completion: list[int], logprobs: list[float], *, cut: bool) -> TurnTokens:
    if fault := find_turn_fault(prompt, completion, logprobs):
        raise TokensMissingError(fault)
    return TurnTokens(prompt_ids=prompt, completion_ids=completion, logprobs=logprobs, cut=cut)
