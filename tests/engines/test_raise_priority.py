"""The env server's scheduling priority over the sandboxes."""

import subprocess
import sys
from pathlib import Path

import pytest
from autogroups import can_raise_priority

from harbortrainer.engines.env_server import env_main

NEEDS_ROOT = pytest.mark.skipif(not can_raise_priority(), reason="needs CAP_SYS_NICE and a kernel with autogroups")
SCRIPT = """
import os
from pathlib import Path
from harbortrainer.engines.env_server.env_main import raise_priority
if {user}:
    os.setuid({user})
with raise_priority():
    print(Path("/proc/self/autogroup").read_text().split()[-1])
print(Path("/proc/self/autogroup").read_text().split()[-1])
"""


def priorities_of_session(user: int) -> list[str]:
    code = SCRIPT.format(user=user)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, start_new_session=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@NEEDS_ROOT
@pytest.mark.parametrize(
    ("user", "expected"), [(0, ["-10", "0"]), (65534, ["0", "0"])], ids=["root", "an ordinary user"]
)
def test_raises_priority_if_permitted_within_block(user: int, expected: list[str]) -> None:
    assert priorities_of_session(user) == expected


@pytest.mark.parametrize("content", [None, ""], ids=["no file", "session without a group"])
def test_without_autogroups_has_no_effect_and_passes_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    file = tmp_path / "autogroup"
    if content is not None:
        file.write_text(content)
    monkeypatch.setattr(env_main, "_AUTOGROUP", file)
    with pytest.raises(OSError, match="the body's own"), env_main.raise_priority():
        raise OSError("the body's own")
    assert (file.read_text() if file.exists() else None) == content
