"""A Docker daemon that does not see this process's folders is refused: no reward would come back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harbortrainer.doctor.docker_daemon import DaemonInfo, sees

pytestmark = [pytest.mark.process, pytest.mark.docker, pytest.mark.usefixtures("container")]

SCRIPT = """
import pathlib, sys
from harbortrainer.doctor.docker_daemon import folders
print(*folders(pathlib.Path(sys.argv[1]), "run.toml: environment_type"))
"""


def test_daemon_sees_folder_of_this_machine(tmp_path: Path) -> None:
    assert sees(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a folder that the daemon does not see")
def test_folder_of_another_mount_namespace_is_refused(tmp_path: Path) -> None:
    script = f'mount -t tmpfs none {tmp_path} && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-c", SCRIPT, tmp_path / "outputs" / "run"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"does not see this machine's folder {tmp_path}, so no trial" in done.stdout


@pytest.mark.parametrize(
    ("options", "remapping"),
    [(["name=userns"], "userns-remap"), (["name=rootless,x=y"], "rootless mode"), (["name=seccomp"], ""), (None, "")],
)
def test_remapped_users_are_reported(options: list[str] | None, remapping: str) -> None:
    assert DaemonInfo.model_validate({"SecurityOptions": options}).remapping == remapping
