"""Commands in a sandbox: their input, output and termination."""

import asyncio
import time

import pytest
from patience import HANG_S

from harbortrainer.sandbox.errors_and_changes import SandboxDiedError


async def test_returns_stdout_stderr_and_exit_code(sandbox):
    result = await sandbox.exec("echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.return_code) == ("out\n", "err\n", 3)


async def test_passes_cwd_and_env(sandbox):
    result = await sandbox.exec('pwd; echo "$A $B"', cwd="/usr/bin", env={"A": "1 2", "B": "ü\n'"})
    assert result.stdout == "/usr/bin\n1 2 ü\n'\n"


async def test_runs_long_command(sandbox):
    assert (await sandbox.exec(f"printf %s {'é' * 60_000} | wc -c")).stdout == "120000\n"
    refused = await sandbox.exec(f"echo {'é' * 70_000}")
    assert refused.return_code == 126 and "Argument list too long" in refused.stderr
    assert (await sandbox.exec("echo on")).stdout == "on\n"


async def test_reports_missing_working_folder(sandbox):
    result = await sandbox.exec("true", cwd="/no/such/folder")
    assert result.return_code == 127
    assert "/no/such/folder" in result.stderr


async def test_runs_command_as_given_user(sandbox):
    assert (await sandbox.exec("id -un; echo $HOME")).stdout == "root\n/root\n"
    assert (await sandbox.exec("id -un", user="nobody")).stdout == "nobody\n"
    assert (await sandbox.exec("id -u", user=1234)).stdout == "1234\n"
    with sandbox.with_default_user("nobody"):
        assert (await sandbox.exec("id -un")).stdout == "nobody\n"
    unknown = await sandbox.exec("true", user="unknown")
    assert unknown.return_code == 126
    assert "no user 'unknown'" in unknown.stderr


async def test_host_name_resolves(sandbox):
    assert (await sandbox.exec("getent hosts $(hostname)")).stdout.split() == ["127.0.1.1", "sandbox"]


@pytest.mark.parametrize("text", ["a\0b", "\ud83d"])
async def test_text_that_no_process_can_get_fails_only_its_command(sandbox, text):
    for refused in (
        await sandbox.exec(f"echo {text}"),
        await sandbox.exec("true", cwd=f"/{text}"),
        await sandbox.exec("true", env={"A": text}),
        await sandbox.exec(f"echo {text}", user="nobody"),
    ):
        assert refused.return_code == 126 and refused.stderr.startswith("sandbox: ")
    assert (await sandbox.exec("echo on")).stdout == "on\n"


@pytest.mark.parametrize(
    ("user", "ids"),
    [
        ("1234", "1234 0 0 /"),
        ("nobody:daemon", "65534 1 1 /nonexistent"),
        ("1234:2345", "1234 2345 2345 /"),
        ("root:65534", "0 65534 65534 /root"),
    ],
)
async def test_user_and_group_are_as_in_docker(sandbox, user, ids):
    assert (await sandbox.exec("echo $(id -u) $(id -g) $(id -G) $HOME", user=user)).stdout == f"{ids}\n"


@pytest.mark.parametrize("user", ["root", "nobody"])
async def test_command_inherits_no_ignored_signal(sandbox, user):
    """Signals 32 and 33 are the C library's own."""
    _, ignored = (await sandbox.exec("grep SigIgn /proc/self/status", user=user)).stdout.split()
    assert int(ignored, 16) & ~(0b11 << 31) == 0


async def test_unknown_group_is_refused(sandbox):
    refused = await sandbox.exec("true", user="nobody:unknown")
    assert refused.return_code == 126 and "no group 'unknown'" in refused.stderr


async def test_timeout_kills_command_and_children(sandbox):
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
        await sandbox.exec("sleep 4321 & sleep 4321", timeout_sec=1)
    assert time.monotonic() - begin < HANG_S
    assert "4321" not in (await sandbox.exec("ps ax -o args | grep -v grep")).stdout


async def test_cancelled_command_is_killed_and_sandbox_keeps_running(sandbox):
    running = asyncio.create_task(sandbox.exec("sleep 4322"))
    await asyncio.sleep(0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.sleep(0.05)
    assert "4322" not in (await sandbox.exec("ps ax -o args | grep -v grep")).stdout


async def test_returns_invalid_utf8_and_large_output(sandbox):
    result = await sandbox.exec("head -c 5000000 /dev/zero | tr '\\0' x; printf '\\377\\0'")
    assert len(result.stdout) == 5_000_002
    assert result.stdout.endswith("�\0")


async def test_endless_output_is_cut_without_using_memory(sandbox):
    with pytest.raises(RuntimeError, match="timed out"):
        await sandbox.exec("yes", timeout_sec=1)
    assert (await sandbox.exec("echo still here")).stdout == "still here\n"


async def test_commands_run_concurrently(sandbox):
    begin = time.monotonic()
    results = await asyncio.gather(*(sandbox.exec(f"sleep 2; echo {n}") for n in range(20)))
    assert [r.stdout for r in results] == [f"{n}\n" for n in range(20)]
    assert time.monotonic() - begin < 20  # one after the other would take 40


async def test_background_process_does_not_block_its_command(sandbox):
    begin = time.monotonic()
    result = await sandbox.exec("sleep 600 & echo started")
    assert result.stdout == "started\n"
    assert time.monotonic() - begin < HANG_S
    assert "sleep 600" in (await sandbox.exec("ps ax -o args")).stdout


async def test_stdin_is_empty(sandbox):
    assert (await sandbox.exec("cat; echo end")).stdout == "end\n"


async def test_tmux_works_and_ends_with_the_sandbox(sandbox):
    result = await sandbox.exec("tmux new-session -d -x 80 -y 24 -s s 'bash --login' && tmux ls")
    assert result.return_code == 0, result.stderr
    await sandbox.exec("tmux send-keys -t s 'echo $((6*7)) > /tmp/out; tmux wait -S done' Enter; tmux wait done")
    assert (await sandbox.exec("cat /tmp/out")).stdout == "42\n"


async def test_exec_in_dead_sandbox_raises(sandbox):
    running = asyncio.create_task(sandbox.exec("sleep 60"))
    await asyncio.sleep(0.1)
    await sandbox.stop(delete=True)
    with pytest.raises(SandboxDiedError):
        await running
    with pytest.raises(SandboxDiedError):
        await sandbox.exec("true")


async def test_does_not_block_event_loop(sandbox):
    stalls: list[float] = []

    async def watch() -> None:
        while True:
            begin = time.monotonic()
            await asyncio.sleep(0.001)
            stalls.append(time.monotonic() - begin)

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(sandbox.exec("head -c 3000000 /dev/zero") for _ in range(8)))
    watcher.cancel()
    assert max(stalls) < 0.2


async def test_makes_file_executable_without_process(sandbox):
    await sandbox.exec("umask 027; echo 'echo ran' > /tmp/x; ln -s x /tmp/link; cp -p /tmp/x /tmp/y; rm -f /bin/chmod")
    assert (await sandbox.exec("chmod +x /tmp/link")).return_code == 0
    assert (await sandbox.exec("stat -c %a /tmp/x; /tmp/x")).stdout == "751\nran\n"
    missing = await sandbox.exec("chmod +x /tmp/no-such-file")
    assert missing.return_code != 0
    assert "/tmp/no-such-file" in missing.stderr
    assert (await sandbox.exec("chmod +x /tmp/y && true")).return_code == 127
    assert (await sandbox.exec("chmod +x /tmp/y", user="nobody")).return_code != 0
