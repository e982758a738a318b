"""The proxy between the environment servers and vLLM: it adds the current policy version to each request.

Clients request the model. The proxy requests one version's adapter from vLLM; no client sees the adapters' names. A
request that runs during a weight update keeps its version, and the completion log records that. The contract of
`local.sampler.sampling_engine` holds here too. Everything runs on one event loop.

Replies (`read_reply`): a reply of /inference/v1/generate is checked. Token ids and log-probabilities must match; other
ids, a missing or non-finite number, or a truncated reply raise a one-line `ValueError`.

Versions (`VersionRegistry`): state without I/O. A version is requested only while vLLM holds it. Its files stay while a
request may use it: the newest two versions, and every version with a running request.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self

import httpx
from pydantic import BaseModel, Field, FiniteFloat, ValidationError, model_validator

from harbortrainer.engines.local.sampler.completion_log import Completion, CompletionLog
from harbortrainer.engines.local.sampler.requests import (
    BadRequestError,
    ChatRequest,
    GenerateRequest,
    Sampling,
    check_request,
    context_length_error,
)
from harbortrainer.engines.local.sampler.rescoring import RecentSamples, Rescored, SampledSequence
from harbortrainer.engines.local.sampler.sampling_engine import EngineFailedError
from harbortrainer.engines.local.sampler.sampling_params import SamplingParams, request_seed
from harbortrainer.engines.vllm.vllm_process import VllmProcess

MISSING_LOGPROB = -9999.0
"""vLLM's placeholder for a missing log-probability."""


class TokenLogprob(BaseModel):
    """One sampled token, identified by `token_id` or by `token` as `token_id:ID`."""

    logprob: FiniteFloat
    token: str | None = None
    token_id: int | None = None

    @property
    def id(self) -> int | None:
        """The token id; None if it is missing."""
        text = (self.token or "").removeprefix("token_id:")
        return int(text) if self.token_id is None and text.isdecimal() else self.token_id


class ChoiceLogprobs(BaseModel):
    """Log-probabilities of one completion, token by token."""

    content: list[TokenLogprob]


class VllmChoice(BaseModel):
    """One completion."""

    token_ids: list[int] = Field(min_length=1)
    finish_reason: Literal["stop", "length"]
    logprobs: ChoiceLogprobs

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if [entry.id for entry in self.logprobs.content] != self.token_ids:
            raise ValueError("the log-probabilities belong to other tokens")
        if MISSING_LOGPROB in self.values:
            raise ValueError("a token has no log-probability")
        return self

    @property
    def values(self) -> list[float]:
        """The log-probabilities, [T] nats."""
        return [entry.logprob for entry in self.logprobs.content]


class PromptLogprob(BaseModel):
    """One candidate token at one position of a prompt."""

    logprob: FiniteFloat


class VllmReply(BaseModel):
    """A whole reply."""

    choices: list[VllmChoice] = Field(min_length=1)
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None

    def logprobs_of_prompt(self, token_ids: Sequence[int], positions: Sequence[int]) -> list[float]:
        """Return the log-probabilities (nats) of the prompt's tokens at these positions, which exclude the first.

        Raises:
            ValueError: One is missing.
        """
        candidates = self.prompt_logprobs or []
        found: list[Mapping[int, PromptLogprob]] = [candidates[t] or {} for t in positions if t < len(candidates)]
        if len(found) < len(positions):
            raise ValueError("no log-probabilities of the prompt")
        entries = [at.get(token_ids[t]) for at, t in zip(found, positions, strict=True)]
        nats = [entry.logprob for entry in entries if entry is not None and entry.logprob != MISSING_LOGPROB]
        if len(nats) < len(positions):
            raise ValueError("a token of the prompt has no log-probability")
        return nats


def read_reply(body: bytes) -> VllmReply:
    """Parse and check a reply; raises a one-line `ValueError`."""
    try:
        return VllmReply.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the reply"
        raise ValueError(f"{where}: {first['msg']}") from None


