"""A model server for Prime-RL's orchestrator with the fault that the task's instruction names.

The orchestrator has one address for all tasks, so the prompt names the fault: `This is about: silent.` Weight updates
and pauses are answered with `ok` and have no effect.
"""

from dataclasses import dataclass

from aiohttp import web
from faulty_engine import FAULTS, FaultyEngine
from orchestrator_endpoints import prometheus
from troubles import subject_of

_STATS = ("running", "waiting", "cache_used_tokens", "cache_tokens", "prompt_tokens", "sampled_tokens", "version")


@dataclass
class FaultyPolicy(FaultyEngine):
    """An engine that is faulty for prompts that name a fault; the script answers all others."""

    def routes(self) -> list[web.RouteDef]:
        admin_paths = ("/pause", "/resume", "/update_weights", "/load_lora_adapter", "/v1/load_lora_adapter")
        return [
            web.post("/inference/v1/generate", self._faulty),
            web.get("/v1/models", self._models),
            web.get("/health", self._health),
            web.get("/metrics", self._metrics),
            *(web.post(path, self._health) for path in admin_paths),
        ]

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=prometheus(dict.fromkeys(_STATS, 0.0), self.model))

    def _fault_of(self, request: web.Request, body: dict) -> str:
        fault = subject_of(self.tokenizer.decode(body["token_ids"]))
        return fault if fault in FAULTS else ""
