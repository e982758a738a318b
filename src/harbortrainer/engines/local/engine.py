"""The parts of a local run, put together: environment servers, sources, sampler, learner.

`Engine` owns what has to be closed. Invariant: `close` leaves no process, thread or socket of its own behind,
whatever state the start was in.
"""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

from harbortrainer.config.runfile import RunConfig
from harbortrainer.engines.local.environments import plan_servers, server_key
from harbortrainer.engines.local.envserver import STARTUP_S, EnvServer
from harbortrainer.engines.local.learner.advantage import MIN_SURVIVORS
from harbortrainer.engines.local.source import Source
from harbortrainer.errors import UserError
from harbortrainer.runs.display import Display
from harbortrainer.runs.folder import RunFolder

WATCH_S = 1.0


class Engine:
    """Everything that works for the loop."""

    def __init__(self, config: RunConfig, run: RunFolder) -> None:
        self.config, self.run = config, run
        orchestrator = config.orchestrator
        self.source_configs = [*orchestrator.train.source, *(orchestrator.eval.source if orchestrator.eval else [])]
        self.servers: dict[str, EnvServer] = plan_servers(self.source_configs, run)
        self.train_sources: dict[str, Source] = {}
        self.eval_sources: dict[str, Source] = {}
        self.sampler: Any = None
        self.learner: Any = None
        self.model = config.model.name
        self.warmup_s = 0.0

    def load_tasks(self) -> None:
        """Read every source's tasks; a mistake in them is told before anything is started."""
        refuse_lonely_trials(self.config)
        self.train_sources = {
            source.resolved_name: Source(
                source.resolved_name,
                source.env,
                sampling=source.sampling.to_sampling_args(),
                group_size=source.group_size,
                ratio=source.ratio,
                penalty=(source.algo or self.config.orchestrator.algo).length_penalty,
            )
            for source in self.config.orchestrator.train.source
        }
        held_out = self.config.orchestrator.eval
        self.eval_sources = {
            source.resolved_name: Source(
                source.resolved_name,
                source.env,
                sampling=source.sampling.to_sampling_args(),
                group_size=source.group_size,
                count=source.num_examples,
            )
            for source in (held_out.source if held_out else [])
        }

    def start_servers(self) -> None:
        """Start the environment servers; their imports run beside what comes next."""
        for server in self.servers.values():
            server.start()

    def make_policy(self, display: Display) -> None:
        """Run the warm-up when the config has one and its policy is not there yet."""
        if self.config.warmup is None:
            return
        if not self.run.model.is_dir():
            from harbortrainer.warmup import warm_up

            started = time.monotonic()
            warm_up(self.config.warmup, self.run.model, seed=self.config.seed, display=display)
            self.warmup_s = time.monotonic() - started
            display.line(f"policy ready in {self.warmup_s:.0f} s: {self.run.model}")
        self.model = str(self.run.model)

    def load_models(self) -> None:
        """Load the policy twice: once to sample from, once to train."""
        import torch
        from transformers.utils.logging import disable_progress_bar

        from harbortrainer.engines.local.learner.learner import Learner
        from harbortrainer.engines.local.sampler import Sampler

        config, gpu = self.config, torch.cuda.is_available()
        if not gpu:
            # Two engines share the cores: threads that wait for each other by spinning cost more than they give.
            torch.set_num_threads(1)
        if Path(self.model).is_dir():
            disable_progress_bar()
        self.sampler = Sampler(self.model, max_model_len=config.max_model_len, seed=config.seed, port=self._port())
        self.sampler.start()
        self.learner = Learner(
            self.model,
            config.lora,
            config.trainer.optim,
            config.trainer.loss,
            scheduler=config.trainer.scheduler,
            max_steps=config.max_steps,
            seq_len=config.seq_len,
            device="cuda" if gpu else "cpu",
            seed=config.seed,
            keep_versions=config.orchestrator.max_off_policy_steps + 1,
        )

    def _port(self) -> int:
        client = self.config.orchestrator.model.client
        if "base_url" not in client.model_fields_set:
            return 0
        return int(client.base_url.rstrip("/").removesuffix("/v1").rpartition(":")[2])

    def hand_over(self) -> float:
        """Give the learner's newest adapter to the sampler. Returns the seconds it took."""
        from peft import LoraConfig

        started = time.monotonic()
        learner = self.learner
        config = LoraConfig(**_known(learner.adapter_config))
        self.sampler.load_adapter(learner.adapter(learner.version), learner.version, config=config)
        return time.monotonic() - started

    async def connect(self) -> None:
        """Connect every source to its server."""
        from pydantic import TypeAdapter
        from renderers import RendererConfig
        from verifiers.v1.configs.client import TrainClientConfig

        policy = TrainClientConfig(
            base_url=f"{self.sampler.url}/v1",
            api_key_var="HARBORTRAINER_NO_KEY",
            renderer=TypeAdapter(RendererConfig).validate_python(self.config.orchestrator.renderer),
            renderer_model_name=self.model,
        )
        addresses = {key: await asyncio.to_thread(server.address) for key, server in self.servers.items()}
        sources = [*self.train_sources.values(), *self.eval_sources.values()]
        for config, source in zip(self.source_configs, sources, strict=True):
            address = addresses[server_key(config.env, config.serve)]
            await source.connect(address, policy, self.model, STARTUP_S)

    async def watch_servers(self) -> None:
        """Raise when an environment server is gone; its rollouts would never come back."""
        while True:
            for server in self.servers.values():
                if not server.alive:
                    raise server.ended()
            await asyncio.sleep(WATCH_S)

    async def disconnect(self) -> None:
        """Let go of the servers; they cancel what still runs."""
        for server in self.servers.values():
            server.close()
        for source in [*self.train_sources.values(), *self.eval_sources.values()]:
            await source.close()

    def close(self, *, within: float) -> bool:
        """Close everything that was opened, side by side.

        Returns:
            Whether everything is down; a sampler in the middle of a long forward pass may not be.
        """
        for server in self.servers.values():
            server.close()
        stops = [server.stop for server in self.servers.values()]
        if self.sampler is not None:
            stops.append(self.sampler.stop)
        threads = [threading.Thread(target=stop, daemon=True) for stop in stops]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + within
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


def refuse_lonely_trials(config: RunConfig) -> None:
    """A trial is compared with the others of its group; alone it has an advantage of 0 and teaches nothing."""
    for source in config.orchestrator.train.source:
        if source.group_size < MIN_SURVIVORS:
            raise UserError(
                f"source {source.resolved_name!r} plays each task once, so there is nothing to compare a trial with",
                where="orchestrator.group_size",
                do="set it to 2 or more; 8 is usual",
            )


def _known(settings: dict[str, Any]) -> dict[str, Any]:
    """The keys of an adapter's config that decide what it computes."""
    return {key: settings[key] for key in ("r", "lora_alpha", "lora_dropout", "target_modules", "bias", "task_type")}
