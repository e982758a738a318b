"""Whose network a local sandbox with a public one has: ports of its own and a way out, or the machine's."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harbor.models.task.config import NetworkMode
from ordinary_user import TUN, run_on_image
from patience import HANG_S, wait_until

from harbortrainer.sandbox import network_choice
from harbortrainer.sandbox.sandbox_errors import SandboxDiedError

PUBLIC = NetworkMode.PUBLIC
PROGRAM = shutil.which("slirp4netns")
WHY_NOT = network_choice.missing_for_own()
OWN = pytest.mark.skipif(bool(WHY_NOT), reason=f"no network of its own: {WHY_NOT}")
SERVER = "import socket; s = socket.create_server(('', {port})); print(s.getsockname()[1], flush=True)\n"
SERVER += "while True: s.accept()[0].sendall(b'{word}')"


def asked(host: str, port: int) -> str:
    """The command that says what a server answers."""
    return f"python3 -c \"from socket import *; print(create_connection(('{host}', {port}), 5).recv(5).decode())\""


@pytest.fixture
def serving() -> Iterator[int]:
    """The port of a server on this machine that says hello at each of its addresses."""
    command = ["python3", "-c", SERVER.format(port=0, word="hello")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()


def own_address() -> str:
    """An address of this machine that is not its loopback's; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("198.18.0.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        return sock.getsockname()[0]


