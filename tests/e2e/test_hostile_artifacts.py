"""Links among a task's artifacts: no file of this machine is read or written through them, and honest ones arrive.

Real trials with the oracle agent, whose solution makes the artifacts, and a separate verifier.
"""

import base64
import gzip
import json
import tarfile
from pathlib import Path

import pytest
from fakes import make_task
from tar_attacks import packed, unresolvable_path

from harbortrainer.trials import Outcome, TrialRecord, TrialSpec, run_trial

pytestmark = pytest.mark.e2e

SEPARATE = '[verifier]\nenvironment_mode = "separate"'
GRADER = "FROM debian:12-slim\nCOPY test.sh /tests/test.sh\n"


async def play(folder: Path, kind: str, artifacts: str, solution: str, test: str, extra: str = "") -> TrialRecord:
    task = make_task(folder / "task", test=test)
    (task / "task.toml").write_text(f"artifacts = {artifacts}\n{SEPARATE}\n{extra}")
    (task / "tests" / "Dockerfile").write_text(GRADER)
    (task / "solution" / "solve.sh").write_text(f"#!/bin/bash\n{solution}\n")
    return await run_trial(
        TrialSpec(task_dir=task, trials_dir=folder / "trials", agent="oracle", environment_type=kind)
    )


def found_in(record: TrialRecord) -> list[str]:
    """Paths of the trial's artifacts, and of what was mounted for them."""
    assert record.trial_dir is not None
    folder = Path(record.trial_dir)
    paths = [*folder.glob("**/artifacts/**/*"), *folder.glob("**/.artifacts*")]
    return sorted(str(path.relative_to(folder)) for path in paths if not path.is_dir())


async def test_link_as_artifact_shows_the_verifier_no_file_of_this_machine(tmp_path: Path, environment_type: str):
    (mine := tmp_path / "mine").mkdir()
    (mine / "key").write_text("of this machine")
    solution = (
        f"ln -s {mine} /folder; ln -s {mine}/key /file; ln -s {mine} /logs/artifacts/folder; echo 1 > /app/honest"
    )
    test = (
        "cat /app/honest > /logs/verifier/reward.txt\n"
        "cat /folder/key /file /logs/artifacts/folder/key && echo 0 > /logs/verifier/reward.txt"
    )
    record = await play(tmp_path, environment_type, '["/folder", "/file", "/app/honest"]', solution, test)
    assert (record.outcome, record.reward) == (Outcome.completed, 1.0), record
    kept = {"artifacts/app/honest", "artifacts/manifest.json"}
    links = {"artifacts/logs/artifacts/folder"}  # Docker keeps it as a link, for the verifier's container
    assert kept <= set(found_in(record)) <= kept | links


async def test_setuid_programs_and_devices_of_container_are_out_of_reach_of_other_users(
    tmp_path: Path, environment_type: str
):
    make = "cp /bin/sh {0}/sh; chmod 6755 {0}/sh; mknod -m 666 {0}/disk b 8 0"
    solution = f"{make.format('/logs/artifacts')}; {make.format('/logs/agent')}; echo 1 > /x"
    test = f"cat /x > /logs/verifier/reward.txt; {make.format('/logs/verifier')}"
    record = await play(tmp_path, environment_type, '["/x"]', solution, test)
    assert (record.outcome, record.reward) == (Outcome.completed, 1.0), record
    dangerous, mode = dangerous_files(Path(str(record.trial_dir)))
    assert not dangerous or mode & 0o077 == 0, dangerous


def dangerous_files(folder: Path) -> tuple[list[Path], int]:
    """Setuid programs and devices in a folder, and the folder's mode."""
    found = [p for p in folder.rglob("*") if p.is_block_device() or p.lstat().st_mode & 0o6000]
    return found, folder.stat().st_mode


async def test_published_artifacts_reach_the_verifier_as_they_are(tmp_path: Path, environment_type: str):
    solution = (
        "cd /logs/artifacts; mkdir -p a/empty; echo echo hello > a/run; chmod 750 a/run; ln -s run a/link; "
        "ln a/run a/same; ln -P a/link a/same-link; "
        "echo late > /app/late"
    )
    test = (
        "cd /logs/artifacts && [ $(a/link) = hello ] && [ -L a/link ] && [ -x a/run ] && [ -d a/empty ] && "
        "[ $(a/same-link) = hello ] && [ -L a/same-link ] && [ $(a/same) = hello ] && "
        "[ $(cat late) = late ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
    )
    hook = '[[verifier.collect]]\ncommand = "cp /app/late /logs/artifacts"'
    record = await play(tmp_path, environment_type, "[]", solution, test, hook)
    assert (record.outcome, record.reward) == (Outcome.completed, 1.0), record
    published = [f"artifacts/logs/artifacts/{name}" for name in ("a/link", "a/run", "a/same", "a/same-link", "late")]
    assert found_in(record) == [*published, "artifacts/manifest.json"]


