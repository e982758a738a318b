"""Access to this machine that a task's compose files grant: found in every spelling that Compose takes."""

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from harbortrainer.sandbox.compose_exposure import compose_exposure
from harbortrainer.sandbox.containers.usage import process_limit
from harbortrainer.sandbox.task_requirements import TaskRequirements

HARMLESS = """
x-common: &common {restart: "no", labels: {team: a}}
services:
  main:
    <<: *common
    build: {context: "${CONTEXT_DIR}", args: {VERSION: "${VERSION:-1}"}, target: run}
    image: ${MAIN_IMAGE_NAME}
    environment: [TEST_DIR=/tests, HOME, "MODE=${MODE:-fast}"]
    env_file: [{path: own.env, required: false}]
    volumes:
      - ${HOST_VERIFIER_LOGS_PATH}:${ENV_VERIFIER_LOGS_PATH}
      - ./data:/data:ro
      - {type: bind, source: "${CONTEXT_DIR}/more", target: /more, read_only: true}
      - ../tests:/shown:ro
      - kept:/kept
      - {type: tmpfs, target: /run}
      - /anonymous
    devices: ["nvidia.com/gpu=0", "/dev/nvidia0:/dev/nvidia0"]
    network_mode: "service:side"
    cap_add: [NET_ADMIN, CAP_CHOWN]
    security_opt: ["no-new-privileges:true"]
    privileged: false
    depends_on: {db: {condition: service_healthy}}
    deploy: {resources: {limits: {cpus: "1"}}}
  db:
    image: postgres:16
    environment: {POSTGRES_PASSWORD: secret, POSTGRES_USER: "${DB_USER:-app}"}
    ports: ["5432", "8080:80"]
    expose: [5432]
    networks: [inner]
    healthcheck: {test: [CMD, pg_isready]}
    volumes_from: [side]
    pid: service:side
    secrets: [file]
  side: {image: debian:12-slim, build: ./side, pull_policy: build, ports: !reset []}
volumes: {kept: {}, other: null, memory: {driver_opts: {type: tmpfs, device: tmpfs}}}
networks: {inner: {driver: bridge}}
secrets: {file: {file: ./password.txt}}
configs: {settings: {content: "a=b"}}
"""


def exposure_of(folder: Path, text: str) -> list[str]:
    """Return the exposure of a task whose compose file has this text."""
    environment = folder / "environment"
    environment.mkdir(exist_ok=True)
    (environment / "docker-compose.yaml").write_text(text)
    return compose_exposure(environment, folder)


def test_harmless_settings_are_not_reported(tmp_path: Path) -> None:
    harmless = HARMLESS.replace("image: debian:12-slim, build", f"image: {tmp_path.name.lower()}-side, build")
    assert exposure_of(tmp_path, harmless) == []
    assert compose_exposure(tmp_path / "no such folder") == []
    assert exposure_of(tmp_path, "") == []


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "\x00",
        "services: {main: {privileged: false}}\n---\nservices: {main: {privileged: true}}\n",
        "services: {main: {pid: !!binary aG9zdA==}}",
        "services: {main: {volumes: !!set {'/:/host'}}}",
        "services: {main: {command: &a [*a]}}",
        "x: &a [1,1,1,1,1,1,1,1,1]\n"
        + "".join(f"x{i}: &x{i} [{','.join([f'*{"a" if i == 0 else f"x{i - 1}"}'] * 9)}]\n" for i in range(9)),
        "services: !unknown {}",
        "services: {}\n" + "# padding\n" * 200_000,
    ],
)
def test_what_cannot_be_read_counts_as_access(tmp_path: Path, text: str) -> None:
    (found,) = exposure_of(tmp_path, text)
    assert "cannot be read" in found or "not a list" in found


def test_file_of_other_encoding_counts_as_access(tmp_path: Path) -> None:
    exposure_of(tmp_path, "")
    (tmp_path / "environment/docker-compose.yaml").write_bytes("services: {}".encode("utf-16"))
    assert "cannot be read" in compose_exposure(tmp_path / "environment")[0]


