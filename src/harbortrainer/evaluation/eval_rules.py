"""Rules of an evaluation's trials: agent, sandbox, sampling, chat format and seed.

Contract: the rules come from a run file, so that an evaluation matches the training, or are the plugin's defaults.
Command line options override them. They are saved in the evaluation's folder, and a resume must have the same rules.
"""

import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from harbortrainer.config.agent_table import TRAINABLE_TERMINUS
from harbortrainer.config.explain import explain
from harbortrainer.config.orchestrator_config import APPENDING_TEMPLATE, EvalSampling
from harbortrainer.config.plugin import PLUGIN_ID, VERIFIERS_KEYS
from harbortrainer.config.reader import load
from harbortrainer.config.redacted_config import REDACTED
from harbortrainer.config.runfile import Quantization, RunConfig
from harbortrainer.config.table import TomlTable, TomlValue, lookup
from harbortrainer.evaluation.policy_files import prime_rl_run
from harbortrainer.runs.prime_rl_files import WHOLE_CONFIG, config_files
from harbortrainer.runs.provenance import read_config, run_config

ONE_WORKER: TomlTable = {"pool": {"type": "static", "num_workers": 1}}
TRAINING_ONLY_KEYS = ("capture", "vllm_base_url", "model_name", "trials_dir")
"""Harness keys for training only: the source of tokens, and the folder of trials."""
EXPORTED_CONFIG = "run_config.json"
"""The config of its run in an export (`export/model_export.py`)."""
_EXPORTED_KEYS = (
    *("agent", "agent_timeout", "context_limit", "environment_kwargs", "environment_type", "leftovers", "max_turns"),
    *("n_parallel_envs", "on_tampering", "reward_bound", "reward_key", "timeout_multiplier"),
)
"""Harness keys that an evaluation takes from an export."""
_NOT_EVALUATED = ("id", "keep_trials", "keep_trials_mb", "stall_factor", "stall_min_s", "starts_per_s")
"""Harness keys without an effect on what an evaluation measures."""


class EvalRules(BaseModel):
    """The rules of one evaluation."""

    model_config = ConfigDict(extra="forbid")

    agent: TomlTable
    """The `env.agent` table for verifiers and the plugin."""
    sampling: EvalSampling = EvalSampling()
    """Sampling parameters; the model's server chooses those that are None."""
    renderer: TomlTable = {"name": "auto"}
    """Chat format of a local model."""
    max_model_len: int | None = None
    """Most tokens of prompt and answer of a local model; None means the model's own limit."""
    seed: int = 0
    """Sampling seed of a local model."""
    quantization: Quantization | None = None
    """Quantization of a local base model."""
    dtype: str = "auto"
    """Number format of a local base model, as `inference.vllm.dtype`."""
    env: TomlTable = {}
    """The rest of the source's `env` table: verifiers' own keys, of `taskset` too."""

    @classmethod
    def of(
        cls,
        config: RunConfig | None,
        *,
        environment: str | None = None,
        environment_kwargs: Mapping[str, JsonValue] | None = None,
        agent: str | None = None,
        trusted: Sequence[str] = (),
    ) -> Self:
        """Return the rules of a run's evaluations (without them, of its training), or the defaults.

        Args:
            config: The run's config; None means the defaults.
            environment: Type of the sandboxes that replaces the run's.
            environment_kwargs: Keyword arguments of the sandbox's class, merged into the run's.
            agent: Agent that replaces the run's.
            trusted: Names or patterns of tasks that may access this machine, besides the run's.
        """
        table = deepcopy(_source(config).env.get("agent") or {}) if config else {}
        harness = {key: value for key, value in (table.get("harness") or {}).items() if key not in TRAINING_ONLY_KEYS}
        harness |= {"id": harness.get("id", PLUGIN_ID), "keep_trials": "all"}
        harness["environment_type"] = environment or (harness.get("environment_type") if config else None) or "local"
        if environment_kwargs:
            harness["environment_kwargs"] = (harness.get("environment_kwargs") or {}) | dict(environment_kwargs)
        harness |= {"agent": agent} if agent else {}
        if trusted:
            harness["trusted_tasks"] = [*(harness.get("trusted_tasks") or []), *trusted]
        rules = cls(agent=table | {"harness": harness})
        if config is None:
            return rules
        from harbortrainer.environment.renderers_compat import with_chat_format

        settings = {
            "renderer": with_chat_format(config).orchestrator.renderer,
            "max_model_len": config.max_model_len,
            "seed": config.seed,
            "quantization": config.model.quantization,
            "dtype": config.inference.vllm.dtype,
            "env": _verifiers_keys(_source(config).env),
        }
        return rules.model_copy(update=settings | {"sampling": _sampling(config)})

    def with_overrides(
        self, *, temperature: float | None, max_tokens: int | None, max_turns: int | None, max_model_len: int | None
    ) -> Self:
        """Return the rules with command line overrides; None keeps a value."""
        overrides = {"temperature": temperature, "max_completion_tokens": max_tokens}
        sampling = self.sampling.model_copy(
            update={key: value for key, value in overrides.items() if value is not None}
        )
        agent = self.agent | ({} if max_turns is None else {"max_turns": max_turns})
        limit = max_model_len or self.max_model_len
        return self.model_copy(update={"sampling": sampling, "agent": agent, "max_model_len": limit})

    @property
    def agent_name(self) -> str:
        """Harbor's name of the agent, or `module:Class`."""
        return str(self.agent["harness"].get("agent") or TRAINABLE_TERMINUS)

    @property
    def environment_type(self) -> str:
        """Type of the sandboxes."""
        return str(self.agent["harness"]["environment_type"])

    @property
    def trusted_tasks(self) -> list[str]:
        """Names or patterns of tasks that may access this machine."""
        return self.agent["harness"].get("trusted_tasks") or []

    @property
    def parallel(self) -> int | None:
        """The run's limit of concurrent trials; None if there is none."""
        return self.agent["harness"].get("n_parallel_envs")

    @property
    def sandboxes(self) -> tuple[str, dict[str, object]]:
        """Type of the sandboxes, and the keyword arguments of their class."""
        return self.environment_type, self.agent["harness"].get("environment_kwargs") or {}