class VersionRegistry:
    """The policy versions that vLLM holds, the current one, and the running requests of each.

    Args:
        base: The name of the model without an adapter, which is version 0.
    """

    def __init__(self, base: str) -> None:
        self.current = 0
        self._base = base
        self._held = {0}
        self._running: Counter[int] = Counter()

    @property
    def running(self) -> int:
        """Number of running requests."""
        return self._running.total()

    @property
    def held(self) -> set[int]:
        """Versions that may be requested."""
        return set(self._held)

    def name(self, version: int) -> str:
        """Return the model name that requests of this version use."""
        return f"policy-{version}" if version else self._base

    @contextmanager
    def request(self, version: int) -> Generator[str]:
        """Count a running request of this version for the block; yields the model name to use.

        Raises:
            KeyError: The version is not held any more.
        """
        if version not in self._held:
            raise KeyError(version)
        self._running[version] += 1
        try:
            yield self.name(version)
        finally:
            self._running[version] -= 1

    def update_weights(self, version: int) -> set[int]:
        """Make a version, loaded by vLLM, the current one; returns the versions that are no longer needed."""
        previous, self.current = self.current, version
        self._held.add(version)
        evicted = {held for held in self._held - {previous, version} if not self._running[held]}
        self._held -= evicted
        return evicted


GENERATE = "/inference/v1/generate"
LOAD_TIMEOUT_S = 120.0
"""Time for vLLM to load an adapter; Prime-RL's value."""

_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
_SCORE_ONLY = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 1, "logprobs": 1}


