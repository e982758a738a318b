"""Our side of `benchmarks/engine.py`: the sampler, requested over HTTP by another process, and the learner."""

import asyncio
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack

import httpx

from benchmarks.engine_setting import ALPHA, RANK, TARGETS, Setting


def post_all(url: str, key: str, bodies: list[dict]) -> tuple[float, list[dict]]:
    """Post all bodies at once; return the seconds until the last reply, and each reply's first choice."""

    async def run() -> tuple[float, list[dict]]:
        limits, headers = httpx.Limits(max_connections=len(bodies)), {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(timeout=600, limits=limits, headers=headers) as client:
            start = time.perf_counter()
            replies = await asyncio.gather(*[client.post(f"{url}/inference/v1/generate", json=b) for b in bodies])
            seconds = time.perf_counter() - start
        return seconds, [reply.raise_for_status().json()["choices"][0] for reply in replies]

    return asyncio.run(run())


class Ours:
    """Sampler and learner on the setting's model, with a client process.

    Args:
        twice: Load the base again for the learner; a run shares the sampler's.
    """

    def __init__(self, case: Setting, *, twice: bool = False) -> None:
        from harbortrainer.config.trainer_table import DefaultLoss, LoraSettings, OptimSettings
        from harbortrainer.engines.local.learner.learner import Learner
        from harbortrainer.engines.local.sampler import Sampler
        from harbortrainer.engines.models import share_weights
        from harbortrainer.runs.memory import frozen_gc

        self.case = case
        lora = LoraSettings(rank=RANK, alpha=ALPHA, target_modules=TARGETS)
        self.sampler = Sampler(case.folder, device=case.device, dtype=case.dtype).start()
        self.learner = Learner(
            case.folder, lora, OptimSettings(lr=1e-4), DefaultLoss(), device=case.device, dtype=case.dtype,
            base=None if twice else self.sampler.model,
        )  # fmt: skip
        self.plain = share_weights(self.sampler.model)
        """The model for `generate`. It shares the sampler's weights, so that a large model is loaded once."""
        self.client = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        self.differences: list[float] = []
        self.handovers: list[float] = []
        self.update_weights()
        self._imports = ExitStack()
        self._imports.enter_context(frozen_gc())

    def close(self) -> None:
        self._imports.close()
        self.client.shutdown()
        self.sampler.stop()

    def update_weights(self) -> None:
        from peft import LoraConfig

        learner = self.learner
        seconds = self.sampler.load_adapter(
            learner.weights(learner.version),
            learner.version,
            config=LoraConfig.from_peft_type(**(learner.adapter_config or {})),
        )
        self.handovers.append(seconds)

    def sample(self, prompts: list[list[int]], lengths: list[int]) -> tuple[float, list[dict]]:
        """Sample one answer per prompt; return the seconds and the choices."""
        bodies = [
            {"token_ids": p, "sampling_params": {"max_tokens": n, "ignore_eos": True, "logprobs": 1}}
            for p, n in zip(prompts, lengths, strict=True)
        ]
        return self.client.submit(post_all, self.sampler.url, self.sampler.api_key, bodies).result()

    def sample_afresh(self, prompts: list[list[int]], lengths: list[int]) -> tuple[float, list[dict]]:
        """Sample with an empty cache, as for the first trials of a policy version."""
        self.update_weights()
        return self.sample(prompts, lengths)

    def samples(self, choices: list[dict]) -> list:
        """Return the learner's samples of these choices."""
        from harbortrainer.engines.local.learner.training_sample import Sample

        made = []
        for i, (prompt, choice) in enumerate(zip(self.case.prompt_ids, choices, strict=True)):
            tokens = choice["token_ids"]
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            made.append(
                Sample(
                    token_ids=[*prompt, *tokens],
                    mask=[False] * len(prompt) + [True] * len(tokens),
                    logprobs=[0.0] * len(prompt) + logprobs,
                    versions=[self.learner.version] * (len(prompt) + len(tokens)),
                    temperature=1.0,
                    advantage=1.0 if i % 2 else -1.0,
                )
            )
        return made

    def step(self) -> tuple[float, float]:
        """Run one step; return its seconds, and the seconds of training alone."""
        start = time.perf_counter()
        _, choices = self.sample(self.case.prompt_ids, [self.case.new] * len(self.case.prompts))
        samples = self.samples(choices)
        training = time.perf_counter()
        metrics = self.learner.train(samples)
        trained = time.perf_counter() - training
        self.update_weights()
        self.differences.append(metrics["proof/logprob_diff/max"])
        return time.perf_counter() - start, trained
