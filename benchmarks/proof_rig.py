"""A run without trials: the real sampler and the real learner, prompts for tasks and chance for rewards.

What the proof sees of a run is all here: requests over HTTP, the sampler's ledger, a hand-over a step, samples that
are one version old, some of them of requests that the hand-over found under way, the second scoring. A step takes a
second or two.
"""

import random
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from harbortrainer.config.runfile import Quantization
from harbortrainer.config.trainer_table import LoraSettings, LossSettings, OptimSettings
from harbortrainer.engines.local.learner.learner import Learner
from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.engines.local.parts import hand_over
from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.local.sampler.rescoring import ScoredAgain
from harbortrainer.errors import ProofError

LONGER = 3
"""Times the usual length: of answers that a hand-over finds under way."""


@dataclass
class ProofRig:
    """Plays steps until the proof stops it.

    Args:
        model: The policy's folder.
        dtype: Of sampler and learner.
        prompts: Token ids; each is answered `group` times a step.
        quantization: Of the base.
        lora: None trains every weight.
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
    reached: dict[str, float] = field(default_factory=dict)
    """Each figure of the proof, the largest up to now."""
    overtaken: int = 0
    """Requests that a hand-over found under way."""
    message: str = ""
    """What the proof said."""

    def stopped_at(self, steps: int) -> int | None:
        """The step that the proof refused, None when all trained."""
        chance = random.Random(self.seed)
        with (
            Sampler(self.model, dtype=self.dtype, seed=self.seed, quantization=self.quantization) as sampler,
            httpx.Client(timeout=120) as client,
            ThreadPoolExecutor(16) as clients,
        ):
            learner = Learner(
                self.model, self.lora, OptimSettings(lr=self.lr), LossSettings(),
                base=sampler.model, seed=self.seed, keep_versions=2,
            )  # fmt: skip
            waiting: list[Sample] = []
            rescored: list[ScoredAgain] = []
            for step in range(1, steps + 1):
                fresh = list(clients.map(lambda job: self._sample(sampler, client, *job), self._jobs(step, chance)))
                chance.shuffle(fresh)
                half = len(fresh) // 2
                try:
                    numbers = learner.train([*waiting, *fresh[:half]], rescored + sampler.score_again())
                except ProofError as error:
                    self.message = str(error)
                    return step
                for name, figure in numbers.items():
                    if name.startswith("proof/"):
                        self.reached[name] = max(self.reached.get(name, 0.0), abs(figure))
                under_way = self._under_way(step, chance, sampler, client, clients)
                rescored = sampler.score_again()
                hand_over(learner, sampler)
                waiting = fresh[half:] + [answer.result() for answer in under_way]
                self.overtaken += sum(sample.versions[-1] < sampler.version for sample in waiting[-len(under_way) :])
        return None

    def _under_way(
        self, step: int, chance: random.Random, sampler: Sampler, client: httpx.Client, clients: ThreadPoolExecutor
    ) -> list[Future[Sample]]:
        """An answer to each prompt, longer than others; when this returns, all are being sampled."""
        jobs = [(f"{session}/long", prompt, lean) for session, prompt, lean in self._jobs(step, chance)[:: self.group]]
        answers = [clients.submit(self._sample, sampler, client, *job, longer=LONGER) for job in jobs]
        while sampler.stats()["running"] < len(jobs):
            time.sleep(0.001)
        return answers

    def _jobs(self, step: int, chance: random.Random) -> list[tuple[str, Sequence[int], float]]:
        asked = [prompt for prompt in self.prompts for _ in range(self.group)]
        return [(f"{self.seed}/{step}/{i}", prompt, chance.gauss(0.0, 0.4)) for i, prompt in enumerate(asked)]

    def _sample(
        self,
        sampler: Sampler,
        client: httpx.Client,
        session: str,
        prompt: Sequence[int],
        advantage: float,
        *,
        longer: int = 1,
    ) -> Sample:
        asked = {"max_tokens": longer * self.max_tokens, "temperature": 1.0, "ignore_eos": longer > 1}
        body = {"token_ids": list(prompt), "sampling_params": asked}
        url, headers = f"{sampler.url}/inference/v1/generate", {"X-Session-ID": session}
        client.post(url, json=body, headers=headers).raise_for_status()
        (done,) = sampler.ledger.take(session)
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
