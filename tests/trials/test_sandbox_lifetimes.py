"""A provider ends a sandbox that nothing stopped soon after its trial's last time limit."""

from pathlib import Path

import pytest
from harbor import environments

from harbortrainer.config.environment_table import ENVIRONMENT_TYPES, Lifetime
from harbortrainer.trials.time_limits import BUILD_S, MARGIN_S, SETUP_S
from harbortrainer.trials.trial_spec import TrialSpec, trial_config

LIMITED = "[agent]\ntimeout_sec = 100\n[verifier]\ntimeout_sec = 20\n"
LONGEST_S = 2 * (2 * BUILD_S + SETUP_S + 100 + 20) + MARGIN_S


def arguments(folder: Path, environment_type: str, toml: str = LIMITED, **spec: object) -> dict[str, object]:
    """Return the arguments of the sandbox's class for a trial with `timeout_multiplier` 2."""
    (folder / "task.toml").write_text(toml)
    made = TrialSpec(
        task_dir=folder, trials_dir=folder, environment_type=environment_type, timeout_multiplier=2, agent="nop"
    )
    return trial_config(made.model_copy(update=spec)).environment.kwargs


def test_lifetime_is_the_sum_of_the_trials_limits(tmp_path: Path):
    seconds = arguments(tmp_path, "modal")["sandbox_timeout_secs"]
    assert seconds == 60 * -(-LONGEST_S // 60) and isinstance(seconds, int)
    assert arguments(tmp_path, "daytona")["auto_stop_interval_mins"] == -(-LONGEST_S // 60)
    longer = arguments(tmp_path, "modal", agent_timeout_s=1090.0)["sandbox_timeout_secs"]
    assert longer == seconds + 2 * 990


def test_users_lifetime_and_endless_trials_keep_theirs(tmp_path: Path):
    own = {"sandbox_timeout_secs": 7200}
    assert arguments(tmp_path, "modal", environment_kwargs=own)["sandbox_timeout_secs"] == 7200
    assert "sandbox_timeout_secs" not in arguments(tmp_path, "modal", "")
    assert arguments(tmp_path, "modal", "[agent]\ntimeout_sec = 1e6\n")["sandbox_timeout_secs"] == 86_400
    assert arguments(tmp_path, "docker") == {}


@pytest.mark.parametrize(
    ("name", "lifetime"), [(name, entry.lifetime) for name, entry in ENVIRONMENT_TYPES.items() if entry.lifetime]
)
def test_harbors_class_has_the_argument(name: str, lifetime: Lifetime):
    folder = Path(environments.__path__[0])
    sources = [folder / f"{name}.py", *(folder / name).rglob("*.py")]
    assert any(f"        {lifetime.argument}: " in source.read_text() for source in sources if source.is_file())
