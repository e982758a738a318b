"""Docker: is there a daemon, does it know Compose v2, and are there networks for all trials at once?"""

import ipaddress
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harbortrainer.config.preflight.facts import Facts
from harbortrainer.config.preflight.finding import Finding, green, red, yellow

TIMEOUT_S = 20
DEFAULT_NETWORKS = 31
"""What Docker's built-in address pools hold: 15 of 172.17.0.0/12 in /16 and 16 of 192.168.0.0/16 in /20."""

POOLS = '{"default-address-pools": [{"base": "10.200.0.0/16", "size": 24}]}'


def check(facts: Facts) -> Iterator[Finding]:
    """Daemon, Compose, address pools, login."""
    if "docker" not in facts.environment_types:
        return
    info = daemon()
    if isinstance(info, str):
        yield red("Docker", info, 'start it (`sudo systemctl start docker`), or use environment_type = "local"')
        return
    yield green("Docker", f"daemon {info.get('ServerVersion', '?')}")
    yield compose()
    yield networks(info, facts.parallel, used_networks())
    yield login(Path(os.environ.get("DOCKER_CONFIG", Path.home() / ".docker")) / "config.json")


def daemon() -> dict[str, Any] | str:
    """What the daemon says about itself, or why it does not."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    done = run("docker", "info", "--format", "{{json .}}")
    if done is None:
        return f"the daemon did not answer within {TIMEOUT_S} s"
    info = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    if done.returncode != 0 or not info.get("ServerVersion"):
        return "the daemon does not answer"
    return info


def compose() -> Finding:
    """Compose v2, which Harbor calls as `docker compose`."""
    done = run("docker", "compose", "version", "--short")
    if done is None or done.returncode != 0:
        return red("Compose", "docker has no `compose` command", "install Compose v2 (docker-compose-plugin)")
    version = done.stdout.strip()
    if version.lstrip("v").startswith("1."):
        return red("Compose", f"version {version} is too old", "install Compose v2 (docker-compose-plugin)")
    return green("Compose", f"version {version}")


def networks(info: dict[str, Any], parallel: int, used: int) -> Finding:
    """Each trial has a network of its own."""
    free = max(capacity(info.get("DefaultAddressPools") or []) - used, 0)
    what = f"{parallel} parallel trials, a network each; {free} networks are free"
    if parallel > free:
        do = f"lower orchestrator.concurrency.max_inflight, or give Docker more: {POOLS} in /etc/docker/daemon.json"
        return red("Docker networks", what, do)
    return green("Docker networks", what)


def capacity(pools: list[dict[str, Any]]) -> int:
    """How many networks fit into the daemon's address pools."""
    if not pools:
        return DEFAULT_NETWORKS
    return sum(2 ** max(int(pool["Size"]) - ipaddress.ip_network(pool["Base"]).prefixlen, 0) for pool in pools)


def used_networks() -> int:
    """Networks that take addresses now; `host` and `none` take none."""
    done = run("docker", "network", "ls", "--format", "{{.Driver}}")
    return 0 if done is None else sum(driver not in ("host", "null") for driver in done.stdout.split())


def login(config: Path) -> Finding:
    """Whether pulls are made under an account."""
    try:
        auths = json.loads(config.read_text()) if config.is_file() else {}
    except (OSError, json.JSONDecodeError):
        auths = {}
    if auths.get("auths") or auths.get("credHelpers"):
        return green("Docker login", "done")
    return yellow("Docker login", "not done; a registry may limit anonymous pulls", "run `docker login`")


def run(*words: str) -> subprocess.CompletedProcess[str] | None:
    """A command's result; none when it took too long."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return None