def test_hostile_values_raise_no_error(tmp_path: Path) -> None:
    rng = random.Random(1)
    keys = re.findall(r"\w+", HARMLESS)

    def value(depth: int = 0) -> object:
        kind = rng.random()
        if depth > 3 or kind < 0.5:
            return rng.choice([None, True, 0, -1, 1.5, "", "a:b:c", "/", "$X", "${X:-/}", "~", ".", "\0", "a=b", ":"])
        if kind < 0.75:
            return [value(depth + 1) for _ in range(rng.randint(0, 3))]
        return {rng.choice(keys): value(depth + 1) for _ in range(4)}

    (tmp_path / "task.toml").write_text("")
    for _ in range(500):
        exposure_of(tmp_path, json.dumps({"services": {"main": value(), "b": value()}, rng.choice(keys): value()}))
        TaskRequirements(tmp_path).exposure("docker", {"X": "1"})


ODD = "services: {main: {volumes: ['', ':', null, 3], environment: {1: null, x: [1]}, env_file: [null, {}]}}"


@pytest.mark.parametrize("text", ["services: [a]", "services: {main: 3}", "services: {main: null}", ODD])
def test_invalid_structure_is_left_to_compose(tmp_path: Path, text: str) -> None:
    assert exposure_of(tmp_path, text) == []


READS_VARIABLE = "has a mount that depends on a variable or has an unknown type:"


@pytest.mark.parametrize(
    ("setting", "report"),
    [
        ("volumes: ['${CONTEXT_DIR}/../..:/shared']", "can write ${CONTEXT_DIR}/../.. of this machine"),
        ("volumes: ['${CONTEXT_DIR}-/../../x:/x:ro']", "can read ${CONTEXT_DIR}-/../../x of this machine"),
        ("volumes: ['/var/run/docker.sock:/var/run/docker.sock']", "can write /var/run/docker.sock of this machine"),
        ("volumes: ['~/.aws:/root/.aws:ro']", "can read ~/.aws of this machine"),
        ("volumes: ['${DATA:-/srv}/x:/x:z,ro']", f"{READS_VARIABLE} ${{DATA:-/srv}}/x:/x:z,ro"),
        ("volumes: ['${X:-/:/host}']", f"{READS_VARIABLE} ${{X:-/:/host}}"),
        ("volumes: ['${HOST_X:-/etc}:/etc']", f"{READS_VARIABLE} ${{HOST_X:-/etc}}:/etc"),
        ("volumes: ['${HOST_AGENT_LOGS_PATH:-../../x}:/x']", READS_VARIABLE),
        ("volumes: ['${ENV_AGENT_LOGS_PATH}:/x']", "can write /logs of this machine"),
        (
            "volumes: ['${HOST_VERIFIER_LOGS_PATH}/../../..:/x:ro']",
            "can read ${HOST_VERIFIER_LOGS_PATH}/../../.. of this machine",
        ),
        ("volumes: [{type: bind, source: ../../other, target: /o}]", "can write ../../other of this machine"),
        ("volumes: [{type: '${T:-bind}', source: /, target: /o}]", READS_VARIABLE),
        ("volumes: [{type: npipe, source: /, target: /o}]", READS_VARIABLE),
        (
            "volumes: [{type: bind, source: ./a, target: /a, read_only: true, bind: {propagation: shared}}]",
            "shares the mounts below ./a with this machine",
        ),
        ("volumes: ['./link:/x:ro']", "can read ./link of this machine"),
        ("volumes: ['./data:/data']", "can write the task's own ./data, which later trials use (add `:ro`)"),
        ("privileged: true", "is privileged"),
        ("privileged: 'true'", "is privileged"),
        ("privileged: '${X:-true}'", "is privileged"),
        ("pid: host", 'has pid = "host"'),
        ("pid: '${X:-host}'", 'has pid = "${X:-host}"'),
        ("pid: 'container:other'", 'has pid = "container:other"'),
        ("ipc: host", 'has ipc = "host"'),
        ("network_mode: host", 'has network_mode = "host"'),
        ("network_mode: 'container:other'", 'has network_mode = "container:other"'),
        ("cgroup: host", 'has cgroup = "host"'),
        ("runtime: other", 'has runtime = "other"'),
        *(
            (f"{key}: {value}", f"has '{key}', which is not known to be harmless")
            for key, value in {
                "uts": "host",
                "userns_mode": "host",
                "cgroup_parent": "/",
                "device_cgroup_rules": "['c 1:3 mr']",
                "use_api_socket": "true",
                "provider": "{type: x}",
                "external_links": "[a]",
                "oom_kill_disable": "true",
                "credential_spec": "{file: a}",
                "a_key_of_tomorrow": "1",
            }.items()
        ),
        ("cap_add: [SYS_PTRACE, CAP_SYS_ADMIN, CHOWN]", "has the capabilities CAP_SYS_ADMIN, SYS_PTRACE"),
        ("cap_add: [all]", "has the capabilities all"),
        ("devices: ['/dev/kvm:/dev/kvm']", "has the devices /dev/kvm"),
        ("devices: ['/dev/nvidia0/../sda:/dev/x']", "has the devices /dev/nvidia0/../sda"),
        ("devices: [{source: /dev/sda, target: /dev/nvidia0}]", "has the devices /dev/sda"),
        ("security_opt: ['seccomp=unconfined', 'no-new-privileges:true']", "has security_opt seccomp=unconfined"),
        ("security_opt: ['apparmor:unconfined']", "has security_opt apparmor:unconfined"),
        ("volumes_from: ['container:other']", "has the volumes of container:other"),
        ("post_start: [{command: a, privileged: true}]", "has a privileged hook"),
        ("logging: {driver: syslog}", "logs through syslog"),
        ("oom_score_adj: -1000", "has oom_score_adj = -1000"),
        ("env_file: ../../.env", "has the variables in ../../.env of this machine"),
        ("env_file: link/.env", "has the variables in link/.env of this machine"),
        ("label_file: /etc/passwd", "has the labels in /etc/passwd of this machine"),
        (
            "env_file: [{path: /etc/environment}, ./own.env, own.env]",
            "has the variables in /etc/environment of this machine",
        ),
        (
            "extends: {file: ./other.yaml, service: a}",
            "extends ./other.yaml, which is not read here; write the service out",
        ),
        ("build: /", "is built from / of this machine"),
        ("build: {context: link}", "is built from link of this machine"),
        ("build: {additional_contexts: {a: /etc}}", "is built from /etc of this machine"),
        ("build: {additional_contexts: ['a=~/.ssh']}", "is built from ~/.ssh of this machine"),
        ("build: {additional_contexts: {a: 'oci-layout:///srv'}}", "is built from oci-layout:///srv of this machine"),
        ("build: {additional_contexts: {a: 'docker-image://debian'}}", None),
        ("build: {dockerfile: ../../Dockerfile}", "is built from ../../Dockerfile of this machine"),
        ("build: {ssh: [default]}", "has build.ssh, which is not known to be harmless"),
        ("build: {cache_to: ['type=local,dest=/x']}", "has build.cache_to, which is not known to be harmless"),
        ("build: {tags: ['debian:12']}", "has build.tags, which is not known to be harmless"),
        ("build: {entitlements: [security.insecure]}", "has build.entitlements, which is not known to be harmless"),
        ("build: {network: host}", 'has build.network = "host"'),
        ("build: {cache_from: ['type=local,src=/x']}", "has a build cache in a folder of this machine"),
        ("{build: ., image: 'debian:12'}", "replaces the image debian:12 of this machine by its own build"),
    ],
)
def test_reports_access_to_this_machine(tmp_path: Path, setting: str, report: str | None) -> None:
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment/link").symlink_to("/etc")
    service = setting if setting.startswith("{") else f"{{{setting}}}"
    found = exposure_of(tmp_path, f"services: {{main: {service}}}")
    expected = [f"main {report}"] if report else []
    assert [line[: len(one)] for line, one in zip(found, expected, strict=True)] == expected


