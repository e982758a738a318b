"""Client for OpenAI-compatible servers that replaces LiteLLM, keeps sampled tokens and shares connections.

LiteLLM costs several milliseconds of CPU per call and hides the reason of a failure. `ChatClient` raises only
`RolloutEnd`, `ContextLengthExceededError`, `OutputLengthExceededError` or `ModelServerError`.

Invariants of the connections that a worker's trials share: they are closed with the last trial that uses them, and no
trial sees another's cookies.

A server of the same event loop is in `ENDPOINTS` and is called without HTTP. As over HTTP, it goes on when the client
stops waiting, and a retry is marked.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextvars import Context
from http import HTTPStatus

import aiohttp
from harbor.llms.base import BaseLLM, ContextLengthExceededError, LLMResponse, OutputLengthExceededError
from harbor.models.metric import UsageInfo
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import to_json

from harbortrainer.trials.faults import ModelServerError, RolloutEnd
from harbortrainer.trials.local_endpoints import ENDPOINTS
from harbortrainer.trials.model_calls import is_prompt_too_long
from harbortrainer.trials.outcome import Outcome, outcome_of_refusal
from harbortrainer.trials.record import TurnTokens
from harbortrainer.trials.tokens import ChatCompletion, CompletionUsage, turn_tokens
from harbortrainer.trials.turn_listener import TURN_LISTENER

logger = logging.getLogger(__name__)

# Shorter than servers keep idle connections (uvicorn: 5 s), so none is closed while a request is sent.
_IDLE_S = 4.0


class ModelConnections:
    """HTTP connections shared by the trials of one event loop.

    Attributes:
        session: HTTP session; headers are set per request.
    """

    def __init__(self, *, tls: bool) -> None:
        self._key, self._users = (asyncio.get_running_loop(), tls), 0
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=tls,  # use a proxy only for remote servers
        )

    @classmethod
    def acquire(cls, *, tls: bool) -> "ModelConnections":
        """Return this event loop's connections for https or for http servers. Call `release` afterwards."""
        key = asyncio.get_running_loop(), tls
        if key not in _open:
            _open[key] = cls(tls=tls)
        _open[key]._users += 1
        return _open[key]

    async def release(self) -> None:
        """Release the connections; the last release closes them."""
        self._users -= 1
        if not self._users:
            del _open[self._key]
            await self.session.close()


_open: dict[tuple[asyncio.AbstractEventLoop, bool], ModelConnections] = {}


_CONNECT_S = 10.0
_RETRYABLE_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


class ClientSettings(BaseModel):
    """Address of the server, limits and retries."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    """The model's name, as the server knows it."""
    base_url: str
    """Ends in /v1."""
    context_limit: int = 32768
    """Tokens of prompt and answer together."""
    output_limit: int | None = None
    """Tokens of one answer."""
    retries: int = 2
    """Retries of a failed request."""
    backoff_s: float = 0.5
    """Pause before the first retry, in seconds; doubles with each retry."""
    timeout_s: float = 600.0
    """Timeout of one answer, in seconds."""
    max_cut_answers: int = 3
    """Allowed consecutive answers cut at their length; one more ends the run."""
    collect_tokens: bool = False
    """Request token ids and log-probabilities and keep them in `turns`."""


class LocalCallError(Exception):
    """A server of this process failed. Further requests to it go over HTTP, which may be what it needs."""


