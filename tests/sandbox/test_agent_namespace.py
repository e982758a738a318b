"""Isolation of the agent's namespaces from grading: what the agent and the verifier can see and reach."""

import asyncio

import pytest

from harbortrainer.sandbox.local import LocalEnvironment

pytestmark = pytest.mark.process

VERIFIER, TESTS = "/logs/verifier", "/tests"


async def output(sandbox: LocalEnvironment, command: str) -> str:
    result = await sandbox.exec(command)
    return (result.stdout or "") + (result.stderr or "")


async def start_in_background(sandbox: LocalEnvironment, command: str) -> None:
    """Start a background process of the agent."""
    await sandbox.exec(f"setsid bash -c '{command}' > /dev/null 2>&1 < /dev/null &")


async def prints_eventually(sandbox: LocalEnvironment, command: str, expected: str) -> bool:
    """Repeat a command for up to ten seconds; return whether it printed the expected text."""
    for _ in range(200):
        if expected in await output(sandbox, command):
            return True
        await asyncio.sleep(0.05)
    return False


async def test_verifier_folders_are_private(sandbox: LocalEnvironment):
    await sandbox.exec(f"echo agent | tee {TESTS}/a {VERIFIER}/a /app.txt")
    await sandbox.raise_limits()
    assert await output(sandbox, f"ls {TESTS} {VERIFIER}; cat /app.txt") == f"{VERIFIER}:\n\n{TESTS}:\nagent\n"
    await sandbox.exec(f"echo verifier | tee {TESTS}/v {VERIFIER}/v")
    await sandbox.restore_limits()
    assert await output(sandbox, f"cat {TESTS}/* {VERIFIER}/*") == "agent\nagent\n"


@pytest.mark.parametrize(
    "attack",
    [
        f"rm -rf {TESTS} {VERIFIER} /logs",
        f"mv {TESTS} /t; mv {VERIFIER} /v; mv /logs /l; mkdir -p {TESTS} {VERIFIER}",
        f"rm -rf {TESTS} && ln -s /app {TESTS}; rm -rf {VERIFIER} && ln -s /app {VERIFIER}",
        f"umount {TESTS} {VERIFIER} /logs; mount -t tmpfs x {TESTS}; mount --bind /etc {VERIFIER}",
        f"unshare -m true && echo got a namespace; unshare -Um umount {TESTS}",
    ],
)
async def test_agent_cannot_replace_verifier_folders(sandbox: LocalEnvironment, attack: str):
    await sandbox.raise_limits()
    await sandbox.exec(f"echo verifier | tee {TESTS}/v {VERIFIER}/v")
    await sandbox.restore_limits()
    assert "got a namespace" not in await output(sandbox, attack)
    await sandbox.raise_limits()
    assert await output(sandbox, f"cat {TESTS}/v {VERIFIER}/v") == "verifier\nverifier\n"
    await sandbox.exec(f"echo 1 > {VERIFIER}/reward.txt")
    await sandbox.restore_limits()
    assert (
        await output(sandbox, f"cat {VERIFIER}/reward.txt; find / -name v -path '*er*/v' 2>/dev/null | wc -l") != "1\n"
    )


async def test_agent_cannot_see_verifier_processes(sandbox: LocalEnvironment):
    await start_in_background(sandbox, "while :; do ps -eo args > /ps.new; mv /ps.new /ps; done")
    await sandbox.raise_limits()
    await sandbox.exec("setsid sleep 444 > /dev/null 2>&1 < /dev/null &")
    assert "sleep 444" in await output(sandbox, "rm -f /ps; ps -eo args")
    assert await prints_eventually(sandbox, "cat /ps", "bash -c")
    assert "sleep 444" not in await output(sandbox, "cat /ps")


async def test_verifier_reaches_agent_services(sandbox: LocalEnvironment):
    await start_in_background(sandbox, "cd /etc; exec python3 -m http.server 8123")
    await sandbox.raise_limits()
    request = "exec 3<> /dev/tcp/127.0.0.1/8123; printf 'GET /passwd HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3"
    assert await prints_eventually(sandbox, request, "root:")
    assert await prints_eventually(sandbox, "readlink /proc/$(pgrep -f '[h]ttp.server')/cwd", "/etc")
    await sandbox.exec("pkill -f '[h]ttp.server'")
    assert await prints_eventually(sandbox, "pgrep -c -f '[h]ttp.server'", "0")


async def test_agent_can_kill_all_its_processes_and_continue(sandbox: LocalEnvironment):
    for attack in ("kill -9 -1", "kill -9 1; kill -TERM 1; kill -STOP 1; kill -INT 1"):
        await sandbox.exec(attack)
        assert await output(sandbox, "echo alive") == "alive\n"
    await sandbox.raise_limits()
    assert await output(sandbox, "echo graded") == "graded\n"


async def test_leftover_processes_are_killed_on_request(sandbox: LocalEnvironment):
    await start_in_background(sandbox, "while :; do sleep 333 & sleep 0.01; done")
    await sandbox.raise_limits(kill=True)
    assert await output(sandbox, "pgrep -c -f 'sleep 333'") == "0\n"
    await sandbox.restore_limits()
    assert await output(sandbox, "echo alive") == "alive\n"


async def test_next_step_starts_in_agent_namespaces_after_grading(sandbox: LocalEnvironment, tmp_path):
    await sandbox.raise_limits()
    await sandbox.exec(f"echo 0.5 > {VERIFIER}/reward.txt; echo x > {VERIFIER}/log")
    await sandbox.download_dir_filtered(source_dir=VERIFIER, target_dir=tmp_path, exclude=["*"], protect=["reward.txt"])
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["reward.txt"]
    await sandbox.exec("setsid sleep 555 > /dev/null 2>&1 < /dev/null &")
    await sandbox.restore_limits()
    assert await prints_eventually(sandbox, "pgrep -c -f 'sleep 555'", "1\n")
