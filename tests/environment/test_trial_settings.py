"""Keys of the plugin reach the trial."""

from pathlib import Path
from types import SimpleNamespace

from harbortrainer.environment.harness import HarborHarness
from harbortrainer.environment.plugin_config import HarborHarnessConfig
from harbortrainer.environment.taskset import HarborTaskData

KEYS = {
    "environment_type": "docker",
    "environment_kwargs": {"network": "none"},
    "timeout_multiplier": 2.5,
    "reward_bound": 7.0,
    "reward_key": "score",
    "leftovers": "kill",
    "keep_trials": "none",
    "keep_trials_mb": 11,
    "max_turns": 5,
}


def test_keys_reach_the_trial():
    harness = HarborHarness.__new__(HarborHarness)
    harness.config = HarborHarnessConfig.model_validate({"id": "harbor_env", **KEYS})
    ctx = SimpleNamespace(model="m", sampling=SimpleNamespace(max_tokens=3))
    trace = SimpleNamespace(id="0" * 32, agent=SimpleNamespace(config=SimpleNamespace(max_turns=None)))
    data = HarborTaskData.model_construct(path="task", task_key="k", name="t")
    spec = harness._spec(ctx, trace, data, Path("here"), "http://127.0.0.1:9/v1", "secret")  # ty: ignore[invalid-argument-type]
    assert spec.task_dir == Path("here")
    assert {key: getattr(spec, key) for key in KEYS} == KEYS
