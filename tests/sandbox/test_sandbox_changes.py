"""Changed files in a sandbox, and changes to the tools that a verifier runs with."""

import pytest
from tool_attacks import ATTACKS, DOCKERFILE, HONEST

from harbortrainer.sandbox.errors_and_changes import ChangedFile, SandboxChanges
from harbortrainer.sandbox.inside.verifier_tools import Change, VerifierTools
from harbortrainer.sandbox.local import LocalEnvironment


async def changes(sandbox: LocalEnvironment) -> SandboxChanges:
    changed = await sandbox.changes()
    assert changed is not None
    return changed


async def test_reports_added_changed_and_removed_files(make_sandbox):
    sandbox = await make_sandbox(
        dockerfile="FROM x\nWORKDIR /app\nCOPY a b ./\nRUN echo 1 > kept", files={"a": "1", "b": "2"}
    )
    await sandbox.exec("echo before > /app/before")
    await sandbox.restore_limits()  # the agent's part starts here
    await sandbox.exec(
        "cd /app; echo 123456 > a; touch -d 2001-01-01 a; mkdir -p d/e; echo new > d/e/f; ln -s x l; "
        "echo > /etc/passwd; rm /etc/hostname; mkfifo p; touch /logs/agent/x; touch /app/gone; rm /app/gone"
    )
    changed = await changes(sandbox)
    assert sorted(changed.files, key=lambda file: file.path) == [
        ChangedFile("/app/a", "changed", 7, "1", "123456\n"),
        ChangedFile("/app/d/e/f", "added", 4, None, "new\n"),
        ChangedFile("/app/l", "added", 1),
        ChangedFile("/etc/hostname", "removed", 0),
        ChangedFile("/etc/passwd", "changed", 1),
    ]
    assert (changed.total, changed.tools) == (5, [])


async def test_keeps_short_texts_only(make_sandbox):
    sandbox = await make_sandbox(
        dockerfile="FROM debian:12-slim\nWORKDIR /app\nCOPY old gone same ./\n"
        "RUN head -c 4097 /dev/zero | tr '\\0' x > long; ln -s /etc away; ln -s old link",
        files={"old": "a\nb\n", "gone": "c", "same": "d"},
        image="build",
    )
    await sandbox.restore_limits()
    await sandbox.exec(
        "cd /app; echo c >> old; touch same; rm gone; echo short > long; printf '\\xff' > latin; "
        "rm link; echo own > link; printf 'a\\0' > binary; seq 2000 | head -c 4097 > new; rm away; mkdir away; "
        "echo mine > away/passwd; mkfifo pipe; truncate -s 1T sparse"
    )
    texts = {file.path.removeprefix("/app/"): (file.before, file.after) for file in (await changes(sandbox)).files}
    kept = {"old": ("a\nb\n", "a\nb\nc\n"), "gone": ("c", None), "away/passwd": (None, "mine\n")}
    assert texts == kept | dict.fromkeys(["same", "link", "long", "latin", "binary", "new", "sparse"], (None, None))


async def test_all_texts_together_are_bounded(sandbox: LocalEnvironment):
    await sandbox.exec("mkdir /many; cd /many; for i in {1..20}; do head -c 4000 /dev/zero | tr '\\0' x > $i; done")
    kept = [file for file in (await changes(sandbox)).files if file.after is not None]
    assert {file.after for file in kept} == {"x" * 4000}
    assert len(kept) == 8


async def test_long_names_hide_no_changed_tool(sandbox: LocalEnvironment):
    """All of the changes are longer than one packet can be."""
    await sandbox.exec(
        "name=$(printf '\\xff%.0s' {1..200}); many=/many/$name; packages=/usr/lib/python3/dist-packages; "
        "mkdir -p $many $packages; echo 'exit 0' > /usr/bin/grep; "
        "for i in {1..120}; do touch $many/$i$name; echo import os > $packages/$i$name.pth; done"
    )
    found = await changes(sandbox)
    assert (found.total, len(found.files), len(found.tools)) == (241, 100, 100)


async def test_long_list_is_truncated_but_counted_in_full(sandbox: LocalEnvironment):
    await sandbox.exec("mkdir /many; cd /many; touch {1..1500}; printf x > $'bad \\xff\\n name'")
    changed = await changes(sandbox)
    assert (len(changed.files), changed.total) == (100, 1501)


