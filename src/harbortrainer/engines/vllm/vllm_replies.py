"""What vLLM answers at /inference/v1/generate, checked: ids and log-probabilities that belong together.

Contract: whatever is not evidence of what was sampled (other ids, a number that is missing or not finite, an answer
that was broken off) is a `ValueError` in one line.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Self

from pydantic import BaseModel, Field, FiniteFloat, ValidationError, model_validator

NO_EVIDENCE = -9999.0
"""What vLLM puts where it has no log-probability."""


class TokenLogprob(BaseModel):
    """One sampled token; which one is said by its id, or as `token_id:ID`."""

    logprob: FiniteFloat
    token: str | None = None
    token_id: int | None = None

    @property
    def id(self) -> int | None:
        """The token, when it is said."""
        said = (self.token or "").removeprefix("token_id:")
        return int(said) if self.token_id is None and said.isdecimal() else self.token_id


class ChoiceLogprobs(BaseModel):
    """Of one answer, token by token."""

    content: list[TokenLogprob]


class VllmChoice(BaseModel):
    """One answer."""

    token_ids: list[int] = Field(min_length=1)
    finish_reason: Literal["stop", "length"]
    logprobs: ChoiceLogprobs

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        if [entry.id for entry in self.logprobs.content] != self.token_ids:
            raise ValueError("the log-probabilities are not those of the tokens")
        if NO_EVIDENCE in self.values:
            raise ValueError("a token has no log-probability")
        return self

    @property
    def values(self) -> list[float]:
        """[T] nats."""
        return [entry.logprob for entry in self.logprobs.content]


class PromptLogprob(BaseModel):
    """One candidate at one place of a prompt."""

    logprob: FiniteFloat


class VllmReply(BaseModel):
    """The whole answer."""

    choices: list[VllmChoice] = Field(min_length=1)
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None

    def of_prompt(self, token_ids: Sequence[int], positions: Sequence[int]) -> list[float]:
        """Nats of the prompt's tokens at these positions, of which none is its first.

        Raises:
            ValueError: They are not there.
        """
        candidates = self.prompt_logprobs or []
        found: list[Mapping[int, PromptLogprob]] = [candidates[t] or {} for t in positions if t < len(candidates)]
        if len(found) < len(positions):
            raise ValueError("no log-probabilities of the prompt")
        told = [at.get(token_ids[t]) for at, t in zip(found, positions, strict=True)]
        nats = [one.logprob for one in told if one is not None and one.logprob != NO_EVIDENCE]
        if len(nats) < len(positions):
            raise ValueError("a token of the prompt has no log-probability")
        return nats


def read_reply(body: bytes) -> VllmReply:
    """The answer in these bytes; raises `ValueError` in one line that says what is wrong with it."""
    try:
        return VllmReply.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the answer"
        raise ValueError(f"{where}: {first['msg']}") from None
