"""`serve-env` runs the trials of a run that was started on another machine: real server, real sandbox.

The two machines are two folders with the same tasks; the server's one lacks the folders that the requests name.
"""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from fakes import DONE, keys, make_task
from leftovers import remaining_processes
from plugin_runs import SAMPLING, client, config
from scripted_engine import ScriptedEngine, by_turn, save_tokenizer
from verifiers.v1.episode import WireEpisode
from verifiers.v1.serve import EnvClient
from verifiers.v1.task import Task
from verifiers.v1.utils.loaders import load_taskset, resolve_env_config

from harbortrainer.cli import main
from harbortrainer.environment.request_check import POLICY_KEY_VARIABLE, RUN_KEY_VARIABLE, RunKey
from harbortrainer.environment.taskset import request_data

pytestmark = pytest.mark.e2e
SOLVES = by_turn([keys("mkdir -p /app && touch /app/answer", duration=1.0), DONE, DONE])
KEY = "0123456789abcdef"
RUN_FILE = """
[run]
name = "r"
[[orchestrator.train.source]]
name = "far"
group_size = 2
serve = { address = "tcp://127.0.0.1:6000", pool = { type = "static", num_workers = 1 } }
env.taskset = { id = "harbor_env", tasks_dir = "tasks" }
env.agent.harness = { environment_type = "local", environment_kwargs = { image = "host" } }
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def served(folder: Path) -> Generator[str]:
    """Run the command in a folder; yield its address. It must end on SIGTERM and leave no process."""
    code = "import sys; from harbortrainer.cli import main; sys.exit(main())"
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            code,
            "serve-env",
            "--config",
            "run.toml",
            "--address",
            f"tcp://127.0.0.1:{free_port()}",
        ],
        cwd=folder,
        env=os.environ | {RUN_KEY_VARIABLE: KEY, POLICY_KEY_VARIABLE: "key of the policy"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith("serving "))
    assert line.startswith("serving far (1 tasks) at tcp://127.0.0.1:")
    started = psutil.Process(process.pid).children(recursive=True)
    assert started
    try:
        yield line.split(" at ")[1].partition(";")[0]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert remaining_processes(started) == []


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Task]:
    """Tasks of the machine that trains: one as on the server's machine, one that differs there, one that it lacks."""
    monkeypatch.delenv(RUN_KEY_VARIABLE, raising=False)
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "run.toml").write_text(RUN_FILE)
    make_task(tmp_path / "server" / "tasks" / "answer")
    for name in ("answer", "edited", "missing"):
        make_task(tmp_path / "trainer" / name, extra="" if name == "answer" else f"# {name}")
    found = {
        str(task.data.name): task
        for task in load_taskset(resolve_env_config(config(tmp_path / "trainer", tmp_path)).taskset)
    }
    for name in ("answer", "missing"):
        (tmp_path / "trainer" / name).rename(tmp_path / f"{name} of the trainer")
    (tmp_path / "trainer" / "edited" / "instruction.md").write_text("Edited.")
    return found


@pytest.mark.long
async def test_plays_the_same_task_and_refuses_others(tmp_path: Path, tasks: dict[str, Task]) -> None:
    with (
        ScriptedEngine(save_tokenizer(tmp_path / "tokenizer"), SOLVES) as engine,
        served(tmp_path / "server") as address,
    ):
        server = EnvClient(address=address)
        await server.wait_for_server_startup(timeout=60, interval=0.5)
        policy = client(engine).model_copy(update={"api_key_var": POLICY_KEY_VARIABLE})

        async def run(name: str, key: RunKey) -> WireEpisode:
            return await server.run(policy, engine.model, SAMPLING, request_data(tasks[name], key, policy))

        try:
            episode = await run("answer", RunKey(KEY))
            with pytest.raises(RuntimeError, match=r"OtherTaskError: task 'edited': has other files in "):
                await run("edited", RunKey(KEY))
            with pytest.raises(RuntimeError, match=r"OtherTaskError: task 'missing': is missing: there is no folder "):
                await run("missing", RunKey(KEY))
            with pytest.raises(
                RuntimeError, match="RequestRefusedError: request refused: the task is signed with another"
            ):
                await run("answer", RunKey.random())
        finally:
            await server.close()
    assert episode.ok and episode.traces[0].reward == 1.0
    assert episode.task.hash == tasks["answer"].hash
    (log,) = (tmp_path / "server" / "outputs").glob("r-env-*/log/env.log")
    assert KEY not in log.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "$HARBORTRAINER_RUN_KEY: is not set"),
        (["--address", "10.0.0.1"], "command line: --address: 10.0.0.1 is not an address; write tcp://HOST:PORT"),
        (["--source", "near"], "no source is named 'near'; the file has far"),
    ],
)
def test_mistakes_end_before_anything_starts(
    tmp_path: Path,
    tasks: object,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path / "server")
    assert main(["serve-env", "--config", "run.toml", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not Path("outputs").exists()


def test_trials_dir_that_cannot_be_made_is_named(
    tmp_path: Path, tasks: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path / "server")
    monkeypatch.setenv(RUN_KEY_VARIABLE, KEY)
    Path("bad.toml").write_text(RUN_FILE.replace("harness = {", 'harness = { trials_dir = "run.toml/trials",'))
    assert main(["serve-env", "--config", "bad.toml"]) == 2
    error = capsys.readouterr().err
    assert "server/run.toml/trials: cannot be made: Not a directory; set output_dir, or trials_dir in" in error
    assert not Path("outputs").exists()


def test_source_without_an_address(
    tmp_path: Path, tasks: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path / "server")
    Path("none.toml").write_text(re.sub(r'address = "[^"]*",?', "", RUN_FILE))
    assert main(["serve-env", "--config", "none.toml", "--source", "far"]) == 2
    assert "none.toml: orchestrator.train.source[0].serve.address: 'far' has none" in capsys.readouterr().err


def test_sources_with_several_servers_are_named(
    tmp_path: Path, tasks: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path / "server")
    second = RUN_FILE.partition("[[")[2].replace('"far"', '"second"').replace(":6000", ":6001")
    Path("two.toml").write_text(f"{RUN_FILE}[[{second}")
    assert main(["serve-env", "--config", "two.toml"]) == 2
    assert "these sources need a server each: far, second; name one with --source" in capsys.readouterr().err
