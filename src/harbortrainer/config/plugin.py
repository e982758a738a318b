"""Keys of our verifiers plugin: `env.taskset` and `env.agent.harness`.

Contract: this module defines fields, defaults and checks without importing verifiers.
`harbortrainer.environment.plugin_config` adds verifiers' own keys; these classes alone ignore them.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from harbortrainer.config.agent_table import (
    OWN_SERVICE,
    SHORT_NAMES,
    TRAINABLE_TERMINUS,
    UNSUPPORTED_AGENTS,
    is_class,
    needs_proxy,
)
from harbortrainer.config.environment_table import environment_entry, unknown_type
from harbortrainer.config.explain import explain, unknown_key
from harbortrainer.config.table import TomlTable, lookup
from harbortrainer.config.task_source import TaskSource, task_source
from harbortrainer.errors import UserError

PLUGIN_ID = "harbor_env"
"""The plugin's name, as run files and verifiers write it."""

REWARD_BOUND = 1e6
"""Default maximum absolute reward; a larger one is a verifier error."""

NEAR_COPY = 0.8
"""Default similarity from which two tasks count as near copies."""

type KeepTrials = Literal["all", "failed", "none"]
type Leftovers = Literal["keep", "kill"]
type OnTampering = Literal["flag", "drop", "zero"]


def _known_type(name: str) -> str:
    if wrong := unknown_type(name):
        raise ValueError("; ".join(wrong))
    return name


type KnownEnvironmentType = Annotated[str, AfterValidator(_known_type)]


