"""The learner: one call, one optimizer step, one new policy version.

Version 0 is the base model with a fresh adapter, which changes nothing. `train` makes version n + 1 from version n:

1. prune samples without an advantage, cut long ones, pack what is left into micro batches;
2. forward and backward of every micro batch with Prime-RL's loss, normalized by the trained tokens of all of them;
3. prove that every trained token belongs to its log-probability, under the version that sampled it;
4. clip, step, and keep the new adapter.

The invariant: after an exception nothing has changed, neither weights nor optimizer nor version. The learner owns its
model; it starts no thread and sets no number of threads, so `train` may run in a worker thread while a sampler runs.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harbortrainer.engines.local.learner import checkpoint
from harbortrainer.engines.local.learner.advantage import prune
from harbortrainer.engines.local.learner.batch import Batch, fit, pack
from harbortrainer.engines.local.learner.history import History
from harbortrainer.engines.local.learner.metrics import token_metrics
from harbortrainer.engines.local.learner.policy import Adapter, Policy, load_base
from harbortrainer.engines.local.learner.proof import TOLERANCES, Tolerance, prove
from harbortrainer.engines.local.learner.sample import Sample
from harbortrainer.engines.local.learner.schedule import learning_rate
from harbortrainer.engines.local.learner.settings import (
    ConstantScheduler,
    CosineScheduler,
    LinearScheduler,
    LoraSettings,
    LossSettings,
    OptimSettings,
)
from harbortrainer.engines.local.learner.step import forward_backward, under_own_version

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Learner:
    """GRPO on the LoRA of one model.

    Args:
        model: A hub id or a folder that transformers can load.
        lora: `[trainer.model.lora]`.
        optim: `[trainer.optim]`.
        loss: `[trainer.loss]`.
        scheduler: `[trainer.scheduler]`.
        max_steps: The run's length, for schedulers that end.
        seq_len: Longer samples lose their tail.
        device: "cpu" or "cuda". On a GPU activations are computed again in the backward pass, as Prime-RL does.
        dtype: Of the base model: "float32" or "bfloat16"; by default float32 on a CPU, bfloat16 on a GPU.
        seed: Of the adapter's first weights.
        keep_versions: How many adapters are kept, the current one included: max_off_policy_steps + 1.
        micro_batch_tokens: Tokens of one forward, padding included; by default 2048 on a CPU (what its caches
            hold), 16384 on a GPU.
        tolerance: Of the proof; by default what the dtype needs.

    Raises:
        UserError: The model cannot be loaded, or no layer matches lora.target_modules.
        ValueError: The scheduler does not fit max_steps.
    """

    def __init__(
        self,
        model: str | Path,
        lora: LoraSettings,
        optim: OptimSettings,
        loss: LossSettings,
        *,
        scheduler: ConstantScheduler | LinearScheduler | CosineScheduler | None = None,
        max_steps: int | None = None,
        seq_len: int = 4096,
        device: str = "cpu",
        dtype: str | None = None,
        seed: int = 0,
        keep_versions: int = 9,
        micro_batch_tokens: int | None = None,
        tolerance: Tolerance | None = None,
    ) -> None:
        on_cpu = device == "cpu"
        chosen = DTYPES[dtype or ("float32" if on_cpu else "bfloat16")]
        self._optim, self._loss, self._seq_len = optim, loss, seq_len
        self._scheduler, self._max_steps = scheduler or ConstantScheduler(), max_steps
        self._budget = micro_batch_tokens or (2048 if on_cpu else 16384)
        self._tolerance = tolerance or TOLERANCES[chosen]
        self._rate(0)
        base = load_base(model, chosen)
        self._policy = Policy(
            base, lora, device=torch.device(device), seed=seed, name=str(model), checkpointing=not on_cpu
        )
        self._history = History(keep_versions, self._policy.adapter())
        self._optimizer = torch.optim.AdamW(
            self._policy.parameters,
            lr=optim.lr,
            betas=(optim.betas1, optim.betas2),
            weight_decay=optim.weight_decay,
        )

    @property
    def version(self) -> int:
        """The current policy version: the optimizer steps taken since the base model."""
        return self._history.newest

    @property
    def versions(self) -> list[int]:
        """The policy versions whose adapters are kept, oldest first; the last is the current one."""
        return self._history.versions

    @property
    def adapter_config(self) -> dict[str, Any]:
        """What peft writes to adapter_config.json."""
        return self._policy.model.peft_config["default"].to_dict()

    def adapter(self, version: int | None = None) -> Adapter:
        """The LoRA weights of a kept version (the current one by default); not to be written to.

        Raises:
            KeyError: The version is not kept (any more).
        """
        return self._history[self.version if version is None else version]

    def train(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Take one optimizer step on these samples and become the next version.

        Args:
            samples: One step's samples of any number of groups, at least one with an advantage other than 0.

        Returns:
            The step's metrics (docs/loss.md lists them).

        Raises:
            SampleError: A sample breaks the rules of `sample.py`.
            ProofError: Tokens and log-probabilities do not belong together.
            ValueError: Nothing to train on.
            RuntimeError: The gradient is not finite.
        """
        start = time.perf_counter()
        kept = prune(samples)
        batch = fit(kept, self._seq_len)
        if not batch.samples:
            raise ValueError("nothing to train on: no sample has an advantage and a token within seq_len")
        metrics = self._step(batch)
        seconds = time.perf_counter() - start
        return metrics | {
            "samples/pruned": float(len(samples) - len(kept)),
            "time/forward_backward": seconds,
            "perf/throughput": metrics["tokens/total"] / seconds,
        }

    def _step(self, batch: Batch) -> dict[str, float]:
        policy, samples, scale = self._policy, batch.samples, batch.trained
        self._optimizer.zero_grad(set_to_none=True)
        try:
            micro_batches = pack(samples, self._budget, policy.device)
            seen = [forward_backward(policy, m, self._loss, scale=scale) for m in micro_batches]
            parts = under_own_version(policy, samples, seen, self._history, budget=self._budget)
            metrics = batch.metrics | token_metrics(seen, len(samples), self.version)
            metrics |= prove(samples, parts, self._tolerance)
            return metrics | self._update()
        finally:
            self._optimizer.zero_grad(set_to_none=True)

    def _update(self) -> dict[str, float]:
        limit = float("inf") if self._optim.max_norm is None else self._optim.max_norm
        norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters, limit, error_if_nonfinite=True)
        rate = self._rate(self.version)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._history.add(self._policy.adapter())
        return {"optim/lr": rate, "optim/grad_norm": norm.item()}

    def _rate(self, step: int) -> float:
        return learning_rate(step, self._scheduler, peak=self._optim.lr, max_steps=self._max_steps)

    def write_adapter(self, folder: Path) -> None:
        """Write the current adapter alone, in peft's plain format."""
        checkpoint.write_adapter(self._policy, folder)

    def save(self, folder: Path) -> None:
        """Write a checkpoint: adapter, optimizer, random state, version. Complete or not there."""
        state = checkpoint.State(
            version=self.version, optimizer=self._optimizer.state_dict(), rng=checkpoint.random_state()
        )
        checkpoint.save(folder, self._policy, state)

    def load(self, folder: Path) -> None:
        """Go on where `save` was called; only that version's adapter is kept then.

        Raises:
            UserError: No checkpoint, a damaged one, or one of another model. Nothing has changed then.
        """
        adapter, state = checkpoint.load(folder)
        checkpoint.put(self._policy, adapter, folder)
        self._optimizer.load_state_dict(state.optimizer)
        checkpoint.set_random_state(state.rng)
        self._history.restart(state.version, self._policy.adapter())
