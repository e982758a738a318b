"""What is sampled by what, and how a token is drawn: from a random number that depends on nothing but the request.

Each token needs one uniform number. It is a hash of the request's seed and of the token's position, so a request
gets the same numbers whatever else is in the batch, however often it was preempted, and in whichever order requests
came; there is no generator whose state could be shared.

Invariant: the log-probability returned is that of the distribution the token was drawn from, after temperature,
top_k, top_p and min_p. At temperature 0 the likeliest token is taken, with its log-probability at temperature 1.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_MASK = (1 << 64) - 1
DRAWN_ELEMENTS = 1 << 22
"""Of logits that are drawn from at once: what is made of them on the way is many times as large."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What one request asks of the sampling step.

    Attributes:
        seed: 64 bits.
        temperature: 0 takes the likeliest token.
        top_k: Likeliest tokens kept; -1 or 0 keeps all.
        top_p: The likeliest tokens that together reach this probability are kept; 1 keeps all.
        min_p: Tokens at least this likely, as a share of the likeliest one, are kept; 0 keeps all.
    """

    seed: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def uniform(self, position: int) -> float:
        """In (0, 1), 24 bits, for the token at `position` of the sequence (splitmix64, Steele et al. 2014)."""
        z = (self.seed + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return (((z ^ (z >> 31)) >> 40) + 0.5) / (1 << 24)


@dataclass(frozen=True, slots=True)
class SamplingJob:
    """One sequence to sample.

    Attributes:
        prompt: Token ids, at least one.
        max_tokens: At least 1; prompt and completion fit the context (the caller saw to it).
        stop_ids: Tokens that end the completion, and are part of it.
    """

    request_id: str
    session_id: str
    prompt: Sequence[int]
    max_tokens: int
    stop_ids: frozenset[int]
    draw: Draw


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy version as the engine samples it.

    Attributes:
        serial: Tells it from every other one of this engine; the newest has the largest.
        version: What the trainer calls it.
        adapter: Its adapter's name in the model; None is the base alone.
    """

    serial: int = 0
    version: int = 0
    adapter: str | None = None


def request_seed(*parts: object, prompt: Sequence[int]) -> int:
    """64 bits from whatever tells this request from others, and its prompt."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8)
    digest.update(array("q", prompt).tobytes())
    return int.from_bytes(digest.digest())


def draw(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: torch.Tensor,
    truncation: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one token a row by inverting the cumulative distribution, some rows at a time.

    Args:
        logits: [n, V] float32.
        uniform: [n] in (0, 1).
        temperature: [n], 0 for greedy rows.
        truncation: (top_k, top_p, min_p), each [n]; None when no row truncates.

    Returns:
        Tokens [n] and their log-probabilities [n], nats.
    """
    at_once = max(1, DRAWN_ELEMENTS // logits.shape[-1])
    given = logits, uniform, temperature, *(truncation or ())
    drawn = [_draw(*rows) for rows in zip(*(tensor.split(at_once) for tensor in given), strict=True)]
    tokens, logprobs = (torch.cat(column) for column in zip(*drawn, strict=True))
    return tokens, logprobs


def _draw(
    logits: torch.Tensor, uniform: torch.Tensor, temperature: torch.Tensor, *truncation: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    greedy = temperature <= 0
    # `where` with a number would copy that to a GPU, and wait for it.
    logprobs = (logits / temperature.masked_fill(greedy, 1.0)[:, None]).log_softmax(-1)
    if truncation:
        logprobs = torch.where(greedy[:, None], logprobs, truncate(logprobs, *truncation))
    # Doubles: float32 sums over a large vocabulary lose the rare tokens.
    cumulative = logprobs.double().exp().cumsum(-1)
    target = uniform.double()[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy, logits.argmax(-1), drawn)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def truncate(logprobs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Removes the tokens that top_k, top_p or min_p exclude, and normalizes what is left; [n, V] to [n, V]."""
    ordered, order = logprobs.sort(-1, descending=True)
    rank = torch.arange(logprobs.shape[-1], device=logprobs.device)
    before = ordered.double().exp().cumsum(-1) - ordered.double().exp()
    drop = (top_k[:, None] > 0) & (rank >= top_k[:, None])
    drop |= (before >= top_p[:, None]) & (top_p < 1)[:, None]
    drop |= ordered < ordered[:, :1] + min_p.log()[:, None]
    drop[:, 0] = False
    dropped = torch.empty_like(drop).scatter_(-1, order, drop)
    return logprobs.masked_fill(dropped, -torch.inf).log_softmax(-1)
