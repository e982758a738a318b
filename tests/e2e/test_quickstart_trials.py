"""The quickstart's warm-up measures its policy in real trials: real sampler, real sandbox, an untrained model."""

import pytest
from tiny_model import build_tiny_model

from make_tasks import variants
from tiny_policy.real_trials import measure_rewards

pytestmark = pytest.mark.e2e


def test_untrained_policy_is_graded_in_real_trials(tmp_path):
    tasks = variants()[:2]
    rewards, failure = measure_rewards(
        build_tiny_model(tmp_path / "model"),
        tasks,
        seed=1,
        environment_type="local",
        environment_kwargs={"image": "host"},
    )
    assert failure == ""
    assert rewards == [0.0, 0.0]