async def test_artifacts_of_each_step_are_its_own(tmp_path: Path, container: str):
    names = {"one": "test ! -e /logs/artifacts/two", "two": "test ! -e /logs/artifacts/one"}
    task = make_task(
        tmp_path / "task",
        steps={
            name: f"{check} && touch /logs/artifacts/{name} && echo 1 > /logs/verifier/reward.txt"
            for name, check in names.items()
        },
    )
    for name in names:
        (task / "steps" / name / "solution").mkdir()
        (task / "steps" / name / "solution" / "solve.sh").write_text(f"#!/bin/bash\ntouch /logs/artifacts/{name}\n")
    spec = TrialSpec(task_dir=task, trials_dir=tmp_path / "trials", agent="oracle", environment_type=container)
    record = await run_trial(spec)
    assert (record.outcome, record.reward) == (Outcome.completed, 1.0), record
    own = [f"steps/{name}/artifacts/logs/artifacts/{name}" for name in names]
    assert [path for path in found_in(record) if "manifest" not in path] == own


async def test_large_artifacts_are_not_copied(tmp_path: Path, container: str):
    solution = "truncate -s 1T /logs/artifacts/big"
    test = "test ! -e /logs/artifacts/big && echo 1 > /logs/verifier/reward.txt"
    record = await play(tmp_path, container, "[]", solution, test)
    assert (record.outcome, record.reward) == (Outcome.completed, 1.0), record


async def test_sparse_terabyte_and_devices_are_not_copied_from_container(tmp_path: Path, container: str):
    solution = (
        "mkdir -p /data/sub /huge; truncate -s 1T /terabyte /huge/terabyte; mknod -m 666 /data/disk b 8 0; "
        "mkfifo /data/pipe; echo kept > /data/sub/file; ln -s sub/file /data/link"
    )
    test = "cat /data/sub/file /data/link && echo 1 > /logs/verifier/reward.txt"
    artifacts = '["/terabyte", { source = "/huge" }, { source = "/data" }]'
    record = await play(tmp_path, container, artifacts, solution, test)
    assert (record.outcome, record.reward) == (Outcome.completed, 1.0), record
    kept = [f"artifacts/data/{name}" for name in ("link", "sub/file")]
    assert found_in(record) == [*kept, "artifacts/manifest.json"]


async def test_archive_of_agents_own_tar_writes_nothing_outside_and_fills_no_disk(
    tmp_path: Path, environment_type: str
):
    escape = gzip.compress(packed(unresolvable_path("..")).getvalue())
    (large := tarfile.TarInfo("large")).size = 100 << 20
    bomb = gzip.compress(gzip.compress(large.tobuf() + bytes(large.size)))
    tar = 'case " $* " in *" czf "*/data*) cp /escape "$2";; *" czf "*) cp /bomb "$2";; *) exec /bin/honest "$@";; esac'
    solution = (
        f"echo {base64.b64encode(escape).decode()} | base64 -d > /escape; mkdir /data /more; mv /bin/tar /bin/honest\n"
        f"echo {base64.b64encode(bomb).decode()} | base64 -d | gunzip > /bomb\n"
        f"cat > /bin/tar <<'END'\n#!/bin/sh\n{tar}\nEND\nchmod +x /bin/tar"
    )
    sources = "/data", "/more"
    artifacts = ", ".join(f'{{ source = "{source}", exclude = ["nothing"] }}' for source in sources)
    test, storage = "echo 1 > /logs/verifier/reward.txt", "[environment]\nstorage_mb = 64\n"
    record = await play(tmp_path, environment_type, f"[{artifacts}]", solution, test, storage)
    assert (record.outcome, record.reward) == (Outcome.completed, 1.0), record
    folder = Path(str(record.trial_dir)) / "artifacts"
    entries = {entry["source"]: entry["status"] for entry in json.loads((folder / "manifest.json").read_text())}
    assert [entries[source] for source in sources] == ["failed", "failed"]
    assert not (folder / "new").exists() and not [path for path in folder.rglob("*") if path.name == "large"]


async def test_artifact_with_exclude_arrives(tmp_path: Path, environment_type: str):
    solution = "mkdir -p /data/sub; cd /data/sub; echo 1 > kept; echo 2 > left.out; ln -s kept link; mkfifo pipe"
    artifacts = '[{ source = "/data", exclude = ["*.out"] }]'
    test = "cd /data/sub; test ! -e left.out && cat link > /logs/verifier/reward.txt"
    record = await play(tmp_path, environment_type, artifacts, solution, test)
    assert (record.outcome, record.reward) == (Outcome.completed, 1.0), record
    assert found_in(record) == ["artifacts/data/sub/kept", "artifacts/data/sub/link", "artifacts/manifest.json"]
