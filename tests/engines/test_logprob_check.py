"""The log-probability check stops a run whose tokens and log-probabilities do not match, and names the token."""

from dataclasses import replace

import pytest
import torch
from plain_sampler import PlainSampler
from tiny_model import build_tiny_model

from harbortrainer.config.trainer_table import DefaultLoss, LoraSettings, OptimSettings
from harbortrainer.engines.local.learner.learner import Learner
from harbortrainer.engines.local.learner.logprob_check import TOLERANCES
from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.errors import ProofError

PROMPT = [9, 10, 11]
LENGTH = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("tiny"), hidden=32, layers=2)


@pytest.fixture
def learner(model) -> Learner:
    return Learner(model, LoraSettings(rank=4), OptimSettings(lr=0.1), DefaultLoss())


@pytest.fixture
def samples(model, learner) -> list[Sample]:
    answers = PlainSampler(model, learner.adapter_config).sample(PROMPT, 4, LENGTH)
    return [replace(s, advantage=(-1.0) ** i) for i, s in enumerate(answers)]


def check_error(learner: Learner, samples: list[Sample]) -> str:
    """Train on samples that the check must refuse; return its message. The learner must not change."""
    version, weights = learner.version, {n: w.clone() for n, w in learner.weights().items()}
    with pytest.raises(ProofError) as error:
        learner.train(samples)
    assert learner.version == version
    assert all(torch.equal(learner.weights()[n], w) for n, w in weights.items())
    return str(error.value)


def changed(sample: Sample, name: str, at: int, value) -> Sample:
    values = list(getattr(sample, name))
    values[at] = value
    return replace(sample, **{name: values})


def test_sampled_tokens_pass(learner, samples):
    assert learner.train(samples)["proof/logprob_diff/max"] < 1e-4


def test_finds_changed_logprob(learner, samples):
    wrong = samples[2].logprobs[7] - 0.05
    message = check_error(learner, [*samples[:2], changed(samples[2], "logprobs", 7, wrong), samples[3]])
    assert message.startswith(
        f"task demo, trial demo__2: token 7 (id {samples[2].token_ids[7]}) was sampled under policy version 0 "
        f"with log-probability {wrong:.4f}, but that version gives {samples[2].logprobs[7]:.4f}"
    )
    assert "Likely causes" in message


def test_finds_changed_token(learner, samples):
    token = (samples[1].token_ids[5] + 1) % 300
    assert "trial demo__1" in check_error(learner, [samples[0], changed(samples[1], "token_ids", 5, token)])


def test_recognizes_shifted_logprobs(learner, samples):
    shifted = [*samples[0].logprobs[:3], *samples[0].logprobs[4:], -1.0]
    assert "shifted by one" in check_error(learner, [replace(samples[0], logprobs=shifted)])


def test_finds_changed_prompt(learner, samples):
    assert "trial demo__0" in check_error(learner, [changed(samples[0], "token_ids", 1, 200)])


def test_finds_changed_temperature(learner, samples):
    assert "temperature other than 0.8" in check_error(learner, [replace(samples[0], temperature=0.8)])


def test_finds_wrong_version(learner, samples):
    learner.train(samples)
    wrong_version = replace(samples[0], versions=[1] * len(samples[0]))
    assert "under policy version 1" in check_error(learner, [wrong_version])
    assert learner.train(samples)["staleness/max"] == 1


def test_error_names_evicted_version(learner, samples):
    message = check_error(learner, [replace(samples[0], versions=[7] * len(samples[0]))])
    assert "policy version 7" in message
    assert "kept: [0]" in message


def test_bfloat16_tolerates_outlier_but_not_shift(model, samples):
    learner = Learner(model, LoraSettings(rank=4), OptimSettings(), DefaultLoss(), dtype="bfloat16")
    noisy = changed(samples[0], "logprobs", 5, samples[0].logprobs[5] - 0.5)
    learner.train([noisy, *samples[1:]])
    learner = Learner(model, LoraSettings(rank=4), OptimSettings(), DefaultLoss(), dtype="bfloat16")
    shifted = [*samples[0].logprobs[:3], *samples[0].logprobs[4:], -1.0]
    check_error(learner, [replace(samples[0], logprobs=shifted)])


def test_float32_tolerance_is_1e_3():
    assert TOLERANCES[torch.float32].worst == 1e-3
