"""Network of a local sandbox for a task with public network: its own through slirp4netns, or the host's."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harbor.models.task.config import NetworkMode
from ordinary_user import TUN, run_on_image
from patience import HANG_S, wait_until

from harbortrainer.sandbox import network_choice
from harbortrainer.sandbox.errors_and_changes import SandboxDiedError

PUBLIC = NetworkMode.PUBLIC
SLIRP4NETNS_PATH = shutil.which("slirp4netns")
SLIRP4NETNS_PROBLEM = network_choice.slirp_problem()
needs_slirp4netns = pytest.mark.skipif(bool(SLIRP4NETNS_PROBLEM), reason=f"slirp4netns: {SLIRP4NETNS_PROBLEM}")
SERVER = "import socket; s = socket.create_server(('', {port})); print(s.getsockname()[1], flush=True)\n"
SERVER += "while True: s.accept()[0].sendall(b'{word}')"


def recv_command(host: str, port: int) -> str:
    """Return a command that connects to a server and prints its reply."""
    return f"python3 -c \"from socket import *; print(create_connection(('{host}', {port}), 5).recv(5).decode())\""


@pytest.fixture
def host_server() -> Iterator[int]:
    """Port of a server on this machine that replies hello on every address."""
    command = ["python3", "-c", SERVER.format(port=0, word="hello")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()


def host_address() -> str:
    """Return a non-loopback address of this machine, without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("198.18.0.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        return sock.getsockname()[0]


def slirp_processes() -> set[int]:
    """Return the slirp4netns processes of this process's sandboxes."""
    rows = subprocess.run(["ps", "-eo", "pid=,ppid=,comm="], capture_output=True, text=True, check=True).stdout
    table = [(int(pid), int(parent), name) for pid, parent, name in (row.split(None, 2) for row in rows.splitlines())]
    parents = {pid: parent for pid, parent, _ in table}

    def is_descendant(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return {pid for pid, _, name in table if name == "slirp4netns" and is_descendant(pid)}


def status_of(pid: int) -> dict[str, str]:
    """Return the fields of a process's /proc status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def sockets(pid: int) -> set[str]:
    """Return the link targets of a process's open sockets."""
    targets = (str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir())
    return {name for name in targets if name.startswith("socket:")}


@needs_slirp4netns
async def test_concurrent_sandboxes_can_serve_on_same_port(make_sandbox):
    sandboxes = {word: await make_sandbox(network=PUBLIC) for word in ("first", "other")}
    for word, sandbox in sandboxes.items():
        serve = f'python3 -c "{SERVER.format(port=80, word=word)}"'
        await sandbox.exec(f"setsid {serve} > /tmp/log 2>&1 & until grep -q 80 /tmp/log; do sleep 0.1; done")
    for word, sandbox in sandboxes.items():
        result = await sandbox.exec(recv_command("127.0.0.1", 80))
        assert result.stdout.strip() == word, result.stderr


@needs_slirp4netns
async def test_reaches_other_addresses_but_not_host_localhost(make_sandbox, host_server):
    sandbox = await make_sandbox(network=PUBLIC)
    reached = await sandbox.exec(recv_command(host_address(), host_server))
    assert reached.stdout.strip() == "hello", reached.stderr
    for host in ("127.0.0.1", "198.19.214.2", "localhost"):
        refused = await sandbox.exec(recv_command(host, host_server))
        assert refused.return_code and "hello" not in refused.stdout, host


@needs_slirp4netns
async def test_name_server_is_slirp4netns(make_sandbox):
    sandbox = await make_sandbox(network=PUBLIC)
    result = (await sandbox.exec("cat /etc/resolv.conf")).stdout
    assert [line for line in result.splitlines() if line.startswith("nameserver")] == ["nameserver 198.19.214.3"]


@needs_slirp4netns
async def test_slirp4netns_is_confined_and_ends_with_sandbox(make_sandbox):
    before = slirp_processes()
    sandbox = await make_sandbox(network=PUBLIC)
    (pid,) = slirp_processes() - before
    status = status_of(pid)
    bind_low_ports = 1 << 10
    assert int(status["CapEff"], 16) | bind_low_ports == bind_low_ports
    assert (status["Seccomp"], status["NoNewPrivs"]) == ("2", "1")
    assert not sockets(pid) & sockets(int(status["PPid"])), "slirp4netns could write to the sandbox's control socket"
    assert "slirp" not in (await sandbox.exec("ps ax")).stdout
    await sandbox.raise_limits()
    assert "slirp" not in (await sandbox.exec("ps ax")).stdout, "the verifier sees slirp4netns"
    await sandbox.stop(delete=True)
    assert slirp_processes() - before == set()


@needs_slirp4netns
@pytest.mark.parametrize("busy_s", [0, 1])
async def test_killed_slirp4netns_is_sandbox_error(make_sandbox, busy_s):
    """The event loop may be busy until the sandbox has ended, so that its last message is still unread."""
    before = slirp_processes()
    sandbox = await make_sandbox(network=PUBLIC)
    (pid,) = slirp_processes() - before
    os.kill(pid, signal.SIGKILL)
    time.sleep(busy_s)  # noqa: ASYNC251 (it must block the loop)
    with pytest.raises(SandboxDiedError, match="slirp4netns, which connects the sandbox's network, has ended"):
        await sandbox.exec("sleep 20")


@needs_slirp4netns
async def test_listen_inside_accepts_connections_from_sandbox(make_sandbox):
    sandbox = await make_sandbox(network=PUBLIC)
    loop = asyncio.get_running_loop()
    with await sandbox.listen_inside(4321) as listening:
        listening.setblocking(False)
        sending = asyncio.create_task(sandbox.exec("echo hello > /dev/tcp/127.0.0.1/4321"))
        async with asyncio.timeout(HANG_S):
            client, _ = await loop.sock_accept(listening)
            assert await loop.sock_recv(client, 5) == b"hello"
        client.close()
        await sending


async def test_sandbox_without_network_may_serve_on_low_ports(make_sandbox):
    sandbox = await make_sandbox()
    result = await sandbox.exec("python3 -c \"import socket; socket.create_server(('', 80))\"")
    assert result.return_code == 0, result.stderr


async def test_host_network_reaches_localhost(make_sandbox, host_server):
    sandbox = await make_sandbox(network=PUBLIC, network_setting="host")
    assert (await sandbox.exec(recv_command("127.0.0.1", host_server))).stdout.strip() == "hello"
    assert await sandbox.listen_inside(4321) is None


@pytest.fixture
def programs_found(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str | None]]:
    """The programs that `shutil.which` finds; the test sets slirp4netns."""
    programs: dict[str, str | None] = {"slirp4netns": None}
    monkeypatch.setattr(shutil, "which", programs.get)
    network_choice.slirp_problem.cache_clear()
    yield programs
    network_choice.slirp_problem.cache_clear()


def test_without_slirp4netns_auto_uses_host_network_and_own_raises(programs_found):
    assert network_choice.slirp4netns_path("auto") == ""
    with pytest.raises(ValueError, match=r"slirp4netns is not installed\. To fix it: install slirp4netns"):
        network_choice.slirp4netns_path("own")


def test_failing_slirp4netns_is_not_used(programs_found):
    programs_found["slirp4netns"] = "/bin/false"
    assert network_choice.slirp4netns_path("auto") == ""
    assert (
        network_choice.slirp_problem()
        == "OSError: slirp4netns could not connect the sandbox's network: it printed nothing"
    )


async def test_slirp4netns_check_runs_once_without_blocking_event_loop(make_sandbox, programs_found, tmp_path):
    program, check_log, release = tmp_path / "slirp4netns", tmp_path / "check-log", tmp_path / "release"
    program.write_text(f"#!/bin/sh\necho >> {check_log}\nuntil [ -e {release} ]; do sleep 0.05; done\nexit 1\n")
    program.chmod(0o755)
    programs_found["slirp4netns"] = str(program)
    starting = [asyncio.create_task(make_sandbox(network=PUBLIC)) for _ in range(3)]
    await asyncio.to_thread(wait_until, check_log.exists)
    assert network_choice.slirp_problem.cache_info().currsize == 0, "a result was cached before the check ended"
    release.touch()
    await asyncio.gather(*starting)
    assert check_log.read_text() == "\n" * 3, "expected three attempts in total, not three per sandbox"


@needs_slirp4netns
def test_failed_slirp4netns_check_is_retried(programs_found, tmp_path):
    program, failed = tmp_path / "slirp4netns", tmp_path / "failed"
    program.write_text(f'#!/bin/sh\n[ -e {failed} ] || {{ touch {failed}; exit 1; }}\nexec {SLIRP4NETNS_PATH} "$@"\n')
    program.chmod(0o755)
    programs_found["slirp4netns"] = str(program)
    assert network_choice.slirp_problem() == ""
    assert failed.exists()


def test_unknown_network_setting_is_refused():
    with pytest.raises(ValueError, match="network = 'bridge': use one of auto, own, host"):
        network_choice.slirp4netns_path("bridge")


@needs_slirp4netns
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can become another user")
def test_ordinary_user_has_own_network_if_tun_device_is_open():
    command = f"grep -c tap0 /proc/net/dev; {recv_command(host_address(), 9)} 2>&1 | tail -n 1"
    result = run_on_image("FROM x\n", command, prepare=TUN, IMAGE="host", NETWORK="public")
    assert result[0] == "1 ConnectionRefusedError: [Errno 111] Connection refused"


@needs_slirp4netns
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_slirp4netns_check_keeps_host_mounts():
    """slirp4netns unmounts every mount that it sees; unmounting a shared one would propagate to the host."""
    check_script = "from harbortrainer.sandbox.network_choice import slirp_problem; print('missing:', slirp_problem())"
    script = (
        "mount -t tmpfs none /media && mount --make-shared /media && mkdir /media/under"
        ' && mount -t tmpfs none /media/under && touch /media/under/kept && "$@" && ls /media/under'
    )
    command = ["unshare", "--mount", "sh", "-ec", script, "sh", sys.executable, "-c", check_script]
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True, check=False)
    assert result.stdout == "missing: \nkept\n", result.stderr
