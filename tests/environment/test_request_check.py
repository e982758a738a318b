"""The run's key: its file, its signatures, and the requests that it refuses."""

import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from harbortrainer.config.reader import RawRun
from harbortrainer.engines.prime_rl.model_servers import model_servers
from harbortrainer.environment.request_check import (
    RUN_KEY_FILE_VARIABLE,
    RUN_KEY_VARIABLE,
    ModelServer,
    RequestRefusedError,
    RunKey,
    check_unsigned,
)
from harbortrainer.errors import UserError

TASK = {"name": "a", "path": "/tasks/a", "task_key": "0", "n_steps": 1}
SERVER = ModelServer(base_url="http://127.0.0.1:1/v1", api_key_var="POLICY_KEY")


def client(base_url: str = SERVER.base_url or "", api_key_var: str = SERVER.api_key_var) -> SimpleNamespace:
    return SimpleNamespace(base_url=base_url, api_key_var=api_key_var)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (RUN_KEY_VARIABLE, RUN_KEY_FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_key_file_is_private_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "log" / ".run_key"
    first = RunKey.create(file)
    key = RunKey.create(file, [SERVER])
    assert key.secret != first.secret and len(key.secret) >= 64
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == [".run_key"]
    monkeypatch.setenv(RUN_KEY_FILE_VARIABLE, str(file))
    assert RunKey.of_process() == key
    assert key.secret not in repr(key)
    assert key.secret not in (key.sampler_key, key.sampler_variable) and key.sampler_key != key.sampler_variable


def test_variable_sets_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RunKey.of_process() is None
    monkeypatch.setenv(RUN_KEY_VARIABLE, "a long enough secret")
    assert RunKey.create(tmp_path / "key").secret == "a long enough secret"
    assert RunKey.of_process() == RunKey("a long enough secret")
    monkeypatch.setenv(RUN_KEY_VARIABLE, "short")
    with pytest.raises(UserError, match=rf"\${RUN_KEY_VARIABLE}: has fewer than 16 characters; export"):
        RunKey.of_process()


@pytest.mark.parametrize("content", [None, "", "{}", "[1]"])
def test_unreadable_key_file_is_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv(RUN_KEY_FILE_VARIABLE, str(file))
    with pytest.raises(UserError, match="cannot be read") as caught:
        RunKey.of_process()
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_accepts_what_the_run_signed() -> None:
    key = RunKey.random([SERVER])
    key.check(TASK, key.permit(TASK), client())
    key.check(TASK, key.permit(TASK), client(base_url="http://127.0.0.1:1/v1/"))
    key.check(TASK, key.permit(TASK), client(base_url="http://localhost:1/v1"))
    anywhere = ModelServer(base_url=None, api_key_var="POLICY_KEY")
    key.check(TASK, key.permit(TASK, [anywhere]), client(base_url="http://node7:8000/v1"))


@pytest.mark.parametrize("field", TASK)
def test_refuses_changed_task(field: str) -> None:
    key = RunKey.random([SERVER])
    with pytest.raises(RequestRefusedError, match="signed with another key, or was changed"):
        key.check(TASK | {field: "other"}, key.permit(TASK), client())


def test_refuses_unsigned_and_foreign_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    key = RunKey.random([SERVER])
    with pytest.raises(RequestRefusedError, match="not signed"):
        key.check(TASK, None, client())
    with pytest.raises(RequestRefusedError, match="another key"):
        key.check(TASK, RunKey.random([SERVER]).permit(TASK), client())
    with pytest.raises(RequestRefusedError, match="another key"):
        key.check(TASK, key.permit(TASK).model_copy(update={"servers": []}), client())
    with pytest.raises(RequestRefusedError, match="no model server 'http://evil/v1'"):
        key.check(TASK, key.permit(TASK), client(base_url="http://evil/v1"))
    for url in ("http://127.0.0.1:2/v1", "http://127.0.0.1:port/v1"):
        with pytest.raises(RequestRefusedError, match="no model server"):
            key.check(TASK, key.permit(TASK), client(base_url=url))
    with pytest.raises(RequestRefusedError, match="the key in 'AWS_TOKEN'"):
        key.check(TASK, key.permit(TASK), client(api_key_var="AWS_TOKEN"))
    monkeypatch.setenv("AWS_TOKEN", "x")
    with pytest.raises(RequestRefusedError, match="does not know the run file"):
        key.check(TASK, key.permit(TASK, []), client(api_key_var="AWS_TOKEN"))


def test_refusal_is_one_printable_line() -> None:
    key = RunKey.random([SERVER])
    with pytest.raises(RequestRefusedError) as caught:
        key.check(TASK, key.permit(TASK), client(base_url="x\n\x1b[2J\u2028" + "y" * 9999))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


def test_server_without_key_checks_folder_and_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, foreign = tmp_path / "tasks", tmp_path / "foreign"
    for folder in (tasks / "deep" / "a", foreign, tmp_path / "linked"):
        folder.mkdir(parents=True)
        (folder / "task.toml").touch()
    (tasks / "link").symlink_to(tmp_path / "linked")
    (tmp_path / "same").symlink_to(tasks)
    for inside in (tasks / "deep" / "a", tasks / "link", tmp_path / "linked", tmp_path / "same" / "deep" / "a"):
        check_unsigned(inside, tasks, client(api_key_var="UNSET_VARIABLE"))
    for outside in (foreign, tasks / ".." / "foreign", tasks / "link" / ".." / "foreign", tmp_path / "tasks-2"):
        with pytest.raises(RequestRefusedError, match="is not in"):
            check_unsigned(outside, tasks, client())
    monkeypatch.setenv("VLLM_API_KEY", "x")
    check_unsigned(tasks / "deep" / "a", tasks, client(api_key_var="VLLM_API_KEY"))
    monkeypatch.setenv("POLICY_KEY", "x")
    with pytest.raises(RequestRefusedError, match="put the key into VLLM_API_KEY"):
        check_unsigned(tasks / "deep" / "a", tasks, client())


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, [("http://localhost:8000/v1", "VLLM_API_KEY")]),
        (
            {"inference": {"server": {"port": 8100}}},
            [("http://localhost:8000/v1", "VLLM_API_KEY"), ("http://localhost:8100/v1", "VLLM_API_KEY")],
        ),
        (
            {"orchestrator": {"model": {"client": {"base_url": "http://h:1/v1", "api_key_var": "MINE"}}}},
            [("http://h:1/v1", "MINE")],
        ),
        ({"slurm": {}}, [(None, "VLLM_API_KEY")]),
        ({"deployment": {"type": "multi_node"}}, [(None, "VLLM_API_KEY")]),
        (
            {
                "orchestrator": {
                    "algo": {"sampling": {"source": {"name": "m", "base_url": "http://f/v1", "api_key_var": "F"}}},
                    "train": {
                        "source": [
                            {
                                "env": {"judge": {"base_url": "http://judge/v1"}},
                                "algo": {"sampling": {"source": {"base_url": "http://g/v1"}}},
                            }
                        ]
                    },
                }
            },
            [("http://localhost:8000/v1", "VLLM_API_KEY"), ("http://f/v1", "F"), ("http://g/v1", "VLLM_API_KEY")],
        ),
    ],
)
def test_model_servers_of_run_file(data: dict, expected: list[tuple[str | None, str]]) -> None:
    found = model_servers(RawRun("run.toml", data))
    assert [(server.base_url, server.api_key_var) for server in found] == expected
