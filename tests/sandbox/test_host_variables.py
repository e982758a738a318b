"""Variables of this machine that tasks take: in every spelling, and without those that the task defines itself."""

from pathlib import Path

import pytest

from harbortrainer.sandbox import host_variables
from harbortrainer.sandbox.task_requirements import TaskRequirements

RANDOM = "x7Kq2Lp9Zt4Wb8RdV3"
HOST = {"MY_PAT": "abc", "HF_TOKEN": "abc", "PLAIN": RANDOM, "MODE": "fast", "HOME": "/root", "DB_PASSWORD": "abc"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("Bearer ${A}", {"A": False}),
        ("$A-$B", {"A": False, "B": False}),
        ("${A:-x} ${B-y}", {"A": True, "B": True}),
        ("${A:-${B}}", {"A": True, "B": False}),
        ("${A:-x} $A", {"A": False}),
        ("${A:?no}", {"A": False}),
        ("$${A} $$B $$$C", {"C": False}),
        ("costs 5$, $1", {}),
    ],
)
def test_finds_variables_in_text(text: str, named: dict[str, bool]) -> None:
    assert host_variables.variables_of_text(text) == named


def exposed_by(tmp_path: Path, compose: str, **files: str) -> list[str]:
    for name, text in {"docker-compose.yaml": compose, **files}.items():
        (tmp_path / name).write_text(text)
    return host_variables.exposed(host_variables.compose_variables(tmp_path), HOST)


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("environment: [MY_PAT, MODE=1]", ["MY_PAT"]),
        ("environment: {A: 'Bearer ${HF_TOKEN}', B: 1}", ["HF_TOKEN"]),
        ("environment: {A: '$HF_TOKEN'}", ["HF_TOKEN"]),
        ('environment: {A: "\\x24{HF_TOKEN}"}', ["HF_TOKEN"]),
        ("environment: {A: '${NONE:-${HF_TOKEN:-x}}'}", ["HF_TOKEN"]),
        ("environment: {A: '${PLAIN}'}", ["PLAIN"]),
        ("environment: {DB_PASSWORD: }", ["DB_PASSWORD"]),
        ("environment: {DB_PASSWORD: known, A: '$${HF_TOKEN}', B: '${MODE}', C: '$HOME'}", []),
        ("environment: {A: '${POSTGRES_PASSWORD:-postgres}'}", []),
        ("environment: {A: '${POSTGRES_PASSWORD}'}", ["POSTGRES_PASSWORD"]),
        ("environment: {A: '${DB_PASSWORD:-postgres}'}", ["DB_PASSWORD"]),
        ("command: curl there/$MY_PAT", ["MY_PAT"]),
        ("labels: {'a': '${MY_PAT}'}", ["MY_PAT"]),
        ("build: {args: [MY_PAT]}", ["MY_PAT"]),
        ("build: {args: {HF_TOKEN: null}}", ["HF_TOKEN"]),
        ("env_file: own.env", ["DB_PASSWORD", "MY_PAT"]),
    ],
)
def test_finds_secrets_that_compose_passes_on(tmp_path: Path, setting: str, names: list[str]) -> None:
    found = exposed_by(tmp_path, f"services: {{side: {{{setting}}}}}", **{"own.env": "A=${MY_PAT}\nDB_PASSWORD\nB=1"})
    assert found == names


def test_finds_secrets_in_env_file_and_top_level_tables(tmp_path: Path) -> None:
    assert exposed_by(tmp_path, "services: {}", **{".env": "X=${MY_PAT}"}) == ["MY_PAT"]
    assert exposed_by(tmp_path, "secrets: {a: {environment: HF_TOKEN}}", **{".env": ""}) == ["HF_TOKEN"]
    assert exposed_by(tmp_path, "services: [$MY_PAT") == ["MY_PAT"]


def test_env_file_is_a_default(tmp_path: Path) -> None:
    compose = "services: {main: {environment: {A: '${POSTGRES_PASSWORD}', B: '${DB_PASSWORD}'}}}"
    assert exposed_by(tmp_path, compose, **{".env": "POSTGRES_PASSWORD=postgres\nDB_PASSWORD=postgres\n"}) == [
        "DB_PASSWORD"
    ]


