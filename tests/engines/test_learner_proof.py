"""The proof stops a run when tokens and log-probabilities do not belong together, and says what and where."""

from dataclasses import replace

import pytest
import torch
from plain_sampler import PlainSampler
from tiny_model import build_tiny_model

from harbortrainer.config.trainer_table import LoraSettings, LossSettings, OptimSettings
from harbortrainer.engines.local.learner.learner import Learner
from harbortrainer.engines.local.learner.proof import TOLERANCES
from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.engines.local.sampler.ledger import Completion, match_completions
from harbortrainer.errors import ProofError

PROMPT = [9, 10, 11]
LENGTH = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("tiny"), hidden=32, layers=2)


@pytest.fixture
def learner(model) -> Learner:
    return Learner(model, LoraSettings(rank=4), OptimSettings(lr=0.1), LossSettings())


@pytest.fixture
def samples(model, learner) -> list[Sample]:
    answers = PlainSampler(model, learner.adapter_config).answers(PROMPT, 4, LENGTH)
    return [replace(s, advantage=(-1.0) ** i) for i, s in enumerate(answers)]


def refusal(learner: Learner, samples: list[Sample]) -> str:
    before = learner.version, {n: w.clone() for n, w in learner.weights().items()}
    with pytest.raises(ProofError) as error:
        learner.train(samples)
    assert learner.version == before[0]
    assert all(torch.equal(learner.weights()[n], w) for n, w in before[1].items())
    return str(error.value)


def changed(sample: Sample, name: str, at: int, value) -> Sample:
    values = list(getattr(sample, name))
    values[at] = value
    return replace(sample, **{name: values})


def test_what_was_sampled_passes(learner, samples):
    assert learner.train(samples)["proof/logprob_diff/max"] < 1e-4


def test_one_changed_log_probability_is_found_and_named(learner, samples):
    said = samples[2].logprobs[7] - 0.05
    message = refusal(learner, [*samples[:2], changed(samples[2], "logprobs", 7, said), samples[3]])
    assert message.startswith(
        f"task demo, trial demo__2: token 7 (id {samples[2].token_ids[7]}) was sampled under policy version 0 "
        f"with log-probability {said:.4f}, but that version gives {samples[2].logprobs[7]:.4f}"
    )
    assert "Likely causes" in message


def test_one_changed_token_is_found(learner, samples):
    other = (samples[1].token_ids[5] + 1) % 300
    assert "trial demo__1" in refusal(learner, [samples[0], changed(samples[1], "token_ids", 5, other)])


def test_shifted_log_probabilities_are_recognized(learner, samples):
    shifted = [*samples[0].logprobs[:3], *samples[0].logprobs[4:], -1.0]
    assert "shifted by one" in refusal(learner, [replace(samples[0], logprobs=shifted)])


def test_another_prompt_is_found(learner, samples):
    assert "trial demo__0" in refusal(learner, [changed(samples[0], "token_ids", 1, 200)])


def test_another_temperature_is_found(learner, samples):
    assert "temperature other than 0.8" in refusal(learner, [replace(samples[0], temperature=0.8)])


def test_a_wrong_version_is_found(learner, samples):
    learner.train(samples)
    claims_to_be_new = replace(samples[0], versions=[1] * len(samples[0]))
    assert "under policy version 1" in refusal(learner, [claims_to_be_new])
    assert learner.train(samples)["staleness/max"] == 1


def test_a_version_that_is_gone_is_named(learner, samples):
    message = refusal(learner, [replace(samples[0], versions=[7] * len(samples[0]))])
    assert "policy version 7" in message
    assert "kept: [0]" in message


def test_bfloat16_forgives_noise_on_a_token_but_not_a_shift(model, samples):
    learner = Learner(model, LoraSettings(rank=4), OptimSettings(), LossSettings(), dtype="bfloat16")
    noisy = changed(samples[0], "logprobs", 5, samples[0].logprobs[5] - 0.5)
    learner.train([noisy, *samples[1:]])
    learner = Learner(model, LoraSettings(rank=4), OptimSettings(), LossSettings(), dtype="bfloat16")
    shifted = [*samples[0].logprobs[:3], *samples[0].logprobs[4:], -1.0]
    refusal(learner, [replace(samples[0], logprobs=shifted)])


def test_float32_allows_a_thousandth():
    assert TOLERANCES[torch.float32].worst == 1e-3


LEDGER = [
    Completion("s", "1", 4, (1, 2), (-0.5, -0.25), version=0),
    Completion("s", "2", 4, (3,), (-1.0,), version=0),
    Completion("s", "3", 4, (1, 2), (-0.75, -0.125), version=1),
]


def test_each_turn_finds_its_completion_also_among_equal_answers():
    turns = [([1, 2], [-0.75, -0.125]), ([1, 2], [-0.5, -0.25])]
    assert [c.version for c in match_completions(turns, LEDGER)] == [1, 0]


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([([1, 3], [-0.5, -0.25])], "tokens of sampled turn 0"),
        ([([1], [-0.5])], "tokens of sampled turn 0"),
        ([([3], [-1.0]), ([3], [-1.0])], "tokens of sampled turn 1"),
        ([([3], [-1.1])], "log-probabilities of sampled turn 0"),
    ],
)
def test_a_turn_that_the_engine_did_not_sample_is_refused(turns, message):
    with pytest.raises(ProofError, match=f"task a, trial b: the {message}"):
        match_completions(turns, LEDGER, where="task a, trial b")