class ChatClient(BaseLLM):
    """Harbor's `BaseLLM` with one POST to /chat/completions per call.

    Args:
        settings: Address of the server, limits and retries.
        api_key: Bearer token; kept in memory only.
        sampling: Further keys of the request's body (`temperature`, `max_tokens`, ...).
    """

    def __init__(self, settings: ClientSettings, *, api_key: str, sampling: Mapping[str, object]) -> None:
        super().__init__()
        self.settings = settings
        self.turns: list[TurnTokens] = []
        """Sampled tokens of each call, including cut answers."""
        self.cut_reasoning: str | None = None
        """Reasoning of the last answer if it was cut."""
        self.waited_s = 0.0
        """Seconds spent waiting for answers, including failed calls; the agent resets it."""
        self.usage = UsageInfo(prompt_tokens=0, completion_tokens=0, cache_tokens=0, cost_usd=0.0)
        """Tokens of all answers, including cut ones."""
        self._sampling = sampling
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        self._consecutive_cuts = 0
        self._url = f"{settings.base_url.rstrip('/')}/chat/completions"
        self._connections: ModelConnections | None = None

    def get_model_context_limit(self) -> int:
        """Tokens of prompt and answer together."""
        return self.settings.context_limit

    def get_model_output_limit(self) -> int | None:
        """Tokens of one answer; None if the server decides."""
        return self.settings.output_limit

    async def call(
        self,
        prompt: str,
        message_history: Sequence[Mapping[str, object]] | None = None,
        extra_body: Mapping[str, object] | None = None,
        extra_headers: Mapping[str, str] | None = None,
        logging_path: object = None,
        previous_response_id: object = None,
        **sampling: object,
    ) -> LLMResponse:
        """Request the next answer.

        Raises:
            RolloutEnd: The endpoint stopped the rollout, or too many answers in a row were cut.
            ContextLengthExceededError: The prompt does not fit.
            OutputLengthExceededError: The answer was cut at its length.
            ModelServerError: No answer after the retries, or an unreadable one.
        """
        messages = [*(message_history or []), {"role": "user", "content": prompt}]
        body = {"model": self.settings.model, "messages": messages, **self._sampling, **sampling}
        if self.settings.collect_tokens:
            body |= {"logprobs": True, "return_token_ids": True}
        listener = TURN_LISTENER.get()
        if listener is not None:
            listener.on_prompt(prompt)
        started = time.perf_counter()
        try:
            completion = await self._post({**body, **(extra_body or {})}, extra_headers or {})
        finally:
            self.waited_s += time.perf_counter() - started
        return self._read(completion, prompt)

    async def aclose(self) -> None:
        """Release the connections; the next call acquires them again."""
        if self._connections is not None:
            connections, self._connections = self._connections, None
            await connections.release()

    async def _post(self, body: Mapping[str, object], headers: Mapping[str, str]) -> ChatCompletion:
        sent = to_json(body)
        for attempt in range(self.settings.retries + 1):
            if attempt:
                await asyncio.sleep(self.settings.backoff_s * 2 ** (attempt - 1))
            # The interception endpoint answers a marked retry with the tokens it has already sampled.
            mark = {"x-stainless-retry-count": str(attempt)} if attempt else {}
            try:
                status, content = await self._request(sent, {**self._headers, **headers, **mark})
            except (aiohttp.ClientError, TimeoutError) as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
                return _completion(self._url, content)
            failure = f"HTTP {status}: {content.decode(errors='replace')[:500]}"
            if status not in _RETRYABLE_STATUS:
                _raise_refusal(failure)
        raise ModelServerError(f"{self.settings.base_url}: no answer after {attempt + 1} tries: {failure}")

    async def _request(self, sent: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Send one request. Returns status and body of the response."""
        key = asyncio.get_running_loop(), self._url
        if (endpoint := ENDPOINTS.get(key)) is not None:
            try:
                return await self._ask(endpoint(headers, sent))
            except LocalCallError:
                ENDPOINTS.pop(key, None)
                return HTTPStatus.INTERNAL_SERVER_ERROR, b"the server failed"
        if self._connections is None:
            self._connections = ModelConnections.acquire(tls=self._url.startswith("https:"))
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=self.settings.timeout_s)
        request = self._connections.session.post(
            self._url, data=sent, headers=headers, timeout=timeout, allow_redirects=False
        )
        async with request as answer:
            return answer.status, await answer.read()

    async def _ask(self, request: Coroutine[object, None, tuple[int, bytes]]) -> tuple[int, bytes]:
        """Wait for the answer of a server in this process, which goes on without us if we are cancelled.

        Raises:
            LocalCallError: The server raised an error.
            TimeoutError: There was no answer in time.
            ServerDisconnectedError: The server cancelled the request.
        """
        task = asyncio.create_task(request, context=Context())
        task.add_done_callback(_log_failure)
        await asyncio.wait({task}, timeout=self.settings.timeout_s)
        if not task.done():
            raise TimeoutError
        if task.cancelled():
            raise aiohttp.ServerDisconnectedError
        if task.exception() is not None:
            raise LocalCallError
        return task.result()

    def _read(self, completion: ChatCompletion, prompt: str) -> LLMResponse:
        choice = completion.choices[0]
        if (usage := _usage(completion.usage)) is not None:
            self.usage.prompt_tokens += usage.prompt_tokens
            self.usage.completion_tokens += usage.completion_tokens
            self.usage.cache_tokens += usage.cache_tokens
        cut = choice.finish_reason == "length"
        if self.settings.collect_tokens:
            self.turns.append(turn_tokens(completion, cut=cut).model_copy(update={"new_message": prompt}))
        content = choice.message.content or ""
        reasoning = choice.message.reasoning_content or choice.message.reasoning
        if (listener := TURN_LISTENER.get()) is not None:
            listener.on_answer(reasoning, content, cut=cut)
        if cut:
            self._raise_cut(content, reasoning)
        self._consecutive_cuts, self.cut_reasoning = 0, None
        return LLMResponse(
            content=content,
            reasoning_content=reasoning,
            model_name=completion.model,
            usage=usage,
        )

    def _raise_cut(self, content: str, reasoning: str | None) -> None:
        self._consecutive_cuts, self.cut_reasoning = self._consecutive_cuts + 1, reasoning
        if self._consecutive_cuts > self.settings.max_cut_answers:
            raise RolloutEnd(Outcome.output_limit, f"{self._consecutive_cuts} consecutive answers were cut")
        raise OutputLengthExceededError("the answer was cut at its length", truncated_response=content)


def _log_failure(task: asyncio.Task[tuple[int, bytes]]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a model call failed in the server of this process", exc_info=error)


def _raise_refusal(refusal: str) -> None:
    """Raise the error for a refusal that a retry would not change."""
    ending = outcome_of_refusal(refusal)
    if ending is not None:
        raise RolloutEnd(ending, refusal)
    if is_prompt_too_long(refusal):
        raise ContextLengthExceededError(refusal)
    raise ModelServerError(refusal)


def _completion(url: str, content: bytes) -> ChatCompletion:
    try:
        return ChatCompletion.model_validate_json(content)
    except ValidationError as error:
        fault = "the reply is not JSON" if error.errors()[0]["type"] == "json_invalid" else "the reply is no completion"
        raise ModelServerError(f"{url}: {fault}: {content.decode(errors='replace')[:300]}") from error


def _usage(usage: CompletionUsage | None) -> UsageInfo | None:
    if usage is None:
        return None
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    return UsageInfo(
        prompt_tokens=usage.prompt_tokens or 0,
        completion_tokens=usage.completion_tokens or 0,
        cache_tokens=cached or 0,
        cost_usd=0.0,
    )
