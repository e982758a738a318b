"""Our advantages, loss and learning rates equal those computed by Prime-RL's code, imported from the submodule.

Prime-RL's files need packages that only its environment has, mostly for annotations and type checks. Empty stub
modules are enough to import them.
"""

import asyncio
import importlib.util
import logging
import os
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tiny_model import build_tiny_model
from transformers import AutoModelForCausalLM
from verifiers.v1.trace import WireTrace

from harbortrainer.config.algorithm_config import EchoRoles, LengthPenalty
from harbortrainer.config.trainer_table import (
    CosineScheduler,
    DefaultLoss,
    IpoLoss,
    LinearScheduler,
    LoraSettings,
)
from harbortrainer.engines.local.learner.learner import learning_rate
from harbortrainer.engines.local.learner.loss import Scales, forward_backward, policy_loss, token_metrics
from harbortrainer.engines.local.learner.micro_batch import pack, truncate_samples
from harbortrainer.engines.local.learner.policies import LoraPolicy
from harbortrainer.engines.local.learner.training_sample import Sample, predicted_tokens
from harbortrainer.engines.local.rollouts.advantage import TrialLength, group_advantages
from harbortrainer.engines.local.rollouts.trace_samples import trace_samples

SOURCE = Path(os.environ.get("HARBORTRAINER_PRIME_RL", Path(__file__).parents[2] / "prime-rl"))
PACKAGE = SOURCE / "src/prime_rl"

pytestmark = [
    pytest.mark.prime_rl,
    pytest.mark.skipif(not PACKAGE.exists(), reason="needs the populated submodule prime-rl"),
]


class StubType:
    """A stub for a type used only in annotations, or for an empty base class."""

    def __init__(self, *_args) -> None:
        pass

    def __class_getitem__(cls, _item):
        return cls


def identity(*args, **_kwargs):
    return args[0] if args else identity


def trace_pairs(traces):
    return ((None, trace) for trace in traces)


def assign_advantage(trace, advantage):
    trace.advantage = advantage


def stub_module(name: str, **members) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(members)
    return module