def carriers() -> set[int]:
    """The processes that carry packets of sandboxes that this process has started."""
    rows = subprocess.run(["ps", "-eo", "pid=,ppid=,comm="], capture_output=True, text=True, check=True).stdout
    table = [(int(pid), int(parent), name) for pid, parent, name in (row.split(None, 2) for row in rows.splitlines())]
    parents = {pid: parent for pid, parent, _ in table}

    def is_ours(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return {pid for pid, _, name in table if name == "slirp4netns" and is_ours(pid)}


def status_of(pid: int) -> dict[str, str]:
    """What the kernel says of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def sockets(pid: int) -> set[str]:
    """Those that a process holds."""
    held = (str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir())
    return {name for name in held if name.startswith("socket:")}


@OWN
async def test_two_at_once_serve_on_one_port_and_each_is_answered_by_its_own(make_sandbox):
    sandboxes = {word: await make_sandbox(network=PUBLIC) for word in ("first", "other")}
    for word, sandbox in sandboxes.items():
        serve = f'python3 -c "{SERVER.format(port=80, word=word)}"'
        await sandbox.exec(f"setsid {serve} > /tmp/log 2>&1 & until grep -q 80 /tmp/log; do sleep 0.1; done")
    for word, sandbox in sandboxes.items():
        said = await sandbox.exec(asked("127.0.0.1", 80))
        assert said.stdout.strip() == word, said.stderr


@OWN
async def test_it_reaches_other_addresses_but_not_this_machines_localhost(make_sandbox, serving):
    sandbox = await make_sandbox(network=PUBLIC)
    reached = await sandbox.exec(asked(own_address(), serving))
    assert reached.stdout.strip() == "hello", reached.stderr
    for host in ("127.0.0.1", "198.19.214.2", "localhost"):
        refused = await sandbox.exec(asked(host, serving))
        assert refused.return_code and "hello" not in refused.stdout, host


@OWN
async def test_names_are_asked_for_at_its_own_networks_address(make_sandbox):
    sandbox = await make_sandbox(network=PUBLIC)
    said = (await sandbox.exec("cat /etc/resolv.conf")).stdout
    assert [line for line in said.splitlines() if line.startswith("nameserver")] == ["nameserver 198.19.214.3"]


@OWN
async def test_what_carries_its_packets_is_confined_and_ends_with_it(make_sandbox):
    before = carriers()
    sandbox = await make_sandbox(network=PUBLIC)
    (pid,) = carriers() - before
    status = status_of(pid)
    bind_low_ports = 1 << 10
    assert int(status["CapEff"], 16) | bind_low_ports == bind_low_ports
    assert (status["Seccomp"], status["NoNewPrivs"]) == ("2", "1")
    assert not sockets(pid) & sockets(int(status["PPid"])), "it could speak for the sandbox"
    assert "slirp" not in (await sandbox.exec("ps ax")).stdout
    await sandbox.make_room()
    assert "slirp" not in (await sandbox.exec("ps ax")).stdout, "the verifier sees it"
    await sandbox.stop(delete=True)
    assert carriers() - before == set()


@OWN
async def test_a_sandbox_whose_way_out_is_gone_ends_as_a_failure_of_the_sandbox(make_sandbox):
    before = carriers()
    sandbox = await make_sandbox(network=PUBLIC)
    (pid,) = carriers() - before
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SandboxDiedError, match="slirp4netns, the way out of the sandbox's network, has ended"):
        await sandbox.exec("sleep 20")


@OWN
async def test_an_agents_door_is_a_socket_inside(make_sandbox):
    sandbox = await make_sandbox(network=PUBLIC)
    loop = asyncio.get_running_loop()
    with await sandbox.listen_inside(4321) as listening:
        listening.setblocking(False)
        asking = asyncio.create_task(sandbox.exec("echo hello > /dev/tcp/127.0.0.1/4321"))
        async with asyncio.timeout(HANG_S):
            asked_from, _ = await loop.sock_accept(listening)
            assert await loop.sock_recv(asked_from, 5) == b"hello"
        asked_from.close()
        await asking


async def test_a_sandbox_without_a_network_may_serve_on_low_ports(make_sandbox):
    sandbox = await make_sandbox()
    done = await sandbox.exec("python3 -c \"import socket; socket.create_server(('', 80))\"")
    assert done.return_code == 0, done.stderr


async def test_the_machines_network_is_there_when_it_is_asked_for(make_sandbox, serving):
    sandbox = await make_sandbox(network=PUBLIC, network_setting="host")
    assert (await sandbox.exec(asked("127.0.0.1", serving))).stdout.strip() == "hello"
    assert await sandbox.listen_inside(4321) is None


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str | None]]:
    """What stands for the program on this machine."""
    programs: dict[str, str | None] = {"slirp4netns": None}
    monkeypatch.setattr(shutil, "which", programs.get)
    network_choice.missing_for_own.cache_clear()
    yield programs
    network_choice.missing_for_own.cache_clear()


def test_without_the_program_auto_takes_the_machines_and_own_says_what_to_install(found):
    assert network_choice.way_out("auto") == ""
    with pytest.raises(ValueError, match="slirp4netns is not here: install slirp4netns"):
        network_choice.way_out("own")


def test_a_program_that_fails_is_no_way_out(found):
    found["slirp4netns"] = "/bin/false"
    assert network_choice.way_out("auto") == ""
    assert network_choice.missing_for_own() == "OSError: slirp4netns made no way out: it said nothing"


async def test_the_loop_goes_on_while_it_is_tried_and_sandboxes_that_start_at_once_try_it_once(
    make_sandbox, found, tmp_path
):
    program, tried, end = tmp_path / "slirp4netns", tmp_path / "tried", tmp_path / "end"
    program.write_text(f"#!/bin/sh\necho >> {tried}\nuntil [ -e {end} ]; do sleep 0.05; done\nexit 1\n")
    program.chmod(0o755)
    found["slirp4netns"] = str(program)
    starting = [asyncio.create_task(make_sandbox(network=PUBLIC)) for _ in range(3)]
    await asyncio.to_thread(wait_until, tried.exists)
    assert network_choice.missing_for_own.cache_info().currsize == 0, "it is still being tried"
    end.touch()
    await asyncio.gather(*starting)
    assert tried.read_text() == "\n" * 3, "three failures, for all sandboxes together"


@OWN
def test_a_program_that_failed_once_is_asked_again(found, tmp_path):
    program, failed = tmp_path / "slirp4netns", tmp_path / "failed"
    program.write_text(f'#!/bin/sh\n[ -e {failed} ] || {{ touch {failed}; exit 1; }}\nexec {PROGRAM} "$@"\n')
    program.chmod(0o755)
    found["slirp4netns"] = str(program)
    assert network_choice.missing_for_own() == ""
    assert failed.exists()


def test_another_setting_is_refused():
    with pytest.raises(ValueError, match="network = 'mine': use one of auto, own, host"):
        network_choice.way_out("mine")


@OWN
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can become another user")
def test_an_ordinary_user_has_it_too_where_the_device_is_open():
    say = f"grep -c tap0 /proc/net/dev; {asked(own_address(), 9)} 2>&1 | tail -n 1"
    said = run_on_image("FROM x\n", say, prepare=TUN, IMAGE="host", NETWORK="public")
    assert said[0] == "1 ConnectionRefusedError: [Errno 111] Connection refused"


@OWN
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_trying_it_takes_away_none_of_the_machines_mounts():
    """slirp4netns drops the mounts that it sees, which others see go where a mount is shared."""
    ask = "from harbortrainer.sandbox.network_choice import missing_for_own; print('missing:', missing_for_own())"
    script = (
        "mount -t tmpfs none /media && mount --make-shared /media && mkdir /media/under"
        ' && mount -t tmpfs none /media/under && touch /media/under/kept && "$@" && ls /media/under'
    )
    command = ["unshare", "--mount", "sh", "-ec", script, "sh", sys.executable, "-c", ask]
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True, check=False)
    assert done.stdout == "missing: \nkept\n", done.stderr