def _verifiers_keys(env: TomlTable) -> TomlTable:
    """Return the keys of an `env` table that are verifiers' own."""
    taskset = env.get("taskset")
    own = {key: taskset[key] for key in VERIFIERS_KEYS["taskset"] & taskset.keys()} if isinstance(taskset, dict) else {}
    return {key: value for key, value in env.items() if key not in ("agent", "taskset")} | (
        {"taskset": own} if own else {}
    )


def run_file(policy: str | None, config: Path | None) -> Path | None:
    """Return the file with the rules: `config`, or the config of the policy's run, which an export carries."""
    if config is not None or policy is None:
        return config
    folder = Path(policy).absolute()
    if prime_run := prime_rl_run(folder):
        return orchestrator_file(prime_run)
    if (folder / EXPORTED_CONFIG).is_file():
        return folder / EXPORTED_CONFIG
    for above in (folder, folder.parent, folder.parent.parent):
        if (above / "config.toml").is_file() and (above / "checkpoints").is_dir():
            return above / "config.toml"
    return None


def read_run(file: Path | None) -> RunConfig | None:
    """Read a run file, or the config of an export or of a run of Prime-RL. Raises `UserError` if it cannot be read."""
    if file is None:
        return None
    if file.name == EXPORTED_CONFIG:
        return read_exported(file)
    prime_run = next((above.parent for above in file.parents if above.name == "configs"), None)
    if prime_run is not None and file == orchestrator_file(prime_run):
        return read_prime_rl(prime_run, file)
    return load(file)


