"""Local sandboxes as an ordinary user; skipped if the kernel denies ordinary users namespaces."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from image_setup import SLIM, engine_skip_reason
from ordinary_user import as_nobody, run_on_image

SCRIPT = """
import asyncio, os, sys, tempfile
from pathlib import Path
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.paths import TrialPaths
from harbortrainer.sandbox.local import LocalEnvironment

async def main():
    assert os.geteuid() != 0
    top = Path(tempfile.mkdtemp())
    (top / "environment").mkdir()
    (top / "environment" / "Dockerfile").write_text(
        "FROM x\\nWORKDIR /app\\nCOPY f ./\\nRUN id -u > built; echo x >> /etc/hosts\\n"
    )
    (top / "environment" / "f").write_text("copied")
    (top / "secret").write_text("swordfish")
    sandbox = LocalEnvironment(
        environment_dir=top / "environment", environment_name="t", session_id="t",
        trial_paths=TrialPaths(trial_dir=top / "trial"), task_env_config=EnvironmentConfig(),
        network_policy=NetworkPolicy(network_mode=NetworkMode.NO_NETWORK),
        cache_dir=str(top / "cache"), image="host", memory_mb=200, disk_mb=50, pids=50,
    )
    await sandbox.start(force_build=False)
    async def out(command, **more):
        result = await sandbox.exec(command, **more)
        return (result.stdout + result.stderr).strip()
    print("built:", await out("cat f built; tail -n1 /etc/hosts"))
    print("user:", await out("id -u"))
    print("secret:", await out(f"cat {top}/secret; ls /home /root"))
    print("network:", await out("cat /proc/net/dev | grep -c :"))
    print("tmux:", await out("tmux new -d 'sleep 5' && tmux ls | wc -l"))
    print("disk:", await out("head -c 100M /dev/zero > /tmp/f; stat -c %s /tmp/f; rm /tmp/f"))
    print("memory:", await out("head -c 900M /dev/zero | tail | wc -c; echo ${PIPESTATUS[1]}", timeout_sec=30))
    print("processes:", await out("for i in $(seq 200); do sleep 9 & done 2>/dev/null; ps ax | grep -c '[s]leep 9'"))
    print("after:", await out("echo alive"))
    print("other user:", await out("id", user="nobody"))
    print("nested:", await out("unshare --user true; echo $?"))
    await sandbox.upload_dir(top / "environment", "/up")
    await sandbox.download_dir("/up", top / "down")
    print("down:", (top / "down" / "f").read_text())
    await sandbox.stop(delete=True)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Output of the script as an ordinary user, by heading."""
    command = [sys.executable, "-c", SCRIPT]
    environment = {"PATH": os.defpath, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None or shutil.which("unshare") is None:
            pytest.skip("setpriv and unshare (util-linux) are not installed")
        command, variables = as_nobody(command)
        environment |= variables
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd="/")
    if "Operation not permitted" in result.stderr and "SandboxStartError" in result.stderr:
        pytest.skip(f"the kernel gives ordinary users no namespaces: {result.stderr.strip().splitlines()[-1]}")
    assert result.returncode == 0, result.stdout + result.stderr
    outputs, heading = {}, ""
    for line in result.stdout.splitlines():
        if line.partition(": ")[0] in HEADINGS:
            heading, _, line = line.partition(": ")
        outputs[heading] = f"{outputs.get(heading, '')}{line}\n"
    return {heading: text.strip() for heading, text in outputs.items()}


HEADINGS = (
    *("built", "user", "secret", "network", "tmux", "disk", "memory", "processes", "after", "other user", "nested"),
    "down",
)


def test_dockerfile_steps_run(output):
    assert output["built"] == "copied0\nx"


def test_is_root_inside_and_sees_no_secret(output):
    assert output["user"] == "0"
    assert "swordfish" not in output["secret"]


def test_has_no_network_and_gains_no_capabilities(output):
    assert output["network"] == "1"
    assert output["nested"].startswith("1")


def test_tmux_works(output):
    assert output["tmux"] == "1"


def test_limits_hold_without_cgroups(output):
    assert "No space left" in output["disk"]
    assert output["memory"].splitlines()[-1] != "0" or output["memory"].startswith("137")
    assert sum(line.isdigit() and int(line) for line in output["processes"].splitlines()) <= 50
    assert output["after"] == "alive"


def test_other_user_is_refused(output):
    assert "cannot become user 65534" in output["other user"]


def test_file_round_trip(output):
    assert output["down"] == "copied"


IMAGE = f"""\
{SLIM}
RUN mkdir -p /kept /emptied/old && touch /kept/a /kept/b && echo 1 > /srv/one && ln /srv/one /srv/two \\
 && chown 7:8 /srv/one && chmod 555 /srv
RUN rm -r /kept/b /emptied && mkdir /emptied && touch /emptied/new
ENV GREETING="hello you"
WORKDIR /app
"""


def run_with_docker_access(dockerfile: str, *commands: str) -> list[str]:
    """Run commands on an image as an ordinary user with access to Docker; return the output lines."""
    socket = Path("/var/run/docker.sock")
    if os.geteuid() != 0 or not socket.is_socket():
        pytest.skip("needs a local Docker daemon, and root to join the group of its socket")
    return run_on_image(dockerfile, *commands, groups=f"--groups {socket.stat().st_gid}")


@pytest.mark.skipif(bool(engine_skip_reason("docker")), reason=engine_skip_reason("docker") or "-")
def test_docker_image_as_ordinary_user():
    commands = (
        "pwd; echo $GREETING; id -u; ls -A /kept /emptied; ls /bin/bash",
        "stat -c '%u %g' /srv/one; echo more >> /srv/one; touch /srv/new; cat /srv/two; ls /srv",
        "rm -r /kept /srv; ls -d /kept /srv 2> /dev/null | wc -l; ls -d /emptied",
    )
    assert run_with_docker_access(IMAGE, *commands) == [
        "/app hello you 0 /emptied: new /kept: a /bin/bash",
        "0 0 1 more new one two",
        "0 /emptied",
        "bytes: True",
        "left: 0 []",
    ]


@pytest.mark.skipif(bool(engine_skip_reason("docker")), reason=engine_skip_reason("docker") or "-")
def test_image_for_other_user_is_refused():
    message, leftovers = run_with_docker_access(f"{SLIM}USER 1234\n")
    assert message.startswith("refused: the image's USER is '1234': only root can give a sandbox other users")
    assert leftovers == "left: 0 []"
