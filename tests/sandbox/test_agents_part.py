"""The agent's part of a sandbox and what grades it, outside: who sees and reaches what."""

import asyncio

import pytest

from harbortrainer.sandbox.local import LocalEnvironment

VERIFIER, TESTS = "/logs/verifier", "/tests"


async def said(sandbox: LocalEnvironment, command: str) -> str:
    done = await sandbox.exec(command)
    return (done.stdout or "") + (done.stderr or "")


async def started(sandbox: LocalEnvironment, command: str) -> None:
    """Leave a process of the agent's running."""
    await sandbox.exec(f"setsid bash -c '{command}' > /dev/null 2>&1 < /dev/null &")


async def seen(sandbox: LocalEnvironment, command: str, wanted: str) -> bool:
    """Whether a command says something before long."""
    for _ in range(200):
        if wanted in await said(sandbox, command):
            return True
        await asyncio.sleep(0.05)
    return False


async def test_the_verifiers_folders_are_its_own(sandbox: LocalEnvironment):
    await sandbox.exec(f"echo agent | tee {TESTS}/a {VERIFIER}/a /app.txt")
    await sandbox.make_room()
    assert await said(sandbox, f"ls {TESTS} {VERIFIER}; cat /app.txt") == f"{VERIFIER}:\n\n{TESTS}:\nagent\n"
    await sandbox.exec(f"echo verifier | tee {TESTS}/v {VERIFIER}/v")
    await sandbox.room_is_over()
    assert await said(sandbox, f"cat {TESTS}/* {VERIFIER}/*") == "agent\nagent\n"


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
async def test_nothing_done_to_their_names_reaches_them(sandbox: LocalEnvironment, attack: str):
    await sandbox.make_room()
    await sandbox.exec(f"echo verifier | tee {TESTS}/v {VERIFIER}/v")
    await sandbox.room_is_over()
    assert "got a namespace" not in await said(sandbox, attack)
    await sandbox.make_room()
    assert await said(sandbox, f"cat {TESTS}/v {VERIFIER}/v") == "verifier\nverifier\n"
    await sandbox.exec(f"echo 1 > {VERIFIER}/reward.txt")
    await sandbox.room_is_over()
    assert await said(sandbox, f"cat {VERIFIER}/reward.txt; find / -name v -path '*er*/v' 2>/dev/null | wc -l") != "1\n"


async def test_the_agent_cannot_name_a_process_of_the_verifiers(sandbox: LocalEnvironment):
    await started(sandbox, "while :; do ps -eo args > /seen.new; mv /seen.new /seen; done")
    await sandbox.make_room()
    await sandbox.exec("setsid sleep 444 > /dev/null 2>&1 < /dev/null &")
    assert "sleep 444" in await said(sandbox, "rm -f /seen; ps -eo args")
    assert await seen(sandbox, "cat /seen", "bash -c")
    assert "sleep 444" not in await said(sandbox, "cat /seen")


async def test_the_verifier_sees_and_reaches_the_agents_services(sandbox: LocalEnvironment):
    await started(sandbox, "cd /etc; exec python3 -m http.server 8123")
    await sandbox.make_room()
    ask = "exec 3<> /dev/tcp/127.0.0.1/8123; printf 'GET /passwd HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3"
    assert await seen(sandbox, ask, "root:")
    assert await seen(sandbox, "readlink /proc/$(pgrep -f '[h]ttp.server')/cwd", "/etc")
    await sandbox.exec("pkill -f '[h]ttp.server'")
    assert await seen(sandbox, "pgrep -c -f '[h]ttp.server'", "0")


async def test_the_agent_kills_all_that_it_can_name_and_works_on(sandbox: LocalEnvironment):
    for attack in ("kill -9 -1", "kill -9 1; kill -TERM 1; kill -STOP 1; kill -INT 1"):
        await sandbox.exec(attack)
        assert await said(sandbox, "echo alive") == "alive\n"
    await sandbox.make_room()
    assert await said(sandbox, "echo graded") == "graded\n"


async def test_what_the_agent_left_is_killed_when_it_is_asked_for(sandbox: LocalEnvironment):
    await started(sandbox, "while :; do sleep 333 & sleep 0.01; done")
    await sandbox.make_room(kill=True)
    assert await said(sandbox, "pgrep -c -f 'sleep 333'") == "0\n"
    await sandbox.room_is_over()
    assert await said(sandbox, "echo alive") == "alive\n"


async def test_after_the_grade_was_fetched_a_next_step_is_set_up_in_the_agents_part(
    sandbox: LocalEnvironment, tmp_path
):
    await sandbox.make_room()
    await sandbox.exec(f"echo 0.5 > {VERIFIER}/reward.txt; echo x > {VERIFIER}/log")
    await sandbox.download_dir_filtered(source_dir=VERIFIER, target_dir=tmp_path, exclude=["*"], protect=["reward.txt"])
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["reward.txt"]
    await sandbox.exec("setsid sleep 555 > /dev/null 2>&1 < /dev/null &")
    await sandbox.room_is_over()
    assert await said(sandbox, "pgrep -c -f 'sleep 555'") == "1\n"
