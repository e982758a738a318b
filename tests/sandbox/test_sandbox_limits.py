"""Resource limits: fork bombs, memory hogs and full disks stop at the limit, and the sandbox keeps running."""

import asyncio
import time

import pytest


async def test_fork_bomb_stops_at_process_limit(make_sandbox):
    sandbox = await make_sandbox(pids=64)
    with pytest.raises(RuntimeError, match="timed out"):
        await sandbox.exec("bomb() { bomb | bomb & }; bomb; sleep 30", timeout_sec=2)
    assert (await sandbox.exec("echo alive")).stdout == "alive\n"


async def test_process_limit_holds(make_sandbox):
    sandbox = await make_sandbox(pids=40)
    result = await sandbox.exec("for i in $(seq 200); do sleep 5 & done 2>/dev/null; ps ax | grep -c '[s]leep 5'")
    assert int(result.stdout.split()[-1] if result.stdout.split() else 0) <= 40


async def test_memory_hog_is_killed_and_sandbox_keeps_running(make_sandbox):
    sandbox = await make_sandbox(memory_mb=100, disk_mb=28)
    result = await sandbox.exec("head -c 400M /dev/zero | tail", timeout_sec=20)
    assert result.return_code != 0
    assert (await sandbox.exec("echo alive")).stdout == "alive\n"


async def test_task_memory_limit_applies(make_sandbox):
    sandbox = await make_sandbox(task={"memory_mb": 100, "storage_mb": 28})
    assert (await sandbox.exec("head -c 400M /dev/zero | tail | wc -c; exit ${PIPESTATUS[1]}")).return_code != 0
    larger = await make_sandbox(task={"memory_mb": 1000, "storage_mb": 28})
    assert (await larger.exec("head -c 400M /dev/zero | tail | wc -c")).stdout.strip() == str(400 << 20)


@pytest.mark.parametrize("path", ["/tmp/f", "/root/f", "/usr/f", "/etc/f", "/logs/agent/f", "/dev/shm/f", "/app/f"])
async def test_disk_limit_applies_everywhere(make_sandbox, path):
    sandbox = await make_sandbox(disk_mb=20)
    result = await sandbox.exec(f"mkdir -p /app; head -c 100M /dev/zero > {path}; stat -c %s {path}")
    assert "No space left" in result.stderr
    assert int(result.stdout) <= 20 << 20


async def test_disk_limit_covers_all_folders_together(make_sandbox):
    sandbox = await make_sandbox(disk_mb=20)
    result = await sandbox.exec(
        "for d in /tmp /usr /etc /root; do head -c 15M /dev/zero > $d/f; done; cat /*/f | wc -c"
    )
    assert int(result.stdout) <= 20 << 20


async def test_number_of_files_is_limited(make_sandbox):
    sandbox = await make_sandbox(disk_mb=1)
    result = await sandbox.exec("cd /tmp; seq 5000 | xargs touch", timeout_sec=30)
    assert "No space left" in result.stderr


async def test_task_cpu_limit_applies(make_sandbox):
    sandbox = await make_sandbox(task={"cpus": 1})
    begin = time.monotonic()
    spin = "python3 -c 'import time\nwhile time.process_time() < 0.5: pass'"
    if (await sandbox.exec("command -v python3")).return_code:
        pytest.skip("the root filesystem has no python3 to spin with")
    await asyncio.gather(*(sandbox.exec(spin) for _ in range(3)))
    assert time.monotonic() - begin > 1.2
