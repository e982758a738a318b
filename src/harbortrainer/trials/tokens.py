"""Token ids and log-probabilities out of a chat completion, all of them or an error.

Invariant: one log-probability for each sampled id, each a finite number that can be one, and a prompt; or nothing is
returned.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from harbortrainer.trials.faults import TokensMissingError
from harbortrainer.trials.record import TurnTokens

if TYPE_CHECKING:
    from harbor.models.agent.rollout_detail import RolloutDetail


_ROUNDING = 1e-3  # how far above 0 a log-probability may come out of a sum in low precision


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
    """What the server counted."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None


class ChatCompletion(BaseModel):
    """The body of /v1/chat/completions, as far as it is read; the ids as vLLM and the embedded sampler return them."""

    choices: list[_Choice] = Field(min_length=1)
    model: str | None = None
    prompt_token_ids: list[int] | None = None
    usage: CompletionUsage | None = None


def of_rollout_details(details: "Sequence[RolloutDetail]") -> list[TurnTokens]:
    """Read Harbor's rollout_details, which it fills list by list, each only with what is there.

    Args:
        details: One entry for each chat history; see `harbor.models.agent.rollout_detail`.

    Raises:
        TokensMissingError: A turn lacks a list, or lists differ in length: from there on all are misaligned.
    """
    turns = []
    for detail in details:
        prompts, answers = detail.get("prompt_token_ids") or [], detail.get("completion_token_ids") or []
        logprobs = detail.get("logprobs") or []
        lengths = [len(prompts), len(answers), len(logprobs)]
        if len(set(lengths)) != 1:
            raise TokensMissingError(f"lists of {lengths} turns in rollout_details")
        turns += [_checked(*turn, cut=False) for turn in zip(prompts, answers, logprobs, strict=True)]
    return turns


def rollout_details(turns: list[TurnTokens]) -> "list[RolloutDetail] | None":
    """The inverse of `of_rollout_details`: one chat history, None when there are no turns."""
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
    """One call's tokens, asked for with `return_token_ids` and `logprobs`; `cut`: the answer was cut at its length.

    Raises:
        TokensMissingError: Something is missing, not finite, or of another length.
    """
    choice = completion.choices[0]
    prompt = completion.prompt_token_ids or choice.prompt_token_ids
    sampled = choice.logprobs.content if choice.logprobs else None
    if not prompt or choice.token_ids is None or sampled is None:
        raise TokensMissingError("the model server returned no token ids or log-probabilities")
    return _checked(prompt, choice.token_ids, [entry.logprob for entry in sampled], cut=cut)


def fault_of(prompt: Sequence[int], completion: Sequence[int], logprobs: Sequence[float]) -> str:
    """What is missing of a call's tokens, or does not fit together; "" when nothing is."""
    if not prompt:
        return "a turn without a prompt"
    if min(prompt) < 0:
        return "a negative token id"
    return fault_of_answer(completion, logprobs)


def fault_of_answer(completion: Sequence[int], logprobs: Sequence[float]) -> str:
    """What cannot be in a sampled answer: other numbers of ids and log-probabilities, or values that are none; else
    ""."""
    if len(logprobs) != len(completion):
        return f"{len(completion)} sampled tokens but {len(logprobs)} log-probabilities"
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in logprobs):
        return "a log-probability is not a finite number"
    if max(logprobs, default=0.0) > _ROUNDING:
        return f"a log-probability of {max(logprobs):g}, above 0"
    return "a negative token id" if min(completion, default=0) < 0 else ""


def _checked(prompt: list[int], completion: list[int], logprobs: list[float], *, cut: bool) -> TurnTokens:
    if fault := fault_of(prompt, completion, logprobs):
        raise TokensMissingError(fault)
    return TurnTokens(prompt_ids=prompt, completion_ids=completion, logprobs=logprobs, cut=cut)