class PluginKeys(BaseModel):
    """Base of the plugin's tables. The class that adds verifiers' keys checks for unknown keys."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str = PLUGIN_ID
    """Id of this plugin."""


class TasksetKeys(PluginKeys):
    """`env.taskset`: selection of Harbor tasks."""

    tasks_dir: Path = Path("datasets/harbor_tasks")
    """Folder with Harbor tasks at any depth. A relative path is relative to the working directory."""
    dataset: str | None = None
    """Pinned task source instead of `tasks_dir`, as `harbortrainer tasks fetch` prints it. It is a dataset of Harbor's
    registry, a git repository at a commit, a Hugging Face dataset at a revision, or a parquet file."""
    include: list[str] = Field(default_factory=list)
    """Shell patterns for task names; only matching tasks are used. Empty means all."""
    exclude: list[str] = Field(default_factory=list)
    """Shell patterns for task names to exclude; takes precedence over `include`."""
    split: Literal["all", "train", "eval"] = "all"
    """All tasks, or one side of a stable train/eval split of the folder."""
    eval_share: float = Field(0.2, gt=0, lt=1)
    """Share of tasks on the `eval` side of the split, chosen by a hash of their instructions and tests."""
    near_copy: float = Field(NEAR_COPY, gt=0, le=1)
    """Similarity of instructions and tests from which two tasks count as near copies. Near copies are on the same side
    of a split, and never in both training and evaluation."""
    may_overlap: bool = False
    """Allow an evaluation source to contain training tasks."""
    checked_only: bool = False
    """Use only tasks that passed `harbortrainer tasks check` and are unchanged since."""
    audited: bool = False
    """Use only tasks for which `harbortrainer tasks audit` found nothing, and that are unchanged since."""
    skip_bad: bool = False
    """Skip unreadable tasks with a warning each, instead of refusing the run."""
    difficulty: Path | None = None
    """File of measured pass rates, written by `harbortrainer eval --difficulty`."""
    min_pass_rate: float | None = Field(None, ge=0, le=1)
    """Minimum pass rate in `difficulty`; 0.01 excludes tasks that were never solved."""
    max_pass_rate: float | None = Field(None, ge=0, le=1)
    """Maximum pass rate in `difficulty`; 0.99 excludes tasks that were always solved."""

    @model_validator(mode="after")
    def _check_pass_rates(self) -> Self:
        used = [key for key in ("min_pass_rate", "max_pass_rate") if getattr(self, key) is not None]
        if used and self.difficulty is None:
            raise ValueError(f"{used[0]} needs difficulty, a file that `harbortrainer eval --difficulty` wrote")
        if (
            self.min_pass_rate is not None
            and self.max_pass_rate is not None
            and self.min_pass_rate > self.max_pass_rate
        ):
            raise ValueError(f"min_pass_rate ({self.min_pass_rate:g}) is above max_pass_rate ({self.max_pass_rate:g})")
        return self

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.dataset is None:
            return self
        if self.tasks_dir != type(self).model_fields["tasks_dir"].default:
            raise ValueError("tasks_dir and dataset are both set; remove one")
        try:
            source = task_source(self.dataset)
        except UserError as error:
            raise ValueError(str(error)) from None
        if not source.pinned:
            do = f"`harbortrainer tasks fetch {shlex.quote(str(source))}` prints the pinned source"
            raise ValueError(f"{source} may mean other tasks tomorrow; {do}")
        return self

    @property
    def source(self) -> TaskSource:
        """Parsed source of the tasks."""
        return task_source(self.dataset) if self.dataset is not None else TaskSource("folder", str(self.tasks_dir))


class HarnessKeys(PluginKeys):
    """`env.agent.harness`: settings of a trial."""

    agent: str = TRAINABLE_TERMINUS
    """Agent: Harbor's name (`terminus-2`), `plain`, or `module:Class`."""
    agent_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments of the agent class."""
    environment_type: KnownEnvironmentType = "docker"
    """Sandbox type: `local`, one of Harbor's (`docker`, `modal`, ...), `module:Class`, or `auto`. `auto` uses `local`
    for tasks that it fully supports and `docker` for the others."""
    environment_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments of the environment class; with `auto`, of the local sandbox."""
    trusted_tasks: list[str] = Field(default_factory=list)
    """Names or shell patterns of tasks that may access this machine: its folders and devices through compose files, its
    secrets through variables. Other tasks that do so are refused."""
    timeout_multiplier: float = Field(1.0, gt=0)
    """Factor on every timeout in the task's task.toml."""
    agent_timeout: Literal["verify", "zero", "mask"] = "verify"
    """Reward of a trial whose agent ran out of time: the verifier's (`verify`), 0 (`zero`), or none, so that the trial
    is not trained on (`mask`)."""
    leftovers: Leftovers = "keep"
    """Processes left running by the agent, before its sandbox is graded: keep them, or kill them with all services."""
    on_tampering: OnTampering = "flag"
    """Reward of a trial whose agent changed tools that the verifier uses: the verifier's (`flag`), none, so that the
    trial is not trained on (`drop`), or 0 (`zero`). For `local` and `docker`."""
    stall_factor: float = Field(10.0, ge=1, allow_inf_nan=False)
    """A model call counts as stalled after this multiple of the worker's recent response times."""
    stall_min_s: float = Field(30.0, gt=0, allow_inf_nan=False)
    """Minimum seconds before a model call counts as stalled."""
    reward_bound: float = Field(REWARD_BOUND, gt=0, allow_inf_nan=False)
    """Maximum absolute reward. A larger one is a verifier error, and the trial is not trained on."""
    reward_key: str | None = None
    """Reward to train on, by its key in reward.json; by default `reward`, or the mean of all where there is none."""
    context_limit: int | None = Field(None, ge=1)
    """Context limit of Terminus-2 in tokens of prompt and answer; by default the model server's, else 32768."""
    keep_trials: KeepTrials = "failed"
    """Which of Harbor's trial folders to keep; `failed` keeps those whose outcome is not trained on."""
    keep_trials_mb: int = Field(4000, ge=1)
    """Maximum megabytes of the folders that `keep_trials = "failed"` keeps in `trials_dir`; the oldest are deleted."""
    trials_dir: Path | None = None
    """Folder of the trials, shared by all workers; by default $HARBORTRAINER_TRIALS_DIR, else outputs/trials."""
    max_turns: int | None = Field(None, ge=1)
    """Maximum turns of Terminus-2 or `plain` per step of a trial. `env.agent.max_turns` limits all steps together."""
    n_parallel_envs: int | None = Field(None, ge=1)
    """Maximum number of concurrent trials over all workers that share `trials_dir`; null means no limit."""
    starts_per_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Maximum sandbox starts per second at a provider, over all workers that share `trials_dir`; null means no limit
    until the provider refuses a start (429)."""
    capture: Literal["interception", "rollout_details"] = "interception"
    """Source of the tokens: the verifiers endpoint (`interception`), or rollout_details of a direct connection."""
    vllm_base_url: str | None = None
    """OpenAI-compatible server (its /v1 address) that the agent calls with `capture = "rollout_details"`."""
    model_name: str | None = None
    """Model name at `vllm_base_url`; by default the run's model, which follows the trained adapter."""

    @field_validator("agent")
    @classmethod
    def _replace_short_name(cls, name: str) -> str:
        return SHORT_NAMES.get(name, name)

    @model_validator(mode="after")
    def _check_environment_type(self) -> Self:
        entry = environment_entry(self.environment_type)
        if self.leftovers == "kill" and not entry.examinable:
            raise ValueError(f'leftovers = "kill" needs environment_type local or docker, not {self.environment_type}')
        if self.on_tampering != "flag" and not entry.reports_changes:
            needs = f'on_tampering = "{self.on_tampering}" needs environment_type local or docker'
            raise ValueError(f"{needs}; {self.environment_type} does not detect changed tools")
        return self

    @model_validator(mode="after")
    def _check_agent(self) -> Self:
        if self.agent in OWN_SERVICE:
            raise ValueError(
                f"agent {self.agent!r} asks its vendor's own service, so there is no policy to train; "
                "docs/agents.md lists the supported agents"
            )
        if reason := UNSUPPORTED_AGENTS.get(self.agent):
            raise ValueError(
                f"agent {self.agent!r} cannot be trained: Harbor's class {reason}; "
                "docs/agents.md lists the supported agents"
            )
        inside = needs_proxy(self.agent) and not is_class(self.agent) and self.capture == "interception"
        if inside and environment_entry(self.environment_type).remote:
            raise ValueError(
                f"agent {self.agent!r} runs inside the sandbox, and sandboxes of environment_type = "
                f"{self.environment_type!r} cannot reach the model; use local or docker, Terminus-2 or plain"
            )
        return self

    @model_validator(mode="after")
    def _check_capture(self) -> Self:
        direct = self.capture == "rollout_details"
        if direct and self.vllm_base_url is None:
            raise ValueError('capture = "rollout_details" needs vllm_base_url, the server that the agent calls')
        if not direct and (self.vllm_base_url or self.model_name):
            raise ValueError(
                'vllm_base_url and model_name belong to capture = "rollout_details"; with "interception" '
                "the run's own client and model are used"
            )
        return self


