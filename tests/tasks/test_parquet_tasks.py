"""Datasets of the Hugging Face hub, with the hub's client and a local server."""

import json
import os
import subprocess
import sys
from pathlib import Path

from hub_server import COMMIT, serve_dataset
from task_sets import make_task, packed, write_parquet

COMMANDS = """
import contextlib, io, json, sys
from harbortrainer.cli import main
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def run(endpoint: str, home: Path, *sources: str) -> list[tuple[int, str, str]]:
    """Fetch each source in one process that uses the hub at `endpoint`."""
    variables = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home / "hf"), "XDG_CACHE_HOME": str(home / "cache")}
    variables |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"}
    commands = json.dumps([["tasks", "fetch", source] for source in sources])
    command = [sys.executable, "-c", COMMANDS]
    done = subprocess.run(
        command, input=commands, capture_output=True, text=True, env=os.environ | variables, check=True
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def parquet(folder: Path, **tasks: str) -> bytes:
    rows = {name: packed(make_task(folder / name, instruction)) for name, instruction in tasks.items()}
    return write_parquet(folder / "t.parquet", rows).read_bytes()


def test_hub_dataset_is_downloaded_once_at_its_commit(tmp_path: Path) -> None:
    files = {
        "data/train-0.parquet": parquet(tmp_path / "0", one="Do one.", two="Do two."),
        "data/test-0.parquet": parquet(tmp_path / "1", three="Do three."),
        "README.md": b"tasks",
    }
    with serve_dataset("org/set", files) as endpoint:
        results = run(
            endpoint,
            tmp_path,
            "hf:org/set",
            "hf:org/set@main#data/train-*.parquet",
            "hf:org/set@nowhere",
            "hf:org/other",
            "hf:org/unexplained",
            "hf:org/set#none/*.parquet",
        )
    whole, part, revision, name, refused, pattern = results
    assert whole[0] == 0 and "3 tasks in" in whole[1] and f'dataset = "hf:org/set@{COMMIT}"' in whole[1]
    assert part[0] == 0 and "2 tasks in" in part[1]
    assert f'dataset = "hf:org/set@{COMMIT}#data/train-*.parquet"' in part[1]
    for (code, _, error), expected in (
        (revision, "has no revision 'nowhere'"),
        (name, "no such dataset on the hub, or it is private"),
        (refused, "the hub refused the request with 404"),
        (pattern, "no file of the dataset matches none/*.parquet"),
    ):
        assert code == 2 and expected in error.splitlines()[-1] and "Traceback" not in error
    pinned, moving = run("http://127.0.0.1:9", tmp_path, f"hf:org/set@{COMMIT}", "hf:org/set")
    assert pinned[0] == 0 and "3 tasks in" in pinned[1]
    assert moving[0] == 2 and "the hub cannot be reached" in moving[2] and moving[2].count("\n") == 1
