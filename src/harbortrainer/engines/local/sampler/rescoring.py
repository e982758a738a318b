"""The sampler scores some of its own samples again: what rounding alone makes of a log-probability, on this machine.

A token was sampled from a forward pass over one position with a cache, in a batch of many requests. Here the whole
sequence goes through the same weights at once. Both are right; their difference is the noise that the learner's
proof measures with.

Invariant: what is scored again was sampled by the version that scores it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from harbortrainer.engines.local.sampler.draw import Draw
from harbortrainer.engines.local.sampler.ledger import Completion

_KEPT = 32
"""Requests that are remembered, the newest."""
_TOKENS = 1024
"""Of prompts and answers that are scored at a time; one sequence at least."""
_CHUNK = 512
"""Rows of float32 logits alive at once."""


@dataclass(frozen=True, slots=True)
class ScoredAgain:
    """One answer's log-probabilities, nats: as it was sampled, and again."""

    logprobs: Sequence[float]
    again: Sequence[float]


@dataclass(frozen=True, slots=True)
class SampledRequest:
    """What was sampled, after what, and at which temperature."""

    prompt: Sequence[int]
    temperature: float
    completion: Completion


class RecentSamples:
    """The last samples, with what they were sampled after. For one event loop, not for threads."""

    def __init__(self) -> None:
        self._kept: deque[SampledRequest] = deque(maxlen=_KEPT)

    def keep(self, prompt: Sequence[int], draw: Draw, completion: Completion) -> None:
        """Remember a request; one that was greedy or truncated says nothing about log-probabilities."""
        if draw.temperature > 0 and not draw.truncates:
            self._kept.append(SampledRequest(prompt, draw.temperature, completion))

    def take(self, version: int) -> list[SampledRequest]:
        """What this version sampled, the newest first, within the budget of tokens; all of it is forgotten."""
        kept, chosen, tokens = list(self._kept), [], 0
        self._kept.clear()
        for sampled in reversed(kept):
            length = len(sampled.prompt) + len(sampled.completion.token_ids)
            if sampled.completion.version != version or (chosen and tokens + length > _TOKENS):
                continue
            chosen.append(sampled)
            tokens += length
        return chosen


@torch.no_grad()
def score_again(model: PreTrainedModel, chosen: Sequence[SampledRequest]) -> list[ScoredAgain]:
    """One forward pass over each sequence; nothing of the cache is read or written."""
    return [ScoredAgain(sampled.completion.logprobs, _scored(model, sampled)) for sampled in chosen]


def _scored(model: PreTrainedModel, sampled: SampledRequest) -> list[float]:
    answer = torch.tensor(sampled.completion.token_ids, device=model.device)
    ids = torch.cat([torch.tensor(list(sampled.prompt), device=model.device), answer])[None]
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(answer) + 1).logits[0, -len(answer) - 1 : -1]
    found: list[float] = []
    for rows, tokens in zip(logits.split(_CHUNK), answer.split(_CHUNK), strict=True):
        logprobs = (rows.float() / sampled.temperature).log_softmax(-1)
        found += logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
    return found
