"""Keys: W&B, and those of sandbox providers, by name. Values are never shown."""

import contextlib
import io
import netrc
import os
from collections.abc import Iterator
from pathlib import Path

from harbortrainer.config.preflight.facts import Facts
from harbortrainer.config.preflight.finding import Finding, green, red, yellow
from harbortrainer.engines.prime_rl.command import dotenv

OURS = ("local", "docker")
WANDB_HOST = "api.wandb.ai"


def check_dotenv(facts: Facts) -> Iterator[Finding]:
    """`.env` in the current folder."""
    if not Path(".env").is_file():
        if facts.prime_rl:
            yield yellow(".env", "none in the current folder", "put WANDB_API_KEY and other keys there")
        return
    names = ", ".join(sorted(dotenv())) or "nothing"
    yield green(".env", f"sets {names}")


def check_wandb(facts: Facts) -> Iterator[Finding]:
    """The key, when the run logs to W&B."""
    asked = any(facts.get(f"{part}monitors.wandb") is not None for part in ("", "trainer.", "orchestrator."))
    if not facts.prime_rl or not asked:
        return
    if os.environ.get("WANDB_MODE") in ("disabled", "offline"):
        yield green("W&B", f"WANDB_MODE={os.environ['WANDB_MODE']}")
    elif value("WANDB_API_KEY"):
        yield green("W&B", "WANDB_API_KEY is set")
    elif in_netrc(WANDB_HOST):
        yield green("W&B", "logged in by ~/.netrc")
    else:
        yield red("W&B", "WANDB_API_KEY is not set", "put it in .env, or remove [monitors.wandb]")


def check_providers(facts: Facts) -> Iterator[Finding]:
    """What Harbor's own check of each sandbox provider says about its credentials."""
    for name in facts.environment_types:
        if name in OURS or ":" in name:
            continue
        problem = provider_problem(name)
        if problem:
            yield red(f"sandboxes: {name}", problem, "set the provider's keys in .env or log in with its tool")
        else:
            yield green(f"sandboxes: {name}", "credentials are there")


def provider_problem(name: str) -> str:
    """Why Harbor cannot use a provider, or nothing."""
    from harbor.environments.factory import EnvironmentFactory
    from harbor.models.environment_type import EnvironmentType

    from harbortrainer.sandbox.names import environment_config

    environment_config(name)  # an unknown name is the user's mistake, told with the known ones
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
