"""Checks of API keys: W&B and sandbox providers. Only names of keys are printed, never values."""

import contextlib
import io
import netrc
import os
from collections.abc import Iterator
from pathlib import Path

from harbortrainer.config.environment_table import environment_entry
from harbortrainer.config.prime_rl_run import PrimeRun
from harbortrainer.config.runfile import RunConfig
from harbortrainer.doctor.finding import Finding, green, red, yellow
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.engines.prime_rl.checkout import apply_dotenv, dotenv
from harbortrainer.errors import UserError
from harbortrainer.runs.display import loading
from harbortrainer.runs.monitors import require_monitors

LOG_IN = "set the provider's keys in .env, or log in with its CLI"
WANDB_HOST = "api.wandb.ai"


def check_dotenv(plan: LaunchPlan) -> Iterator[Finding]:
    """Check `.env` in the current folder."""
    if Path(".env").is_file():
        yield green(".env", f"sets {', '.join(sorted(dotenv())) or 'nothing'}")
    elif plan.on_prime_rl:
        yield yellow(".env", "not found in the current folder", "create it, with WANDB_API_KEY and other keys")


def check_wandb(plan: LaunchPlan) -> Iterator[Finding]:
    """Check the W&B key, if the run logs to W&B."""
    run = plan.run
    wandb_key = prime_wandb_key(run) if isinstance(run, PrimeRun) else None
    if isinstance(run, RunConfig):
        try:
            require_monitors(run)
        except UserError as error:
            yield red("monitors", error.what, error.do, plan.where(error.where.strip("[]")))
            return
        wandb = run.monitors.wandb
        if wandb is not None and wandb.offline and not os.environ.get("WANDB_MODE"):
            yield green("W&B", "offline")
            return
        wandb_key = "monitors.wandb" if wandb is not None else None
    if wandb_key is None:
        return
    if os.environ.get("WANDB_MODE") in ("disabled", "offline"):
        yield green("W&B", f"WANDB_MODE={os.environ['WANDB_MODE']}")
    elif value("WANDB_API_KEY"):
        yield green("W&B", "WANDB_API_KEY is set")
    elif in_netrc(WANDB_HOST):
        yield green("W&B", "logged in through ~/.netrc")
    else:
        yield red("W&B", "WANDB_API_KEY is not set", f"add it to .env, or remove [{wandb_key}]", plan.where(wandb_key))


def prime_wandb_key(run: PrimeRun) -> str | None:
    """The dotted key that turns on W&B in a run on Prime-RL; None if there is none."""
    tables = {"": run.monitors, "trainer.": run.trainer.monitors, "orchestrator.": run.orchestrator.monitors}
    return next((f"{part}monitors.wandb" for part, table in tables.items() if table.wandb is not None), None)


def check_providers(plan: LaunchPlan) -> Iterator[Finding]:
    """Run Harbor's own credential check for each sandbox provider."""
    for name, where in plan.environment_types.items():
        if not environment_entry(name).remote:
            continue
        with loading("Harbor", "harbor.environments.factory"):
            problem = provider_problem(name)
        if problem:
            yield red(f"sandboxes: {name}", problem, LOG_IN, where)
        else:
            yield green(f"sandboxes: {name}", "credentials found")


def provider_problem(name: str) -> str:
    """Return why Harbor cannot use a provider; empty when it can."""
    from harbor.environments.factory import EnvironmentFactory
    from harbor.models.environment_type import EnvironmentType

    output = io.StringIO()
    apply_dotenv()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            path = environment_entry(name).import_path
            EnvironmentFactory.run_preflight(type=None if path else EnvironmentType(name), import_path=path)
    except (SystemExit, ImportError, ValueError, RuntimeError) as error:
        lines = f"{error}\n{output.getvalue()}".strip().splitlines()
        return next((line.strip() for line in lines if line.strip()), "its credential check failed")
    return ""


def value(name: str) -> str:
    """Return a variable of the environment or of `.env`; empty if it is not set."""
    return os.environ.get(name) or dotenv().get(name, "")


def in_netrc(host: str) -> bool:
    """Whether ~/.netrc has a login for the host."""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
