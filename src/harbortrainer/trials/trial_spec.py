"""The spec of one trial, and its conversion to Harbor's `TrialConfig`.

- `TrialSpec` describes a trial; `trial_config` converts it.
- `AgentModelSettings` has the model settings of an agent other than Terminus: a model name in the agent's own format,
  and variables with address and key. The name is only a label, since the endpoint always samples from the run's model.
  Characters that are unsafe in shells, paths or agents' own rules are therefore replaced.

Invariant for Terminus agents of this project: Harbor writes no secret of the model endpoint to disk. For other agents
`writes_key` is true, and the key is removed from Harbor's files after the trial.
"""

import importlib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from harbortrainer.config.agent_table import (
    AGENTS,
    IN_THIS_PROCESS,
    OUR_AGENTS,
    TRAINABLE_TERMINUS,
    UNKNOWN,
    UNKNOWN_CLASS,
    WITHOUT_MODEL,
    AgentEntry,
    is_class,
)
from harbortrainer.config.plugin import REWARD_BOUND, KeepTrials, Leftovers
from harbortrainer.harbor_compat import LITELLM_OFFLINE, accepts_base_url, without_grading
from harbortrainer.trials.outcome import ENGINE, FINAL, SANDBOX
from harbortrainer.trials.time_limits import MARGIN_S, trial_s

if TYPE_CHECKING:
    from harbor.models.trial.config import AgentConfig, TrialConfig

DEFAULT_CONTEXT_LIMIT = 32768
"""Tokens of prompt and answer together, if the model's limit is unknown."""


class ModelEndpoint(BaseModel):
    """The OpenAI-compatible server that the agent calls."""

    model_config = ConfigDict(extra="forbid")

    name: str
    """The model's name, as the server knows it."""
    base_url: str
    """Base URL, which ends in /v1."""
    api_key: SecretStr = SecretStr("EMPTY")
    """Never kept on disk. Not visible in the sandbox if the agent runs outside it."""
    context_limit: int = DEFAULT_CONTEXT_LIMIT
    """Tokens of prompt and answer together."""
    output_limit: int | None = None
    """Tokens of one answer; named to the model after a cut answer."""


class TrialSpec(BaseModel):
    """One trial: task, agent, sandbox, and the files to keep."""

    model_config = ConfigDict(extra="forbid")

    task_dir: Path
    """The task's folder, in Harbor's format."""
    trials_dir: Path
    """Parent of the folder that Harbor makes for this trial."""
    task_key: str = ""
    """Hash of the task's content, copied to the record."""
    trial_name: str = ""
    """Name of the trial's folder; if empty, Harbor generates one."""
    agent: str = TRAINABLE_TERMINUS
    """Harbor's name of the agent (`oracle`, `nop`, `terminus-2`, ...), or `module:Class`."""
    agent_kwargs: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments of the agent's class."""
    agent_env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the agent, visible inside the sandbox."""
    model: ModelEndpoint | None = None
    """The agent's model; None for an agent without one."""
    max_turns: int | None = Field(default=None, ge=1)
    """Limit of the agent's turns, for Terminus-2 and `plain`."""
    environment_type: str = "local"
    """`local`, a Harbor environment type, `module:Class`, or `auto` (see `sandbox.environment_types`)."""
    environment_kwargs: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments of the environment's class."""
    trusted: bool = False
    """Whether the task may access this machine; other tasks that do so are refused."""
    timeout_multiplier: float = Field(default=1.0, gt=0)
    """Factor for all timeouts of the task."""
    agent_timeout_s: float | None = Field(default=None, gt=0)
    """Agent timeout in seconds, instead of the task's."""
    reward_bound: float = Field(default=REWARD_BOUND, gt=0)
    """Largest allowed absolute reward; a larger one is a `verifier_error`."""
    reward_key: str | None = None
    """Key of the verifier's rewards to train on; None for `reward`, or the mean of all rewards where it is missing."""
    leftovers: Leftovers = "keep"
    """Whether processes that the agent left running are kept or killed before grading in its sandbox."""
    keep_trials: KeepTrials = "all"
    """Trials whose folders are kept: all, failed ones (the outcome does not train), or none."""
    keep_trials_mb: int | None = Field(default=None, ge=1)
    """Limit of the kept folders of failed trials in megabytes; the oldest are removed. None means no limit."""

    @property
    def uses_model(self) -> bool:
        """Whether the agent calls a model and takes model arguments."""
        return self.model is not None and self.agent not in WITHOUT_MODEL


