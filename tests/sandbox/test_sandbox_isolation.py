"""Isolation of the host: code that a model runs in a sandbox cannot see, reach or change it."""

import os
import socket
from pathlib import Path

import pytest

from harbortrainer.sandbox import host_view

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can write to /etc")


async def out(sandbox, command: str) -> str:
    result = await sandbox.exec(command)
    return f"{result.stdout}{result.stderr}"


async def test_home_folders_and_project_are_hidden(sandbox, tmp_path):
    (tmp_path / "secret.txt").write_text("swordfish")
    assert "No such file" in await out(sandbox, f"cat {tmp_path}/secret.txt")
    assert "No such file" in await out(sandbox, f"cat {Path(__file__)}")
    assert (
        await out(sandbox, "ls -A /root /home /tmp /run /mnt /media /srv /opt /var/tmp | grep -v -e : -e '^$' -e lock")
        == ""
    )


async def test_only_system_folders_are_visible(sandbox):
    visible = set((await out(sandbox, "ls -A /")).split())
    assert visible <= {
        *("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "var", "nix", "gnu", "boot", "dev", "home"),
        *("logs", "media", "mnt", "opt", "proc", "root", "run", "srv", "sys", "tests", "tmp"),
    }


@pytest.mark.parametrize("path", ["/etc/shadow", "/etc/gshadow", "/etc/machine-id", "/etc/ssh", "/etc/sudoers"])
async def test_host_secrets_in_etc_are_hidden(sandbox, path):
    content = (await sandbox.exec(f"cat {path} {path}/*")).stdout.strip()
    assert content in ("", "root:*:19000:0:99999:7:::", "root:*::")


@pytest.fixture
def secret_in_etc(monkeypatch):
    secret = Path("/etc/harbortrainer-test-secret")
    secret.write_text("swordfish")
    secret.chmod(0o600)
    # Clear the cached view of the host now; monkeypatch restores it after the test.
    monkeypatch.setattr(host_view, "_cached_view", (0.0, (), None))
    yield secret
    secret.unlink()


@needs_root
async def test_file_not_world_readable_is_hidden(secret_in_etc, make_sandbox):
    sandbox = await make_sandbox()
    assert "swordfish" not in await out(sandbox, f"cat {secret_in_etc}; grep -r swordfish /etc")


async def test_host_environment_variables_are_absent(make_sandbox, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "swordfish")
    sandbox = await make_sandbox()
    names = {line.partition("=")[0] for line in (await out(sandbox, "env")).splitlines()}
    assert names == {"HOME", "PATH", "PWD", "SHLVL", "_"}
    assert "swordfish" not in await out(sandbox, "cat /proc/*/environ | tr '\\0' '\\n'")


async def test_host_processes_are_hidden(sandbox):
    lines = (await out(sandbox, "ps ax -o pid,args")).splitlines()
    assert len(lines) <= 4
    assert str(Path.cwd()) not in await out(sandbox, "cat /proc/1/cmdline")


async def test_init_process_cannot_be_read_or_killed(sandbox):
    for path in ("mem", "root/", "cwd/", "environ", "maps", "fd/3"):
        assert "denied" in await out(sandbox, f"cat /proc/1/{path} || ls /proc/1/{path}"), path
    await out(sandbox, "kill -9 1; kill -STOP 1; kill -TERM -1")
    assert await out(sandbox, "echo alive") == "alive\n"


@pytest.mark.parametrize(
    "attempt",
    [
        "mount -t tmpfs none /mnt",
        "mount -o remount,rw /proc/sys",
        "umount /proc/sys",
        "umount -l /etc",
        "mknod /tmp/disk b 254 0",
        "unshare --user true",
        "unshare --mount true",
        "chroot / mount -t proc proc /mnt",
        "echo x > /proc/sys/kernel/core_pattern",
        "echo 1 > /proc/sys/kernel/sysrq",
        "chmod 700 /dev/null",
        "hostname other",
        "dmesg",
        "date -s 2001-01-01",
        "swapoff -a && false || ! true",
        "nsenter -t 1 -m true",
    ],
)
async def test_privileged_operations_are_refused(sandbox, attempt):
    assert (await sandbox.exec(attempt)).return_code != 0


async def test_capabilities_cannot_be_regained(sandbox):
    status = await out(sandbox, "cat /proc/self/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    admin, module, ptrace, mknod, net_admin, raw = 21, 16, 19, 27, 12, 13
    for cap in (admin, module, ptrace, mknod, net_admin, raw):
        for kind in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb"):
            assert not int(fields[kind], 16) >> cap & 1, (kind, cap)
    assert fields["NoNewPrivs"] == "1"


async def test_host_files_do_not_change(sandbox):
    before = host_state()
    await out(
        sandbox, "echo pwned > /etc/hosts; touch /usr/bin/pwned; rm -rf /usr/bin/tmux /lib/x86_64-linux-gnu/libz*"
    )
    assert host_state() == before
    assert "pwned" in await out(sandbox, "cat /etc/hosts; ls /usr/bin/pwned")


def host_state() -> tuple[bytes, list[str]]:
    return Path("/etc/hosts").read_bytes(), sorted(path.name for path in Path("/usr/bin").iterdir())


SOCKET = "import socket; socket.socket({family}, {kind})"


@pytest.mark.parametrize(("family", "kind"), [(40, 1), (38, 5), (17, 3), (31, 3)])
async def test_socket_families_outside_namespaces_are_refused(sandbox, family, kind):
    if (await sandbox.exec("command -v python3")).return_code:
        pytest.skip("the root filesystem has no python3 to open sockets with")
    output = await out(sandbox, f"python3 -c '{SOCKET.format(family=family, kind=kind)}'")
    assert "Address family not supported" in output
    assert await out(sandbox, f"python3 -c '{SOCKET.format(family=2, kind=1)}'") == ""


async def test_unneeded_syscalls_are_refused(sandbox):
    if (await sandbox.exec("command -v python3")).return_code:
        pytest.skip("the root filesystem has no python3 to make system calls with")
    calls = {"keyctl": 250, "bpf": 321, "io_uring_setup": 425, "perf_event_open": 298}
    if os.uname().machine != "x86_64":
        pytest.skip("the test has only x86_64's system call numbers")
    code = (
        "import ctypes; c = ctypes.CDLL(None, use_errno=True); print(c.syscall({}, 0, 0, 0, 0, 0), ctypes.get_errno())"
    )
    for name, number in calls.items():
        assert await out(sandbox, f"python3 -c '{code.format(number)}'") == "-1 38\n", name


async def test_network_has_only_loopback(sandbox):
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    assert "refused" in await out(sandbox, f"exec 3<>/dev/tcp/127.0.0.1/{port}")
    assert (await out(sandbox, "cat /proc/net/dev")).count(":") == 1
    assert "nameserver" not in await out(sandbox, "cat /etc/resolv.conf")
    connect = "(echo hi | timeout 5 nc -l -p 5555 || true) & sleep 0.3; timeout 2 cat < /dev/tcp/127.0.0.1/5555"
    assert "refused" not in await out(sandbox, f"command -v nc >/dev/null || exit 0; {connect}")
    server.close()


async def test_sandboxes_are_isolated_from_each_other(make_sandbox):
    one, two = await make_sandbox(), await make_sandbox()
    await out(one, "touch /tmp/private /dev/shm/private; echo x > /usr/private")
    assert await out(two, "ls /tmp /dev/shm") == "/dev/shm:\n\n/tmp:\n"
    assert "No such file" in await out(two, "cat /usr/private")


async def test_user_mount_is_visible_and_can_be_read_only(make_sandbox, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "f").write_text("data")
    mounts = [
        {"type": "bind", "source": str(tmp_path / "data"), "target": "/data", "read_only": True},
        {"type": "bind", "source": str(tmp_path / "data"), "target": "/mnt/rw"},
    ]
    sandbox = await make_sandbox(mounts=mounts)
    assert await out(sandbox, "cat /data/f; echo more > /mnt/rw/g") == "data"
    assert "Read-only" in await out(sandbox, "touch /data/h")
    assert (tmp_path / "data" / "g").read_text() == "more\n"


async def test_trial_log_folders_are_not_mounted(make_sandbox, tmp_path):
    (tmp_path / "trial0" / "agent").mkdir(parents=True)
    mounts = [{"type": "bind", "source": str(tmp_path / "trial0" / "agent"), "target": "/logs/agent"}]
    sandbox = await make_sandbox(mounts=mounts)
    assert await out(sandbox, "touch /logs/agent/x && stat -c %a /logs/agent") == "777\n"
    assert not names_in(tmp_path / "trial0" / "agent")


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]
