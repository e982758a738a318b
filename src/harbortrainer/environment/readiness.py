"""What a trial needs of its model before its agent's clock starts: the tokenizer, and how much the model can hold.

Contract: neither can fail a trial. A tokenizer that cannot be loaded fails the first call, with its own message; a
server that does not say how long a prompt may be leaves the agent with its default.
"""

import logging
from collections.abc import Mapping

import httpx
from verifiers.v1.clients import ModelContext

from harbortrainer.environment.plugin_config import HarborHarnessConfig
from harbortrainer.environment.verifiers_side import load_renderer, models_of
from harbortrainer.trials.trial_spec import DEFAULT_CONTEXT_LIMIT

logger = logging.getLogger(__name__)

_PATIENCE = httpx.Timeout(5.0)


class Readiness:
    """Of one worker's harness. Remembers what servers said."""

    def __init__(self, config: HarborHarnessConfig) -> None:
        self._config = config
        self._limits: dict[tuple[str, str], int | None] = {}

    async def prepare(self, ctx: ModelContext) -> int:
        """Load what the model's calls need. Returns the tokens of prompt and answer together that the agent is told."""
        try:
            await load_renderer(ctx)
        except Exception as error:  # noqa: BLE001 - the first call that needs it raises it again, where it is recorded
            logger.warning("the tokenizer of %s cannot be loaded: %s", ctx.model, error)
        return self._config.context_limit or await self._context_limit(ctx) or DEFAULT_CONTEXT_LIMIT

    async def _context_limit(self, ctx: ModelContext) -> int | None:
        url, headers = models_of(ctx) if self._config.vllm_base_url is None else (self._config.vllm_base_url, {})
        key = url, self._config.model_name or ctx.model
        if key not in self._limits:
            try:
                async with httpx.AsyncClient(timeout=_PATIENCE, trust_env=url.startswith("https:")) as http:
                    reply = (await http.get(f"{url.rstrip('/')}/models", headers=headers)).raise_for_status().json()
                self._limits[key] = limit_in(reply, key[1])
            except (httpx.HTTPError, ValueError) as error:
                logger.info("%s does not say how much the model can hold: %s", url, error)
                return None
        return self._limits[key]


def limit_in(reply: object, model: str) -> int | None:
    """`max_model_len` of the model in the answer of /v1/models; an adapter has that of the model below it.

    Example:
        >>> limit_in({"data": [{"id": "base", "max_model_len": 8192}, {"id": "a", "parent": "base"}]}, "a")
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
