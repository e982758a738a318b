"""The config classes of the plugin: what the user writes under `env.taskset`, `env.agent.harness`, `env`.

They are verifiers' own config classes with our keys (`harbortrainer.config.plugin`) added, so Prime-RL, verifiers'
eval command and the embedded engine read the same text. Invariant: validating a config imports neither harbor nor
litellm.
"""

import os
from pathlib import Path

from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.configs.retries import RetryConfig
from verifiers.v1.configs.taskset import TasksetConfig
from verifiers.v1.envs.single_agent import SingleAgentEnvConfig

from harbortrainer.config.plugin import HarnessKeys, TasksetKeys
from harbortrainer.environment.attempts import TrialRetriedError
from harbortrainer.environment.verifiers_side import retries, seat
from harbortrainer.runs.label import TRIALS_DIR_VARIABLE
from harbortrainer.trials.outcome import Outcome


def retry_config() -> RetryConfig:
    """The agent's retries: as many as all outcomes together may need."""
    return retries(TrialRetriedError, sum(outcome.retries for outcome in Outcome))


class HarborTasksetConfig(TasksetKeys, TasksetConfig):
    """`env.taskset`: our keys and verifiers' own."""


class HarborHarnessConfig(HarnessKeys, HarnessConfig):
    """`env.agent.harness`: our keys and verifiers' own."""

    @property
    def trials_folder(self) -> Path:
        """`trials_dir`, or what the run set in the environment, absolute."""
        return (self.trials_dir or Path(os.environ.get(TRIALS_DIR_VARIABLE) or "outputs/trials")).resolve()


class HarborEnvConfig(SingleAgentEnvConfig):
    """`env`: one seat, the policy, played by the harness of this plugin in the plain process."""

    agent: AgentConfig = seat(HarborHarnessConfig(), retry_config())
    """The policy's seat; Harbor's trial owns the sandbox, so the runtime is the plain process."""
