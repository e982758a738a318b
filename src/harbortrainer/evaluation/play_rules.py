"""How every trial of an evaluation is played: the agent and its sandbox, the sampling, the chat format, the seed.

Contract: they come from a run file's evaluation, so that what is measured is what was trained, or are the plugin's
defaults; what is said on the command line wins. They are written down, and a resume must have the same.
"""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, JsonValue

from harbortrainer.config.agent_table import TRAINABLE_TERMINUS
from harbortrainer.config.plugin import PLUGIN_ID
from harbortrainer.config.reader import load
from harbortrainer.config.runfile import RunConfig
from harbortrainer.config.sampling_table import EvalSampling
from harbortrainer.config.table import TomlTable

ONE_WORKER: TomlTable = {"pool": {"type": "static", "num_workers": 1}}
NOT_OF_AN_EVALUATION = ("capture", "vllm_base_url", "model_name", "trials_dir")
"""Where training reads its tokens, and where its trials lie."""


class PlayRules(BaseModel):
    """The rules of one evaluation."""

    model_config = ConfigDict(extra="forbid")

    agent: TomlTable
    """The `env.agent` table, as verifiers and the plugin read it."""
    sampling: EvalSampling = EvalSampling()
    """What is asked of the model's server; what is none is left to it."""
    renderer: TomlTable = {"name": "auto"}
    """Chat format of a model that is served here."""
    max_model_len: int | None = None
    """Most tokens of prompt and answer of a model that is served here; None takes the model's own limit."""
    seed: int = 0
    """Of what a model that is served here samples."""

    @classmethod
    def of(
        cls,
        config: RunConfig | None,
        *,
        environment: str | None = None,
        environment_kwargs: Mapping[str, JsonValue] | None = None,
        agent: str | None = None,
    ) -> Self:
        """The rules of a run's own evaluations (of its training, where it has none), or the defaults.

        Args:
            config: The run.
            environment: Where the sandboxes are, instead of the run's.
            environment_kwargs: Keyword arguments of the sandbox's class, over the run's.
            agent: Who plays, instead of the run's agent.
        """
        table = deepcopy(_source(config).env.get("agent") or {}) if config else {}
        harness = {key: value for key, value in (table.get("harness") or {}).items() if key not in NOT_OF_AN_EVALUATION}
        harness |= {"id": harness.get("id", PLUGIN_ID), "keep_trials": "all"}
        harness["environment_type"] = environment or (harness.get("environment_type") if config else None) or "local"
        if environment_kwargs:
            harness["environment_kwargs"] = (harness.get("environment_kwargs") or {}) | dict(environment_kwargs)
        harness |= {"agent": agent} if agent else {}
        rules = cls(agent=table | {"harness": harness})
        if config is None:
            return rules
        told = {"renderer": config.orchestrator.renderer, "max_model_len": config.max_model_len, "seed": config.seed}
        return rules.model_copy(update=told | {"sampling": _sampling(config)})

    def changed(
        self, *, temperature: float | None, max_tokens: int | None, max_turns: int | None, max_model_len: int | None
    ) -> Self:
        """With what was said on the command line; None leaves a value as it is."""
        asked = {"temperature": temperature, "max_completion_tokens": max_tokens}
        sampling = self.sampling.model_copy(update={key: value for key, value in asked.items() if value is not None})
        agent = self.agent | ({} if max_turns is None else {"max_turns": max_turns})
        limit = max_model_len or self.max_model_len
        return self.model_copy(update={"sampling": sampling, "agent": agent, "max_model_len": limit})

    @property
    def player(self) -> str:
        """Who plays: Harbor's name for the agent, or `module:Class`."""
        return str(self.agent["harness"].get("agent") or TRAINABLE_TERMINUS)

    @property
    def environment_type(self) -> str:
        """Where the sandboxes are."""
        return str(self.agent["harness"]["environment_type"])

    @property
    def sandboxes(self) -> tuple[str, dict[str, object]]:
        """Where they are, and the keyword arguments of their class."""
        return self.environment_type, self.agent["harness"].get("environment_kwargs") or {}


def run_file(policy: str | None, config: Path | None) -> Path | None:
    """The run file that tells how to play: the one that was named, else that of the run which the policy belongs to."""
    if config is not None or policy is None:
        return config
    folder = Path(policy)
    for above in (folder, folder.parent, folder.parent.parent):
        if (above / "config.toml").is_file() and (above / "checkpoints").is_dir():
            return above / "config.toml"
    return None


def read_run(file: Path | None) -> RunConfig | None:
    """The run of a file. Raises `UserError` for a file that cannot be read."""
    return load(file) if file is not None else None


def _source(config: RunConfig):
    held_out = config.orchestrator.eval
    return held_out.source[0] if held_out else config.orchestrator.train.source[0]


def _sampling(config: RunConfig) -> EvalSampling:
    source = _source(config)
    known = source.sampling.model_dump(include=set(EvalSampling.model_fields), exclude_none=True)
    return EvalSampling.model_validate(known)