_UNSAFE_CHARS = re.compile(r"[^A-Za-z0-9._/-]")
_ADDRESSES = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "LLM_BASE_URL")
# Keeps the user's own subscription out of sandboxes. Harbor redacts the value of a variable with AUTH in its name in
# all files of the trial, so "fAlSe" is spelled as no file spells it.
_NO_SUBSCRIPTION = {
    "CLAUDE_CODE_OAUTH_TOKEN": "",
    "CLAUDE_FORCE_OAUTH": "fAlSe",
    "CLAUDE_CODE_USE_BEDROCK": "0",
    "AWS_BEARER_TOKEN_BEDROCK": "",
}
_KEYS = ("OPENAI_API_KEY", "LLM_API_KEY")


@dataclass(frozen=True)
class AgentModelSettings:
    """Model settings of one agent."""

    entry: AgentEntry

    def name_and_variables(self, model: ModelEndpoint) -> tuple[str, dict[str, str]]:
        """Return the model's name in the agent's format, and the environment variables."""
        key, variables = model.api_key.get_secret_value(), dict(LITELLM_OFFLINE)
        if self.entry.speaks != "messages":
            variables |= dict.fromkeys(_ADDRESSES, model.base_url) | dict.fromkeys(_KEYS, key)
        if self.entry.speaks in ("messages", None):
            variables |= {"ANTHROPIC_BASE_URL": _host(model), "ANTHROPIC_API_KEY": key}
            variables |= _NO_SUBSCRIPTION
        return self.entry.model.format(label(model.name)), variables | _filled(self.entry.variables, model)

    def arguments(self, model: ModelEndpoint) -> dict[str, str]:
        """Return further keyword arguments of the agent's class."""
        return _filled(self.entry.arguments, model)

    def base_url(self, model: ModelEndpoint) -> str:
        """Return the address for Harbor's own `base_url`, which Harbor passes to the agent unchanged."""
        return _host(model) if self.entry.speaks == "messages" else model.base_url


def _host(model: ModelEndpoint) -> str:
    """Return the base URL without /v1, for clients that append it, such as Anthropic's."""
    return model.base_url.removesuffix("/v1")


def _filled(pairs: tuple[tuple[str, str], ...], model: ModelEndpoint) -> dict[str, str]:
    values = {"base_url": model.base_url, "host": _host(model), "api_key": model.api_key.get_secret_value()}
    return {name: value.format_map(values) for name, value in pairs}


def label(name: str) -> str:
    """Return the model's name as a label that is safe for agents.

    Example:
        >>> label("/home/a user/models/Qwen3-8B")
        'home/a-user/models/Qwen3-8B'
    """
    return _UNSAFE_CHARS.sub("-", name).strip("/-") or "policy"


def agent_model_settings(agent: str) -> AgentModelSettings:
    """Return the model settings of an agent; a user's subclass of a Harbor agent has that agent's settings.

    Args:
        agent: Harbor's name, or `module:Class`.
    """
    if is_class(agent):
        return AgentModelSettings(AGENTS.get(_name_of(agent), UNKNOWN_CLASS))
    return AgentModelSettings(AGENTS.get(agent, UNKNOWN))


def _name_of(import_path: str) -> str:
    """Return the name that an agent's class reports, "" if it fails; Harbor reports the error itself."""
    module, _, name = import_path.partition(":")
    try:
        return str(getattr(importlib.import_module(module), name).name())
    except (ImportError, AttributeError, TypeError):
        return ""


