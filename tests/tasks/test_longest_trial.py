"""The longest that an episode may take is the sum of what Harbor allows its phases, times its attempts."""

from pathlib import Path
from typing import Any

from harbortrainer.tasks.longest_trial import ATTEMPTS, BUILD_S, MARGIN_S, SETUP_S, VERIFIER_S, longest_episode_s


def write(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "task.toml").write_text(text)


def test_the_slowest_task_counts_with_its_multiplier_and_every_attempt(tmp_path: Path) -> None:
    write(tmp_path / "quick", "[agent]\ntimeout_sec = 10\n[verifier]\ntimeout_sec = 20\n")
    write(
        tmp_path / "slow",
        "[agent]\ntimeout_sec = 100\n[verifier]\ntimeout_sec = 20\n[environment]\nbuild_timeout_sec = 700\n",
    )
    slow = 2 * 700 + SETUP_S + 100 + 20
    assert longest_episode_s(tmp_path, multiplier=2) == slow * 2 * ATTEMPTS + MARGIN_S


def test_steps_add_up_as_harbor_gives_them_their_times(tmp_path: Path) -> None:
    steps = '[[steps]]\nname = "a"\n[steps.agent]\ntimeout_sec = 7\n[[steps]]\nname = "b"\n'
    write(tmp_path / "t", f"[agent]\ntimeout_sec = 10\n[verifier]\ntimeout_sec = 5\n{steps}")
    one = 2 * BUILD_S + SETUP_S + 7 + 10 + 2 * VERIFIER_S
    assert longest_episode_s(tmp_path / "t", multiplier=1) == one * ATTEMPTS + MARGIN_S


def test_an_agent_without_a_timeout_is_bounded_by_the_episode_alone(tmp_path: Path) -> None:
    write(tmp_path / "quick", "[agent]\ntimeout_sec = 10\n")
    write(tmp_path / "endless", "")
    assert longest_episode_s(tmp_path, multiplier=1) is None
    assert longest_episode_s(tmp_path, multiplier=1, episode_s=50) == 50 + MARGIN_S
    assert longest_episode_s(tmp_path / "nowhere", multiplier=1) is None


def test_the_defaults_are_harbors() -> None:
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