@pytest.fixture
def prime_rl(monkeypatch):
    """Return a function that imports one file of Prime-RL."""
    configs = dict.fromkeys(
        ("CustomLossConfig", "DefaultLossConfig", "IPOLossConfig", "LossConfig", "SchedulerConfig"), StubType
    )
    for module in (
        stub_module("beartype", beartype=identity),
        stub_module("jaxtyping", Bool=StubType, Float=StubType, Int=StubType, jaxtyped=identity),
        stub_module("prime_rl"),
        stub_module("prime_rl.configs"),
        stub_module("prime_rl.configs.trainer", **configs),
        stub_module("prime_rl.utils"),
        stub_module("prime_rl.utils.utils", import_object=identity),
        stub_module("prime_rl.trainer"),
        stub_module("prime_rl.trainer.optim", OffloadOptimizer=StubType, OptimizerLike=StubType),
        stub_module("prime_rl.configs.algorithm", GRPOAlgoConfig=StubType, EchoAlgoConfig=StubType),
        stub_module("prime_rl.utils.logger", get_logger=logging.getLogger),
        stub_module("prime_rl.transports"),
        stub_module("prime_rl.transports.rollouts", TrainingSample=SimpleNamespace),
        stub_module("prime_rl.transports.rollouts.types", EncodedTensor=StubType, RoutedExperts=StubType),
        stub_module("prime_rl.orchestrator"),
        stub_module("prime_rl.orchestrator.algo"),
        stub_module("prime_rl.orchestrator.algo.base", Algorithm=StubType, iter_trainable_traces=trace_pairs),
        stub_module("prime_rl.orchestrator.algo.routing", assign_advantages=assign_advantage),
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
def test_loss_gradient_and_masks_match_prime_rl(prime_rl, staleness):
    theirs = prime_rl("trainer/rl/loss.py")
    settings = DefaultLoss(kl_tau=0.05, adv_tau=1.5, dppo_mask_low=0.1, dppo_mask_high=0.15)
    torch.manual_seed(0)
    sampled = torch.rand(400).clamp_min(1e-4).log()
    moved = (sampled + staleness * torch.randn(400)).clamp_max(-1e-4)
    advantages = torch.randn(400) * (torch.rand(400) > 0.1)
    mask = torch.rand(400) > 0.3
    our_logprobs, their_logprobs = moved.clone().requires_grad_(), moved.clone().requires_grad_()

    ours = policy_loss(our_logprobs, sampled, advantages, mask, settings, scale=int(mask.sum()))
    inputs = theirs.LossInputs(their_logprobs, sampled, None, advantages, mask)
    expected = theirs.default_loss_fn(inputs, settings)
    (expected.loss / mask.sum()).backward()
    ours.loss.backward()

    torch.testing.assert_close(ours.loss, expected.loss / mask.sum())
    torch.testing.assert_close(our_logprobs.grad, their_logprobs.grad)
    masked = ours.flags["is_masked"]
    assert (staleness == 2.0) <= bool(masked.any())
    for name in ("is_masked", "is_masked_high", "is_masked_low"):
        torch.testing.assert_close(ours.flags[name][mask].float().mean(), expected.metrics[name])
    if masked.any():
        torch.testing.assert_close(ours.mismatch_kl[masked].mean(), expected.metrics["masked_mismatch_kl"])


@pytest.mark.parametrize("kl_tau", [0.0, 0.05])
def test_ipo_with_token_weights_matches_prime_rl(prime_rl, kl_tau):
    theirs = prime_rl("trainer/rl/loss.py")
    settings = IpoLoss(eps=0.1, adv_tau=1.5, kl_tau=kl_tau)
    torch.manual_seed(0)
    sampled = torch.rand(400).clamp_min(1e-2).log()
    moved = (sampled + torch.randn(400)).clamp_max(-1e-4)
    advantages, weights, mask = torch.randn(400), torch.rand(400), torch.rand(400) > 0.3
    our_logprobs, their_logprobs = moved.clone().requires_grad_(), moved.clone().requires_grad_()
    scale = (weights * mask).sum().item()

    ours = policy_loss(our_logprobs, sampled, advantages, mask, settings, scale=scale, weights=weights)
    inputs = theirs.LossInputs(their_logprobs, sampled, None, advantages, mask, weights)
    expected = theirs.ipo_loss_fn(inputs, SimpleNamespace(ipo_threshold=0.1, adv_tau=1.5, kl_tau=kl_tau))
    (expected.loss / scale).backward()
    ours.loss.backward()

    torch.testing.assert_close(ours.loss, expected.loss / scale)
    torch.testing.assert_close(our_logprobs.grad, their_logprobs.grad)
    torch.testing.assert_close(ours.flags["is_masked"][mask].float().mean(), expected.metrics["is_masked"])
    assert 0.1 < expected.metrics["is_masked"] < 0.9


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
def test_learning_rates_match_prime_rl(prime_rl, scheduler):
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
def test_advantages_match_prime_rl(prime_rl, penalty):
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


def test_max_rl_advantages_match_prime_rl(prime_rl):
    theirs = prime_rl("orchestrator/algo/max_rl.py").MaxRLAlgorithm(None, None)
    generator = random.Random(0)
    for _ in range(50):
        traces = [SimpleNamespace(reward=generator.choice([0.0, 0.0, 0.5, 1.0])) for _ in range(4)]
        asyncio.run(theirs.score_group(traces))
        ours = group_advantages([trace.reward for trace in traces], normalized=True)
        assert ours == pytest.approx([trace.advantage for trace in traces], abs=1e-5)


def random_trace(rng: random.Random) -> WireTrace:
    """Return a random message graph: all roles, branches, content masks that may be missing, rewritten answers."""
    nodes: list[dict] = []
    for index in range(rng.randint(2, 14)):
        parent = rng.randrange(max(0, index - 2), index) if index else None
        role = rng.choice(["system", "user", "assistant", "assistant", "tool"])
        sampled, length = role == "assistant" and rng.random() < 0.8, rng.randint(0, 4)
        message = {"role": role, "content": str(index)} | ({"tool_call_id": "c"} if role == "tool" else {})
        mask = [sampled and position > 0 for position in range(length)]
        is_content = [rng.random() < 0.6 for _ in range(length)] if rng.random() < 0.7 else []
        tokens = [rng.randint(1, 99) for _ in range(length)]
        node = {"parent": parent, "message": message, "sampled": sampled, "token_ids": tokens, "mask": mask}
        nodes.append(node | {"is_content": is_content, "logprobs": [-0.5] * sum(mask)})
    agent = {"config": {}, "trainable": True}
    return WireTrace.model_validate({"id": "t", "task": {"type": "T", "data": {}}, "agent": agent, "nodes": nodes})


@pytest.mark.parametrize(
    "weights", [{"user": 0.1}, {"user": 0.1, "tool": 0.3, "assistant": 0.7, "system": 1.0}], ids=str
)
def test_echo_predicted_tokens_match_prime_rl(prime_rl, monkeypatch, weights):
    trajectories = prime_rl("orchestrator/trajectories.py")
    monkeypatch.setitem(sys.modules, "prime_rl.orchestrator.trajectories", trajectories)
    monkeypatch.setitem(sys.modules, "prime_rl.orchestrator.algo.grpo", prime_rl("orchestrator/algo/grpo.py"))
    roles = EchoRoles.model_validate({role: {"alpha": alpha} for role, alpha in weights.items()})
    config = SimpleNamespace(roles=roles, filter=None, length_penalty=None)
    theirs = prime_rl("orchestrator/algo/echo.py").EchoAlgorithm(config, None)
    rng, predicted = random.Random(0), 0
    for _ in range(300):
        trace = random_trace(rng)
        ours = trace_samples(trace, {}, 1.0, roles.weights, task="", trial="")
        theirs._weight_observations(trace)
        expected = trajectories.trace_to_samples(trace) if trace.num_branches else []
        assert [s.token_ids for s in ours] == [s.token_ids for s in expected]
        assert [list(s.mask) for s in ours] == [s.mask for s in expected]
        assert [s.ce_weights for s in ours] == [s.ce_weights for s in expected]
        predicted += predicted_tokens(ours)
    assert predicted > 200


def test_echo_loss_and_gradient_match_prime_rl(prime_rl, tmp_path):
    """Compare two samples of one step: with and without an advantage, both with predicted tokens."""
    torch.manual_seed(0)
    settings = DefaultLoss(kl_tau=0.05, dppo_mask_low=0.01, dppo_mask_high=0.01)
    length, ce_weights = 12, [0.0, 0.0, 0.0, 0.3, 0.3, 0.0, 0.0, 0.7, 0.0, 0.0, 0.3, 0.0]
    mask = [t in (2, 5, 6, 9, 11) for t in range(length)]
    samples = [
        Sample(
            torch.randint(3, 300, (length,)).tolist(),
            mask,
            [-5.0 * m for m in mask],
            [0] * length,
            0.8,
            advantage,
            ce_weights,
        )
        for advantage in (0.6, 0.0)
    ]
    base = AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path, hidden=32, layers=1))
    policy = LoraPolicy(base, LoraSettings(rank=2, target_modules=["q_proj"]), device=torch.device("cpu"), seed=0)
    policy.set_weights({name: torch.full_like(weight, 0.05) for name, weight in policy.weights().items()})
    batch = truncate_samples(samples, 100)
    scales = Scales(batch.trained, batch.predicted)
    micro_batches = pack(batch.samples, 12, torch.device("cpu"))
    results = [forward_backward(policy, m, settings, scales=scales) for m in micro_batches]
    our_grads = [weight.grad.clone() for weight in policy.parameters if weight.grad is not None]
    for weight in policy.parameters:
        weight.grad = None
    theirs = prime_rl("trainer/rl/loss.py")
    their_logprobs = []
    for sample in samples:
        logits = policy.model(input_ids=torch.tensor([sample.token_ids])).logits[0, :-1] / sample.temperature
        ids = torch.tensor(sample.token_ids[1:])
        their_logprobs.append(torch.cat([torch.zeros(1), logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]]))
    masks = [torch.tensor(s.mask) for s in samples]
    policy_masks = [m.float() * (s.advantage != 0) for m, s in zip(masks, samples, strict=True)]
    loss, metrics = theirs.compute_loss(
        their_logprobs,
        [torch.tensor(s.logprobs) for s in samples],
        None,
        [torch.full((length,), s.advantage) for s in samples],
        masks,
        policy_masks,
        [torch.tensor(ce_weights)] * 2,
        None,
        lambda inputs: theirs.default_loss_fn(inputs, settings),
        int(sum(p.sum() for p in policy_masks)),
        2 * sum(map(bool, ce_weights)),
        1,
    )
    loss.backward()
    torch.testing.assert_close(sum(output.result.loss for output in results), loss.detach())
    for grad, weight in zip(our_grads, policy.parameters, strict=True):
        torch.testing.assert_close(grad, weight.grad)
    our_metrics = token_metrics(results, len(batch.samples), 0)
    assert our_metrics["nll/mean"] == pytest.approx(metrics["nll"].mean().item(), rel=1e-5)
    for name in ("is_masked", "unmasked_mismatch_kl", "masked_mismatch_kl"):
        assert our_metrics[f"{name}/mean"] == pytest.approx(metrics[name].mean().item(), rel=1e-4)
