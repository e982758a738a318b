"""What was changed in a sandbox, and which changes touch what a verifier is run with."""

import pytest

from harbortrainer.sandbox.inside.changed_tools import said_of
from harbortrainer.sandbox.local import LocalEnvironment
from harbortrainer.sandbox.sandbox_changes import ChangedFile, SandboxChanges


async def changes(sandbox: LocalEnvironment) -> SandboxChanges:
    found = await sandbox.changes()
    assert found is not None
    return found


async def test_files_that_were_added_changed_and_removed_are_told(make_sandbox):
    sandbox = await make_sandbox(
        dockerfile="FROM x\nWORKDIR /app\nCOPY a b ./\nRUN echo 1 > kept", files={"a": "1", "b": "2"}
    )
    await sandbox.exec("echo before > /app/before")
    await sandbox.room_is_over()  # the agent begins
    await sandbox.exec(
        "cd /app; echo 123456 > a; touch -d 2001-01-01 a; mkdir -p d/e; echo new > d/e/f; ln -s x l; "
        "echo > /etc/passwd; rm /etc/hostname; mkfifo p; touch /logs/agent/x; touch /app/gone; rm /app/gone"
    )
    found = await changes(sandbox)
    assert sorted(found.files, key=lambda file: file.path) == [
        ChangedFile("/app/a", "changed", 7),
        ChangedFile("/app/d/e/f", "added", 4),
        ChangedFile("/app/l", "added", 1),
        ChangedFile("/etc/hostname", "removed", 0),
        ChangedFile("/etc/passwd", "changed", 1),
    ]
    assert (found.total, found.tools) == (5, [])


async def test_a_list_of_many_is_short_and_says_how_many(sandbox: LocalEnvironment):
    await sandbox.exec("mkdir /many; cd /many; touch {1..1500}; printf x > $'bad \\xff\\n name'")
    found = await changes(sandbox)
    assert (len(found.files), found.total) == (100, 1501)


async def test_more_than_can_be_looked_through_is_told(make_sandbox):
    sandbox = await make_sandbox(disk_mb=100)
    await sandbox.exec("mkdir /many; cd /many; seq 60000 | xargs touch")
    assert (await changes(sandbox)).tools == ["more than 50000 entries were changed: not all were looked at"]


async def test_a_link_planted_in_place_of_a_folder_is_not_followed(sandbox: LocalEnvironment):
    await sandbox.exec("ln -s /usr /srv/usr; ln -s / /root/all")
    assert {file.path for file in (await changes(sandbox)).files} == {"/srv/usr", "/root/all"}


TOOLS = {
    "echo 'exit 0' > /usr/bin/grep": "the program /usr/bin/grep was changed",
    "cp /bin/true /usr/bin/.x; mv /usr/bin/.x /usr/bin/bash": "the program /usr/bin/bash was changed",
    "rm -f /usr/bin/env": "the program /usr/bin/env was removed",
    "cp /bin/true /usr/local/bin/cat": "the program /usr/local/bin/cat was added in front of /usr/bin/cat",
    "ln -s /bin/true /usr/local/sbin/cat": "the program /usr/local/sbin/cat was added in front of /usr/bin/cat",
    "echo /evil.so > /etc/ld.so.preload": "/etc/ld.so.preload, which the loader reads, was added",
    "mkdir -p /usr/local/lib/python3.9/site-packages; "
    "echo 'import os' > /usr/local/lib/python3.9/site-packages/x.pth": (
        "/usr/local/lib/python3.9/site-packages/x.pth, code that Python runs when it starts, was added"
    ),
    "mkdir -p /usr/lib/python3/dist-packages; echo > /usr/lib/python3/dist-packages/sitecustomize.py": (
        "/usr/lib/python3/dist-packages/sitecustomize.py, which Python runs when it starts, was added"
    ),
    "echo > /conftest.py": "/conftest.py, which tests and installers read, was added",
}


@pytest.mark.parametrize("command", TOOLS)
async def test_a_changed_tool_is_found(sandbox: LocalEnvironment, command: str):
    await sandbox.exec(command)
    assert (await changes(sandbox)).tools == [TOOLS[command]]


@pytest.mark.parametrize(
    ("path", "how", "text"),
    [
        ("/usr/local/bin/mytool", "added", ""),
        ("/usr/lib/python3/dist-packages/mine.pth", "added", "/somewhere/else\n"),
        ("/usr/lib/python3/dist-packages/pytest/__init__.py", "added", ""),
        ("/usr/lib/python3/dist-packages/mine/entry_points.txt", "added", "[console_scripts]\n"),
        ("/app/conftest.py", "added", ""),
        ("/app/sitecustomize.py", "added", ""),
        ("/usr/lib/x86_64-linux-gnu/libmine.so.1", "added", ""),
        ("/root/.bashrc", "changed", ""),
    ],
)
def test_what_an_honest_agent_installs_is_no_tool_that_was_changed(path: str, how: str, text: str):
    assert said_of(path, how, exists=lambda _: False, read=lambda: text) == ""


@pytest.mark.parametrize(
    ("path", "how", "text"),
    [
        ("/usr/lib/python3/dist-packages/mine/entry_points.txt", "added", "[pytest11]\nx = y\n"),
        ("/usr/lib/python3/dist-packages/_pytest/runner.py", "changed", ""),
        ("/usr/lib/python3.11/json/__init__.py", "changed", ""),
        ("/usr/lib/x86_64-linux-gnu/libc.so.6", "changed", ""),
        ("/usr/bin", "removed", ""),
        ("/root/.local/bin/uvx", "added", ""),
        ("/root/.config/pip/pip.conf", "added", ""),
    ],
)
def test_other_tools(path: str, how: str, text: str):
    assert path in said_of(path, how, exists=lambda _: False, read=lambda: text)
