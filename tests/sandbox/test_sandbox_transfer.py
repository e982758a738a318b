"""Uploads and downloads, including links and named pipes that an agent created as attacks."""

import os
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from harbortrainer.sandbox.errors_and_changes import SandboxError
from harbortrainer.sandbox.inside import file_calls


async def test_upload_keeps_modes_and_links(sandbox, tmp_path):
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


async def test_file_round_trip(sandbox, tmp_path):
    (tmp_path / "a").write_text("one")
    await sandbox.upload_file(tmp_path / "a", "/some/where/b")
    await sandbox.download_file("/some/where/b", tmp_path / "c" / "d")
    assert (tmp_path / "c" / "d").read_text() == "one"


@pytest.mark.parametrize("size", [10, 10_000_000], ids=["small", "large"])
async def test_downloaded_file_is_executable_as_in_the_sandbox(sandbox, tmp_path, size):
    await sandbox.exec(f"head -c {size} /dev/zero > /plain; cp /plain /run-me; chmod 4755 /run-me")
    for name in ("plain", "run-me"):
        await sandbox.download_file(f"/{name}", tmp_path / name)
    modes = [(tmp_path / name).stat().st_mode & 0o7111 for name in ("plain", "run-me")]
    assert modes == [0, 0o111]


async def test_upload_replaces_existing_file(sandbox, tmp_path):
    (tmp_path / "a").write_text("one")
    await sandbox.exec("mkdir -p /x; ln -s /etc/passwd /x/b")
    await sandbox.upload_file(tmp_path / "a", "/x/b")
    assert (await sandbox.exec("cat /x/b; head -c 4 /etc/passwd")).stdout == "oneroot"


@pytest.mark.parametrize("target", ["/app", "/app/", "/link"])
async def test_upload_of_file_to_folder_puts_it_inside(sandbox, tmp_path, target):
    (tmp_path / "new").write_text("2")
    await sandbox.exec("mkdir /app; echo 1 > /app/old; ln -s /app /link")
    await sandbox.upload_file(tmp_path / "new", target)
    assert (await sandbox.exec("cat /app/old /link/new")).stdout == "1\n2"


def test_packing_reports_entries_above_maximum(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(file_calls, "_MAX_ENTRIES", 3)
    for name in ("a", "b", "c"):
        (tmp_path / name).touch()
    with TemporaryFile() as archive:
        fds = [0, archive.fileno(), 2]
        assert file_calls.pack(fds, str(tmp_path), "100") == 0
        assert capfd.readouterr().err == ""
        (tmp_path / "d").touch()
        assert file_calls.pack(fds, str(tmp_path), "100") == 0
        assert capfd.readouterr().err == "left out: all but 3 files and folders\n"


async def test_download_skips_links_out_of_folder(sandbox, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("swordfish")
    create = f"ln -s {secret} stolen; ln -s ../../../../../etc up; ln -s {tmp_path} dir; echo ok > fine; mkfifo pipe"
    await sandbox.exec(f"mkdir /d && cd /d && {create}")
    await sandbox.download_dir("/d", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["fine"]


async def test_download_does_not_write_through_host_link(sandbox, tmp_path):
    target = tmp_path / "target"
    target.write_text("host")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "result.json").symlink_to(target)
    await sandbox.exec("mkdir /d && echo agent > /d/result.json")
    await sandbox.download_dir("/d", tmp_path / "out")
    await sandbox.download_file("/d/result.json", tmp_path / "out" / "result.json")
    assert target.read_text() == "host"
    assert (tmp_path / "out" / "result.json").read_text() == "agent\n"


async def test_download_does_not_follow_agent_links(sandbox, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("swordfish")
    await sandbox.exec(f"mkdir -p {tmp_path} && ln -s {secret} /logs/agent/trajectory.json")
    with pytest.raises(SandboxError, match="download"):
        await sandbox.download_file("/logs/agent/trajectory.json", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


async def test_file_larger_than_disk_does_not_fill_host(make_sandbox, tmp_path):
    sandbox = await make_sandbox(disk_mb=8)
    await sandbox.exec("mkdir /d && truncate -s 10G /d/hole && echo ok > /d/fine")
    await sandbox.download_dir("/d", tmp_path / "out")
    size_on_disk = sum(path.stat().st_blocks * 512 for path in (tmp_path / "out").rglob("*"))
    assert size_on_disk < 64 << 20
    assert (tmp_path / "out" / "fine").read_text() == "ok\n"


async def test_sandbox_gets_no_descriptor_of_host_file(sandbox, tmp_path):
    (tmp_path / "a").write_text("x" * 100)
    await sandbox.exec("mkdir /w && (while true; do ls -l /proc/[0-9]*/fd; done) >> /w/descriptors 2>/dev/null &")
    for _ in range(5):
        await sandbox.upload_file(tmp_path / "a", "/y")
    descriptors = (await sandbox.exec("cat /w/descriptors")).stdout
    assert str(tmp_path) not in descriptors
    assert str(Path.cwd()) not in descriptors


async def test_empties_folders_without_following_links(sandbox):
    create = "mkdir -p /keep /e/a/b; echo x > /keep/f; ln -s /keep /e/link; ln -s /keep /linked; echo x > /file"
    await sandbox.exec(f"{create}; mkdir -m 700 /e/locked; touch /e/locked/f; mkfifo /e/pipe")
    await sandbox.empty_dirs(["/e", "/linked", "/file", "/new/deep"])
    output = await sandbox.exec("ls -A /e /linked /file /new/deep; stat -c %a /e /new/deep; cat /keep/f")
    assert output.stdout == "/e:\n\n/file:\n\n/linked:\n\n/new/deep:\n777\n777\nx\n"


async def test_deeply_nested_folder_is_emptied_and_packed(sandbox, tmp_path):
    chain = "d/" * 500
    nest = f"mkdir /deep && cd /deep && for i in 1 2 3 4 5 6; do mkdir -p {chain} && cd -P {chain} || exit 1; done"
    assert (await sandbox.exec(nest, timeout_sec=60)).return_code == 0
    await sandbox.exec("echo y > /deep/fine")
    await sandbox.download_dir("/deep", tmp_path / "out")
    assert (tmp_path / "out" / "fine").read_text() == "y\n"
    emptied = await sandbox.empty_dirs(["/deep"])
    assert emptied.return_code == 0, emptied.stderr
    assert (await sandbox.exec("ls -A /deep")).stdout == ""


async def test_is_dir_and_is_file(sandbox):
    assert await sandbox.is_dir("/etc")
    assert await sandbox.is_file("/etc/passwd")
    assert not await sandbox.is_dir("/etc/passwd")
    assert not await sandbox.is_file("/nothing")
    assert await sandbox.is_dir("/root")
    assert await sandbox.is_dir("/root", user="nobody")


async def test_named_pipe_does_not_block_transfer(sandbox, tmp_path):
    (tmp_path / "a").write_text("one")
    await sandbox.exec("mkdir /p; mkfifo /p/a /p/b")
    await sandbox.upload_file(tmp_path / "a", "/p/a")
    await sandbox.download_dir("/p", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]
    with pytest.raises(SandboxError, match="not a regular file"):
        await sandbox.download_file("/p/b", tmp_path / "b")


async def test_large_file_round_trip(sandbox, tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / "in" / str(number)).write_bytes(os.urandom(9 << 20))
    await sandbox.upload_dir(tmp_path / "in", "/big")
    await sandbox.download_dir("/big", tmp_path / "out")
    for number in range(3):
        assert (tmp_path / "out" / str(number)).read_bytes() == (tmp_path / "in" / str(number)).read_bytes()
