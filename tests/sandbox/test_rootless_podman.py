"""Sandboxes of an unprivileged user, on images that the user's own podman builds."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from image_setup import engine_skip_reason
from ordinary_user import NOBODY, TUN, run_on_image

IMAGE = """\
FROM localhost/slim:1
RUN mkdir -p /kept /emptied/old && touch /kept/a /kept/b && echo 1 > /srv/one && ln /srv/one /srv/two \\
 && chown 7:8 /srv/one && chmod 555 /srv
RUN rm -r /kept/b /emptied && mkdir /emptied && touch /emptied/new
ENV GREETING="hello you"
WORKDIR /app
"""
COMMANDS = (
    "pwd; echo $GREETING; id -u; ls -A /kept /emptied; ls /bin/bash",
    "stat -c '%u %g' /srv/one; echo more >> /srv/one; touch /srv/new; cat /srv/two; ls /srv",
)


def skip_reason() -> str:
    """Return why rootless podman cannot be tested here; "" if it can."""
    if os.geteuid() != 0:
        return "only root can set up an unprivileged user's podman"
    if missing := [name for name in ("newuidmap", "setpriv", "unshare") if shutil.which(name) is None]:
        return f"{', '.join(missing)} is not installed"
    return engine_skip_reason("podman")


pytestmark = pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "-")


# Copies some programs of this machine with their libraries.
COPY_PROGRAMS_SCRIPT = r"""
mkdir -p bin usr tmp srv && chmod 1777 tmp && cp --parents /etc/passwd /etc/group . && ln -s ../bin usr/bin
for name in bash sh cat ls id stat mkdir rm ln chmod chown touch; do
  program=$(readlink -f "$(command -v $name)")
  cp "$program" bin/$name && cp -L --parents $(ldd "$program" | grep -o '/[^ ]*') .
done
"""


@pytest.fixture(scope="module")
def rootfs_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small root filesystem as an archive."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "slim").mkdir()
    subprocess.run(["bash", "-ec", COPY_PROGRAMS_SCRIPT], cwd=folder / "slim", check=True)
    subprocess.run(["tar", "-cf", "slim.tar", "-C", "slim", "."], cwd=folder, check=True)
    return folder / "slim.tar"


def run_as_user(rootfs_archive: Path, ids: str) -> list[str]:
    """Run the commands on the image as a user with these subordinate ids; return the output lines."""
    ids_file = rootfs_archive.parent / "ids"
    ids_file.write_text(ids)
    prepare = (
        # A home for the user, and the archive in a place that the user can read.
        f"{TUN} && mount -t tmpfs none /media && mkdir -p /media/home/run && cp {rootfs_archive} /media/slim.tar"
        f" && mount --bind {ids_file} /etc/subuid && mount --bind {ids_file} /etc/subgid"
        f" && chown -R {NOBODY} /media/home && chmod 700 /media/home/run"
        f" && setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups podman import -q"
        " --change 'ENV PATH=/usr/bin:/bin' /media/slim.tar localhost/slim:1 >&2"
    )
    return run_on_image(IMAGE, *COMMANDS, prepare=prepare, HOME="/media/home", XDG_RUNTIME_DIR="/media/home/run")


def test_sandbox_runs_on_image_from_users_podman(rootfs_archive: Path):
    assert run_as_user(rootfs_archive, "nobody:200000:65536\n") == [
        "/app hello you 0 /emptied: new /kept: a /bin/bash",
        "0 0 1 more new one two",
        "bytes: True",
        "left: 0 []",
    ]


def test_error_without_subordinate_ids_names_fix(rootfs_archive: Path):
    (message,) = run_as_user(rootfs_archive, "")
    assert message.startswith("refused: image = 'build'")
    assert "podman has no subordinate user ids for this user (sudo usermod --add-subuids" in message
