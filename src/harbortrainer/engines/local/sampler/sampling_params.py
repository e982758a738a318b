"""Sampling parameters, and the sampling step itself.

Each token needs one uniform random number: a hash of the request's seed and the token's position. A request therefore
gets the same numbers whatever else is in the batch, however often it was preempted, and whenever it arrived. No
generator state is shared.

Invariant: the returned log-probability belongs to the distribution that the token was drawn from, after temperature,
top_k, top_p and min_p. At temperature 0 the likeliest token is chosen, with its log-probability at temperature 1.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_MASK = (1 << 64) - 1
LOGITS_AT_ONCE = {"cpu": 1 << 19, "cuda": 1 << 22}
"""Most logits in one step of sampling or rescoring, whose temporaries are many times as large, by type of device.

On a CPU the temporaries fit into the cache: a third of the time for 64 rows of 49 152 logits. A GPU has the time of
each step's launches.
"""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request.

    Attributes:
        seed: 64 bits.
        temperature: 0 chooses the likeliest token.
        top_k: Keep this many of the likeliest tokens; -1 or 0 keeps all.
        top_p: Keep the likeliest tokens that together reach this probability; 1 keeps all.
        min_p: Keep tokens with at least this share of the likeliest token's probability; 0 keeps all.
    """

    seed: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def truncates(self) -> bool:
        """Whether any parameter excludes tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def uniform(self, position: int) -> float:
        """Return a number in (0, 1), also in float32, for the token at `position` (splitmix64, Steele et al. 2014)."""
        z = (self.seed + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return unit_interval(z ^ (z >> 31))


def unit_interval(bits: int) -> float:
    """Map 64 random bits to (0, 1). 23 of them are used: with 24, float32 would round the largest result to 1."""
    return ((bits >> 41) + 0.5) / (1 << 23)


@dataclass(frozen=True, slots=True)
class SamplingJob:
    """One sequence to sample.

    Attributes:
        prompt: Token ids, at least one.
        max_tokens: At least 1. The caller makes sure that prompt and completion fit the context.
        stop_ids: Tokens that end the completion and are part of it.
    """

    request_id: str
    session_id: str
    prompt: Sequence[int]
    max_tokens: int
    stop_ids: frozenset[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """One policy version in the engine.

    Attributes:
        serial: Unique within this engine and increasing: the newest has the largest.
        version: The trainer's version number.
        adapter: Its adapter's name in the model; None for the base alone.
    """

    serial: int = 0
    version: int = 0
    adapter: str | None = None


def request_seed(*parts: object, prompt: Sequence[int]) -> int:
    """Hash whatever distinguishes this request, and its prompt, to a 64-bit seed."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8)
    digest.update(array("q", prompt).tobytes())
    return int.from_bytes(digest.digest())


def sample_tokens(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: torch.Tensor,
    truncation: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row by inverting the cumulative distribution, a chunk of rows at a time.

    Args:
        logits: [n, V] float32.
        uniform: [n] in (0, 1).
        temperature: [n], 0 for greedy rows.
        truncation: (top_k, top_p, min_p), each [n]; None if no row truncates.

    Returns:
        Tokens [n] and their log-probabilities [n], nats.
    """
    chunk = max(1, LOGITS_AT_ONCE[logits.device.type] // logits.shape[-1])
    inputs = logits, uniform, temperature, *(truncation or ())
    sampled = [_sample_chunk(*rows) for rows in zip(*(tensor.split(chunk) for tensor in inputs), strict=True)]
    tokens, logprobs = (torch.cat(column) for column in zip(*sampled, strict=True))
    return tokens, logprobs


def _sample_chunk(
    logits: torch.Tensor, uniform: torch.Tensor, temperature: torch.Tensor, *truncation: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    greedy = temperature <= 0
    # `torch.where` with a Python number would copy it to the GPU and synchronize.
    logprobs = (logits / temperature.masked_fill(greedy, 1.0)[:, None]).log_softmax(-1)
    if truncation:
        logprobs = torch.where(greedy[:, None], logprobs, truncate(logprobs, *truncation))
    # float64: float32 sums over a large vocabulary lose the rare tokens.
    cumulative = logprobs.double().exp().cumsum(-1)
    target = uniform.double()[:, None] * cumulative[:, -1:]
    sampled = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy, logits.argmax(-1), sampled)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def truncate(logprobs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Mask the tokens that top_k, top_p or min_p exclude, and renormalize; [n, V] to [n, V]."""
    ordered, order = logprobs.sort(-1, descending=True)
    rank = torch.arange(logprobs.shape[-1], device=logprobs.device)
    before = ordered.double().exp().cumsum(-1) - ordered.double().exp()
    drop = (top_k[:, None] > 0) & (rank >= top_k[:, None])
    drop |= (before >= top_p[:, None]) & (top_p < 1)[:, None]
    drop |= ordered < ordered[:, :1] + min_p.log()[:, None]
    drop[:, 0] = False
    dropped = torch.empty_like(drop).scatter_(-1, order, drop)
    return logprobs.masked_fill(dropped, -torch.inf).log_softmax(-1)
