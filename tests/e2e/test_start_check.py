"""A set-up that no command survives ends by its cause, equally in both sandboxes, and the message names it."""

import os
from pathlib import Path

import pytest
from fakes import make_task

from harbortrainer.environment.rollout_state import Attempts, trace_error
from harbortrainer.tasks.task_check import check_tasks
from harbortrainer.tasks.task_folder import load_folder
from harbortrainer.trials import Outcome, TrialRecord, TrialSpec, run_trial

pytestmark = pytest.mark.e2e

HEALTHCHECK = '[environment.healthcheck]\ncommand = "{}"\ninterval_sec = 0.1\nretries = 2\n'
MAKES_WORKDIR = """\
FROM debian:12-slim
RUN printf '#!/bin/sh\\nsleep 1; mkdir -p /made/later /app; exec "$@"\\n' > /start.sh && chmod +x /start.sh
ENTRYPOINT ["/start.sh"]
"""
BASH_ELSEWHERE = """\
FROM debian:12-slim
WORKDIR /app
RUN mkdir -p /opt/own && mv /usr/bin/bash /opt/own/bash
ENV PATH=/opt/own:/usr/bin:/bin
"""


async def trial(folder: Path, environment_type: str, task: Path) -> TrialRecord:
    kwargs = {"image": "build"} if environment_type == "local" else {}
    return await run_trial(
        TrialSpec(
            task_dir=task,
            trials_dir=folder / "trials",
            agent="oracle",
            environment_type=environment_type,
            environment_kwargs=kwargs,
        )
    )


def assert_final(record: TrialRecord, what: str) -> None:
    """Check that a record is a `sandbox_error` with this message, which is not retried."""
    assert record.outcome is Outcome.sandbox_error and record.reward is None, record
    assert record.error is not None and what in record.error.message, record.error
    assert type(trace_error(record, Attempts())).__name__ == "TrialFailedError"


async def test_missing_workdir_is_named(tmp_path: Path, environment_type: str) -> None:
    toml = '[environment]\nworkdir = "/no where"\n' + HEALTHCHECK.format("true")
    task = make_task(tmp_path / "task", extra=toml)
    assert_final(await trial(tmp_path, environment_type, task), "the image has no folder /no where, the workdir")


async def test_missing_bash_is_named(tmp_path: Path, environment_type: str) -> None:
    task = make_task(tmp_path / "task", dockerfile="FROM debian:12-slim\nWORKDIR /app\nRUN rm /usr/bin/bash\n")
    assert_final(await trial(tmp_path, environment_type, task), "the image has no bash")


@pytest.mark.parametrize(
    ("toml", "last_line", "what"),
    [
        ('workdir = "/nowhere"', "WORKDIR /app", "the image has no folder /nowhere, the workdir"),
        ("", "RUN rm /usr/bin/bash", "the image has no bash"),
    ],
    ids=["workdir", "bash"],
)
async def test_image_of_separate_verifier_is_checked(
    tmp_path: Path, environment_type: str, toml: str, last_line: str, what: str
) -> None:
    task = make_task(tmp_path / "task", extra=f"[verifier.environment]\n{toml}\n")
    (task / "tests" / "Dockerfile").write_text(f"FROM debian:12-slim\nCOPY . /tests\n{last_line}\n")
    assert_final(await trial(tmp_path, environment_type, task), what)


async def test_failed_healthcheck_keeps_its_output(tmp_path: Path, environment_type: str) -> None:
    task = make_task(tmp_path / "task", extra=HEALTHCHECK.format("echo port 5432 is closed >&2; exit 3"))
    record = await trial(tmp_path, environment_type, task)
    assert record.outcome is Outcome.sandbox_error and record.error is not None
    assert record.error.message.endswith("it ended with code 3 and printed port 5432 is closed")


@pytest.mark.parametrize(
    ("toml", "dockerfile"),
    [
        ('[environment]\nworkdir = "/made/later"\n', MAKES_WORKDIR),
        ("", BASH_ELSEWHERE),
        (HEALTHCHECK.format("true"), "FROM debian:12-slim\nWORKDIR /app\n"),
        ('[environment]\nworkdir = "app"\n', "FROM debian:12-slim\nRUN mkdir /app\n"),
    ],
    ids=["entrypoint makes workdir", "bash elsewhere", "healthcheck", "relative workdir"],
)
async def test_honest_image_gets_its_reward(tmp_path: Path, environment_type: str, toml: str, dockerfile: str) -> None:
    task = make_task(tmp_path / "task", extra=toml, dockerfile=dockerfile)
    if "/opt/own" in dockerfile:
        for script in (task / "tests" / "test.sh", task / "solution" / "solve.sh"):
            script.write_text(script.read_text().replace("/bin/bash", "/bin/sh"))
    record = await trial(tmp_path, environment_type, task)
    assert (record.outcome, record.reward) == (Outcome.completed, 1.0), record.error


async def test_agent_that_removes_workdir_is_not_the_image(tmp_path: Path, environment_type: str) -> None:
    task = make_task(tmp_path / "task", extra='[environment]\nworkdir = "/app"\n')
    (task / "solution" / "solve.sh").write_text("#!/bin/bash\ncd /; rm -rf /app\n")
    record = await trial(tmp_path, environment_type, task)
    assert record.error is None or record.error.type != "ImageLacksError"


@pytest.mark.docker
@pytest.mark.usefixtures("container")
async def test_compose_file_that_is_a_pipe_does_not_hang(tmp_path: Path) -> None:
    task = make_task(tmp_path / "task")
    os.mkfifo(task / "environment" / "docker-compose.yaml")
    spec = TrialSpec(
        task_dir=task, trials_dir=tmp_path / "trials", agent="oracle", environment_type="docker", trusted=True
    )
    record = await run_trial(spec)
    assert record.outcome is Outcome.sandbox_error and record.error is not None
    assert "docker-compose.yaml is not a regular file" in record.error.message


async def test_yml_file_is_no_compose_file(tmp_path: Path, environment_type: str) -> None:
    """As in Harbor, which builds the Dockerfile."""
    task = make_task(tmp_path / "tasks" / "task")
    (task / "environment" / "docker-compose.yml").write_text("services: {side: {image: none-of-this-name:1}}\n")
    kwargs = {"image": "build"} if environment_type == "local" else {}
    (verdict,) = await check_tasks(
        load_folder(tmp_path / "tasks"), environment_type=environment_type, environment_kwargs=kwargs
    )
    assert verdict.problem == "" and verdict.environment == environment_type
    assert verdict.note == "Harbor ignores environment/docker-compose.yml, and reads only docker-compose.yaml"
