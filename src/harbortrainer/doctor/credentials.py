"""Keys: W&B, and those of sandbox providers, by name. Values are never shown."""

import contextlib
import io
import netrc
import os
from collections.abc import Iterator
from pathlib import Path

from harbortrainer.config.plugin import is_provider
from harbortrainer.config.prime_rl_run import PrimeRun
from harbortrainer.config.runfile import RunConfig
from harbortrainer.doctor.finding import Finding, green, red, yellow
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.engines.prime_rl.command import dotenv
from harbortrainer.errors import UserError
from harbortrainer.runs.loading import loading
from harbortrainer.runs.monitors import need_monitors

WANDB_HOST = "api.wandb.ai"


def check_dotenv(plan: LaunchPlan) -> Iterator[Finding]:
    """`.env` in the current folder."""
    if Path(".env").is_file():
        yield green(".env", f"sets {', '.join(sorted(dotenv())) or 'nothing'}")
    elif plan.on_prime_rl:
        yield yellow(".env", "none in the current folder", "put WANDB_API_KEY and other keys there")


def check_wandb(plan: LaunchPlan) -> Iterator[Finding]:
    """The key, when the run logs to W&B."""
    run = plan.run
    asked = wandb_asked(run) if isinstance(run, PrimeRun) else None
    if isinstance(run, RunConfig):
        try:
            need_monitors(run)
        except UserError as error:
            yield red("monitors", error.what, error.do, plan.where(error.where.strip("[]")))
            return
        keys = run.monitors.wandb
        if keys is not None and keys.offline and not os.environ.get("WANDB_MODE"):
            yield green("W&B", "offline")
            return
        asked = "monitors.wandb" if keys is not None else None
    if asked is None:
        return
    if os.environ.get("WANDB_MODE") in ("disabled", "offline"):
        yield green("W&B", f"WANDB_MODE={os.environ['WANDB_MODE']}")
    elif value("WANDB_API_KEY"):
        yield green("W&B", "WANDB_API_KEY is set")
    elif in_netrc(WANDB_HOST):
        yield green("W&B", "logged in by ~/.netrc")
    else:
        yield red("W&B", "WANDB_API_KEY is not set", f"put it in .env, or remove [{asked}]", plan.where(asked))


def wandb_asked(run: PrimeRun) -> str | None:
    """The key by which a run on Prime-RL asks for W&B."""
    tables = {"": run.monitors, "trainer.": run.trainer.monitors, "orchestrator.": run.orchestrator.monitors}
    return next((f"{part}monitors.wandb" for part, table in tables.items() if table.wandb is not None), None)


def check_providers(plan: LaunchPlan) -> Iterator[Finding]:
    """What Harbor's own check of each sandbox provider says about its credentials."""
    for name, where in plan.environment_types.items():
        if not is_provider(name):
            continue
        loading("Harbor", "harbor")
        from harbortrainer.sandbox.environment_types import environment_config

        try:
            environment_config(name)
        except UserError as error:
            yield red("sandboxes", error.what, error.do, where)
            continue
        if problem := provider_problem(name):
            do = "set the provider's keys in .env or log in with its tool"
            yield red(f"sandboxes: {name}", problem, do, where)
        else:
            yield green(f"sandboxes: {name}", "credentials are there")


def provider_problem(name: str) -> str:
    """Why Harbor cannot use a provider, or nothing."""
    from harbor.environments.factory import EnvironmentFactory
    from harbor.models.environment_type import EnvironmentType

    said = io.StringIO()
    os.environ.update({key: text for key, text in dotenv().items() if key not in os.environ})
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            EnvironmentFactory.run_preflight(type=EnvironmentType(name))
    except (SystemExit, ImportError, ValueError, RuntimeError) as error:
        lines = f"{error}\n{said.getvalue()}".strip().splitlines()
        return next((line.strip() for line in lines if line.strip()), "cannot be used")
    return ""


def value(name: str) -> str:
    """A variable of the environment or of `.env`."""
    return os.environ.get(name) or dotenv().get(name, "")


def in_netrc(host: str) -> bool:
    """Whether ~/.netrc knows a host."""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
