"""The learner: one call, one optimizer step, one new policy version.

Version 0 is the base model, with a fresh adapter that changes nothing where a LoRA is trained. `train` makes version
n + 1 from version n:

1. prune samples without an advantage, cut long ones, pack what is left into micro batches;
2. forward and backward of every micro batch with Prime-RL's loss, normalized by the trained tokens of all of them;
3. prove that every trained token belongs to its log-probability, under the version that sampled it, each trial on
   its own (`proof.py`) and all tokens together against the measured noise (`evidence.py`);
4. clip, step, and keep the new weights.

The invariant: after an exception nothing has changed, neither weights nor optimizer nor version. The learner owns what
it trains and never writes into a base whose weights are a sampler's too; it starts no thread and sets no number of
threads, so `train` may run in a worker thread while that sampler samples.
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
)
from harbortrainer.engines.device_memory import is_out_of_memory
from harbortrainer.engines.local.learner.evidence import Evidence
from harbortrainer.engines.local.learner.full_policy import FullPolicy
from harbortrainer.engines.local.learner.learner_state import LearnerState, load_learner, save_learner
from harbortrainer.engines.local.learner.lora_policy import LoraPolicy
from harbortrainer.engines.local.learner.loss import Scales, forward_backward, token_metrics
from harbortrainer.engines.local.learner.micro_batch import MICRO_BATCH, FittedBatch, fit, pack
from harbortrainer.engines.local.learner.policy_versions import (
    VersionHistory,
    compared,
    other_versions,
    under_own_version,
)
from harbortrainer.engines.local.learner.proof import (
    NOISE_BOUNDS,
    TOLERANCES,
    Noise,
    Recomputed,
    Rescored,
    SecondScores,
    Tolerance,
    prove,
)
from harbortrainer.engines.local.learner.trained_policy import PolicyWeights, TrainedPolicy
from harbortrainer.engines.local.learner.training_sample import Sample, prune
from harbortrainer.engines.pretrained import load_model, own_model, second_model
from harbortrainer.errors import ProofError, RunStoppedError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TINY = 1e-8
"""The least share of the peak that a learning rate starts and ends at."""


class Learner:
    """GRPO on one model.

    Args:
        model: A hub id or a folder that transformers can load.
        lora: `[trainer.model.lora]`; None trains every weight.
        optim: `[trainer.optim]`.
        loss: `[trainer.loss]`.
        scheduler: `[trainer.scheduler]`.
        max_steps: The run's length, for schedulers that end.
        seq_len: Longer samples lose their tail.
        base: The model, loaded already and without an adapter, whose weights a LoRA's learner shares: they stay in
            memory once; where every weight is trained they are copied. Its device and its dtype (one of those below)
            are the learner's then. Without it the model is loaded.
        device: "cpu" or "cuda". On a GPU activations are computed again in the backward pass, as Prime-RL does.
        dtype: Of the base model: "float32" or "bfloat16"; by default float32 on a CPU, bfloat16 on a GPU.
        seed: Of the adapter's first weights.
        keep_versions: How many versions are kept, the current one included: max_off_policy_steps + 1.
        micro_batch_tokens: Tokens of one forward; by default what `micro_batch.MICRO_BATCH` says.
        tolerance: Of the proof; by default what the dtype needs.

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
        place = torch.device(device) if base is None else base.device
        on_cpu = place.type == "cpu"
        chosen = DTYPES[dtype or ("float32" if on_cpu else "bfloat16")] if base is None else base.dtype
        self._optim, self._loss, self._seq_len = optim, loss, seq_len
        self._scheduler, self._max_steps = scheduler or ConstantScheduler(), max_steps
        self._budget = micro_batch_tokens or MICRO_BATCH["cpu" if on_cpu else "cuda"]
        self._halved = False
        self._tolerance = tolerance or TOLERANCES[chosen]
        self._noise = Noise(NOISE_BOUNDS[chosen])
        self._evidence, self._scores = Evidence(self._noise), SecondScores()
        self._policy: TrainedPolicy
        if base is None:
            own = load_model(model, chosen, where=f"model.name = {str(model)!r}")
        else:
            own = own_model(base) if lora is None else second_model(base)
        if lora is None:
            self._policy = FullPolicy(own, device=place, name=str(model), checkpointing=not on_cpu)
        else:
            self._policy = LoraPolicy(own, lora, device=place, seed=seed, name=str(model), checkpointing=not on_cpu)
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
        """The current policy version: the optimizer steps taken since the base model."""
        return self._history.newest

    @property
    def versions(self) -> list[int]:
        """The policy versions whose weights are kept, oldest first; the last is the current one."""
        return self._history.versions

    @property
    def adapter_config(self) -> Mapping[str, object] | None:
        """What peft writes to adapter_config.json; None where every weight is trained."""
        return self._policy.adapter_config

    def weights(self, version: int | None = None) -> PolicyWeights:
        """The trained weights of a kept version (the current one by default); not to be written to.

        Raises:
            KeyError: The version is not kept (any more).
        """
        return self._history[self.version if version is None else version]

    def train(self, samples: Sequence[Sample], rescored: Sequence[Rescored] = ()) -> dict[str, float]:
        """Take one optimizer step on these samples and become the next version.

        Args:
            samples: One step's samples of any number of groups, at least one with an advantage other than 0 or with
                tokens to predict.
            rescored: What the sampler scored again since the last step; without it the proof is as coarse as the
                dtype alone allows.

        Returns:
            The step's metrics (docs/loss.md lists them).

        Raises:
            SampleError: A sample breaks the rules of `training_sample.py`.
            ProofError: Tokens and log-probabilities do not belong together.
            ValueError: Nothing to train on.
            RuntimeError: The gradient is not finite.
            RunStoppedError: Out of memory for the second time in the learner's life; the first time it goes on with
                micro batches of half the size.
        """
        start = time.perf_counter()
        self._noise.measure(rescored)
        self._scores.add(rescored)
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

    def _step(self, batch: FittedBatch) -> dict[str, float]:
        try:
            proven, halved = self._with_less_memory(batch)
            figures = {"memory/micro_batch_tokens": float(self._budget), "memory/halved": float(halved)}
            return proven | figures | self._update()
        finally:
            self._optimizer.zero_grad(set_to_none=True)

    def _with_less_memory(self, batch: FittedBatch) -> tuple[dict[str, float], bool]:
        """What `_gradients` does, begun anew with micro batches of half the size where the memory is not enough, and
        whether that was so. It happens once: what is short a second time is not the micro batch."""
        halved = False
        while True:
            try:
                return self._gradients(batch), halved
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if self._halved:
                    raise out_of_memory(self._budget, max(map(len, batch.samples))) from error
            # Not while the error is handled: its traceback holds all that the pass had computed.
            self._budget, self._halved, halved = max(1, self._budget // 2), True, True
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _gradients(self, batch: FittedBatch) -> dict[str, float]:
        """The whole batch's gradient, from nothing, and the proof of it; the policy itself stays as it is."""
        policy, samples, scales = self._policy, batch.samples, Scales(max(1, batch.trained), max(1, batch.predicted))
        self._optimizer.zero_grad(set_to_none=True)
        micro_batches = pack(samples, self._budget, policy.device, packing=policy.packing)
        trained = [forward_backward(policy, m, self._loss, scales=scales) for m in micro_batches]
        recomputed = under_own_version(policy, samples, trained, self._history, budget=self._budget)
        metrics = batch.metrics | token_metrics(trained, len(samples), self.version)
        metrics |= prove(samples, recomputed, self._tolerance)
        return metrics | self._weigh(samples, recomputed)

    def _weigh(self, samples: Sequence[Sample], recomputed: Recomputed) -> dict[str, float]:
        """The measured part of the proof: all tokens together against the noise, and against other versions."""
        start = time.perf_counter()
        rivals = other_versions(self._policy, samples, recomputed, self._history, budget=self._budget)
        again = self._scores.of(samples, recomputed.tokens)
        finding = self._evidence.weigh(compared(samples, recomputed), again, recomputed.entropy.double().cpu(), rivals)
        if finding is not None:
            raise ProofError(str(finding))
        figures = {f"proof/{name}": figure for name, figure in self._evidence.figures.items()}
        return figures | {"time/other_versions": time.perf_counter() - start}

    def _update(self) -> dict[str, float]:
        limit = float("inf") if self._optim.max_norm is None else self._optim.max_norm
        norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters, limit, error_if_nonfinite=True)
        rate = self._rate(self.version)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._policy.stepped()
        self._history.add(self._policy.weights())
        self._scores.forget_before(self.versions[0])
        return {"optim/lr": rate, "optim/grad_norm": norm.item()}

    def _rate(self, step: int) -> float:
        return learning_rate(step, self._scheduler, peak=self._optim.lr, max_steps=self._max_steps)

    def save(self, folder: Path) -> None:
        """Write a checkpoint: policy, optimizer, random state, version. Complete or not there."""
        save_learner(folder, self._policy, LearnerState.now(self.version, self._optimizer, self._policy))

    def load(self, folder: Path) -> None:
        """Go on where `save` was called; only that version is kept then.

        Raises:
            UserError: No checkpoint, a damaged one, or one of another model. Nothing has changed then.
        """
        state = load_learner(folder, self._policy)
        state.restore(self._optimizer)
        self._history.restart(state.version, self._policy.weights())


