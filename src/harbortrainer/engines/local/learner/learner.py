"""The learner: one call, one optimizer step, one new policy version.

Version 0 is the base model with a fresh adapter, which changes nothing. `train` makes version n + 1 from
version n:

1. prune samples without an advantage, cut long ones, pack what is left into micro batches;
2. forward and backward of every micro batch with Prime-RL's loss, normalized by the trained tokens of all
of them; 3. prove that every trained token belongs to its log-probability, under the version that sampled
it. For tokens of
   version n the forward of 2 serves; each older version costs one more forward, over its own samples;
4. clip, step, and keep the new adapter.

The invariant: after an exception nothing has changed, neither weights nor optimizer nor version. The
learner owns its model; it starts no thread and sets no number of threads, so `train` may run in a worker
thread while a sampler runs.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harbortrainer.engines.local.learner import checkpoint
from harbortrainer.engines.local.learner.advantage import prune
from harbortrainer.engines.local.learner.batch import Batch, MicroBatch, fit, pack
from harbortrainer.engines.local.learner.loss import policy_loss
from harbortrainer.engines.local.learner.metrics import Seen, token_metrics
from harbortrainer.engines.local.learner.policy import Adapter, Policy, load_base
from harbortrainer.engines.local.learner.proof import (
    TOLERANCES,
    ProofError,
    Recomputed,
    Tolerance,
    prove,
)
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
        device: "cpu" or "cuda".
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
        self._optim, self._loss, self._lora = optim, loss, lora
        self._scheduler, self._max_steps = scheduler or ConstantScheduler(), max_steps
        self._seq_len, self._keep = seq_len, keep_versions
        self._budget = micro_batch_tokens or (2048 if device == "cpu" else 16384)
        self.version = 0
        self._rate()
        torch_dtype = _dtype(dtype, device)
        self._tolerance = tolerance or TOLERANCES[torch_dtype]
        base = load_base(model, torch_dtype)
        self._policy = Policy(base, lora, device=torch.device(device), seed=seed, name=str(model))
        self._optimizer = torch.optim.AdamW(
            self._policy.parameters,
            lr=optim.lr,
            betas=(optim.betas1, optim.betas2),
            weight_decay=optim.weight_decay,
        )
        self._history: dict[int, Adapter] = {0: self._policy.adapter()}

    @property
    def versions(self) -> list[int]:
        """The policy versions whose adapters are kept, oldest first; the last is the current one."""
        return list(self._history)

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
        """
        start = time.perf_counter()
        kept = prune(samples)
        batch = fit(kept, self._seq_len)
        if not batch.samples:
            raise ValueError("nothing to train on: no sample has an advantage and a token within seq_len")
        metrics = self._step(batch)
        seconds = time.perf_counter() - start
        return metrics | {
            "samples/trained": float(len(batch.samples)),
            "samples/pruned": float(len(samples) - len(kept)),
            "samples/truncated": float(batch.cut_samples),
            "tokens/truncated": float(batch.cut_tokens),
            "time/forward_backward": seconds,
            "perf/throughput": metrics["tokens/total"] / seconds,
        }

    def _step(self, batch: Batch) -> dict[str, float]:
        micro_batches = pack(batch.samples, self._budget, self._policy.device)
        self._optimizer.zero_grad(set_to_none=True)
        try:
            seen = [self._forward_backward(m, batch.trained) for m in micro_batches]
            proof = prove(batch.samples, self._recompute(batch, seen), self._tolerance)
        except BaseException:
            self._optimizer.zero_grad(set_to_none=True)
            raise
        metrics = token_metrics(seen, len(batch.samples), self.version) | proof
        metrics["tokens/trained"] = float(batch.trained)
        metrics["tokens/total"] = float(sum(len(s) for s in batch.samples))
        return metrics | self._update()

    def _forward_backward(self, micro_batch: MicroBatch, scale: int) -> Seen:
        tokens = micro_batch.tokens
        logprobs, entropy = self._policy.logprobs(micro_batch, training=True)
        every = torch.ones_like(logprobs, dtype=torch.bool)
        result = policy_loss(logprobs, tokens.sampled_logprob, tokens.advantage, every, self._loss, scale=scale)
        result.loss.backward()
        return Seen(
            tokens=tokens,
            logprobs=logprobs.detach(),
            entropy=entropy,
            mismatch_kl=result.mismatch_kl,
            masked=result.masked,
            loss=result.loss.detach(),
        )

    def _recompute(self, batch: Batch, seen: Sequence[Seen]) -> list[Recomputed]:
        """Every token's log-probability under the version that sampled it."""
        versions = {v for s in batch.samples for v, m in zip(s.versions, s.mask, strict=True) if m}
        again = versions if self._lora.dropout > 0 else versions - {self.version}
        parts = [
            Recomputed(s.tokens.where(s.tokens.version == self.version), s.logprobs[s.tokens.version == self.version])
            for s in seen
            if self.version not in again
        ]
        try:
            for version in sorted(again):
                parts += self._under(version, batch)
        finally:
            if again:
                self._policy.set_adapter(self._history[self.version])
        return parts

    def _under(self, version: int, batch: Batch) -> list[Recomputed]:
        if version not in self._history:
            raise ProofError(
                f"a token was sampled under policy version {version}, which is not kept any more "
                f"(kept: {self.versions}); the staleness bound must keep such samples out"
            )
        self._policy.set_adapter(self._history[version])
        micro_batches = pack(batch.samples, self._budget, self._policy.device, version=version)
        return [Recomputed(m.tokens, self._policy.logprobs(m, training=False)[0]) for m in micro_batches]

    def _update(self) -> dict[str, float]:
        limit = self._optim.max_norm
        norm = torch.nn.utils.clip_grad_norm_(
            self._policy.parameters, float("inf") if limit is None else limit, error_if_nonfinite=True
        )
        rate = self._rate()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._remember(self.version + 1)
        return {"optim/lr": rate, "optim/grad_norm": norm.item()}

    def _remember(self, version: int) -> None:
        self.version = version
        self._history[version] = self._policy.adapter()
        while len(self._history) > self._keep:
            del self._history[next(iter(self._history))]

    def _rate(self) -> float:
        return learning_rate(self.version, self._scheduler, peak=self._optim.lr, max_steps=self._max_steps)

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
            UserError: No checkpoint, a damaged one, or one of another model.
        """
        adapter, state = checkpoint.load(folder)
        checkpoint.put(self._policy, adapter, folder)
        self._optimizer.load_state_dict(state.optimizer)
        checkpoint.set_random_state(state.rng)
        self._history.clear()
        self._remember(state.version)


def _dtype(name: str | None, device: str) -> torch.dtype:
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return names[name or ("float32" if device == "cpu" else "bfloat16")]
