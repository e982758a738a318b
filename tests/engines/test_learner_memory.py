"""Out of memory in a step: the step restarts once with smaller micro batches and has the same result."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from plain_sampler import PlainSampler
from tiny_model import build_tiny_model
from torch import nn

from harbortrainer.config.trainer_table import DefaultLoss, LoraSettings, OptimSettings
from harbortrainer.engines.local.learner.learner import Learner
from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.engines.local.rollouts.advantage import group_advantages
from harbortrainer.engines.local.step_metrics import headline
from harbortrainer.engines.memory_parts import is_out_of_memory
from harbortrainer.errors import RunStoppedError

BUDGET = 60
TIMINGS = ("time/", "perf/")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("tiny"), hidden=32, layers=2)


def make(model, budget: int = BUDGET) -> Learner:
    lora = LoraSettings(rank=4, alpha=8)
    return Learner(model, lora, OptimSettings(lr=1e-2), DefaultLoss(), micro_batch_tokens=budget)


def batch(model, learner: Learner) -> list[Sample]:
    """Return three groups of the learner's newest version, each with its own prompt."""
    sampler = PlainSampler(model, learner.adapter_config)
    sampler.load(learner.weights(), learner.version)
    found = []
    for prompt in ([5, 6, 7, 8], [9] * 12, list(range(20, 27))):
        answers = sampler.sample(prompt, 4, 12)
        advantages = group_advantages([float(sum(a.token_ids) % 7) for a in answers])
        found += [replace(a, advantage=advantage) for a, advantage in zip(answers, advantages, strict=True)]
    return found


def decoder_of(learner: Learner) -> nn.Module:
    decoder = learner._policy.model.get_submodule("base_model.model.model")
    assert next(decoder.children(), None) is not None
    return decoder


def simulate_out_of_memory(learner: Learner, when: Callable[[int, int], bool]) -> list[int]:
    """Let forward passes of the learner's base run out of memory.

    Args:
        when: Called with the number of a pass, from 1, and its tokens; returns whether the pass fails.

    Returns:
        The tokens of each pass, appended as the passes run.
    """
    passes: list[int] = []

    def fail(module, args, kwargs):
        passes.append(kwargs["input_ids"].shape[1])
        if when(len(passes), passes[-1]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    decoder_of(learner).register_forward_pre_hook(fail, with_kwargs=True)
    return passes


def without_timings(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith((*TIMINGS, "memory/halved"))}


def same_weights(first: Learner, second: Learner) -> bool:
    return all(torch.equal(weights, second.weights()[name]) for name, weights in first.weights().items())


@pytest.mark.parametrize("which", [1, 2, 3])
def test_out_of_memory_step_equals_step_with_halved_micro_batch(model, which):
    short, half = make(model), make(model, BUDGET // 2)
    samples = batch(model, short)
    passes = simulate_out_of_memory(short, lambda number, _: number == which)
    metrics, expected = short.train(samples), half.train(samples)
    assert max(passes[:which]) > BUDGET // 2 >= max(passes[which:])
    assert (metrics["memory/halved"], expected["memory/halved"]) == (1.0, 0.0)
    assert without_timings(metrics) == without_timings(expected)
    assert same_weights(short, half)
    samples = batch(model, short)
    metrics, expected = short.train(samples), half.train(samples)
    assert (metrics["memory/halved"], metrics["memory/micro_batch_tokens"]) == (0.0, BUDGET // 2)
    assert without_timings(metrics) == without_timings(expected)
    assert same_weights(short, half)


def test_check_passes_may_run_out_of_memory(model):
    """With samples of an older version, half of the passes check log-probabilities under that version's adapter."""
    short, half = make(model), make(model, BUDGET // 2)
    samples = batch(model, short)
    short.train(samples)
    half.train(samples)
    failed: list[int] = []

    def in_first_check_pass(number: int, tokens: int) -> bool:
        if torch.is_grad_enabled() or failed:
            return False
        failed.append(number)
        return True

    simulate_out_of_memory(short, in_first_check_pass)
    metrics, expected = short.train(samples), half.train(samples)
    assert failed
    assert metrics["memory/halved"] == 1.0
    assert metrics["staleness/mean"] == 1.0
    # Approximate: the first steps of the two learners had different micro batches.
    assert without_timings(metrics) == pytest.approx(without_timings(expected), rel=1e-3, abs=1e-5)
    for name, weights in short.weights().items():
        torch.testing.assert_close(weights, half.weights()[name], atol=1e-4, rtol=1e-3)


def test_second_out_of_memory_stops_run(model):
    learner = make(model)
    samples = batch(model, learner)
    simulate_out_of_memory(learner, lambda _, tokens: tokens > 20)
    before = {name: weights.clone() for name, weights in learner.weights().items()}
    with pytest.raises(RunStoppedError, match=r"of 30 tokens.*lower seq_len \(.* has 24 tokens\)") as error:
        learner.train(samples)
    assert "\n" not in str(error.value)
    assert learner.version == 0
    assert all(torch.equal(learner.weights()[name], weights) for name, weights in before.items())
    assert all(parameter.grad is None for parameter in learner._policy.parameters)


def test_out_of_memory_in_later_step_stops_run(model):
    learner = make(model)
    samples = batch(model, learner)
    simulate_out_of_memory(learner, lambda number, _: number == 1)
    learner.train(samples)
    simulate_out_of_memory(learner, lambda number, _: number == 2)
    with pytest.raises(RunStoppedError, match="out of memory"):
        learner.train(samples)
    assert learner.version == 1


def test_other_error_is_not_out_of_memory(model):
    learner = make(model)
    samples = batch(model, learner)

    def fail(*_):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    decoder_of(learner).register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="mat1"):
        learner.train(samples)


def test_recognizes_cpu_out_of_memory():
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**58, dtype=torch.uint8)
    assert is_out_of_memory(error.value)


def test_headline_reports_out_of_memory():
    metrics = {"progress/rollouts": 8.0, "progress/trained": 8.0, "time/step": 3.0, "time/wait_for_rollouts": 1.0}
    line = headline(3, 10, metrics | {"memory/halved": 1.0, "memory/micro_batch_tokens": 1024.0})
    assert line.endswith("out of memory: restarted the step with micro batches of 1024 tokens")
    assert headline(3, 10, metrics | {"memory/halved": 0.0}).endswith("s (waited 1.0)")
