"""Our advantages, loss and learning rates against Prime-RL's own code, imported from the submodule.

Its files need packages that only Prime-RL's environment has, mostly for annotations and type checks; empty stand-ins
for those are enough to import them.
"""

import asyncio
import importlib.util
import os
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from harbortrainer.engines.local.learner.advantage import TrialLength, group_advantages
from harbortrainer.engines.local.learner.loss import policy_loss
from harbortrainer.engines.local.learner.schedule import learning_rate
from harbortrainer.engines.local.learner.settings import (
    CosineScheduler,
    LengthPenalty,
    LinearScheduler,
    LossSettings,
)

SOURCE = Path(os.environ.get("HARBORTRAINER_PRIME_RL", Path(__file__).parents[2] / "prime-rl"))
PACKAGE = SOURCE / "src/prime_rl"

pytestmark = [
    pytest.mark.prime_rl,
    pytest.mark.skipif(not PACKAGE.exists(), reason="needs the populated submodule prime-rl"),
]


class Anything:
    """Stands for a type that is only named in annotations, or a base class that does nothing."""

    def __init__(self, *_args) -> None:
        pass

    def __class_getitem__(cls, _item):
        return cls


def identity(*args, **_kwargs):
    return args[0] if args else identity


def pairs(traces):
    return ((None, trace) for trace in traces)


def assign(trace, advantage):
    trace.advantage = advantage


def stand_in(name: str, **members) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(members)
    return module


@pytest.fixture
def prime_rl(monkeypatch):
    """Imports one file of Prime-RL."""
    configs = dict.fromkeys(
        ("CustomLossConfig", "DefaultLossConfig", "IPOLossConfig", "LossConfig", "SchedulerConfig"), Anything
    )
    for module in (
        stand_in("beartype", beartype=identity),
        stand_in("jaxtyping", Bool=Anything, Float=Anything, Int=Anything, jaxtyped=identity),
        stand_in("prime_rl"),
        stand_in("prime_rl.configs"),
        stand_in("prime_rl.configs.trainer", **configs),
        stand_in("prime_rl.utils"),
        stand_in("prime_rl.utils.utils", import_object=identity),
        stand_in("prime_rl.trainer"),
        stand_in("prime_rl.trainer.optim", OffloadOptimizer=Anything, OptimizerLike=Anything),
        stand_in("prime_rl.configs.algorithm", GRPOAlgoConfig=Anything),
        stand_in("prime_rl.orchestrator"),
        stand_in("prime_rl.orchestrator.algo"),
        stand_in("prime_rl.orchestrator.algo.base", Algorithm=Anything, iter_trainable_traces=pairs),
        stand_in("prime_rl.orchestrator.algo.routing", assign_advantages=assign),
    ):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def load(path: str):
        spec = importlib.util.spec_from_file_location("prime_rl_" + Path(path).stem, PACKAGE / path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("staleness", [0.0, 0.2, 2.0])
def test_loss_gradient_and_masks_are_prime_rls(prime_rl, staleness):
    theirs = prime_rl("trainer/rl/loss.py")
    settings = LossSettings(kl_tau=0.05, adv_tau=1.5, dppo_mask_low=0.1, dppo_mask_high=0.15)
    torch.manual_seed(0)
    sampled = torch.rand(400).clamp_min(1e-4).log()
    moved = (sampled + staleness * torch.randn(400)).clamp_max(-1e-4)
    advantages = torch.randn(400) * (torch.rand(400) > 0.1)
    mask = torch.rand(400) > 0.3
    ours_in, theirs_in = moved.clone().requires_grad_(), moved.clone().requires_grad_()

    ours = policy_loss(ours_in, sampled, advantages, mask, settings, scale=int(mask.sum()))
    inputs = theirs.LossInputs(theirs_in, sampled, None, advantages, mask)
    expected = theirs.default_loss_fn(inputs, settings)
    (expected.loss / mask.sum()).backward()
    ours.loss.backward()

    torch.testing.assert_close(ours.loss, expected.loss / mask.sum())
    torch.testing.assert_close(ours_in.grad, theirs_in.grad)
    assert (staleness == 2.0) <= bool(ours.masked.any())
    torch.testing.assert_close(ours.masked[mask].float().mean(), expected.metrics["is_masked"])
    if ours.masked.any():
        torch.testing.assert_close(ours.mismatch_kl[ours.masked].mean(), expected.metrics["masked_mismatch_kl"])


@pytest.mark.parametrize(
    "scheduler",
    [
        LinearScheduler(),
        LinearScheduler(warmup_steps=0, decay_steps=7, min_lr=1e-7),
        LinearScheduler(warmup_steps=5, decay_steps=0),
        CosineScheduler(warmup_steps=0, min_lr=1e-7),
        CosineScheduler(warmup_steps=4),
    ],
    ids=str,
)
def test_learning_rates_are_prime_rls(prime_rl, scheduler):
    peak, steps = 1e-6, 30
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    theirs = prime_rl("trainer/scheduler.py").setup_scheduler(
        optimizer, SimpleNamespace(**scheduler.model_dump()), steps, peak
    )
    for step in range(steps):
        ours = learning_rate(step, scheduler, peak=peak, max_steps=steps)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6, abs=peak * 1e-7)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("penalty", [None, LengthPenalty(), LengthPenalty(num_turns_weight=0.5)], ids=str)
def test_advantages_are_prime_rls(prime_rl, penalty):
    theirs = prime_rl("orchestrator/algo/grpo.py").GRPOAlgorithm(SimpleNamespace(length_penalty=penalty), None)
    generator = random.Random(0)
    lengths = [
        TrialLength(generator.randint(1, 99), generator.randint(1, 999), generator.randint(1, 9)) for _ in range(8)
    ]
    rewards = [generator.choice([0.0, 0.5, 1.0]) for _ in lengths]
    traces = [
        SimpleNamespace(
            reward=reward,
            num_output_tokens=length.output_tokens,
            num_total_tokens=length.output_tokens + length.input_tokens,
            num_turns=length.turns,
        )
        for reward, length in zip(rewards, lengths, strict=True)
    ]
    asyncio.run(theirs.score_group(traces))
    ours = group_advantages(rewards, penalty=penalty, lengths=lengths)
    assert ours == pytest.approx([trace.advantage for trace in traces], abs=1e-6)