class VllmProxy:
    """Answers requests for one model by forwarding them to vLLM.

    Args:
        client: An HTTP client connected to vLLM.
        process: vLLM's process.
        model: The model's name in requests.
        max_model_len: Longest prompt plus completion, in tokens.
        completion_log: Receives finished completions.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        process: VllmProcess,
        model: str,
        max_model_len: int,
        completion_log: CompletionLog,
    ) -> None:
        self.model_names, self.max_model_len = [model], max_model_len
        self.versions = VersionRegistry(model)
        self.counters: Counter[str] = Counter()
        self._client, self._process, self._completion_log = client, process, completion_log
        self._recent: dict[int, RecentSamples] = {}

    @property
    def failure(self) -> BaseException | None:
        """The error of a vLLM that has ended; None while it runs."""
        return None if self._process.alive else self._process.exit_error()

    async def generate(self, request: GenerateRequest, session: str) -> dict[str, object]:
        """Answer POST /inference/v1/generate."""
        check_request(request, self.model_names)
        if len(request.token_ids) >= self.max_model_len:
            raise context_length_error(len(request.token_ids), self.max_model_len)
        request_id, version = uuid.uuid4().hex, self.versions.current
        reply = await self._sample(request, version)
        crossed_update = version != self.versions.current
        ids = [f"{request_id}-{i}" if i else request_id for i in range(len(reply.choices))]
        choices = []
        for index, (choice_id, choice) in enumerate(zip(ids, reply.choices, strict=True)):
            completion = Completion(
                session, choice_id, len(request.token_ids),
                tuple(choice.token_ids), tuple(choice.values), version, crossed_update,
            )  # fmt: skip
            self._record(request, completion)
            choices.append(_choice_json(index, choice) | {"weight_versions": completion.weight_versions})
        return {"request_id": request_id, "choices": choices}

    async def chat(self, request: ChatRequest, session: str) -> dict[str, object]:
        """Refuse POST /v1/chat/completions, which no run uses."""
        raise BadRequestError(f"with vLLM only {GENERATE} is supported", 404)

    async def _sample(self, request: GenerateRequest, version: int) -> VllmReply:
        try:
            params = _vllm_params(request.sampling_params)
            if request.sampling_params.seed is not None:
                # As in the embedded sampler: with the same seed for each turn, vLLM draws the same random numbers.
                params |= {"seed": request_seed("request", request.sampling_params.seed, prompt=request.token_ids) >> 1}
            return await self._request(version, request.token_ids, params)
        except asyncio.CancelledError:
            self.counters["cancelled"] += 1
            raise
        except EngineFailedError:
            self.counters["failed"] += 1
            raise

    def _record(self, request: GenerateRequest, completion: Completion) -> None:
        self.counters.update(
            requests=1, prompt_tokens=completion.prompt_len, sampled_tokens=len(completion.token_ids)
        )  # fmt: skip
        self._completion_log.add(completion)
        sent = _vllm_params(request.sampling_params)
        params = SamplingParams(
            0, float(sent["temperature"]), int(sent["top_k"]), float(sent["top_p"]), sent["min_p"]
        )  # fmt: skip
        # vLLM scores prompts at temperature 1, so samples at other temperatures cannot be compared.
        if params.temperature == 1.0:
            self._recent.setdefault(completion.version, RecentSamples()).add(request.token_ids, params, completion)

    async def _request(self, version: int, token_ids: Sequence[int], params: Mapping[str, object]) -> VllmReply:
        with self.versions.request(version) as name:
            reply = await self._post(GENERATE, {"model": name, "token_ids": token_ids, "sampling_params": params})
        try:
            return read_reply(reply.content)
        except ValueError as error:
            raise EngineFailedError(f"vLLM's reply is invalid: {error}") from error

    async def _post(self, path: str, body: Mapping[str, object], *, timeout_s: float | None = None) -> httpx.Response:
        try:
            reply = await self._client.post(path, json=body, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise EngineFailedError(f"vLLM does not answer: {self.failure or error or type(error).__name__}") from error
        if reply.status_code in (400, 404, 422):
            raise BadRequestError(_message(reply), reply.status_code)
        if reply.is_error:
            raise EngineFailedError(f"vLLM answered {reply.status_code}: {_message(reply)}")
        return reply

    async def update_weights(self, version: int, folder: Path) -> set[int]:
        """Load the adapter in `folder` and use it for new requests, without waiting for running ones.

        Returns:
            The versions whose files are no longer needed.

        Raises:
            EngineFailedError: vLLM did not load it; the old version stays.
        """
        body = {"lora_name": self.versions.name(version), "lora_path": str(folder)}
        try:
            await self._post("/v1/load_lora_adapter", body, timeout_s=LOAD_TIMEOUT_S)
        except BadRequestError as error:
            raise EngineFailedError(f"vLLM refused the adapter: {error}") from error
        evicted = self.versions.update_weights(version)
        for old in evicted:
            self._recent.pop(old, None)
        return evicted

    async def rescore(self) -> list[Rescored]:
        """Rescore some samples since the last call, as prompts, by the version that sampled them."""
        chosen = [
            sequence
            for version in sorted(self._recent.keys() & self.versions.held)
            for sequence in self._recent[version].pop(version)
        ]
        return await asyncio.gather(*(self._rescore(sequence) for sequence in chosen))

    async def _rescore(self, sequence: SampledSequence) -> Rescored:
        # vLLM requires space for one sampled token after the prompt.
        ids = sequence.token_ids[: self.max_model_len - 1]
        count = sum(position < len(ids) for position in sequence.positions)
        positions, logprobs = sequence.positions[:count], sequence.logprobs[:count]
        reply = await self._request(sequence.version, ids, _SCORE_ONLY)
        try:
            recomputed = reply.logprobs_of_prompt(ids, positions)
        except ValueError as error:
            raise EngineFailedError(f"vLLM's reply is invalid: {error}") from error
        return Rescored(
            sequence.version, sequence.temperature, ids, positions, logprobs, recomputed, sequence.crossed_update
        )


def _vllm_params(sampling: Sampling) -> dict[str, float]:
    """Return vLLM's sampling parameters: every supported one explicitly, and no unknown ones."""
    given = sampling.model_dump(include=set(Sampling.model_fields), exclude_none=True)
    return _NEUTRAL | given | {"logprobs": 1}


def _choice_json(index: int, choice: VllmChoice) -> dict[str, object]:
    """Format a completion for the renderers' client."""
    pairs = zip(choice.token_ids, choice.values, strict=True)
    content = [{"token": f"token_id:{token}", "logprob": nats} for token, nats in pairs]
    fields = {"index": index, "token_ids": choice.token_ids, "finish_reason": choice.finish_reason}
    return fields | {"logprobs": {"content": content}}


def _message(reply: httpx.Response) -> str:
    """Return the message of an error reply, in one line."""
    try:
        body = reply.json()
    except ValueError:
        body = reply.text
    inner = body.get("error", body) if isinstance(body, dict) else body
    message = inner.get("message", inner) if isinstance(inner, dict) else inner
    return " ".join(str(message).split())[:500]
