"""Unsupported requirements of a task are detected and named by key; tests/parity runs the supported ones."""

from pathlib import Path

import pytest
from harbor.models.task.task import Task

from harbortrainer.harbor_compat import separate_verifier_can_use_environment
from harbortrainer.sandbox import task_requirements
from harbortrainer.sandbox.environment_types import choose_environment
from harbortrainer.sandbox.images import image_choice
from harbortrainer.sandbox.task_requirements import TaskRequirements

HOST = {"image": "host"}
CAN_USE_ENVIRONMENT = separate_verifier_can_use_environment()
UNDEFINED = [] if CAN_USE_ENVIRONMENT else ["[verifier.environment] neither a Dockerfile nor docker_image"]
A_LACKS = ["steps/a/tests/test.sh and tests/test.sh are missing"]
SEPARATE = '[verifier]\nenvironment_mode = "separate"'
STEP_NAMES = ("a", "b", "A", "a:b")
STEPS = '[[steps]]\nname = "a"\n[[steps]]\nname = "b"\n'


def write_task(folder: Path, toml: str = "", **files: str) -> Path:
    """Write a task with an ordinary Dockerfile, a test script, and instructions of some steps."""
    ordinary = {"environment/Dockerfile": "FROM debian:12-slim\n", "tests/test.sh": "true\n", "task.toml": toml}
    ordinary |= {f"{step}instruction.md": "do it" for step in ("", *(f"steps/{name}/" for name in STEP_NAMES))}
    for name, text in (ordinary | files).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def unsupported(folder: Path, kind: str = "local", **kwargs: object) -> list[str]:
    return TaskRequirements(folder).unsupported(kind, HOST | kwargs)


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ("", []),
        ('[environment]\nnetwork_mode = "no-network"', []),
        ('[environment]\nnetwork_mode = "no-network"\n[agent]\nnetwork_mode = "no-network"', []),
        ('[environment]\nallow_internet = false\n[verifier]\nnetwork_mode = "no-network"', []),
        ('[environment]\nnetwork_mode = "allowlist"', ['[environment] network_mode = "allowlist"']),
        (
            '[environment]\nallow_internet = false\n[verifier]\nnetwork_mode = "public"',
            ['[verifier] network_mode = "public" in a sandbox that has "no-network"'],
        ),
        (
            '[[steps]]\nname = "a"\n[steps.agent]\nnetwork_mode = "no-network"',
            ['[steps.a.agent] network_mode = "no-network" in a sandbox that has "public"'],
        ),
        (
            '[verifier]\nnetwork_mode = "no-network"\n[verifier.environment]\nnetwork_mode = "no-network"',
            UNDEFINED,
        ),
        ("[environment]\ngpus = 2", ["[environment] gpus = 2"]),
        ('[environment]\nos = "Windows"', ["[environment] os = 'Windows'"]),
        (
            '[verifier.environment]\ndocker_image = "judge:1"',
            ["[verifier.environment] docker_image 'judge:1'"],
        ),
        (
            '[[steps]]\nname = "a"\n[steps.verifier.environment]\ndocker_image = "judge:1"',
            ["[steps.a.verifier.environment] docker_image 'judge:1'"],
        ),
        ('[[artifacts]]\nsource = "/log"\nservice = "db"', ["artifacts of the service 'db'"]),
        ("artifacts = 5\nsteps = 5\nverifier = 5", []),
    ],
)
def test_unsupported_requirement_names_its_key(tmp_path, toml, expected):
    assert unsupported(write_task(tmp_path, toml)) == expected


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ('artifacts = ["/a/b", "/a", "/a", "/logs/artifacts/x", "/logs", "c"]', []),
        ('artifacts = ["//etc/cron.d/x"]', ["artifacts: //etc/cron.d/x begins with two slashes"]),
        (
            'artifacts = [{ source = "/a", destination = "x" }, { source = "/a", destination = "x/l/y" }]',
            ["artifacts: /a and /a have nested destinations"],
        ),
        (
            'artifacts = [{ source = "/a", destination = "logs/artifacts/l/y" }, "/logs/artifacts/"]',
            ["artifacts: /a and /logs/artifacts have nested destinations"],
        ),
        (
            'artifacts = [{ source = "/a", destination = "logs" }]\n'
            '[[steps]]\nname = "a"\n[[steps.artifacts]]\nsource = "/logs/artifacts"\nexclude = ["*.o"]',
            ["artifacts: /a and /logs/artifacts have nested destinations"],
        ),
    ],
)
def test_artifact_that_links_can_redirect_is_exposure(tmp_path, toml, expected):
    assert TaskRequirements(write_task(tmp_path, toml)).exposure("docker", {}) == expected


@pytest.mark.parametrize(
    ("toml", "kept", "is_refused"),
    [
        ("", "", True),
        ("", "tests/test.bat", True),
        (SEPARATE, "", CAN_USE_ENVIRONMENT),
        (SEPARATE, "tests/Dockerfile", False),
        (STEPS, "steps/a/tests/test.sh", True),
        (f'{STEPS}verifier = {{ environment_mode = "separate" }}\n', "steps/b/tests/Dockerfile", True),
    ],
)
def test_missing_test_script_is_refused(tmp_path, toml, kept, is_refused):
    folder = write_task(tmp_path, toml, **({kept: "true\n"} if kept else {}))
    (folder / "tests/test.sh").unlink()
    assert ("test.sh" in TaskRequirements(folder).refusal()) is is_refused


