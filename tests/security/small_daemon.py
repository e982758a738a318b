"""A separate Docker daemon on a small disk, so that an agent can fill it without filling the machine's."""

import os
import shutil
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

IMAGE = "debian:12-slim"
_MOUNTED_MB = 900
_PATIENCE_S = 60
_NO_NETWORK = ("--bridge=none", "--iptables=false", "--ip6tables=false")


def why_not() -> str:
    """Return why no daemon can be started here, or ""."""
    if os.geteuid() != 0:
        return "only root starts a Docker daemon"
    return "" if shutil.which("dockerd") else "there is no dockerd on this machine"


@contextmanager
def small_daemon(folder: Path) -> Generator[str]:
    """Run the daemon in `folder` and yield its address. It gets its image from the machine's daemon."""
    run(["mount", "-t", "tmpfs", "-o", f"size={_MOUNTED_MB}m", "tmpfs", str(folder)])
    address = f"unix://{folder}/socket"
    places = [f"--data-root={folder}/root", f"--exec-root={folder}.exec", f"--pidfile={folder}.pid"]
    with (folder / "log").open("wb") as log:
        # In its own network namespace: a daemon without a bridge removes that of the machine's daemon.
        words = ["unshare", "--net", "dockerd", "-H", address, *places, *_NO_NETWORK]
        daemon = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait(address, folder / "log")
        with subprocess.Popen(["docker", "save", IMAGE], stdout=subprocess.PIPE) as image:
            run(["docker", "-H", address, "load", "--quiet"], stdin=image.stdout)
        yield address
    finally:
        daemon.terminate()
        daemon.wait(_PATIENCE_S)
        run(["umount", "--recursive", str(folder)])


def _wait(address: str, log: Path) -> None:
    end = time.monotonic() + _PATIENCE_S
    while subprocess.run(["docker", "-H", address, "info"], capture_output=True, check=False).returncode:
        assert time.monotonic() < end, log.read_text()[-2000:]
        time.sleep(0.2)


def run(words: list[str], **more) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, **more)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout
