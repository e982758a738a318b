"""Access to this machine in a task's compose file: risky settings are reported, harmless ones are not."""

from pathlib import Path

import pytest

from harbortrainer.sandbox.task_exposure import compose_exposure
from harbortrainer.sandbox.task_requirements import TaskRequirements

HARMLESS = """
services:
  main:
    build: {context: "${CONTEXT_DIR}"}
    image: ${MAIN_IMAGE_NAME}
    environment: [TEST_DIR=/tests, HOME, "MODE=${MODE:-fast}"]
    volumes:
      - ${HOST_VERIFIER_LOGS_PATH}:${ENV_VERIFIER_LOGS_PATH}
      - ./data:/data:ro
      - {type: bind, source: "${CONTEXT_DIR}/more", target: /more, read_only: true}
      - kept:/kept
      - {type: tmpfs, target: /run}
      - /anonymous
    devices: ["nvidia.com/gpu=0", "/dev/nvidia0:/dev/nvidia0"]
    network_mode: "service:side"
    cap_add: [NET_ADMIN]
    privileged: false
  side: {image: debian:12-slim, environment: [ANTHROPIC_API_KEY]}
volumes: {kept: {}}
"""


INVALID_VALUES = "services: {main: {volumes: ['', ':', null, 3], environment: {1: null, x: [1]}, env_file: [null, {}]}}"


def exposure_of(folder: Path, text: str) -> list[str]:
    (folder / "docker-compose.yaml").write_text(text)
    return compose_exposure(folder)


def test_harmless_settings_are_not_reported(tmp_path: Path) -> None:
    assert exposure_of(tmp_path, HARMLESS) == []
    assert compose_exposure(tmp_path / "no such folder") == []


@pytest.mark.parametrize("text", ["", "[1, 2]", "services: [a]", "services: {main: 3}", "a: [", "\x00", INVALID_VALUES])
def test_invalid_compose_file_is_ignored(tmp_path: Path, text: str) -> None:
    assert exposure_of(tmp_path, text) == []


@pytest.mark.parametrize(
    ("setting", "report"),
    [
        ("volumes: ['${CONTEXT_DIR}/../..:/shared']", "can write ${CONTEXT_DIR}/../.. of this machine"),
        ("volumes: ['/var/run/docker.sock:/var/run/docker.sock']", "can write /var/run/docker.sock of this machine"),
        ("volumes: ['~/.aws:/root/.aws:ro']", "can read ~/.aws of this machine"),
        ("volumes: ['${DATA:-/srv}/x:/x:z,ro']", "can read ${DATA:-/srv}/x of this machine"),
        ("volumes: [{type: bind, source: ../other, target: /o}]", "can write ../other of this machine"),
        ("volumes: ['./data:/data']", "can write the task's own ./data, which later trials use"),
        ("privileged: true", "is privileged"),
        ("pid: host", 'has pid = "host"'),
        ("network_mode: host", 'has network_mode = "host"'),
        ("cap_add: [SYS_PTRACE, CAP_SYS_ADMIN, CHOWN]", "has the capabilities SYS_ADMIN, SYS_PTRACE"),
        ("devices: ['/dev/kvm:/dev/kvm']", "has /dev/kvm"),
        ("environment: [OPENAI_API_KEY, MODE=1]", "has the variable OPENAI_API_KEY of this machine"),
        ("environment: {A: '${HF_TOKEN}', B: 1}", "has the variable HF_TOKEN of this machine"),
        ("environment: {DB_PASSWORD: }", "has the variable DB_PASSWORD of this machine"),
        ("environment: {DB_PASSWORD: known}", None),
        ("env_file: ../../.env", "has the variables in ../../.env of this machine"),
        (
            "env_file: [{path: /etc/environment}, ./own.env, own.env]",
            "has the variables in /etc/environment of this machine",
        ),
    ],
)
def test_reports_access_to_this_machine(tmp_path: Path, setting: str, report: str | None) -> None:
    assert exposure_of(tmp_path, f"services: {{main: {{{setting}}}}}") == ([f"main {report}"] if report else [])


def test_reports_volumes_shared_by_trials(tmp_path: Path) -> None:
    volumes = "volumes: {a: {external: true}, b: {name: all}, c: {driver_opts: {type: none, device: /srv, o: bind}}}"
    assert exposure_of(tmp_path, volumes) == [
        "the volume a is shared by all trials",
        "the volume b is shared by all trials",
        "the volume c is /srv of this machine",
    ]


def test_includes_containers_of_separate_verifier(tmp_path: Path) -> None:
    for folder in ("environment", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "task.toml").write_text('[verifier]\nenvironment_mode = "separate"\n')
    (tmp_path / "tests/docker-compose.yml").write_text("services: {main: {privileged: true}}")
    assert TaskRequirements(tmp_path).exposure("docker") == ["main is privileged"]
    assert TaskRequirements(tmp_path).exposure("local") == []