@pytest.mark.parametrize(
    ("text", "report"),
    [
        ("volumes: {a: {external: true}}", "the volume a is shared by all trials"),
        ("volumes: {a: {name: all}}", "the volume a is shared by all trials"),
        ("volumes: {a: {driver_opts: {type: none, device: /srv, o: bind}}}", "the volume a is /srv of this machine"),
        (
            "volumes: {a: {driver_opts: !override {type: none, device: /srv, o: bind}}}",
            "the volume a is /srv of this machine",
        ),
        ("volumes: {a: {driver: other}}", "the volume a has the driver other"),
        ("networks: {a: {external: true, name: host}}", "the network a is shared by all trials"),
        ("networks: {a: {driver: macvlan}}", "the network a has the driver macvlan"),
        (
            "networks: {a: {driver_opts: {com.docker.network.bridge.name: docker0}}}",
            "the network a has the options com.docker.network.bridge.name",
        ),
        ("configs: {a: {file: /etc/shadow}}", "config a is the file /etc/shadow of this machine"),
        ("secrets: {a: {file: ~/.netrc}}", "secret a is the file ~/.netrc of this machine"),
        ("include: [../other.yaml]", "the compose file has 'include'"),
        ("models: {a: {model: b}}", "the compose file has 'models'"),
        ("[1, 2]", "the compose file is not a mapping"),
    ],
)
def test_reports_shared_volumes_networks_and_files(tmp_path: Path, text: str, report: str) -> None:
    assert exposure_of(tmp_path, text) == [report]


@pytest.mark.parametrize("line", ["DOCKER_HOST=tcp://there", "export HOST_AGENT_LOGS_PATH=/etc", "CONTEXT_DIR: /"])
def test_reports_env_file_that_steers_compose(tmp_path: Path, line: str) -> None:
    exposure_of(tmp_path, "services: {}")
    (tmp_path / "environment/.env").write_text(f"A=1\n{line}\n")
    (found,) = compose_exposure(tmp_path / "environment")
    assert found.startswith(".env sets ") and found.endswith("which steers Compose")
    assert "Harbor's own" in compose_exposure(tmp_path / "none", defined=["HOST_AGENT_LOGS_PATH", "MODE"])[0]


def test_text_of_task_is_printed_without_control_characters(tmp_path: Path) -> None:
    exposure_of(tmp_path, 'services: {main: {volumes: ["/a\\u001b[2J:/x:ro"], pid: "' + "x" * 1000 + '"}}')
    (tmp_path / "task.toml").write_text("")
    pid, mount = TaskRequirements(tmp_path).exposure("docker")
    assert mount == "main can read /a?[2J of this machine"
    assert len(pid) == 300


def test_includes_containers_of_separate_verifier(tmp_path: Path) -> None:
    for folder in ("environment", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "task.toml").write_text('[verifier]\nenvironment_mode = "separate"\n')
    (tmp_path / "tests/docker-compose.yaml").write_text("services: {main: {privileged: true}}")
    for kind in ("docker", "auto", "somewhere:Class"):
        assert TaskRequirements(tmp_path).exposure(kind) == ["main is privileged"]
    assert TaskRequirements(tmp_path).exposure("local") == TaskRequirements(tmp_path).exposure("modal") == []


def test_only_providers_read_compose_file_named_yml(tmp_path: Path) -> None:
    (tmp_path / "environment").mkdir()
    (tmp_path / "task.toml").write_text("")
    (tmp_path / "environment/docker-compose.yml").write_text("services: {main: {privileged: true, user: $DEPLOY_KEY}}")
    host = {"DEPLOY_KEY": "sk-7f3a9c1e5b"}
    task = TaskRequirements(tmp_path)
    assert task.exposure("docker", host) == task.exposure("local", host) == []
    assert task.ignored_files() == ["environment/docker-compose.yml"]
    variable = "environment/docker-compose.yaml has $DEPLOY_KEY of this machine"
    assert task.exposure("beam", host) == [variable]
    assert task.exposure("somewhere:Class", host) == [variable, "main is privileged"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_compose_file_that_is_no_file_is_never_opened(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment/Dockerfile").write_text("FROM debian:12-slim\n")
    (tmp_path / "task.toml").write_text("")
    make(tmp_path / "environment/docker-compose.yaml")
    task = TaskRequirements(tmp_path)
    unread = "docker-compose.yaml cannot be read, so its access is unknown (not a regular file)"
    assert task.exposure("docker") == [unread]
    for kind in ("docker", "local"):
        assert "environment/docker-compose.yaml is not a regular file" in task.unsupported(kind)
    assert process_limit([tmp_path / "environment/docker-compose.yaml"], 7) == {"pids_limit": 7}