def task(tmp_path: Path, toml: str, compose: str = "") -> TaskRequirements:
    (tmp_path / "environment").mkdir()
    (tmp_path / "task.toml").write_text(toml)
    if compose:
        (tmp_path / "environment/docker-compose.yaml").write_text(compose)
    return TaskRequirements(tmp_path)


@pytest.mark.parametrize("table", ["environment", "verifier", "solution"])
@pytest.mark.parametrize(
    ("value", "variable"),
    [
        ("${MY_PAT}", "MY_PAT"),
        ("${HF_TOKEN:-none}", "HF_TOKEN"),
        ("Bearer ${HF_TOKEN}!", "HF_TOKEN"),
        ("$HF_TOKEN", "HF_TOKEN"),
        ("${PLAIN}", "PLAIN"),
        ("${MODE}", None),
        ("${UNSET_TOKEN:-}", None),
        ("/opt/bin:$PATH", None),
    ],
)
def test_finds_secrets_in_env_tables(tmp_path: Path, table: str, value: str, variable: str | None) -> None:
    found = task(tmp_path, f'[{table}.env]\nNAME = "{value}"\n').exposure("local", HOST)
    assert found == ([f"[{table}.env] NAME is ${variable} of this machine"] if variable else [])


def test_name_inside_sandbox_also_tells_secret(tmp_path: Path) -> None:
    assert task(tmp_path, '[verifier.env]\nJUDGE_API_KEY = "${MODE}"\n').exposure("local", HOST) != []


def test_variables_that_task_defines_are_not_the_machines(tmp_path: Path) -> None:
    compose = "services: {main: {environment: {A: '${DB_PASSWORD}'}}}"
    toml = '[environment.env]\nDB_PASSWORD = "postgres"\n'
    assert task(tmp_path, toml, compose).exposure("docker", HOST) == []
    (tmp_path / "task.toml").write_text("")
    access = ["environment/docker-compose.yaml has $DB_PASSWORD of this machine"]
    assert TaskRequirements(tmp_path).exposure("docker", HOST) == access
    assert TaskRequirements(tmp_path).exposure("modal", HOST) == access, "providers pass named variables on"
    assert TaskRequirements(tmp_path).exposure("local", HOST) == []


def test_task_cannot_hide_a_setting_of_docker_by_defining_it(tmp_path: Path) -> None:
    compose = "services: {main: {environment: {A: '${HTTPS_PROXY}'}}}"
    requirements = task(tmp_path, '[environment.env]\nHTTPS_PROXY = "x"\n', compose)
    assert requirements.exposure("docker", {"HTTPS_PROXY": "http://me:hunter2@proxy"}) != []


@pytest.mark.parametrize("name", ["environment", "tests", "instruction.md", "steps/one/solution"])
def test_links_out_of_task_count_as_access(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "task"
    (folder / "steps/one").mkdir(parents=True)
    (folder / "task.toml").write_text("")
    (folder / "shared").mkdir()
    (folder / "other").symlink_to("shared")
    (folder / name).symlink_to("/etc")
    assert TaskRequirements(folder).exposure("local", {}) == [f"{name} is a link to /etc of this machine"]


def test_compose_gets_no_secret_and_no_setting_of_its_programs_from_task() -> None:
    host = HOST | {"PATH": "/bin", "HTTPS_PROXY": "http://u:p@proxy", "DOCKER_HOST": "unix:///a", "GOOGLE_API_KEY": "k"}
    task_env = {"PATH": "./evil", "LD_PRELOAD": "./evil.so", "DOCKER_HOST": "tcp://there", "OWN": "1", "UNUSED": "1"}
    infra = {"CONTEXT_DIR": "/t"}
    named = {"OWN", "LD_PRELOAD", "PATH", "HF_TOKEN"}
    assert host_variables.compose_environment(host | task_env | infra, host, infra, named) == {
        "MODE": "fast",
        "HOME": "/root",
        "PATH": "/bin",
        "HTTPS_PROXY": "http://u:p@proxy",
        "DOCKER_HOST": "unix:///a",
        "OWN": "1",
        "CONTEXT_DIR": "/t",
        "HF_TOKEN": "abc",
    }
