"""Messages to and from a sandbox, and the imports of the fork server that uses them."""

import subprocess
import sys
from pathlib import Path

import pytest

from harbortrainer.sandbox.inside.messages import (
    Command,
    Ended,
    Failed,
    HostView,
    Kill,
    Listen,
    Listening,
    Message,
    Ready,
    SandboxSpec,
    decode,
    encode,
)

SOURCE = Path(__file__).parents[2] / "src"
VIEW = HostView(
    shown=["/usr"],
    plain=["/etc/hosts"],
    links={"/bin": "usr/bin"},
    folders={"/root": 0o700},
    hidden=["/etc/ssh"],
    files={"/etc/shadow": ""},
    modes={"/etc": 0o755},
    key="k",
)
SPEC = SandboxSpec(
    view="k", binds={"/in": "/out"}, read_only=["/in"], files={"/etc/resolv.conf": "ü\n"}, network=True, cpu_us=100_000
)
MESSAGES = [
    VIEW,
    SPEC,
    Command(["true"], env={"kind": "x"}, user=7, id=3),
    Kill(3),
    Listen(40_000, 4),
    Listening(),
    Ready(),
    Ended(3, 137),
    Failed("why"),
    Failed("why", 3),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_round_trip(message: Message):
    assert decode(encode(message)) == message


def test_fork_server_imports_only_light_modules():
    code = (
        f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n"
        "from harbortrainer.sandbox.inside import fork_server\n"
        "print(*sys.modules)"
    )
    result = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    imported = result.stdout.split()
    project_modules = [name for name in imported if name.startswith("harbortrainer.") and ".inside" not in name]
    assert project_modules == ["harbortrainer.sandbox"]
    assert not {"pathlib", "typing", "asyncio", "logging", "psutil"} & set(imported)