def read_exported(file: Path) -> RunConfig:
    """Return the settings of an export's run.

    An export may be a stranger's, and its config has no paths. So it selects no class and no access to this machine: a
    warning names the keys that are not used.

    Raises:
        UserError: The config cannot be read.
    """
    found = read_config(file)
    if found.get("warmup"):
        found["model"] = {"name": lookup(found, "warmup.model") or "policy"}
    config, unused = settings_of(found, file), set[str]()
    renderer = config.orchestrator.renderer
    own_class = renderer.get("name") == "custom" and renderer != APPENDING_TEMPLATE
    if own_class or any(str(value).startswith(REDACTED) for value in renderer.values()):
        config.orchestrator.renderer = {"name": "auto"}
        unused.add("renderer")
    for source in [
        *config.orchestrator.train.source,
        *(config.orchestrator.eval.source if config.orchestrator.eval else ()),
    ]:
        agent = source.env.get("agent") or {}
        harness = agent.get("harness") or {}
        used = {key: value for key, value in harness.items() if key in _EXPORTED_KEYS and _is_harmless(key, value)}
        unused |= {key for key, value in harness.items() if value} - {*used, *_NOT_EVALUATED, *TRAINING_ONLY_KEYS}
        source.env = {"taskset": {"id": PLUGIN_ID}, "agent": agent | {"harness": used}}
    if unused:
        do = "to use them, pass --config RUN/config.toml"
        print(f"warning: {file}: not used: {', '.join(sorted(unused))}; {do}", file=sys.stderr)
    return config


def _is_harmless(key: str, value: TomlValue) -> bool:
    """Whether a value of a harness selects no class, and nothing of this machine but the choice of the image."""
    if key == "environment_kwargs":
        return isinstance(value, dict) and value.keys() <= {"image"}
    return not isinstance(value, str) or ":" not in value or value == TRAINABLE_TERMINUS


def orchestrator_file(prime_run: Path) -> Path | None:
    """Return the file with the orchestrator's config of a run of Prime-RL; None if there is none."""
    files = config_files(prime_run)
    return files.get("orchestrator") or files.get(WHOLE_CONFIG)


def read_prime_rl(prime_run: Path, file: Path) -> RunConfig:
    """Return the settings of a run of Prime-RL that its evaluations need; other settings are defaults.

    Args:
        prime_run: The run folder.
        file: Its `orchestrator_file`, for errors.

    Raises:
        UserError: The config cannot be read.
    """
    return settings_of(run_config(prime_run), file)


def settings_of(found: TomlTable, file: Path) -> RunConfig:
    """Return the settings that evaluations need of the config of a run of either engine.

    Raises:
        UserError: A value is invalid; `file` is named.
    """
    orchestrator = found.get("orchestrator") or {}
    tables = {kind: _sources_of(orchestrator, kind) for kind in ("train", "eval")}
    chosen: TomlTable = {
        "model": {
            "name": lookup(orchestrator, "model.name") or lookup(found, "model.name"),
            "quantization": lookup(found, "model.quantization"),
        },
        "seq_len": orchestrator.get("seq_len") or found.get("seq_len"),
        "seed": found.get("seed") if isinstance(found.get("seed"), int) else None,
        "inference": {
            "vllm": {key: lookup(found, f"inference.vllm.{key}") for key in ("max_model_len", "dtype")},
        },
        "orchestrator": {
            "renderer": orchestrator.get("renderer"),
            "concurrency": {"max_inflight": lookup(orchestrator, "concurrency.max_inflight")},
            **{kind: {"source": sources} for kind, sources in tables.items() if sources},
        },
    }
    try:
        return RunConfig.model_validate(_without_nulls(chosen))
    except ValidationError as error:
        raise explain(error, str(file)) from None


def _sources_of(orchestrator: TomlTable, kind: str) -> list[TomlTable]:
    """Return the sources of a kind with the keys that an evaluation needs."""
    keys = {"train": ("temperature", "max_completion_tokens"), "eval": tuple(EvalSampling.model_fields)}[kind]
    return [
        {
            "name": source.get("name"),
            "env": {
                "taskset": lookup(source, "env.taskset"),
                "agent": {key: lookup(source, f"env.agent.{key}") for key in ("max_turns", "harness")},
            },
            "sampling": {key: lookup(source, f"sampling.{key}") for key in keys},
        }
        for source in lookup(orchestrator, f"{kind}.source") or []
    ]


def _without_nulls(value: TomlValue) -> TomlValue:
    """Return a copy without null entries, whose keys then have their defaults."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _source(config: RunConfig):
    held_out = config.orchestrator.eval
    return held_out.source[0] if held_out else config.orchestrator.train.source[0]


def _sampling(config: RunConfig) -> EvalSampling:
    source = _source(config)
    known = source.sampling.model_dump(include=set(EvalSampling.model_fields), exclude_none=True)
    return EvalSampling.model_validate(known)
