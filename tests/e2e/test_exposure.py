"""Tasks that reach for this machine are refused before a container starts; honest compose tasks run as in Harbor.

Each hostile task is also run as a trusted one, which shows that its access is real.
"""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from harbortrainer.errors import UserError
from harbortrainer.trials.record import TrialRecord
from harbortrainer.trials.runner import run_trial
from harbortrainer.trials.trial_spec import TrialSpec

pytestmark = [pytest.mark.docker, pytest.mark.e2e, pytest.mark.usefixtures("container")]

DOCKERFILE = "FROM debian:12-slim\nWORKDIR /app\n"
SECRET = "harmless-test-value"


def make_task(folder: Path, *, toml: str = "", test: str, solution: str = "true", files: Mapping[str, str]) -> Path:
    """Write a task whose reward is 1 if the commands of `test` succeed."""
    everything = {
        "task.toml": f'version = "1.0"\n{toml}',
        "instruction.md": "Do it.",
        "environment/Dockerfile": DOCKERFILE,
        "solution/solve.sh": f"#!/bin/bash\n{solution}\n",
        "tests/test.sh": f"#!/bin/bash\nif {test}; then r=1; else r=0; fi\necho $r > /logs/verifier/reward.txt\n",
        **{f"environment/{name}": text for name, text in files.items()},
    }
    for name, text in everything.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


async def oracle(task: Path, *, trusted: bool = False) -> TrialRecord:
    return await run_trial(
        TrialSpec(
            task_dir=task,
            trials_dir=task.parent / "trials",
            agent="oracle",
            environment_type="docker",
            trusted=trusted,
        )
    )


async def reward_by_harbor(task: Path) -> object:
    """Return the reward of stock Harbor's trial in its own Docker environment."""
    from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
    from harbor.trial.trial import Trial

    config = TrialConfig(
        task=TaskConfig(path=task),
        trials_dir=task.parent / "stock",
        agent=AgentConfig(name="oracle"),
        environment=EnvironmentConfig.model_validate({"type": "docker"}),
    )
    result = await (await Trial.create(config)).run()
    assert result.exception_info is None, result.exception_info
    return (result.verifier_result.rewards or {}).get("reward") if result.verifier_result else None


def quick_and_long(cases: Iterable[str]) -> list[Any]:
    """Return the cases as parameters; those after the second are `long`."""
    return [pytest.param(case, marks=() if number < 2 else pytest.mark.long) for number, case in enumerate(cases)]


