"""Config classes of the plugin: the tables `env`, `env.taskset` and `env.agent.harness`.

They extend verifiers' config classes with our keys (`harbortrainer.config.plugin`). Prime-RL, verifiers' eval command
and the embedded engine therefore read the same files. Invariant: validating a config imports neither harbor nor
litellm.
"""

import os
from pathlib import Path
from typing import Self

from pydantic import model_validator
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.configs.retries import RetryConfig
from verifiers.v1.configs.taskset import TasksetConfig
from verifiers.v1.envs.single_agent import SingleAgentEnvConfig

from harbortrainer.config.plugin import HarnessKeys, TasksetKeys
from harbortrainer.environment.rollout_state import TrialRetriedError
from harbortrainer.environment.verifiers_compat import agent_config, retries, scoring_keys
from harbortrainer.runs.label import TRIALS_DIR_VARIABLE
from harbortrainer.trials.outcome import Outcome


def retry_config() -> RetryConfig:
    """Return the agent's retries: the sum of the retries of all outcomes."""
    return retries(TrialRetriedError, sum(outcome.retries for outcome in Outcome))


class HarborTasksetConfig(TasksetKeys, TasksetConfig):
    """The table `env.taskset`: our keys and verifiers' own."""


class HarborHarnessConfig(HarnessKeys, HarnessConfig):
    """The table `env.agent.harness`: our keys and verifiers' own."""

    @property
    def trials_folder(self) -> Path:
        """Absolute folder of the trials: `trials_dir`, else the run's environment variable."""
        return (self.trials_dir or Path(os.environ.get(TRIALS_DIR_VARIABLE) or "outputs/trials")).resolve()


class HarborEnvConfig(SingleAgentEnvConfig):
    """The table `env`: one agent, the policy, run by this plugin's harness in the environment server's process."""

    agent: AgentConfig = agent_config(HarborHarnessConfig(), retry_config())
    """The policy. Its runtime is the server's own process, since Harbor's trial starts the sandbox."""

    @model_validator(mode="after")
    def _grading_is_harbors(self) -> Self:
        if set_keys := scoring_keys(self.agent):
            raise ValueError(
                f"agent.scoring ({', '.join(set_keys)}) is not possible, since Harbor's verifier grades. "
                'For grading in a sandbox of its own, write environment_mode = "separate" in [verifier] of task.toml. '
                "For timeouts, set agent_timeout in agent.harness"
            )
        return self
