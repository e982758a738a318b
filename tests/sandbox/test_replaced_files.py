"""Files that the host, the monitor or an init process reads, replaced by something that could make them wait.

No request to the sandbox waits for another process, and the sandbox stops.
"""

import asyncio
from pathlib import Path

import pytest
from conftest import MakeSandbox
from patience import HANG_S

from harbortrainer.sandbox.errors_and_changes import SandboxError
from harbortrainer.sandbox.local import LocalEnvironment
from harbortrainer.sandbox.local_examination import read

REPLACEMENTS = {
    "a pipe": "rm -rf {0}; mkfifo {0}",
    "a folder": "rm -rf {0}; mkdir -p {0}",
    "a link to itself": "rm -rf {0}; ln -s {0} {0}",
    "a link to a device": "rm -rf {0}; ln -s /dev/ptmx {0}",
    "a sparse terabyte": "rm -rf {0}; truncate -s 1T {0}",
    "a leased file": "rm -rf {0}; echo x > {0}; python3 -c 'import fcntl, signal; signal.signal(29, signal.SIG_IGN); "
    'file = open("{0}"); fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK); print("leased"); signal.pause()\' &',
}
PATHS = [
    "/etc/passwd",
    "/etc/group",
    "/etc/nsswitch.conf",
    "/logs/agent/log",
    "/logs/agent",
    "/logs/artifacts",
    "/logs/verifier/reward.txt",
    "/tests/test.sh",
    "/app",
    "/app/answer",
    "/usr/bin/dash",
    "/usr/lib/python3/dist-packages/x.pth",
    "/usr/lib/python3/dist-packages/x.dist-info/entry_points.txt",
]


async def attempt(request) -> str:
    """Wait for a request, which may fail but not hang. Returns its result as text."""
    try:
        async with asyncio.timeout(HANG_S):
            return str(await request)
    except (SandboxError, OSError) as error:
        return f"refused: {error}"


async def use(sandbox: LocalEnvironment, path: str, folder: Path) -> None:
    """Send every request of a trial after its agent."""
    await attempt(sandbox.changes())
    for user in (None, "root", "nobody", 1234):
        await attempt(sandbox.is_file(path, user=user))
    await attempt(sandbox.download_file(path, folder / "file"))
    for number, source in enumerate({"/logs/agent", "/logs/artifacts", "/app", path}):
        await attempt(sandbox.download_dir(source, folder / str(number)))
    await attempt(sandbox.raise_limits())
    await attempt(sandbox.clear_folders(["/logs/verifier"], ["/tests"]))
    (folder / "upload").mkdir()
    (folder / "upload" / "test.sh").write_text("true")
    await attempt(sandbox.upload_dir(folder / "upload", "/tests"))
    await attempt(sandbox.exec("chmod +x /tests/test.sh"))
    await attempt(read(sandbox._running, path))
    await attempt(sandbox.changes())
    await attempt(sandbox.restore_limits())


@pytest.mark.parametrize("replacement", REPLACEMENTS)
async def test_no_request_waits_for_a_replaced_file(tmp_path: Path, make_sandbox: MakeSandbox, replacement: str):
    sandbox = await make_sandbox(disk_mb=64)
    await sandbox.restore_limits()
    for number, path in enumerate(PATHS):
        command = f"cd /; mkdir -p {Path(path).parent}; {REPLACEMENTS[replacement].format(path)}"
        await sandbox.exec(command, cwd="/", env={"SHELL": "/bin/bash"})
        (tmp_path / str(number)).mkdir()
        await use(sandbox, path, tmp_path / str(number))
        written = [entry for entry in (tmp_path / str(number)).rglob("*") if entry.is_fifo() or entry.is_block_device()]
        assert written == []
        assert sum(entry.stat().st_size for entry in (tmp_path / str(number)).rglob("*") if entry.is_file()) < 64 << 20
    async with asyncio.timeout(HANG_S):
        await sandbox.stop(delete=True)


async def test_owners_of_downloaded_files_are_not_looked_up(tmp_path: Path, sandbox: LocalEnvironment):
    """A lookup reads /etc/passwd, and loads the libraries that /etc/nsswitch.conf names, in an init process."""
    await sandbox.exec("echo x > /logs/agent/x; rm -f /etc/passwd /etc/group; mkfifo /etc/passwd /etc/group")
    async with asyncio.timeout(HANG_S):
        await sandbox.download_dir("/logs/agent", tmp_path / "logs")
        assert (await sandbox.exec("echo $((6*7))", env={"SHELL": "/bin/bash"})).stdout == "42\n"
    assert (tmp_path / "logs" / "x").read_text() == "x\n"


async def test_leases_are_refused_and_locks_are_not(sandbox: LocalEnvironment):
    script = (
        "import errno, fcntl\nfile = open('/tmp/x', 'w+')\nfcntl.flock(file, fcntl.LOCK_EX)\n"
        "fcntl.lockf(file, fcntl.LOCK_EX)\nprint(fcntl.fcntl(file, fcntl.F_GETFD))\n"
        "try:\n    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)\nexcept OSError as error:\n"
        "    print(errno.errorcode[error.errno])\n"
    )
    done = await sandbox.exec(f'python3 -c "{script}"')
    assert done.stdout == "1\nEINVAL\n", done


async def test_process_of_unknown_user_reports_it(sandbox: LocalEnvironment):
    await sandbox.exec("rm -f /etc/passwd; truncate -s 1T /etc/passwd")
    async with asyncio.timeout(HANG_S):
        done = await sandbox.exec("true", user="nobody")
    assert (done.return_code, done.stderr) == (126, "sandbox: no user 'nobody' in the sandbox's /etc/passwd\n")