@pytest.mark.parametrize(
    ("toml", "files", "words"),
    [
        ("", {"tests/.harborignore": "test.sh"}, "Required task input is excluded by .harborignore: tests/test.sh"),
        ("", {"tests/link": None}, "Input paths must stay within the task"),
        ("", {"solution/link": None}, "Input paths must stay within the task"),
        ('[[steps]]\nname = "a:b"', {}, "task.toml: steps[0].name: Invalid step name 'a:b'"),
        ('[[steps]]\nname = "A"\n[[steps]]\nname = "a"', {}, "task.toml: steps: Step names must be unique"),
    ],
)
def test_reports_what_the_installed_harbor_refuses_in_its_words(tmp_path, toml, files, words):
    folder = write_task(tmp_path, toml, **{"solution/solve.sh": "true"})
    for name, text in files.items():
        (folder / name).symlink_to("/etc/hostname") if text is None else (folder / name).write_text(text)
    refusal = TaskRequirements(folder).refusal()
    assert refusal.startswith(words) if CAN_USE_ENVIRONMENT else not refusal
    assert Task.is_valid_dir(folder) is not CAN_USE_ENVIRONMENT


def test_checks_dockerfile_of_separate_verifier(tmp_path):
    folder = write_task(
        tmp_path,
        SEPARATE,
        **{"tests/Dockerfile": 'FROM debian:12-slim\nENTRYPOINT ["/judge"]\n'},
    )
    assert unsupported(folder) == ['[verifier.environment] Dockerfile line 2: ENTRYPOINT ["/judge"]']


@pytest.mark.skipif(bool(image_choice.builder_problem()), reason=image_choice.builder_problem() or "-")
def test_docker_image_is_supported_with_builder(tmp_path):
    folder = write_task(tmp_path, '[environment]\ndocker_image = "a:1"')
    assert unsupported(folder, image="build") == []


def test_separate_verifier_without_image_has_the_agents_where_harbor_allows(tmp_path):
    folder = write_task(tmp_path, SEPARATE)
    assert unsupported(folder, "docker") == UNDEFINED
    assert unsupported(folder, "modal") == []
    (folder / "environment/Dockerfile").write_text('FROM debian:12-slim\nENTRYPOINT ["/judge"]\n')
    own, found = (
        f'{key} Dockerfile line 2: ENTRYPOINT ["/judge"]' for key in ("[environment]", "[verifier.environment]")
    )
    assert unsupported(folder) == ([own, found] if CAN_USE_ENVIRONMENT else [*UNDEFINED, own])


def test_docker_gives_gpus_where_harbor_does(tmp_path):
    folder = write_task(tmp_path, f"[environment]\ngpus = 1\n{SEPARATE}", **{"tests/Dockerfile": "FROM a\n"})
    refused = ["[environment] gpus = 1", "[verifier.environment] gpus = 1"]
    assert unsupported(folder, "docker") == ([] if CAN_USE_ENVIRONMENT else refused)
    assert unsupported(folder, "local") == unsupported(folder, "auto") == refused
    assert choose_environment(folder, "auto", HOST).kind == "docker"


def test_ordinary_user_cannot_have_other_users(tmp_path, monkeypatch):
    folder = write_task(tmp_path, '[agent]\nuser = "worker"\n[verifier]\nuser = "root"')
    assert unsupported(folder) == []
    monkeypatch.setattr(task_requirements.os, "geteuid", lambda: 1000)
    expected = "[agent] user = 'worker' (only root can give a sandbox other users)"
    assert unsupported(folder) == [expected]
    for user, dockerfile_problems in (
        ("root:root", []),
        ("worker:1", ["[environment] Dockerfile line 3: USER worker:1"]),
    ):
        (folder / "environment/Dockerfile").write_text(f"FROM a\nUSER first\nUSER {user}\n")
        only_root = [requirement for requirement in unsupported(folder) if "only root" in requirement]
        assert only_root[0] == expected
        assert [requirement.partition(" (only root")[0] for requirement in only_root[1:]] == dockerfile_problems


def test_unset_variable_is_reported_once(tmp_path):
    folder = write_task(
        tmp_path,
        '[environment.env]\nA = "${KEY}"\nB = "${KEY:-none}"\nC = "${HERE}"\nD = "literal ${KEY}"\n'
        '[verifier.env]\nA = "${JUDGE}"\n[solution.env]\nA = "${OTHER}"',
    )
    expected = ["[environment.env] A: $KEY is not set", "[verifier.env] A: $JUDGE is not set"]
    assert TaskRequirements(folder).unset_variables({"HERE": "1"}) == expected
    assert TaskRequirements(folder).unset_variables({"HERE": "1"}, solution=True) == [
        *expected,
        "[solution.env] A: $OTHER is not set",
    ]


def test_auto_selects_docker_only_if_local_is_unsupported(tmp_path):
    plain_task = write_task(tmp_path / "a")
    compose_task = write_task(tmp_path / "b", **{"environment/docker-compose.yaml": "services: {}\n"})
    assert (choose_environment(plain_task, "auto", HOST).kind, choose_environment(plain_task, "auto", HOST).kwargs) == (
        "local",
        HOST,
    )
    choice = choose_environment(compose_task, "auto", HOST)
    assert (choice.kind, choice.kwargs, choice.reasons) == ("docker", {}, ["environment/docker-compose.yaml"])
    assert choose_environment(compose_task, "local", HOST).kind == "local"


def test_exposure_names_user_keys_of_agent_and_verifier(tmp_path: Path):
    environment = '[environment.env]\nPROXY = "${ANTHROPIC_API_KEY}"\nMODE = "${MODE:-x}"\nOWN_TOKEN = "known"\n'
    folder = write_task(tmp_path, f'{environment}[verifier.env]\nJUDGE = "${{OPENAI_API_KEY}}"\n')
    assert TaskRequirements(folder).exposure("local") == [
        "[environment.env] PROXY is $ANTHROPIC_API_KEY of this machine",
        "[verifier.env] JUDGE is $OPENAI_API_KEY of this machine",
    ]
