"""The requests the server reads and the replies it writes, in vLLM's shapes.

Contract: what would change the distribution and is not honoured is refused by name (`BadRequestError`); keys that
cannot change it are ignored, as vLLM ignores keys of other versions.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

# Settings we do not implement, with the values at which they do nothing.
_NEUTRAL: dict[str, tuple] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_tokens": (None, 0),
    "stop": (None, [], ""),
    "bad_words": (None, []),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None, []),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_grammar": (None,),
    "guided_choice": (None,),
    "thinking_token_budget": (None,),
    "use_beam_search": (None, False),
    "prompt_logprobs": (None,),
}


class BadRequestError(ValueError):
    """The request cannot be served as it is.

    Attributes:
        status: HTTP status, 400 unless said otherwise.
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
        """Raises `BadRequestError` for a setting that is not implemented and not at its neutral value."""
        for key, value in (self.model_extra or {}).items():
            if key in _NEUTRAL and value not in _NEUTRAL[key]:
                raise BadRequestError(f"{key} = {value!r} is not supported by the embedded sampler; leave it out")


class GenerateRequest(BaseModel):
    """POST /inference/v1/generate."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    token_ids: list[int] = Field(min_length=1)
    sampling_params: Sampling = Field(default_factory=Sampling)
    stream: bool | None = False


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    stream: bool | None = False
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0)
    return_token_ids: bool | None = False
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None


def parse[T: BaseModel](kind: type[T], body: bytes) -> T:
    """Reads a request; raises `BadRequestError` in one line that names the key."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise BadRequestError(f"{where}: {first['msg']}") from error


def error_body(message: str, status: int) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def overlong(prompt_len: int, max_model_len: int) -> BadRequestError:
    """vLLM's words: verifiers and LiteLLM recognize a full context by them."""
    return BadRequestError(
        f"This model's maximum context length is {max_model_len} tokens. However, your request has {prompt_len} input "
        "tokens, which leaves no room for a completion. Please reduce the length of the input."
    )
