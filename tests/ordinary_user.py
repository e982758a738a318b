"""Helpers to run commands as an ordinary user in tests that run as root."""

import os
import subprocess
import sys
from pathlib import Path

NOBODY = 65534
TUN = "mount -t tmpfs -o mode=755 none /dev/net && mknod -m 666 /dev/net/tun c 10 200"
"""Opens /dev/net/tun to all users, as udev does; without udev only root may use it."""
_ENVIRONMENT = {"PATH": os.defpath, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def as_nobody(
    command: list[str], groups: str = "--clear-groups", prepare: str = "true"
) -> tuple[list[str], dict[str, str]]:
    """Return a command that runs as `nobody`, and the environment variables that it needs.

    The interpreter is bind-mounted to /mnt, since `nobody` cannot read root's home.

    Args:
        groups: setpriv's option for supplementary groups.
        prepare: Shell code that root runs first, in mount and PID namespaces that end with the command.
    """
    base = Path(sys.base_prefix)
    paths = [str(Path(__file__).parents[1] / "src"), *(path for path in sys.path if "site-packages" in path)]
    python = f"/mnt/bin/{Path(os.path.realpath(sys.executable)).name}"
    drop = f'setpriv --reuid {NOBODY} --regid {NOBODY} {groups} "$@"'
    script = f"mount --bind {base} /mnt && {prepare} && {drop}"
    variables = {"PYTHONPATH": os.pathsep.join(paths), "LD_LIBRARY_PATH": "/mnt/lib", "HOME": "/tmp"}
    apart = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    return [*apart, "sh", "-c", script, "sh", python, *command[1:]], variables


_IMAGE_SCRIPT = """
import asyncio, os, sys, tempfile
from pathlib import Path
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.paths import TrialPaths
from harbortrainer.sandbox.images.image_cache import ImageCache
from harbortrainer.sandbox.layer_store import Store
from harbortrainer.sandbox.local import LocalEnvironment
from harbortrainer.sandbox.errors_and_changes import SandboxBuildError

async def main(top, dockerfile, *commands):
    assert os.geteuid() != 0
    (top / "environment").mkdir()
    (top / "environment/Dockerfile").write_text(dockerfile)
    try:
        sandbox = LocalEnvironment(
            environment_dir=top / "environment", environment_name="t", session_id="t",
            trial_paths=TrialPaths(trial_dir=top / "trial"), task_env_config=EnvironmentConfig(),
            image=os.environ["IMAGE"], cache_dir=str(top / "cache"),
            network_policy=NetworkPolicy(network_mode=NetworkMode(os.environ.get("NETWORK", "no-network"))),
        )
    except ValueError as error:
        return print("refused:", error)
    cache = ImageCache(Store(top / "cache"))
    try:
        await sandbox.start(force_build=False)
        for command in commands:
            result = await sandbox.exec(command)
            print(" ".join((result.stdout + result.stderr).split()))
        print("bytes:", cache.size() > 1_000_000)
    except SandboxBuildError as error:
        print("refused:", error)
    await sandbox.stop(delete=True)
    await cache.shrink(0)
    print("left:", cache.size(), list((top / "cache/user/unpacked").glob("[0-9a-f]*")))

with tempfile.TemporaryDirectory() as folder:
    asyncio.run(main(Path(folder), *sys.argv[1:]))
"""


def run_on_image(
    dockerfile: str, *commands: str, groups: str = "--clear-groups", prepare: str = "true", **variables: str
) -> list[str]:
    """Run commands in an ordinary user's sandbox; return their output line by line, or why it was refused.

    `IMAGE="host"` among the variables selects the machine's root instead of an image.
    """
    script = [sys.executable, "-c", _IMAGE_SCRIPT, dockerfile, *commands]
    command, more = as_nobody(script, groups, prepare)
    environment = _ENVIRONMENT | {"IMAGE": "build"} | more | variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, cwd="/", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()