def out_of_memory(budget: int, longest: int) -> RunStoppedError:
    """What to say when half the micro batch was still too much.

    Args:
        budget: Tokens of a micro batch.
        longest: Tokens of the step's longest sample.
    """
    return RunStoppedError(
        f"out of memory, also with micro batches of {budget} tokens, half of what the run began with",
        do=f"lower seq_len (the longest sample of this step has {longest} tokens), or free memory on the device",
    )


def learning_rate(step: int, scheduler: SchedulerSettings, *, peak: float, max_steps: int | None) -> float:
    """The rate of the optimizer step number `step` (from 0), in closed form: a resumed run needs nothing but its step.

    Equal to what Prime-RL's trainer builds from torch's schedulers (src/prime_rl/trainer/scheduler.py at commit
    559b44772); a min_lr of 0 starts and ends at 1e-8 of the peak in the linear parts. The run's config made sure that
    the scheduler's phases fit into `max_steps`.
    """
    if isinstance(scheduler, ConstantScheduler) or peak == 0:
        return peak
    low = scheduler.min_lr / peak if scheduler.min_lr > 0 else TINY
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
    since = step - (max_steps - scheduler.decay_steps)
    if since <= 0:
        return 1.0
    return 1 + (low - 1) * min(since / max(1, scheduler.decay_steps - 1), 1.0)