class AgentKeys(BaseModel):
    """`env.agent`: our keys, and one of verifiers'."""

    max_turns: int | None = Field(None, ge=1)
    """Maximum turns of a trial. verifiers accepts 0, with which no trial has an answer."""

    harness: HarnessKeys | None = HarnessKeys()
    """Our harness; None for another plugin's harness."""

    @field_validator("harness", mode="before")
    @classmethod
    def _drop_other_plugins(cls, table: object) -> object:
        if isinstance(table, dict) and table.get("id", PLUGIN_ID) != PLUGIN_ID:
            return None
        return {} if table is None else table


class PluginEnv(BaseModel):
    """`env` of a source with our taskset; verifiers' keys are ignored."""

    taskset: TasksetKeys
    agent: AgentKeys = AgentKeys()


VERIFIERS_KEYS = {
    "": {"agent", "id", "interception", "max_concurrent_agents", "retries", "taskset", "timeout"},
    "taskset": {"system_prompt", "task"},
    "agent": {
        *("client", "deployment", "harness", "max_input_tokens", "max_output_tokens", "max_total_tokens", "model"),
        *("max_turn_tokens", "network_notice", "retries", "runtime", "sampling", "scoring", "timeout"),
    },
    "agent.harness": {"dialect", "disabled_tools", "env", "forward_env", "mcp_header_env", "skills", "tool_timeout"},
}
"""verifiers' keys of `env` and its tables, in any supported release. verifiers refuses what the installed one lacks."""
_OWN_KEYS = {"": BaseModel, "taskset": TasksetKeys, "agent": AgentKeys, "agent.harness": HarnessKeys}


