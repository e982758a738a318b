"""Token ids and log-probabilities out of a chat completion, all of them or an error.

Invariant: one log-probability for each sampled id, each a finite number, and a prompt; or nothing is returned.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harbortrainer.trials.faults import TokensMissingError
from harbortrainer.trials.record import TurnTokens

if TYPE_CHECKING:
    from harbor.models.agent.rollout_detail import RolloutDetail


def of_rollout_details(details: Sequence[Mapping[str, Any]]) -> list[TurnTokens]:
    """Read Harbor's rollout_details, which it fills list by list, each only with what is there.

    Args:
        details: One entry for each chat history; see `harbor.models.agent.rollout_detail`.

    Raises:
        TokensMissingError: A turn lacks a list, or lists differ in length: from there on all are misaligned.
    """
    turns = []
    for detail in details:
        columns = [detail.get(key) or [] for key in ("prompt_token_ids", "completion_token_ids", "logprobs")]
        if len({len(column) for column in columns}) != 1:
            raise TokensMissingError(f"lists of {[len(column) for column in columns]} turns in rollout_details")
        turns += [_checked(*turn, cut=False) for turn in zip(*columns, strict=True)]
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


def turn_tokens(reply: dict[str, Any], *, cut: bool) -> TurnTokens:
    """Read one call's tokens as vLLM (`return_token_ids`) and the embedded sampler return them.

    Args:
        reply: The body of /v1/chat/completions.
        cut: The answer was cut at its length.

    Raises:
        TokensMissingError: Something is missing, not finite, or of another length.
    """
    choice = reply["choices"][0]
    prompt = reply.get("prompt_token_ids") or choice.get("prompt_token_ids")
    completion = choice.get("token_ids")
    content = (choice.get("logprobs") or {}).get("content")
    if not prompt or completion is None or content is None:
        raise TokensMissingError("the model server returned no token ids or log-probabilities")
    return _checked(prompt, completion, [entry["logprob"] for entry in content], cut=cut)


def _checked(prompt: list[int], completion: list[int], logprobs: list[float], *, cut: bool) -> TurnTokens:
    if not prompt:
        raise TokensMissingError("a turn without a prompt")
    if len(logprobs) != len(completion):
        raise TokensMissingError(f"{len(completion)} sampled tokens but {len(logprobs)} log-probabilities")
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in logprobs):
        raise TokensMissingError("a log-probability is not a finite number")
    return TurnTokens(prompt_ids=prompt, completion_ids=completion, logprobs=logprobs, cut=cut)
