"""The config classes of the plugin: what the user writes under `env.taskset`, `env.agent.harness`, `env`.

They are verifiers' own config classes with our keys added, so Prime-RL, verifiers' eval command and the
embedded engine read the same text. Invariant: validating a config imports neither harbor nor litellm.
"""

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.configs.taskset import TasksetConfig
from verifiers.v1.envs.single_agent import SingleAgentEnvConfig
from verifiers.v1.runtimes import SubprocessConfig

from harbortrainer.environment.retries import retry_config

PLUGIN_ID = "harbor_env"
TRIALS_DIR_VARIABLE = "HARBORTRAINER_TRIALS_DIR"
TRAINABLE_TERMINUS = "harbortrainer.trials.agent:TrainableTerminus2"


class HarborTasksetConfig(TasksetConfig):
    """`env.taskset`: which Harbor tasks are played."""

    id: str = PLUGIN_ID
    """Names this plugin."""
    tasks_dir: Path = Path("datasets/harbor_tasks")
    """Folder whose sub-folders are Harbor tasks; a relative path starts where the run starts."""
    include: list[str] = Field(default_factory=list)
    """Shell patterns over task names; only matching tasks are played. Empty means all."""
    exclude: list[str] = Field(default_factory=list)
    """Shell patterns over task names that are never played; wins over `include`."""
    split: Literal["all", "train", "eval"] = "all"
    """Play every task, or one side of a stable split, so that one folder is trained and evaluated on."""
    eval_share: float = Field(0.2, gt=0, lt=1)
    """Share of the tasks on the `eval` side of the split, drawn by a hash of the task's name."""
    checked_only: bool = False
    """Play only tasks that passed `harbortrainer tasks check` as they are now."""


class HarborHarnessConfig(HarnessConfig):
    """`env.agent.harness`: how one trial is run."""

    id: str = PLUGIN_ID
    """Names this plugin."""
    agent: str = TRAINABLE_TERMINUS
    """Harbor agent that plays the task: Harbor's name for it (`terminus-2`) or `module:Class`."""
    agent_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments of the agent's class."""
    environment_type: str = "docker"
    """Where the sandbox runs: `local`, a type of Harbor's (`docker`, `modal`, ...), or `module:Class`."""
    environment_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments of the environment's class."""
    timeout_multiplier: float = Field(1.0, gt=0)
    """Stretches every timeout that the task's task.toml sets."""
    keep_trials: Literal["all", "failed", "none"] = "failed"
    """Which of Harbor's trial folders stay on disk; `failed` keeps those whose outcome does not train."""
    trials_dir: Path | None = None
    """Folder of the trials, shared by all workers (None: $HARBORTRAINER_TRIALS_DIR, else outputs/trials)."""
    max_turns: int | None = Field(None, ge=1)
    """Turns of one trial; `env.agent.max_turns` says the same, the smaller of the two counts."""
    n_parallel_envs: int | None = Field(None, ge=1)
    """Hard cap on trials at once over all workers that share `trials_dir` (None: no cap of our own)."""
    capture: Literal["interception", "rollout_details"] = "interception"
    """Where tokens are read: at the verifiers endpoint, or from rollout_details of a direct connection."""
    vllm_base_url: str | None = None
    """OpenAI-compatible server (its /v1) that the agent calls itself with `capture = "rollout_details"`."""
    model_name: str | None = None
    """Model name at `vllm_base_url`; None takes the run's own, which follows the adapter that is trained."""

    @property
    def trials_folder(self) -> Path:
        """`trials_dir`, or what the run set in the environment, absolute."""
        return (self.trials_dir or Path(os.environ.get(TRIALS_DIR_VARIABLE) or "outputs/trials")).resolve()

    @model_validator(mode="after")
    def _capture_has_its_server(self) -> "HarborHarnessConfig":
        direct = self.capture == "rollout_details"
        if direct and self.vllm_base_url is None:
            raise ValueError('capture = "rollout_details" needs vllm_base_url: the agent calls that server itself')
        if not direct and (self.vllm_base_url or self.model_name):
            raise ValueError(
                'vllm_base_url and model_name belong to capture = "rollout_details"; with "interception" '
                "the run's own client and model are used"
            )
        return self


class HarborEnvConfig(SingleAgentEnvConfig):
    """`env`: one seat, the policy, played by the harness of this plugin in the plain process."""

    agent: AgentConfig = AgentConfig.model_construct(
        harness=HarborHarnessConfig(), runtime=SubprocessConfig(), retries=retry_config()
    )
    """The policy's seat; Harbor's trial owns the sandbox, so the runtime is the plain process."""
