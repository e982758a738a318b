"""The warm-up measures its policy in real trials: real sampler, real sandbox, an untrained model."""

import pytest
from tiny_model import build_tiny_model

from harbortrainer.config.run_sections import WarmupConfig
from harbortrainer.warmup.sampled_trials import measure_rewards
from make_tasks import variants

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("agent", ["plain", "harbortrainer.trials.agent:TrainableTerminus2"])
def test_untrained_policy_is_graded_in_real_trials(tmp_path, agent):
    table = {"tasks": "tasks", "model": "model", "agent": agent, "environment_kwargs": {"image": "host"}}
    rewards = measure_rewards(
        build_tiny_model(tmp_path / "model"),
        lambda folder: [variant.write(folder) for variant in variants()[:2]],
        WarmupConfig.model_validate(table),
        seed=1,
        max_turns=3,
        max_length=512,
        answer_length=16,
    )
    assert rewards == [0.0, 0.0]
