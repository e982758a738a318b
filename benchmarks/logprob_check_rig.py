"""A run without trials: the real sampler and learner, with prompts instead of tasks and random advantages.

It has all parts of a run that the log-probability check depends on: requests over HTTP, the completion log, weight
updates and rescoring. Samples are at most one version old, and some requests run during the weight update. A step
takes one to two seconds.
"""

import random
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from harbortrainer.config.runfile import Quantization
from harbortrainer.config.trainer_table import DefaultLoss, LoraSettings, OptimSettings
from harbortrainer.engines.local.learner.learner import Learner
from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.local.sampler.rescoring import Rescored
from harbortrainer.engines.local.weight_update import update_weights
from harbortrainer.errors import ProofError

LENGTH_FACTOR = 3
"""Answers that run during a weight update are this many times longer."""


@dataclass
class LogprobCheckRig:
    """Runs steps until the log-probability check stops it.

    Args:
        model: The policy's folder.
        dtype: Dtype of sampler and learner.
        prompts: Token ids; each is answered `group` times per step.
        quantization: Quantization of the base.
        lora: The LoRA; None trains all weights.
    """

    model: Path
    dtype: str
    prompts: Sequence[Sequence[int]]
    group: int = 4
    max_tokens: int = 24
    lr: float = 2.5e-3
    seed: int = 0
    quantization: Quantization | None = None
    lora: LoraSettings | None = field(default_factory=lambda: LoraSettings(rank=8, alpha=32))
    max_metrics: dict[str, float] = field(default_factory=dict)
    """Maximum of each metric of the check so far."""
    crossed_update: int = 0
    """Number of requests that ran during a weight update."""
    message: str = ""
    """Error message of the check."""

    def stopped_at(self, steps: int) -> int | None:
        """Run `steps` steps; return the step that the check refused, or None if all were trained."""
        rng = random.Random(self.seed)
        with (
            Sampler(self.model, dtype=self.dtype, seed=self.seed, quantization=self.quantization) as sampler,
            httpx.Client(timeout=120) as client,
            ThreadPoolExecutor(16) as clients,
        ):
            learner = Learner(
                self.model, self.lora, OptimSettings(lr=self.lr), DefaultLoss(),
                base=sampler.model, seed=self.seed, keep_versions=2,
            )  # fmt: skip
            delayed: list[Sample] = []
            rescored: list[Rescored] = []
            for step in range(1, steps + 1):
                fresh = list(clients.map(lambda job: self._sample(sampler, client, *job), self._jobs(step, rng)))
                rng.shuffle(fresh)
                half = len(fresh) // 2
                try:
                    metrics = learner.train([*delayed, *fresh[:half]], rescored + sampler.rescore())
                except ProofError as error:
                    self.message = str(error)
                    return step
                for name, value in metrics.items():
                    if name.startswith("proof/"):
                        self.max_metrics[name] = max(self.max_metrics.get(name, 0.0), abs(value))
                running = self._start_long_answers(step, rng, sampler, client, clients)
                rescored = sampler.rescore()
                update_weights(learner, sampler)
                delayed = fresh[half:] + [answer.result() for answer in running]
                long_samples = delayed[-len(running) :]
                self.crossed_update += sum(sample.versions[-1] < sampler.version for sample in long_samples)
        return None

    def _start_long_answers(
        self, step: int, rng: random.Random, sampler: Sampler, client: httpx.Client, clients: ThreadPoolExecutor
    ) -> list[Future[Sample]]:
        """Start a longer answer to each prompt; return when the sampler works on all of them."""
        jobs = [(f"{name}/long", prompt, advantage) for name, prompt, advantage in self._jobs(step, rng)[:: self.group]]
        answers = [clients.submit(self._sample, sampler, client, *job, length_factor=LENGTH_FACTOR) for job in jobs]
        while sampler.stats()["running"] < len(jobs):
            time.sleep(0.001)
        return answers

    def _jobs(self, step: int, rng: random.Random) -> list[tuple[str, Sequence[int], float]]:
        """Return session name, prompt and random advantage of each sample of a step."""
        prompts = [prompt for prompt in self.prompts for _ in range(self.group)]
        return [(f"{self.seed}/{step}/{i}", prompt, rng.gauss(0.0, 0.4)) for i, prompt in enumerate(prompts)]

    def _sample(
        self,
        sampler: Sampler,
        client: httpx.Client,
        session: str,
        prompt: Sequence[int],
        advantage: float,
        *,
        length_factor: int = 1,
    ) -> Sample:
        params = {"max_tokens": length_factor * self.max_tokens, "temperature": 1.0, "ignore_eos": length_factor > 1}
        body = {"token_ids": list(prompt), "sampling_params": params}
        url = f"{sampler.url}/inference/v1/generate"
        headers = {"X-Session-ID": session, "Authorization": f"Bearer {sampler.api_key}"}
        client.post(url, json=body, headers=headers).raise_for_status()
        (done,) = sampler.completion_log.pop(session)
        before, length = len(prompt), len(done.token_ids)
        return Sample(
            token_ids=[*prompt, *done.token_ids],
            mask=[False] * before + [True] * length,
            logprobs=[0.0] * before + list(done.logprobs),
            versions=[0] * before + [done.version] * length,
            temperature=1.0,
            advantage=advantage,
            task_key=f"prompt of {before}",
            trial_name=session,
        )
