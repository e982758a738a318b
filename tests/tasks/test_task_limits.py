"""The longest episode is the sum of Harbor's phase timeouts, times the attempts."""

from pathlib import Path
from typing import Any

from harbortrainer.tasks.task_limits import ATTEMPTS, max_episode_s
from harbortrainer.trials.sandbox_starts import GIVE_UP_S
from harbortrainer.trials.time_limits import BUILD_S, MARGIN_S, SETUP_S, VERIFIER_S


def write(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "task.toml").write_text(text)


def test_max_episode_is_slowest_task_with_multiplier_and_retries(tmp_path: Path) -> None:
    write(tmp_path / "quick", "[agent]\ntimeout_sec = 10\n[verifier]\ntimeout_sec = 20\n")
    write(
        tmp_path / "slow",
        "[agent]\ntimeout_sec = 100\n[verifier]\ntimeout_sec = 20\n[environment]\nbuild_timeout_sec = 700\n",
    )
    slow = 2 * 700 + SETUP_S + 100 + 20
    assert max_episode_s(tmp_path, multiplier=2) == slow * 2 * ATTEMPTS + GIVE_UP_S + MARGIN_S


def test_step_timeouts_add_up_as_in_harbor(tmp_path: Path) -> None:
    steps = '[[steps]]\nname = "a"\n[steps.agent]\ntimeout_sec = 7\n[[steps]]\nname = "b"\n'
    write(tmp_path / "t", f"[agent]\ntimeout_sec = 10\n[verifier]\ntimeout_sec = 5\n{steps}")
    one = 2 * BUILD_S + SETUP_S + 7 + 10 + 2 * VERIFIER_S
    assert max_episode_s(tmp_path / "t", multiplier=1) == one * ATTEMPTS + GIVE_UP_S + MARGIN_S


def test_agent_without_timeout_is_limited_by_episode_timeout(tmp_path: Path) -> None:
    write(tmp_path / "quick", "[agent]\ntimeout_sec = 10\n")
    write(tmp_path / "endless", "")
    assert max_episode_s(tmp_path, multiplier=1) is None
    assert max_episode_s(tmp_path, multiplier=1, episode_s=50) == 50 + MARGIN_S
    assert max_episode_s(tmp_path / "nowhere", multiplier=1) is None


def test_default_timeouts_equal_harbors() -> None:
    from harbor.agents.terminus_2.terminus_2 import Terminus2
    from harbor.models.task.config import TaskConfig
    from harbor.trial.trial import Trial

    config = TaskConfig()
    assert config.environment.build_timeout_sec == BUILD_S
    assert config.verifier.timeout_sec == VERIFIER_S
    assert config.agent.timeout_sec is None
    # The agent's own since Harbor 0.24, the trial's before.
    owner: Any = Terminus2 if hasattr(Terminus2, "DEFAULT_SETUP_TIMEOUT_SEC") else Trial
    name = "DEFAULT_SETUP_TIMEOUT_SEC" if owner is Terminus2 else "_AGENT_SETUP_TIMEOUT_SEC"
    assert getattr(owner, name) == SETUP_S


def test_number_in_quotes_counts_as_in_harbor(tmp_path: Path) -> None:
    write(tmp_path / "t", '[agent]\ntimeout_sec = "10"\n[verifier]\ntimeout_sec = "7200"\n')
    assert (
        max_episode_s(tmp_path, multiplier=1) == (2 * BUILD_S + SETUP_S + 10 + 7200) * ATTEMPTS + GIVE_UP_S + MARGIN_S
    )
