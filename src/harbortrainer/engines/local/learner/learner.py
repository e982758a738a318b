"""The learner: each call of `train` is one optimizer step and makes one new policy version.

Version 0 is the base model; with a LoRA, a new adapter that changes nothing. `train` makes version n + 1 from n:

1. prune samples without an advantage, truncate long ones, pack the rest into micro batches;
2. run forward and backward of every micro batch with Prime-RL's loss, over the trained tokens of the whole batch;
3. check every trained token's log-probability under the version that sampled it: each sample alone
   (`logprob_check.py`), and all tokens together against the measured noise (`logprob_audit.py`);
4. clip the gradient, take the optimizer step, and keep the new weights.

Invariants: after an exception weights, optimizer and version are unchanged. The learner never writes to base weights
that it shares with a sampler. It starts no threads and does not set their number, so `train` may run in a worker thread
beside that sampler.
"""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from harbortrainer.config.trainer_table import (
    ConstantScheduler,
    LinearScheduler,
    LoraSettings,
    LossSettings,
    OptimSettings,
    SchedulerSettings,
    decay_steps,
)
from harbortrainer.engines.local.learner.learner_state import LearnerState, load_learner, save_learner
from harbortrainer.engines.local.learner.logprob_audit import LogprobAudit
from harbortrainer.engines.local.learner.logprob_check import TOLERANCES, Recomputed, Tolerance, check_logprobs
from harbortrainer.engines.local.learner.logprob_noise import (
    NOISE_BOUNDS,
    NoiseEstimate,
    RescoredLogprobs,
    RescoredSequence,
)
from harbortrainer.engines.local.learner.loss import Scales, forward_backward, token_metrics
from harbortrainer.engines.local.learner.micro_batch import MICRO_BATCH, TruncatedBatch, pack, truncate_samples
from harbortrainer.engines.local.learner.policies import FullPolicy, LoraPolicy
from harbortrainer.engines.local.learner.recompute import alternative_logprobs, compare_tokens, recompute_logprobs
from harbortrainer.engines.local.learner.trained_policy import PolicyWeights, TrainedPolicy
from harbortrainer.engines.local.learner.training_sample import Sample, prune
from harbortrainer.engines.local.learner.version_history import VersionHistory
from harbortrainer.engines.memory_parts import is_out_of_memory
from harbortrainer.engines.models import copy_model, load_model, share_weights
from harbortrainer.errors import ProofError, RunStoppedError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MIN_RATE_SHARE = 1e-8
"""Least share of the peak at which a learning rate starts and ends."""


