"""The request bodies that the server reads, in vLLM's format.

Contract: an unsupported key that would change the distribution is refused by name (`BadRequestError`). Keys that cannot
change it are ignored, as vLLM ignores keys of other versions.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

# Unsupported settings, with the values at which they have no effect.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex", "structured_outputs"), (None,)),
    **dict.fromkeys(("prompt_logprobs", "thinking_token_budget"), (None,)),
    **dict.fromkeys(("frequency_penalty", "min_tokens", "presence_penalty"), (None, 0)),
    **dict.fromkeys(("allowed_token_ids", "bad_words"), (None, [])),
    "logit_bias": (None, {}),
    "logprobs": (None, 0, 1),
    "repetition_penalty": (None, 1),
    "stop": (None, [], ""),
    "use_beam_search": (None, False),
}


class BadRequestError(ValueError):
    """The request cannot be served as it is.

    Attributes:
        status: HTTP status, 400 by default.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Sampling(BaseModel):
    """The sampling keys of both endpoints."""

    model_config = ConfigDict(extra="allow")

    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = None
    n: int | None = Field(None, ge=1, le=256)
    max_tokens: int | None = Field(None, ge=1)
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False

    def check(self) -> None:
        """Raise `BadRequestError` for an unsupported setting that is not at its neutral value."""
        for key, value in (self.model_extra or {}).items():
            if key in _NEUTRAL and value not in _NEUTRAL[key]:
                raise BadRequestError(f"{key} = {value!r} is not supported by the embedded sampler; leave it out")


class GenerateRequest(BaseModel):
    """Body of POST /inference/v1/generate."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    token_ids: list[int] = Field(min_length=1)
    sampling_params: Sampling = Field(default_factory=Sampling)
    stream: bool | None = False

    def check(self) -> None:
        """Raise `BadRequestError` for an unsupported setting."""
        if self.stream:
            raise BadRequestError("stream is not supported; leave it out")
        self.sampling_params.check()


class ChatRequest(Sampling):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, JsonValue]] = Field(min_length=1)
    model: str | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, JsonValue]] | None = None
    tool_choice: JsonValue = None
    stream: bool | None = False
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0)
    return_token_ids: bool | None = False
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: dict[str, JsonValue] | None = None

    def check(self) -> None:
        """Raise `BadRequestError` for an unsupported setting."""
        if self.stream:
            raise BadRequestError("stream: streaming is not supported; send stream = false")
        if self.top_logprobs:
            raise BadRequestError(
                "top_logprobs is not supported; use logprobs = true for the sampled tokens' log-probabilities"
            )
        if self.response_format not in (None, {"type": "text"}):
            raise BadRequestError("response_format: only text is supported")
        if self.tool_choice not in (None, "none", "auto"):
            raise BadRequestError("tool_choice: only auto and none are supported")
        super().check()


def check_request(request: GenerateRequest | ChatRequest, models: Sequence[str]) -> None:
    """Raise `BadRequestError` for another model than the served ones, or an unsupported setting."""
    if request.model not in (None, *models):
        raise BadRequestError(f"The model `{request.model}` does not exist.", 404)
    request.check()


def parse_request[T: BaseModel](model: type[T], body: bytes) -> T:
    """Parse a request body; raises `BadRequestError` with one line that names the key."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise BadRequestError(f"{where}: {first['msg']}") from error


def context_length_error(prompt_len: int, max_model_len: int) -> BadRequestError:
    """Return vLLM's context-length error; verifiers and LiteLLM recognize its wording."""
    return BadRequestError(
        f"This model's maximum context length is {max_model_len} tokens. However, your request has {prompt_len} input "
        "tokens, which leaves no room for a completion. Please reduce the length of the input."
    )