def plugin_errors(data: TomlTable, file: str) -> list[UserError]:
    """Return the errors in our plugin's values of a run file's tables, which need not be valid."""
    found = []
    for key, env in _env_tables(data):
        try:
            plugin_env(env, file=file, key=key)
        except UserError as error:
            found.append(error)
    return found


def missing_folders(data: TomlTable, file: str) -> Iterator[UserError]:
    """Yield an error for each `tasks_dir` of our plugin that is no folder; the tables need not be valid."""
    for key, env in _env_tables(data):
        folder = lookup(env, "taskset.tasks_dir") if _is_ours(env) else None
        if isinstance(folder, str) and not Path(folder).exists():
            where = f"{file}: {key}.taskset.tasks_dir"
            yield UserError(f"{folder}: no such folder", where=where, do="pass a folder of Harbor tasks")


def all_unknown_keys(data: TomlTable, file: str) -> list[UserError]:
    """Return the errors of `unknown_keys` of all sources of a run file."""
    return [error for key, env in _env_tables(data) for error in unknown_keys(env, file, key)]


def unknown_keys(env: TomlTable, file: str, where: str) -> Iterator[UserError]:
    """Yield an error for each key of our plugin's tables that neither we nor verifiers have.

    Args:
        env: The `env` table of a source; nothing is yielded for another plugin's.
        file: The run file.
        where: Dotted key of the table.
    """
    for name, own in _OWN_KEYS.items() if _is_ours(env) else ():
        table = lookup(env, name) if name else env
        if not isinstance(table, dict) or (own is HarnessKeys and table.get("id", PLUGIN_ID) != PLUGIN_ID):
            continue
        prefix = f"{where}.{name}" if name else where
        known = [f"{prefix}.{key}" for key in sorted(own.model_fields.keys() | VERIFIERS_KEYS[name])]
        written = (f"{prefix}.{key}" for key in table)
        yield from (unknown_key(key, file, known) for key in written if key not in known)


def _env_tables(data: TomlTable) -> Iterator[tuple[str, TomlTable]]:
    """Yield the `env` tables of all sources, with their dotted keys."""
    for table in ("orchestrator.train.source", "orchestrator.eval.source"):
        sources = lookup(data, table)
        for index, source in enumerate(sources if isinstance(sources, list) else []):
            if isinstance(source, dict) and isinstance(source.get("env"), dict):
                yield f"{table}[{index}].env", source["env"]


def _is_ours(env: TomlTable) -> bool:
    taskset = env.get("taskset")
    return isinstance(taskset, dict) and taskset.get("id") == PLUGIN_ID


def plugin_env(env: dict[str, Any], *, file: str, key: str) -> PluginEnv | None:
    """Return the plugin's keys of an `env` table with defaults; None for another plugin's taskset.

    Args:
        env: The table as written.
        file: The run file.
        key: Dotted key of the table.

    Raises:
        UserError: A value is invalid.
    """
    if not _is_ours(env):
        return None
    try:
        return PluginEnv.model_validate(env)
    except ValidationError as error:
        raise explain(error, file, prefix=key) from None