class Learner:
    """GRPO on one model.

    Args:
        model: Hub id or folder that transformers can load.
        lora: `[trainer.model.lora]`; None trains every weight.
        optim: `[trainer.optim]`.
        loss: `[trainer.loss]`.
        scheduler: `[trainer.scheduler]`.
        max_steps: The run's length, for schedulers that end.
        seq_len: Longer samples are truncated.
        base: The loaded model without an adapter. A LoRA's learner shares its weights; full fine-tuning copies them.
            The learner takes its device and dtype. None loads the model.
        device: "cpu" or "cuda". On a GPU activations are recomputed in the backward pass, as in Prime-RL.
        dtype: "float32" or "bfloat16" of the base model; the default is float32 on a CPU, bfloat16 on a GPU.
        seed: Seed of the adapter's initial weights.
        keep_versions: Number of versions to keep, including the current one: max_off_policy_steps + 1.
        micro_batch_tokens: Tokens of one forward pass; the default is `micro_batch.MICRO_BATCH`.
        tolerance: Tolerance of the log-probability check; the default is the dtype's.

    Raises:
        UserError: The model cannot be loaded, or no layer matches lora.target_modules.
    """

    def __init__(
        self,
        model: str | Path,
        lora: LoraSettings | None,
        optim: OptimSettings,
        loss: LossSettings,
        *,
        scheduler: SchedulerSettings | None = None,
        max_steps: int | None = None,
        seq_len: int = 4096,
        base: PreTrainedModel | None = None,
        device: str = "cpu",
        dtype: str | None = None,
        seed: int = 0,
        keep_versions: int = 9,
        micro_batch_tokens: int | None = None,
        tolerance: Tolerance | None = None,
    ) -> None:
        own_device = torch.device(device) if base is None else base.device
        on_cpu = own_device.type == "cpu"
        chosen = DTYPES[dtype or ("float32" if on_cpu else "bfloat16")] if base is None else base.dtype
        self._optim, self._loss, self._seq_len = optim, loss, seq_len
        self._scheduler, self._max_steps = scheduler or ConstantScheduler(), max_steps
        self._micro_batch_tokens = micro_batch_tokens or MICRO_BATCH["cpu" if on_cpu else "cuda"]
        self._halved = False
        self._tolerance = tolerance or TOLERANCES[chosen]
        self._noise = NoiseEstimate(NOISE_BOUNDS[chosen])
        self._audit, self._rescored = LogprobAudit(self._noise), RescoredLogprobs()
        self._policy: TrainedPolicy
        if base is None:
            own = load_model(model, chosen, where=f"model.name = {str(model)!r}")
        else:
            own = copy_model(base) if lora is None else share_weights(base)
        if lora is None:
            self._policy = FullPolicy(own, device=own_device, name=str(model), checkpointing=not on_cpu)
        else:
            self._policy = LoraPolicy(
                own, lora, device=own_device, seed=seed, name=str(model), checkpointing=not on_cpu
            )
        self._history = VersionHistory(keep_versions, self._policy.weights())
        self._optimizer = torch.optim.AdamW(
            self._policy.parameters,
            lr=optim.lr,
            betas=(optim.betas1, optim.betas2),
            weight_decay=optim.weight_decay,
            fused=True,
        )

    @property
    def version(self) -> int:
        """Current policy version: the number of optimizer steps since the base model."""
        return self._history.newest

    @property
    def versions(self) -> list[int]:
        """Policy versions whose weights are kept, oldest first; the last is the current one."""
        return self._history.versions

    @property
    def adapter_config(self) -> Mapping[str, object] | None:
        """Content of peft's adapter_config.json; None for full fine-tuning."""
        return self._policy.adapter_config

    def weights(self, version: int | None = None) -> PolicyWeights:
        """Return the trained weights of a kept version, by default the current one; do not modify them.

        Raises:
            KeyError: The version is not kept.
        """
        return self._history[self.version if version is None else version]

    def train(self, samples: Sequence[Sample], rescored: Sequence[RescoredSequence] = ()) -> dict[str, float]:
        """Take one optimizer step on these samples, which makes the next version.

        Args:
            samples: Samples of one step, at least one with a nonzero advantage or with tokens to predict.
            rescored: Sequences that the sampler rescored since the last step; without them the noise bounds are the
                dtype's.

        Returns:
            The step's metrics (docs/loss.md lists them).

        Raises:
            SampleError: A sample breaks the rules of `training_sample.py`.
            ProofError: Tokens and log-probabilities do not belong together.
            ValueError: There is nothing to train on.
            RuntimeError: The gradient is not finite.
            RunStoppedError: Out of memory for the second time; the first time the micro batches are halved.
        """
        start = time.perf_counter()
        self._noise.measure(rescored)
        self._rescored.add(rescored)
        kept = prune(samples)
        batch = truncate_samples(kept, self._seq_len)
        if not batch.samples:
            raise ValueError("nothing to train on: no sample has an advantage and a token within seq_len")
        metrics = self._step(batch)
        seconds = time.perf_counter() - start
        return metrics | {
            "samples/pruned": float(len(samples) - len(kept)),
            "time/forward_backward": seconds,
            "perf/throughput": metrics["tokens/total"] / seconds,
        }

    def _step(self, batch: TruncatedBatch) -> dict[str, float]:
        try:
            metrics, halved = self._gradients_with_retry(batch)
            memory = {"memory/micro_batch_tokens": float(self._micro_batch_tokens), "memory/halved": float(halved)}
            return metrics | memory | self._update()
        finally:
            self._optimizer.zero_grad(set_to_none=True)

    def _gradients_with_retry(self, batch: TruncatedBatch) -> tuple[dict[str, float], bool]:
        """Return the metrics of `_gradients`, and whether it was restarted with micro batches of half the size.

        That happens once, when memory runs out. A second time the micro batch is not the cause.
        """
        halved = False
        while True:
            try:
                return self._gradients(batch), halved
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if self._halved:
                    raise out_of_memory(self._micro_batch_tokens, max(map(len, batch.samples))) from error
            # Outside of the except block: the error's traceback keeps the tensors of the pass alive.
            self._micro_batch_tokens, self._halved, halved = max(1, self._micro_batch_tokens // 2), True, True
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _gradients(self, batch: TruncatedBatch) -> dict[str, float]:
        """Compute the gradient of the whole batch and check the log-probabilities; the policy is unchanged."""
        policy, samples, scales = self._policy, batch.samples, Scales(batch.weight or 1.0, max(1, batch.predicted))
        self._optimizer.zero_grad(set_to_none=True)
        micro_batches = pack(samples, self._micro_batch_tokens, policy.device, packing=policy.packing)
        trained = [forward_backward(policy, m, self._loss, scales=scales) for m in micro_batches]
        recomputed = recompute_logprobs(policy, samples, trained, self._history, max_tokens=self._micro_batch_tokens)
        metrics = batch.metrics | token_metrics(trained, len(samples), self.version)
        metrics |= check_logprobs(samples, recomputed, self._tolerance)
        return metrics | self._audit_logprobs(samples, recomputed)

    def _audit_logprobs(self, samples: Sequence[Sample], recomputed: Recomputed) -> dict[str, float]:
        """Test all tokens together against the measured noise and against other policy versions."""
        start = time.perf_counter()
        alternatives = alternative_logprobs(
            self._policy, samples, recomputed, self._history, max_tokens=self._micro_batch_tokens
        )
        rescored = self._rescored.lookup(samples, recomputed.tokens)
        entropy = recomputed.entropy.double().cpu()
        failure = self._audit.check(compare_tokens(samples, recomputed), rescored, entropy, alternatives)
        if failure is not None:
            raise ProofError(str(failure))
        metrics = {f"proof/{name}": value for name, value in self._audit.metrics.items()}
        return metrics | {"time/other_versions": time.perf_counter() - start}

    def _update(self) -> dict[str, float]:
        limit = float("inf") if self._optim.max_norm is None else self._optim.max_norm
        norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters, limit, error_if_nonfinite=True)
        rate = learning_rate(self.version, self._scheduler, peak=self._optim.lr, max_steps=self._max_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._policy.load_masters()
        self._history.add(self._policy.weights())
        self._rescored.evict_before(self.versions[0])
        return {"optim/lr": rate, "optim/grad_norm": norm.item()}

    def save(self, folder: Path) -> None:
        """Write a checkpoint atomically: policy, optimizer, random state and version."""
        save_learner(folder, self._policy, LearnerState.now(self.version, self._optimizer, self._policy))

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint; then only its version is kept.

        Raises:
            UserError: The checkpoint is missing, damaged or of another model. The learner is unchanged.
        """
        state = load_learner(folder, self._policy)
        state.restore(self._optimizer)
        self._history.restart(state.version, self._policy.weights())


def out_of_memory(budget: int, longest: int) -> RunStoppedError:
    """Return the error of a step that runs out of memory with halved micro batches too.

    Args:
        budget: Tokens of a micro batch.
        longest: Tokens of the step's longest sample.
    """
    return RunStoppedError(
        f"out of memory, also with micro batches of {budget} tokens, half of the initial size",
        do=f"lower seq_len (the longest sample of this step has {longest} tokens), or free memory on the device",
    )


def learning_rate(step: int, scheduler: SchedulerSettings, *, peak: float, max_steps: int | None) -> float:
    """Return the learning rate of optimizer step `step` (from 0), in closed form, so that a resume needs no state.

    Equal to what Prime-RL's trainer builds from torch's schedulers (src/prime_rl/trainer/scheduler.py at commit
    559b44772); in its linear parts a min_lr of 0 starts and ends at 1e-8 of the peak. A linear decay is at most as long
    as the steps after the warm-up, which the config has checked.
    """
    if isinstance(scheduler, ConstantScheduler) or peak == 0:
        return peak
    low = scheduler.min_lr / peak if scheduler.min_lr > 0 else MIN_RATE_SHARE
    if step < scheduler.warmup_steps:
        return peak * (low + (1 - low) * step / scheduler.warmup_steps)
    if isinstance(scheduler, LinearScheduler):
        return peak * _linear_decay(step, scheduler, low, max_steps)
    assert max_steps is not None
    done = (step - scheduler.warmup_steps) / (max_steps - scheduler.warmup_steps)
    return scheduler.min_lr + (peak - scheduler.min_lr) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


def _linear_decay(step: int, scheduler: LinearScheduler, low: float, max_steps: int | None) -> float:
    if scheduler.decay_steps == 0 or max_steps is None:
        return 1.0
    steps = decay_steps(scheduler, max_steps)
    since = step - (max_steps - steps)
    if since <= 0:
        return 1.0
    return 1 + (low - 1) * min(since / max(1, steps - 1), 1.0)
