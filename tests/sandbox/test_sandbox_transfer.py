"""Files in and out, with an agent that plants links and devices where the host will look."""

import os
from pathlib import Path

import pytest

from harbortrainer.sandbox.sandbox_errors import SandboxError


async def test_a_folder_goes_in_with_modes_and_links(sandbox, tmp_path):
    source = tmp_path / "in"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "deep" / "run.sh").chmod(0o755)
    (source / "link").symlink_to("deep/run.sh")
    (source / "bytes").write_bytes(bytes(range(256)))
    await sandbox.upload_dir(source, "/new/place")
    assert (await sandbox.exec("/new/place/link; stat -c %u:%g /new/place/bytes")).stdout == "ran\n0:0\n"
    await sandbox.download_dir("/new/place", tmp_path / "out")
    assert (tmp_path / "out" / "bytes").read_bytes() == bytes(range(256))
    assert os.access(tmp_path / "out" / "deep" / "run.sh", os.X_OK)


async def test_a_file_goes_in_and_comes_out(sandbox, tmp_path):
    (tmp_path / "a").write_text("one")
    await sandbox.upload_file(tmp_path / "a", "/some/where/b")
    await sandbox.download_file("/some/where/b", tmp_path / "c" / "d")
    assert (tmp_path / "c" / "d").read_text() == "one"


async def test_an_uploaded_file_replaces_what_is_there(sandbox, tmp_path):
    (tmp_path / "a").write_text("one")
    await sandbox.exec("mkdir -p /x; ln -s /etc/passwd /x/b")
    await sandbox.upload_file(tmp_path / "a", "/x/b")
    assert (await sandbox.exec("cat /x/b; head -c 4 /etc/passwd")).stdout == "oneroot"


async def test_links_out_of_the_folder_are_left_out(sandbox, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("swordfish")
    plant = f"ln -s {secret} stolen; ln -s ../../../../../etc up; ln -s {tmp_path} dir; echo ok > fine; mkfifo pipe"
    await sandbox.exec(f"mkdir /d && cd /d && {plant}")
    await sandbox.download_dir("/d", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["fine"]


async def test_a_link_that_is_already_on_the_host_is_not_written_through(sandbox, tmp_path):
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "result.json").symlink_to(target)
    await sandbox.exec("mkdir /d && echo theirs > /d/result.json")
    await sandbox.download_dir("/d", tmp_path / "out")
    await sandbox.download_file("/d/result.json", tmp_path / "out" / "result.json")
    assert target.read_text() == "mine"
    assert (tmp_path / "out" / "result.json").read_text() == "theirs\n"


async def test_the_host_never_reads_through_a_link_of_the_agents(sandbox, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("swordfish")
    await sandbox.exec(f"mkdir -p {tmp_path} && ln -s {secret} /logs/agent/trajectory.json")
    with pytest.raises(SandboxError, match="download"):
        await sandbox.download_file("/logs/agent/trajectory.json", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


async def test_a_file_larger_than_the_disk_does_not_fill_the_host(make_sandbox, tmp_path):
    sandbox = await make_sandbox(disk_mb=8)
    await sandbox.exec("mkdir /d && truncate -s 10G /d/hole && echo ok > /d/fine")
    await sandbox.download_dir("/d", tmp_path / "out")
    held = sum(path.stat().st_blocks * 512 for path in (tmp_path / "out").rglob("*"))
    assert held < 64 << 20
    assert (tmp_path / "out" / "fine").read_text() == "ok\n"


async def test_no_descriptor_of_a_file_of_the_hosts_gets_in(sandbox, tmp_path):
    (tmp_path / "a").write_text("x" * 100)
    await sandbox.exec("mkdir /w && (while true; do ls -l /proc/[0-9]*/fd; done) >> /w/seen 2>/dev/null &")
    for _ in range(5):
        await sandbox.upload_file(tmp_path / "a", "/y")
    seen = (await sandbox.exec("cat /w/seen")).stdout
    assert str(tmp_path) not in seen
    assert str(Path.cwd()) not in seen


async def test_folders_are_emptied_and_made_without_following_links(sandbox):
    plant = "mkdir -p /keep /e/a/b; echo x > /keep/f; ln -s /keep /e/link; ln -s /keep /linked; echo x > /file"
    await sandbox.exec(f"{plant}; mkdir -m 700 /e/locked; touch /e/locked/f; mkfifo /e/pipe")
    await sandbox.empty_dirs(["/e", "/linked", "/file", "/new/deep"])
    shown = await sandbox.exec("ls -A /e /linked /file /new/deep; stat -c %a /e /new/deep; cat /keep/f")
    assert shown.stdout == "/e:\n\n/file:\n\n/linked:\n\n/new/deep:\n777\n777\nx\n"


async def test_a_folder_as_deep_as_an_agent_can_make_it_is_emptied_and_packed(sandbox, tmp_path):
    chain = "d/" * 500
    dig = f"mkdir /deep && cd /deep && for i in 1 2 3 4 5 6; do mkdir -p {chain} && cd -P {chain} || exit 1; done"
    assert (await sandbox.exec(dig, timeout_sec=60)).return_code == 0
    await sandbox.exec("echo y > /deep/fine")
    await sandbox.download_dir("/deep", tmp_path / "out")
    assert (tmp_path / "out" / "fine").read_text() == "y\n"
    emptied = await sandbox.empty_dirs(["/deep"])
    assert emptied.return_code == 0, emptied.stderr
    assert (await sandbox.exec("ls -A /deep")).stdout == ""


async def test_what_kind_a_path_is(sandbox):
    assert await sandbox.is_dir("/etc")
    assert await sandbox.is_file("/etc/passwd")
    assert not await sandbox.is_dir("/etc/passwd")
    assert not await sandbox.is_file("/nothing")
    assert await sandbox.is_dir("/root")
    assert await sandbox.is_dir("/root", user="nobody")


async def test_a_named_pipe_in_the_way_holds_nothing_up(sandbox, tmp_path):
    (tmp_path / "a").write_text("one")
    await sandbox.exec("mkdir /p; mkfifo /p/a /p/b")
    await sandbox.upload_file(tmp_path / "a", "/p/a")
    await sandbox.download_dir("/p", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]
    with pytest.raises(SandboxError, match="not a regular file"):
        await sandbox.download_file("/p/b", tmp_path / "b")


async def test_many_bytes_go_in_and_out(sandbox, tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / "in" / str(number)).write_bytes(os.urandom(9 << 20))
    await sandbox.upload_dir(tmp_path / "in", "/big")
    await sandbox.download_dir("/big", tmp_path / "out")
    for number in range(3):
        assert (tmp_path / "out" / str(number)).read_bytes() == (tmp_path / "in" / str(number)).read_bytes()