SIDE = (
    "{image: debian:12-slim, command: [sh, -c, 'echo ready > /shared/ready; sleep infinity'], volumes: ['kept:/shared']"
)
HONEST = {
    "sidecar, named volume, passwords with defaults": (
        {
            "docker-compose.yaml": """
services:
  main:
    environment: {DB_PASSWORD: "${POSTGRES_PASSWORD:-postgres}", TOKEN: local}
    volumes: ["kept:/shared:ro"]
    depends_on: {side: {condition: service_started}}
  side:
    image: debian:12-slim
    command: [sh, -c, 'echo ready > /shared/ready; sleep infinity']
    volumes: ['kept:/shared']
    ports: ["5432"]
volumes: {kept: {}}
"""
        },
        '[ "$DB_PASSWORD $TOKEN" = "postgres local" ]'
        " && for i in 1 2 3 4 5; do [ -e /shared/ready ] && break; sleep 1; done",
    ),
    "own files: mount, env_file, .env, secret": (
        {
            "docker-compose.yaml": """
services:
  main:
    env_file: own.env
    environment: {MODE: "${MODE_OF_TASK}", USERS_HOME: "${HOME}"}
    volumes: ["./data:/data:ro", "${CONTEXT_DIR}/own.env:/own.env:ro"]
    secrets: [password]
    cap_add: [NET_ADMIN]
secrets: {password: {file: ./password.txt}}
""",
            "own.env": "DB_PASSWORD=postgres\n",
            ".env": "MODE_OF_TASK=fast\n",
            "data/value": "1\n",
            "password.txt": "postgres",
        },
        '[ "$DB_PASSWORD $MODE $(cat /data/value) $(cat /run/secrets/password)" = "postgres fast 1 postgres" ]'
        ' && [ -n "$USERS_HOME" ]',
    ),
    "built sidecar that is asked by name": (
        {
            "docker-compose.yaml": """
services:
  main:
    depends_on: {side: {condition: service_healthy}}
  side:
    build: {context: ./side, args: {VALUE: "7"}}
    healthcheck: {test: [CMD, test, -e, /value], interval: 1s}
    expose: ["8000"]
""",
            "side/Dockerfile": "FROM debian:12-slim\nARG VALUE\nRUN echo $VALUE > /value\nCMD sleep infinity\n",
        },
        "getent hosts side",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", HONEST)
async def test_honest_compose_task_gets_harbors_reward(case: str, tmp_path: Path) -> None:
    files, test = HONEST[case]
    task = make_task(tmp_path / "honest", test=test, files=files)
    record = await oracle(task)
    assert record.reward == 1, (record.error, record.verifier_output)
    assert await reward_by_harbor(task) == 1


REFUSAL = r"hostile: the task can access this machine: .*trusted_tasks = \[\"hostile\"\]"
HOSTILE = {
    "mount": "services: {main: {volumes: ['HERE:/host']}}",
    "mount by a default": "services: {main: {volumes: ['${NOT_SET:-HERE:/host}']}}",
    "mount through a link": "services: {main: {volumes: ['./link:/host']}}",
    "mount as a volume": (
        "services: {main: {volumes: ['vol:/host']}}\n"
        "volumes: {vol: {driver_opts: !override {type: none, o: bind, device: HERE}}}"
    ),
    "mount in another document": "services: {main: {init: true}}\n---\nservices: {main: {volumes: ['HERE:/host']}}",
    "mount of a sidecar": (
        "services: {main: {init: true}, side: {image: debian:12-slim, command: [touch, /host/taken],"
        " volumes: ['HERE:/host']}}"
    ),
}


@pytest.mark.parametrize("case", quick_and_long(HOSTILE))
async def test_folder_of_machine_is_out_of_reach_unless_trusted(case: str, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    compose = HOSTILE[case].replace("HERE", str(here))
    files = {"docker-compose.yaml": compose}
    task = make_task(tmp_path / "hostile", test="true", solution="touch /host/taken", files=files)
    (task / "environment/link").symlink_to(here)
    with pytest.raises(UserError, match=REFUSAL):
        await oracle(task)
    assert not (here / "taken").exists()
    assert not (tmp_path / "trials").exists(), "nothing was started"
    await oracle(task, trusted=True)
    assert (here / "taken").exists(), "the access is real"


VARIABLES = {
    "compose": ("", {"docker-compose.yaml": "services: {main: {environment: {X: 'pre-$MY_PAT'}}}"}),
    "escaped": ("", {"docker-compose.yaml": 'services: {main: {environment: {X: "pre-\\x24{A:-${MY_PAT}}"}}}'}),
    ".env": ("", {"docker-compose.yaml": "services: {main: {environment: {X: '$A'}}}", ".env": "A=pre-${MY_PAT}"}),
    "env_file": ("", {"docker-compose.yaml": "services: {main: {env_file: a.env}}", "a.env": "X=pre-${MY_PAT}"}),
    "env table, longer value": ('[environment.env]\nX = "pre-${MY_PAT}"\n', {}),
    "env table": ('[environment.env]\nX = "${MY_PAT}"\n', {"docker-compose.yaml": "services: {main: {init: true}}"}),
    "verifier's env table": ('[verifier.env]\nX = "${MY_PAT}"\n', {}),
}


@pytest.mark.parametrize("case", quick_and_long(VARIABLES))
async def test_secret_of_machine_is_out_of_reach_unless_trusted(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_PAT", SECRET)
    toml, files = VARIABLES[case]
    reads = f'[[ "$X" == *{SECRET} ]] || grep -qa {SECRET} /proc/1/environ'
    task = make_task(tmp_path / "hostile", toml=toml, test=reads, files=files)
    with pytest.raises(UserError, match="MY_PAT of this machine"):
        await oracle(task)
    assert not (tmp_path / "trials").exists(), "nothing was started"
    assert (await oracle(task, trusted=True)).reward == 1, "the access is real, and a trusted task has it"


async def test_task_cannot_replace_programs_that_start_its_containers(tmp_path: Path) -> None:
    """Harbor passes [environment.env] to the `docker` command itself."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "docker").write_text(f"#!/bin/sh\ntouch {tmp_path}/taken\nexit 1\n")
    (programs / "docker").chmod(0o755)
    path = f"{programs}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    task = make_task(
        tmp_path / "hostile",
        toml=f'[environment.env]\nPATH = "{path}"\nDOCKER_HOST = "tcp://127.0.0.1:1"\n',
        test='[ "$DOCKER_HOST" = tcp://127.0.0.1:1 ]',
        files={"docker-compose.yaml": "services: {main: {init: true}}"},
    )
    assert (await oracle(task)).reward == 1
    assert not (tmp_path / "taken").exists()
    with pytest.raises(AssertionError):
        await reward_by_harbor(task)
    assert (tmp_path / "taken").exists(), "stock Harbor runs the task's program on this machine"


async def test_compose_knows_no_secret_that_task_does_not_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PAT", SECRET)
    wrapper = tmp_path / "bin"
    wrapper.mkdir()
    real = shutil.which("docker")
    (wrapper / "docker").write_text(f'#!/bin/sh\nenv >> {tmp_path}/seen\nexec {real} "$@"\n')
    (wrapper / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper}:/usr/local/bin:/usr/bin:/bin")
    files = {"docker-compose.yaml": "services: {main: {environment: {A: '1'}}}"}
    task = make_task(tmp_path / "plain", test="true", files=files)
    assert (await oracle(task)).reward == 1
    runs = (tmp_path / "seen").read_text()
    assert "CONTEXT_DIR=" in runs, "Compose ran"
    compose_runs = [part for part in runs.split("PATH=") if "MAIN_IMAGE_NAME" in part]
    assert compose_runs and not any(SECRET in part for part in compose_runs)
