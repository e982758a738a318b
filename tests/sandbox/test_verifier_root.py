"""The verifier's own root with `verifier_tools = "image"`: what it and the agent see of each other's files."""

import subprocess
import sys

import pytest
from ordinary_user import as_nobody

from harbortrainer.sandbox.local import LocalEnvironment

pytestmark = pytest.mark.process


async def output(sandbox: LocalEnvironment, command: str) -> str:
    result = await sandbox.exec(command)
    return (result.stdout or "") + (result.stderr or "")


@pytest.fixture
async def sandbox(make_sandbox) -> LocalEnvironment:
    """A sandbox on the host's root whose image adds a file to three system folders."""
    return await make_sandbox(
        dockerfile="FROM x\nWORKDIR /app\nCOPY tool /usr/local/bin/tool\nRUN mkdir -p /opt/made /data; "
        "echo 1 > /opt/made/one; echo 'alias a=b' > /root/.bashrc; echo 1 > /data/one\n",
        files={"tool": "of the image\n"},
        verifier_tools="image",
    )


SYSTEM_FILES = "cat /usr/local/bin/tool /opt/made/one /root/.bashrc; tail -n 2 /etc/hosts; stat -c %a /root /var/lib"


async def test_system_folders_are_as_at_start(sandbox: LocalEnvironment):
    before = await output(sandbox, SYSTEM_FILES)
    await sandbox.exec(
        "echo changed | tee /usr/local/bin/tool /opt/made/one /root/.bashrc /etc/hosts /usr/bin/env /root/.gitconfig "
        "/usr/local/bin/added /conftest.py; mkdir -p /root/.local/bin; rm -rf /var/lib/dpkg/status /usr/share"
    )
    assert await output(sandbox, SYSTEM_FILES) != before
    await sandbox.raise_limits()
    assert await output(sandbox, SYSTEM_FILES) == before
    for path in ("/usr/local/bin/added", "/root/.gitconfig", "/root/.local", "/conftest.py"):
        assert not await sandbox.is_file(path), path
        assert not await sandbox.is_dir(path), path
    assert await sandbox.is_dir("/usr/share")
    assert await sandbox.is_file("/var/lib/dpkg/status")


async def test_other_files_are_as_agent_left_them(sandbox: LocalEnvironment):
    await sandbox.exec(
        "echo 2 > /data/one; echo 3 > /app/new; mkdir /root/work; echo 4 > /root/work/new; echo 5 > /new"
    )
    await sandbox.raise_limits()
    files = "cat /data/one /app/new /root/work/new /new"
    assert await output(sandbox, files) == "2\n3\n4\n5\n"
    await sandbox.exec("echo verifier > /app/new")
    await sandbox.restore_limits()
    assert await output(sandbox, "cat /app/new") == "verifier\n"
    await sandbox.exec("rm -rf /data /new; mv /app /old; mkdir /app; echo 6 > /app/new; mkdir /new; echo 7 > /new/new")
    await sandbox.raise_limits()
    assert await output(sandbox, "cat /app/new /old/new /new/new; ls -d /data 2>&1") == (
        "6\nverifier\n7\nls: cannot access '/data': No such file or directory\n"
    )


async def test_installation_of_verifier_stays_apart(sandbox: LocalEnvironment):
    """The agent does not see it; the next step's verifier does."""
    await sandbox.raise_limits()
    await sandbox.exec(
        "echo installed | tee /usr/local/bin/installed /etc/installed /root/.config /var/cache/installed"
    )
    installed = "cat /usr/local/bin/installed /etc/installed /root/.config /var/cache/installed 2>/dev/null"
    await sandbox.restore_limits()
    assert await output(sandbox, installed) == ""
    await sandbox.raise_limits()
    assert await output(sandbox, installed) == 4 * "installed\n"


async def test_user_mounts_are_visible_to_verifier(make_sandbox, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "f").write_text("data")
    targets = ["/data", "/usr/share/more/data"]
    mounts = [
        {"type": "bind", "source": str(tmp_path / "data"), "target": target, "read_only": True} for target in targets
    ]
    sandbox = await make_sandbox(mounts=mounts, verifier_tools="image")
    await sandbox.raise_limits()
    assert await output(sandbox, "cat /data/f /usr/share/more/data/f") == 2 * "data"
    assert (await output(sandbox, "touch /data/h /usr/share/more/data/h")).count("Read-only") == 2


async def test_working_directory_in_system_folder_is_as_agent_left_it(make_sandbox):
    sandbox = await make_sandbox(dockerfile="FROM x\nWORKDIR /opt/work/app\n", verifier_tools="image")
    await sandbox.exec("echo 1 > answer; echo x > ../beside")
    for content in ("1\n", "2\n"):
        await sandbox.raise_limits()
        assert await output(sandbox, "pwd; cat answer; ls -A ..") == f"/opt/work/app\n{content}app\n"
        await sandbox.restore_limits()
        await sandbox.exec("cd ..; rm -rf app; mkdir app; echo 2 > app/answer")
    await sandbox.exec("rm -rf app; ln -s / app", cwd="/opt/work")
    await sandbox.raise_limits()
    assert await output(sandbox, "ls -A") == ""


async def test_neither_side_sees_the_covered_roots(sandbox: LocalEnvironment):
    """Both roots have the other's under /sys, below a mount that the agent cannot remove."""
    attack = "umount /sys; rmdir /sys; mv /sys /s; mkdir /sys/x; unshare -Um umount /sys; ls -A /sys"
    await sandbox.exec(attack)
    assert await output(sandbox, "ls -A /sys") == ""
    await sandbox.raise_limits()
    assert await output(sandbox, "ls -A /sys") == ""


SCRIPT = """
import asyncio, os, tempfile
from pathlib import Path
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.paths import TrialPaths
from harbortrainer.sandbox.local import LocalEnvironment

async def main(top):
    (top / "environment").mkdir()
    sandbox = LocalEnvironment(
        environment_dir=top / "environment", environment_name="t", session_id="t",
        trial_paths=TrialPaths(trial_dir=top / "trial"), task_env_config=EnvironmentConfig(),
        network_policy=NetworkPolicy(network_mode=NetworkMode.NO_NETWORK),
        cache_dir=str(top / "cache"), image="host", verifier_tools="image",
    )
    await sandbox.start(force_build=False)
    await sandbox.exec("mkdir /app; echo work > /app/answer; echo x > /usr/local/bin/added; rm /usr/bin/env")
    await sandbox.raise_limits()
    result = await sandbox.exec("cat /app/answer; ls -d /usr/local/bin/added /usr/bin/env; id -u")
    print(os.geteuid(), result.stdout)
    await sandbox.stop(delete=True)

with tempfile.TemporaryDirectory() as folder:
    asyncio.run(main(Path(folder)))
"""


def test_ordinary_user_has_verifier_root_too():
    command, variables = as_nobody([sys.executable, "-c", SCRIPT])
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, cwd="/", check=False)
    assert done.stdout.split() == ["65534", "work", "/usr/bin/env", "0"], done.stderr


async def test_refuses_unknown_setting(make_sandbox):
    with pytest.raises(ValueError, match="verifier_tools = 'mine': use one of agent, image"):
        await make_sandbox(verifier_tools="mine", start=False)
