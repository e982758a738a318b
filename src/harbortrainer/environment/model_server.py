"""State that a worker keeps: its model servers' context limits, kind of log-probabilities and latencies; its starts.

verifiers makes a harness for every episode; `WorkerState` outlives them.

- `Readiness` loads the tokenizer and requests the context limit before the agent's time starts. It never fails a
  trial: a tokenizer that cannot be loaded fails the first model call with its own message, and an agent whose server
  reports no limit gets the default.
- `ServerLogprobs` checks that a server named in the run file returns log-probabilities of the distribution it samples
  from, since the importance ratio divides by them. By default vLLM returns them from before temperature, top_k, top_p
  and min_p (`--logprobs-mode raw_logprobs`); at temperature 0.6 the difference is nats. The probe samples with
  top_k = 1. Only one token is possible, so its log-probability is 0, unless it belongs to another distribution.
- The probe runs once per server, and only if the run's sampling makes the two distributions differ. If a server does
  not answer, the next trial probes it again.
"""

import asyncio
import logging
from collections.abc import Mapping

import httpx
from pydantic import JsonValue
from verifiers.v1.clients import ModelContext

from harbortrainer.config.environment_table import environment_entry
from harbortrainer.config.table import table_of
from harbortrainer.environment.plugin_config import HarborHarnessConfig
from harbortrainer.environment.rollout_details import direct_kwargs
from harbortrainer.environment.verifiers_compat import is_training, load_renderer, models_endpoint
from harbortrainer.trials.model_calls import RecentLatencies
from harbortrainer.trials.sandbox_starts import StartGate
from harbortrainer.trials.trial_spec import DEFAULT_CONTEXT_LIMIT

logger = logging.getLogger(__name__)

_MODELS_TIMEOUT = httpx.Timeout(5.0)
_TOKENIZER_ERRORS = (OSError, ValueError, ImportError, LookupError, TypeError, AttributeError, RuntimeError)
"""Raised by transformers and renderers for tokenizer files that are missing, damaged or of another release."""


class Readiness:
    """Loads tokenizers and context limits for a worker's trials. Caches the servers' answers."""

    def __init__(self, config: HarborHarnessConfig) -> None:
        self._config = config
        self._limits: dict[tuple[str, str], int | None] = {}

    async def prepare(self, ctx: ModelContext) -> int:
        """Load the model's renderer. Returns the context limit: tokens of prompt and answer together.

        A tokenizer that cannot be loaded is a warning: the first model call raises the same error, which is recorded.
        """
        failure: Exception | None = None
        try:
            await load_renderer(ctx)
        except _TOKENIZER_ERRORS as error:
            failure = error
        except Exception as error:
            # tokenizers, a Rust extension, raises `Exception` itself. A subclass that is not listed is a bug.
            if type(error) is not Exception:
                raise
            failure = error
        if failure is not None:
            logger.warning("the tokenizer of %s cannot be loaded: %s", ctx.model, failure)
        return self._config.context_limit or await self._context_limit(ctx) or DEFAULT_CONTEXT_LIMIT

    async def _context_limit(self, ctx: ModelContext) -> int | None:
        url, headers = models_endpoint(ctx) if self._config.vllm_base_url is None else (self._config.vllm_base_url, {})
        key = url, self._config.model_name or ctx.model
        if key not in self._limits:
            try:
                async with httpx.AsyncClient(timeout=_MODELS_TIMEOUT, trust_env=url.startswith("https:")) as http:
                    reply = (await http.get(f"{url.rstrip('/')}/models", headers=headers)).raise_for_status().json()
                self._limits[key] = read_context_limit(reply, key[1])
            except (httpx.HTTPError, ValueError) as error:
                logger.info("%s does not report the model's context length: %s", url, error)
                return None
        return self._limits[key]


def read_context_limit(reply: object, model: str) -> int | None:
    """Return the model's `max_model_len` from a reply of /v1/models; an adapter has its base model's.

    Example:
        >>> read_context_limit({"data": [{"id": "base", "max_model_len": 8192}, {"id": "a", "parent": "base"}]}, "a")
        8192
    """
    cards = reply.get("data") if isinstance(reply, dict) else None
    known = {card.get("id"): card for card in cards or [] if isinstance(card, Mapping)}
    card = known.get(model) or {}
    for candidate in (card, known.get(card.get("parent")) or {}):
        limit = candidate.get("max_model_len")
        if isinstance(limit, int) and limit > 0:
            return limit
    return None


