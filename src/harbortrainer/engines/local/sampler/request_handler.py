"""Turns parsed requests into sampling jobs, and completions into replies.

Contract: token ids in, token ids out. Only the chat endpoint handles text: it renders messages with the tokenizer's
chat template and decodes the sampled tokens. Sampled tokens are never re-tokenized.
"""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from harbortrainer.engines.local.sampler.completion_log import Completion
from harbortrainer.engines.local.sampler.requests import (
    BadRequestError,
    ChatRequest,
    GenerateRequest,
    Sampling,
    check_request,
    context_length_error,
)
from harbortrainer.engines.local.sampler.sampling_engine import SamplingEngine
from harbortrainer.engines.local.sampler.sampling_params import SamplingJob, SamplingParams, request_seed


@dataclass
class RequestHandler:
    """Answers requests for one model.

    Attributes:
        model_names: Names that requests may use, the model's own name first.
        seed: The run's seed; see `_seed`.
        eos_ids: Tokens that end every completion, in addition to the request's stop tokens.
    """

    engine: SamplingEngine
    tokenizer: PreTrainedTokenizerBase
    model_names: list[str]
    seed: int
    eos_ids: frozenset[int]
    _running: Counter[str] = field(default_factory=Counter)
    """Running requests by session."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus completion, in tokens."""
        return self.engine.max_model_len

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine; None while it runs."""
        return self.engine.failure

    async def generate(self, request: GenerateRequest, session: str) -> dict[str, object]:
        """Answer POST /inference/v1/generate."""
        check_request(request, self.model_names)
        request_id = uuid.uuid4().hex
        done = await self._sample(request.token_ids, request.sampling_params, session, request_id)
        choices = [
            {
                "index": i,
                "token_ids": c.token_ids,
                "finish_reason": reason,
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{t}", "logprob": p} for t, p in zip(c.token_ids, c.logprobs, strict=True)
                    ]
                },
                "weight_versions": c.weight_versions,
            }
            for i, (c, reason) in enumerate(done)
        ]
        return {"request_id": request_id, "choices": choices, "usage": _usage(len(request.token_ids), done)}

    async def chat(self, request: ChatRequest, session: str) -> dict[str, object]:
        """Answer POST /v1/chat/completions."""
        check_request(request, self.model_names)
        prompt = self._render(request)
        request.max_tokens = request.max_completion_tokens or request.max_tokens
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        done = await self._sample(prompt, request, session, request_id)
        reply: dict[str, object] = {
            "id": request_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model or self.model_names[0],
            "choices": [self._chat_choice(i, c, reason, request) for i, (c, reason) in enumerate(done)],
            "usage": _usage(len(prompt), done),
        }
        if request.return_token_ids:
            reply["prompt_token_ids"] = prompt
        return reply

    def _chat_choice(self, i: int, done: Completion, reason: str, request: ChatRequest) -> dict[str, object]:
        ids = list(done.token_ids)
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        choice: dict[str, object] = {
            "index": i,
            "message": {"role": "assistant", "content": text},
            "finish_reason": reason,
            "logprobs": None,
        }
        if request.logprobs:
            entries = [
                {"token": piece or "", "logprob": p, "bytes": None, "top_logprobs": []}
                for piece, p in zip(self.tokenizer.convert_ids_to_tokens(ids), done.logprobs, strict=True)
            ]
            choice["logprobs"] = {"content": entries}
        if request.return_token_ids:
            choice["token_ids"] = ids
        return choice

    def _render(self, request: ChatRequest) -> list[int]:
        try:
            ids = self.tokenizer.apply_chat_template(
                cast("list[dict[str, str]]", request.messages),
                tools=cast("list[dict | Callable] | None", request.tools),
                add_generation_prompt=request.add_generation_prompt,
                return_dict=False,
                **(request.chat_template_kwargs or {}),
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise BadRequestError(f"messages: the chat template cannot render them ({error})") from error
        return cast("list[int]", ids)

    async def _sample(
        self, prompt: Sequence[int], sampling: Sampling, session: str, request_id: str
    ) -> list[tuple[Completion, str]]:
        jobs = self._jobs(prompt, sampling, session, request_id)
        tasks = [asyncio.ensure_future(self.engine.sample(job)) for job in jobs]
        self._running[session] += 1
        try:
            done = await asyncio.gather(*tasks)
        finally:
            self._running -= Counter((session,))  # drops sessions at 0
            for task in tasks:
                task.cancel()
        return [(c, "stop" if c.token_ids[-1] in jobs[0].stop_ids else "length") for c in done]

    def _jobs(self, prompt: Sequence[int], sampling: Sampling, session: str, request_id: str) -> list[SamplingJob]:
        limit = self.engine.max_model_len
        if len(prompt) >= limit:
            raise context_length_error(len(prompt), limit)
        vocabulary = self.engine.model.config.get_text_config().vocab_size
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            raise BadRequestError(f"token_ids: an id is not in the vocabulary of {vocabulary}")
        max_tokens = min(sampling.max_tokens or limit, limit - len(prompt))
        stop_ids = frozenset(sampling.stop_token_ids or ()) | (frozenset() if sampling.ignore_eos else self.eos_ids)
        seed = self._seed(prompt, sampling, session, request_id)
        count = sampling.n or 1
        ids = [request_id] if count == 1 else [f"{request_id}-{i}" for i in range(count)]
        return [
            SamplingJob(job_id, session, prompt, max_tokens, stop_ids, _sampling_params(sampling, seed + i))
            for i, job_id in enumerate(ids)
        ]

    def _seed(self, prompt: Sequence[int], sampling: Sampling, session: str, request_id: str) -> int:
        """Derive the seed from the request's own, or from the run's seed and the request's index in its session.

        The index gives an agent that repeats a prompt, in sequence or in parallel, a different answer each time. A
        request with neither seed nor session uses its id, so it is not reproducible.
        """
        if sampling.seed is not None:
            return request_seed("request", sampling.seed, prompt=prompt)
        if session:
            index = len(self.engine.completion_log.peek(session)) + self._running[session]
            return request_seed("session", self.seed, session, index, prompt=prompt)
        return request_seed("single", self.seed, request_id, prompt=prompt)


def _sampling_params(sampling: Sampling, seed: int) -> SamplingParams:
    temperature = 1.0 if sampling.temperature is None else sampling.temperature
    # Below this a float32 softmax overflows; vLLM treats it as greedy too.
    temperature = 0.0 if temperature < 1e-5 else temperature
    top_p = 1.0 if sampling.top_p is None else sampling.top_p
    return SamplingParams(seed, temperature, sampling.top_k or -1, top_p, sampling.min_p or 0.0)


def _usage(prompt_len: int, done: list[tuple[Completion, str]]) -> dict[str, int]:
    sampled = sum(len(c.token_ids) for c, _ in done)
    return {"prompt_tokens": prompt_len, "completion_tokens": sampled, "total_tokens": prompt_len + sampled}
