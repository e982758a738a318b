"""The share of the processor that those who serve trials have, beside the sandboxes."""

import subprocess
import sys
from pathlib import Path

import pytest
from autogroups import may_go_first

from harbortrainer.sandbox import precedence

NEEDS_RIGHT = pytest.mark.skipif(
    not may_go_first(), reason="only root may (CAP_SYS_NICE), and on a kernel with autogroups"
)
INSIDE_AND_AFTER = """
import os
from pathlib import Path
from harbortrainer.sandbox.precedence import before_sandboxes
if {user}:
    os.setuid({user})
with before_sandboxes():
    print(Path("/proc/self/autogroup").read_text().split()[-1])
print(Path("/proc/self/autogroup").read_text().split()[-1])
"""


def said_by_a_session(user: int) -> list[str]:
    code = INSIDE_AND_AFTER.format(user=user)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, start_new_session=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@NEEDS_RIGHT
@pytest.mark.parametrize(("user", "said"), [(0, ["-10", "0"]), (65534, ["0", "0"])], ids=["root", "an ordinary user"])
def test_a_session_goes_first_where_it_may_and_as_long_as_it_asks(user: int, said: list[str]) -> None:
    assert said_by_a_session(user) == said


@pytest.mark.parametrize("content", [None, ""], ids=["no file", "a session without a group"])
def test_without_autogroups_nothing_happens_and_errors_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    file = tmp_path / "autogroup"
    if content is not None:
        file.write_text(content)
    monkeypatch.setattr(precedence, "_AUTOGROUP", file)
    with pytest.raises(OSError, match="the body's own"), precedence.before_sandboxes():
        raise OSError("the body's own")
    assert (file.read_text() if file.exists() else None) == content