_PROBE_TIMEOUT = httpx.Timeout(30.0)
_TOLERANCE_NATS = 1e-3
"""Rounding allowed in the log-probability 0 of the only possible token."""
_GREEDY_SAMPLING = {"temperature": 1.0, "top_k": 1, "max_tokens": 16, "logprobs": True}
_PROMPT = "Say some words, whichever come to your mind."
"""Open-ended, so that no model is certain of each of its next sixteen tokens."""


class ServerLogprobs:
    """Checks of the servers' log-probabilities for a worker's trials. Caches the results."""

    def __init__(self, config: HarborHarnessConfig) -> None:
        self._config = config
        self._is_sampled: dict[tuple[str, str], bool] = {}
        self._lock = asyncio.Lock()

    async def fault(self, ctx: ModelContext) -> str:
        """Return what is wrong with the server's log-probabilities and the remedy, "" if no fault is known."""
        config = self._config
        if config.capture != "rollout_details" or not is_training(ctx):
            return ""
        reshaped = reshaping_parameters(direct_kwargs(ctx.sampling, config.agent_kwargs))
        if not reshaped:
            return ""
        url, model = config.vllm_base_url or "", config.model_name or ctx.model
        async with self._lock:
            if (url, model) not in self._is_sampled:
                lowest = await _min_greedy_logprob(url, model)
                if lowest is None:
                    return ""
                self._is_sampled[url, model] = lowest > -_TOLERANCE_NATS
        if self._is_sampled[url, model]:
            return ""
        return (
            f"{url} returns log-probabilities of another distribution than it samples from with {reshaped}: start vLLM "
            "with --logprobs-mode processed_logprobs, or sample with temperature 1 and without top_k, top_p and min_p"
        )


def reshaping_parameters(kwargs: Mapping[str, JsonValue]) -> str:
    """Name the sampling parameters that reshape the model's distribution, with their values; "" if there are none.

    Example:
        >>> reshaping_parameters({"temperature": 0.6, "llm_call_kwargs": {"extra_body": {"top_k": 20, "min_p": 0}}})
        'temperature 0.6, top_k 20'
    """
    call = table_of(kwargs, "llm_call_kwargs")
    sent = {"temperature": kwargs.get("temperature"), "top_p": call.get("top_p"), **table_of(call, "extra_body")}
    neutral = {"temperature": (None, 1), "top_p": (None, 1), "top_k": (None, -1, 0), "min_p": (None, 0)}
    return ", ".join(f"{key} {sent.get(key)}" for key, values in neutral.items() if sent.get(key) not in values)


async def _min_greedy_logprob(url: str, model: str) -> float | None:
    """Return the lowest log-probability of a greedy answer, in nats; None if the server does not report it."""
    body = {"model": model, "messages": [{"role": "user", "content": _PROMPT}], **_GREEDY_SAMPLING}
    try:
        async with httpx.AsyncClient(timeout=_PROBE_TIMEOUT, trust_env=url.startswith("https:")) as http:
            reply = (await http.post(f"{url.rstrip('/')}/chat/completions", json=body)).raise_for_status().json()
        return min(float(token["logprob"]) for token in reply["choices"][0]["logprobs"]["content"])
    except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
        logger.info("cannot check the kind of log-probabilities that %s returns: %s", url, error)
        return None


class WorkerState:
    """State shared by all trials that a worker runs with one harness config.

    Attributes:
        starts: The starts of sandboxes at the provider; None for sandboxes of this machine.
    """

    def __init__(self, config: HarborHarnessConfig) -> None:
        self.readiness = Readiness(config)
        self.logprobs = ServerLogprobs(config)
        known = environment_entry(config.environment_type).has_known_limits  # a machine of the user's, not a provider
        self.starts = None if known else StartGate(config.trials_folder, config.environment_type, config.starts_per_s)
        self._config = config
        self._latencies: dict[str, RecentLatencies] = {}

    def latencies(self, ctx: ModelContext) -> RecentLatencies:
        """Return the recent latencies of the trial's server; servers differ in speed, so each has its own."""
        config, url = self._config, self._config.vllm_base_url or ctx.client.base_url
        return self._latencies.setdefault(url, RecentLatencies(config.stall_factor, config.stall_min_s))