async def test_reports_too_many_changes(make_sandbox):
    sandbox = await make_sandbox(disk_mb=100)
    await sandbox.exec("mkdir /many; cd /many; seq 60000 | xargs touch")
    assert (await changes(sandbox)).tools == ["more than 50000 entries were changed: the rest was not inspected"]


async def test_does_not_follow_added_links_to_folders(sandbox: LocalEnvironment):
    await sandbox.exec("ln -s /usr /srv/usr; ln -s / /root/all")
    assert {file.path for file in (await changes(sandbox)).files} == {"/srv/usr", "/root/all"}


TAMPERING_MESSAGES = {
    "echo 'exit 0' > /usr/bin/grep": "the program /usr/bin/grep was changed",
    "cp /bin/true /usr/bin/.x; mv /usr/bin/.x /usr/bin/bash": "the program /usr/bin/bash was changed",
    "rm -f /usr/bin/env": "the program /usr/bin/env was removed",
    "cp /bin/true /usr/local/bin/cat": "the program /usr/local/bin/cat was added in front of /usr/bin/cat",
    "ln -s /bin/true /usr/local/sbin/cat": "the program /usr/local/sbin/cat was added in front of /usr/bin/cat",
    "echo /evil.so > /etc/ld.so.preload": "/etc/ld.so.preload, which the dynamic loader reads, was added",
    "mkdir -p /usr/local/lib/python3.9/site-packages; "
    "echo 'import os' > /usr/local/lib/python3.9/site-packages/x.pth": (
        "/usr/local/lib/python3.9/site-packages/x.pth, code that Python runs when it starts, was added"
    ),
    "mkdir -p /usr/lib/python3/dist-packages; echo > /usr/lib/python3/dist-packages/sitecustomize.py": (
        "/usr/lib/python3/dist-packages/sitecustomize.py, which Python runs when it starts, was added"
    ),
    "echo > /conftest.py": "/conftest.py, which tests and installers read, was added",
}


@pytest.mark.parametrize("command", TAMPERING_MESSAGES)
async def test_finds_tampered_tool(sandbox: LocalEnvironment, command: str):
    await sandbox.exec(command)
    assert (await changes(sandbox)).tools == [TAMPERING_MESSAGES[command]]


@pytest.fixture(params=["host", "build"])
async def attacked(request: pytest.FixtureRequest, make_sandbox) -> LocalEnvironment:
    """A sandbox on the host's root, or of an image, in which the agent's part has started."""
    sandbox = await make_sandbox(dockerfile=DOCKERFILE, image=request.param)
    await sandbox.restore_limits()
    return sandbox


@pytest.mark.parametrize("command", ATTACKS)
async def test_names_attack(attacked: LocalEnvironment, command: str):
    done = await attacked.exec(command)
    assert any(ATTACKS[command] in tool for tool in (await changes(attacked)).tools), done


async def test_names_attack_in_a_folder_that_keeps_changing(attacked: LocalEnvironment):
    busy = "cd /usr/bin; while :; do touch .{a..z}{a..z}; rm -f .??; done"
    await attacked.exec(f"({busy}) > /dev/null 2>&1 < /dev/null &")
    await attacked.exec("echo 'exit 0' > /usr/bin/zz-tool")
    for _ in range(20):
        assert "the program /usr/bin/zz-tool was changed" in (await changes(attacked)).tools


async def test_honest_work_is_not_named(attacked: LocalEnvironment):
    for command in HONEST:
        await attacked.exec(command)
        assert (await changes(attacked)).tools == [], command


def describe(path: str, change: str, content: str) -> str:
    tools = VerifierTools(exists=lambda _: False)
    return tools.describe(Change(path, change, read=lambda: content))


@pytest.mark.parametrize(
    ("path", "change", "content"),
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
def test_installed_package_is_not_reported_as_tampering(path: str, change: str, content: str):
    assert describe(path, change, content) == ""


@pytest.mark.parametrize(
    ("path", "change", "content"),
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
def test_reports_tampering_with_libraries_and_installers(path: str, change: str, content: str):
    assert path in describe(path, change, content)
