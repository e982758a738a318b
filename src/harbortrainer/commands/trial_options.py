"""What `eval` and `rollout` share: the options for a model, an agent and a sandbox, and their checks."""

import importlib
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from harbortrainer.commands.check_tasks import SandboxOptions
from harbortrainer.config.runfile import RunConfig
from harbortrainer.doctor import preflight, task_checks
from harbortrainer.evaluation.candidate import Candidate, LocalModel, choose_candidate
from harbortrainer.evaluation.eval_rules import EvalRules, read_run, run_file
from harbortrainer.runs.display import loading

DEFAULT_CONTEXT = 32768
"""Context length of a model served on this machine, if neither run file nor command line sets it."""


class TrialOptions(BaseModel):
    """Options of a command, by their names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | None
    base_url: str | None
    api_key_var: str
    agent: str | None
    environment: str | None
    environment_kwarg: list[str] | None
    trust: list[str] | None
    temperature: float | None
    max_tokens: int | None
    max_turns: int | None

    def check(self) -> None:
        """Raise `UserError` for an unknown agent or environment type."""
        if self.agent is not None:
            task_checks.refuse_agent(self.agent, "--agent")
        if self.environment is not None:
            preflight.check_type(self.environment)

    def candidate(self) -> Candidate:
        """Return the model or agent; `UserError` if its files are missing."""
        chosen = choose_candidate(model=self.model, base_url=self.base_url, agent=self.agent, key_var=self.api_key_var)
        if isinstance(chosen, LocalModel):
            preflight.check_model(chosen.files.base, f"--model {self.model}")
        return chosen

    def rules(
        self, candidate: Candidate, *, config: Path | None = None, max_model_len: int | None = None
    ) -> tuple[EvalRules, RunConfig | None, Path | None]:
        """Return the rules of the trials, with the run and the run file that they are from.

        Args:
            candidate: The model or agent. A model served on this machine gets a context limit.
            config: The run file; by default the one of the model's run.
            max_model_len: The context limit; by default the run's.
        """
        is_local = isinstance(candidate, LocalModel)
        file = run_file(self.model if is_local else None, config)
        run = read_run(file)
        kwargs = SandboxOptions("", self.environment_kwarg or []).kwargs
        rules = EvalRules.of(
            run, environment=self.environment, environment_kwargs=kwargs, agent=self.agent, trusted=self.trust or ()
        )
        task_checks.refuse_agent(rules.agent_name, f"{file}: env.agent.harness.agent")
        if max_model_len is None and rules.max_model_len is None and isinstance(candidate, LocalModel):
            max_model_len = candidate.files.context_limit(DEFAULT_CONTEXT)
        rules = rules.with_overrides(
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            max_turns=self.max_turns,
            max_model_len=max_model_len,
        )
        return rules, run, file


def check_available(candidate: Candidate) -> None:
    """Raise `UserError` when the model server does not answer; name damaged checkpoints that were passed over."""
    for line in candidate.files.passed_over if isinstance(candidate, LocalModel) else ():
        print(f"warning: {line}", file=sys.stderr)
    candidate.check()


def load_libraries(candidate: Candidate, library: str, module: str) -> None:
    """Import a module of a library, and torch for a model served on this machine; print the seconds that it takes."""
    is_local = isinstance(candidate, LocalModel)
    if is_local:
        from harbortrainer.engines.engine_choice import require_extra

        require_extra("torch", "transformers", "peft", "fastapi", "uvicorn")
    with loading(library + " and torch" * is_local, module):
        if is_local:
            importlib.import_module("torch")
        importlib.import_module(module)