def trial_config(spec: TrialSpec) -> "TrialConfig":
    """Convert a spec to Harbor's `TrialConfig`.

    Raises:
        UserError: The environment type is unknown.
    """
    from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig

    from harbortrainer.sandbox.environment_types import environment_config

    named = "import_path" if is_class(spec.agent) else "name"
    fields = _model_fields(spec) | {named: spec.agent, "override_timeout_sec": spec.agent_timeout_s}
    agent = AgentConfig.model_validate(fields)
    environment = environment_config(
        spec.environment_type, spec.environment_kwargs, lifetime_s=sandbox_lifetime_s(spec)
    )
    config = {
        "task": TaskConfig(path=spec.task_dir),
        "trial_name": spec.trial_name,
        "trials_dir": spec.trials_dir,
        "timeout_multiplier": spec.timeout_multiplier,
        "agent": _with_base_url(agent, spec),
        "environment": EnvironmentConfig.model_validate(environment),
    }
    return TrialConfig.model_validate(config | without_grading(SANDBOX | ENGINE | FINAL))


def _with_base_url(agent: "AgentConfig", spec: TrialSpec) -> "AgentConfig":
    """Return the agent's config with the model's address in Harbor's own field, unless the user gives another one."""
    if spec.model is None or not spec.uses_model or spec.agent in IN_THIS_PROCESS or not accepts_base_url(agent):
        return agent
    settings = agent_model_settings(spec.agent)
    addresses = {spec.model.base_url, _host(spec.model)}
    variables = {name for name, value in settings.name_and_variables(spec.model)[1].items() if value in addresses}
    if "base_url" in spec.agent_kwargs or variables & spec.agent_env.keys():
        return agent
    return agent.model_copy(update={"base_url": settings.base_url(spec.model)})


def sandbox_lifetime_s(spec: TrialSpec) -> float | None:
    """Return the seconds after which the trial's sandbox is not used any more; None if the trial has no time limit."""
    try:
        table = tomllib.loads((spec.task_dir / "task.toml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return None  # Harbor reports it
    longest = trial_s(table, spec.agent_timeout_s)
    return None if longest is None else longest * spec.timeout_multiplier + MARGIN_S


def writes_key(spec: TrialSpec) -> bool:
    """Whether Harbor writes the model's key to files, from which it must be removed afterwards."""
    return spec.uses_model and spec.agent not in OUR_AGENTS


def _model_fields(spec: TrialSpec) -> dict[str, Any]:
    """Return `model_name`, `kwargs` and `env` of Harbor's agent config."""
    if spec.model is None or not spec.uses_model:
        return {"kwargs": spec.agent_kwargs, "env": spec.agent_env}
    if spec.agent not in IN_THIS_PROCESS:
        settings = agent_model_settings(spec.agent)
        model_name, env = settings.name_and_variables(spec.model)
        kwargs = settings.arguments(spec.model) | spec.agent_kwargs
        return {"model_name": model_name, "kwargs": kwargs, "env": env | spec.agent_env}
    kwargs = _terminus_kwargs(spec.model) | {"max_turns": spec.max_turns}
    if spec.agent == "terminus-2":
        kwargs["llm_kwargs"] = {
            "custom_llm_provider": "openai",
            "api_key": spec.model.api_key.get_secret_value(),
        }
    return {"model_name": spec.model.name, "kwargs": kwargs | spec.agent_kwargs, "env": spec.agent_env}


def _terminus_kwargs(model: ModelEndpoint) -> dict[str, Any]:
    return {
        "api_base": model.base_url,
        "suppress_max_turns_warning": True,
        "model_info": {
            "max_input_tokens": model.context_limit,
            "max_output_tokens": model.output_limit,
            "input_cost_per_token": 0.0,
            "output_cost_per_token": 0.0,
        },
    }
