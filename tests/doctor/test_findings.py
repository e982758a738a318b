"""Every red and yellow finding has a remedy and names the key that it comes from."""

import ast
import socket
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from tiny_model import build_tiny_tokenizer
from transformers import Qwen3Config

from harbortrainer.doctor import (
    credentials,
    docker_daemon,
    engine_checks,
    gpus,
    machine_checks,
    model_files,
    pace,
    policy_checks,
    refused_tasks,
    run_file_checks,
    sampling_speed,
    task_checks,
)
from harbortrainer.doctor.docker_daemon import DaemonInfo
from harbortrainer.doctor.finding import Finding, Level
from harbortrainer.engines import engine_choice
from harbortrainer.engines.engine_choice import Gpu
from harbortrainer.engines.prime_rl.checkout import SCHEMA, Checkout
from harbortrainer.environment.request_check import RUN_KEY_VARIABLE
from harbortrainer.sandbox import network_choice
from harbortrainer.sandbox.images import image_choice
from harbortrainer.tasks.measured_rates import MeasuredRate, MeasuredRates, write_rates
from harbortrainer.tasks.passed_checks import checked_as, record_passed
from harbortrainer.tasks.task_folder import load_task

MODULES = (
    credentials,
    docker_daemon,
    engine_checks,
    gpus,
    machine_checks,
    model_files,
    pace,
    policy_checks,
    refused_tasks,
    run_file_checks,
    sampling_speed,
    task_checks,
)
IN_OTHER_TESTS = {
    "check_architecture",
    "empty_side",
    "contamination",
    "evaluation_error",
    "taught_solutions",
    "unparsed_thinking",
    "unservable",
}
"""Functions whose findings are tested in the other files of this folder."""
THE_MACHINE_ALONE = {".env", "Docker login", "Prime-RL", "plugin", "proxies"}
"""Findings that no key of the run file causes."""


def calls() -> set[tuple[str, int]]:
    """Find the line of each call that makes a red or yellow finding."""
    found = set()
    for module in MODULES:
        tree = ast.parse(Path(str(module.__file__)).read_text())
        functions = [
            node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name not in IN_OTHER_TESTS
        ]
        for node in chain.from_iterable(map(ast.walk, functions)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("red", "yellow"):
                found.add((module.__name__, node.lineno))
    return found


@pytest.fixture
def recorded_findings(monkeypatch):
    """Record the calls that made a red or yellow finding, with the findings."""
    found: dict[tuple[str, int], Finding] = {}

    def note(level: Level):
        def make(about: str, what: str, do: str, where: str = "") -> Finding:
            caller = sys._getframe(1)
            finding = Finding(level, about, what, do, where)
            found[caller.f_globals["__name__"], caller.f_lineno] = finding
            return finding

        return make

    for module in MODULES:
        for name, level in (("red", Level.RED), ("yellow", Level.YELLOW)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, note(level))
    return found


def checked_without_leftovers(plan, tmp_path):
    """A run whose one task passed its check with killed leftovers."""
    task = tmp_path / "files" / "one"
    (task / "solution").mkdir(parents=True)
    for name in ("task.toml", "instruction.md", "solution/solve.sh"):
        (task / name).write_text('version = "1.0"\n')
    record_passed([load_task(task)], checked_as("local", "kill"))
    return plan(sources=[{"env": {"taskset": {"id": "harbor_env", "tasks_dir": "files"}}}])


def file_mistakes(plan, source, tmp_path, monkeypatch):
    """Findings on mistakes in the run file."""
    missing = {"env": {"taskset": {"id": "harbor_env", "tasks_dir": "none"}}}
    yield machine_checks.check_tasks(plan(sources=[missing]))
    elsewhere = {"env": {"taskset": {"id": "harbor_env", "dataset": "some-dataset@1.0"}}}
    yield machine_checks.check_tasks(plan(sources=[elsewhere]))
    task = tmp_path / "tasks" / "one"
    task.mkdir(parents=True)
    (task / "task.toml").write_text('version = "1.0"\n')
    (task / "instruction.md").write_text("do it")
    yield machine_checks.check_tasks(plan(sources=[{"env": {"taskset": {"id": "harbor_env", "tasks_dir": "tasks"}}}]))
    for number in range(4):
        (tmp_path / f"torn/{number}").mkdir(parents=True)
        (tmp_path / f"torn/{number}/task.toml").write_text("= 1")
    (tmp_path / "torn/one").symlink_to(task)
    torn = {"id": "harbor_env", "tasks_dir": "torn", "skip_bad": True}
    yield machine_checks.check_tasks(plan(sources=[{"env": {"taskset": torn}}]))
    untested = {"id": "harbor_env", "tasks_dir": "tasks"}
    yield refused_tasks.check_refused(plan(sources=[{"env": {"taskset": untested}}]))
    yield task_checks.check_leftovers(checked_without_leftovers(plan, tmp_path))
    yield from root_mistakes(plan, tmp_path, monkeypatch)
    yield from difficulty_mistakes(plan, tmp_path)
    yield machine_checks.check_run_folder(plan(run={"name": "r"}, resume=True))
    for name, content in (("", None), ("config.json", "{}"), ("model.safetensors", "{}")):
        if content is not None:
            (tmp_path / "model" / name).write_text(content)
        (tmp_path / "model").mkdir(exist_ok=True)
        yield model_files.check(plan(model={"name": "model"}))
    yield model_files.check(plan(model={"name": "nowhere"}))
    yield model_files.check(plan(warmup={"tasks": "none", "model": "a/b"}))
    yield model_files.check(plan(warmup={"tasks": "tasks", "model": "a/b"}))
    yield run_file_checks.check_numbers(plan("prime-rl", seq_len=10, inference={"vllm": {"max_model_len": 20}}))
    limit = {"group_size": 2, "train": {"sampling": {"max_completion_tokens": 3000}}}
    yield run_file_checks.check_numbers(plan(orchestrator=limit))
    context_limit = {"model_info": {"max_input_tokens": 9000}}
    yield run_file_checks.check_numbers(plan(sources=[source(agent_kwargs=context_limit)]))
    yield task_checks.check_agent_names(plan(sources=[source(agent="mini-swe-agnt")]))
    other = {"eval": {"source": [source(context_limit=9)]}}
    yield run_file_checks.check_same_trials(plan(orchestrator=other))
    yield run_file_checks.check_plugin_keys(plan(sources=[source(enviroment_type="local")]))
    yield run_file_checks.check_echo_roles(plan(orchestrator={"algo": {"type": "echo"}}))
    odd = {"batch_size": 3, "group_size": 2, "concurrency": {"max_inflight": 1}}
    yield run_file_checks.check_numbers(plan("prime-rl", orchestrator=odd))


def several_machines(plan, source, monkeypatch):
    """Findings on environment servers on other machines."""
    elsewhere = {"model": {"client": {"base_url": "http://192.0.2.1:8000/v1"}}}
    yield machine_checks.check_ports(plan(orchestrator=elsewhere))
    run = plan(sources=[source() | {"serve": {"address": "tcp://192.0.2.1:6000"}}])
    monkeypatch.delenv(RUN_KEY_VARIABLE, raising=False)
    yield machine_checks.check_env_servers(run)
    monkeypatch.setenv(RUN_KEY_VARIABLE, "0123456789abcdef")
    yield machine_checks.check_env_servers(run)


def root_mistakes(plan, tmp_path, monkeypatch):
    """Findings on images and networks of local sandboxes."""

    def on(kind="local", trusted=(), **kwargs):
        harness = {"environment_type": kind, "environment_kwargs": kwargs, "trusted_tasks": list(trusted)}
        taskset = {"id": "harbor_env", "tasks_dir": "tasks"}
        return plan(sources=[{"env": {"taskset": taskset, "agent": {"harness": harness}}}])

    yield machine_checks.check_image_builder(on(image="hots"))
    yield machine_checks.check_image_builder(on(network="mine"))
    for module in (image_choice, machine_checks):
        monkeypatch.setattr(module, "builder_problem", lambda: "no image builder is available")
    yield machine_checks.check_image_builder(on())
    monkeypatch.setattr(network_choice, "slirp_problem", lambda: "slirp4netns is not here")
    (tmp_path / "tasks/one/environment").mkdir()
    (tmp_path / "tasks/one/environment/Dockerfile").write_text('FROM a\nENTRYPOINT ["/serve"]\n')
    (tmp_path / "tasks/one/task.toml").write_text('[environment.env]\nKEY = "${NOBODY_SETS_THIS}"')
    yield task_checks.check_requirements(on(image="host"))
    monkeypatch.setenv("JUDGE_URL", "http://localhost:8000/v1")
    (tmp_path / "tasks/one/task.toml").write_text('[verifier]\ntimeout = 5\n[verifier.env]\nURL = "${JUDGE_URL}"\n')
    yield task_checks.check_requirements(on("docker"))
    (tmp_path / "tasks/one/environment/docker-compose.yml").write_text("services: {}")
    (tmp_path / "tasks/one/instruction.md").write_text("Serve it at localhost:8080.")
    yield task_checks.check_requirements(on(image="host"))
    (tmp_path / "tasks/one/environment/docker-compose.yaml").write_text("services: {main: {privileged: true}}")
    yield task_checks.check_requirements(on("docker"))
    yield task_checks.check_requirements(on("docker", trusted=["*"]))


def difficulty_mistakes(plan, tmp_path):
    """Findings on a file of measured pass rates."""
    two = tmp_path / "tasks" / "two"
    two.mkdir()
    (two / "task.toml").write_text('version = "1.0"\n')
    (two / "instruction.md").write_text("do it too")
    known = MeasuredRate(name="two", attempts=1, pass_rate=1.0, mean_reward=1.0)
    write_rates(tmp_path / "rates.json", MeasuredRates(tasks={load_task(two).key: known}))
    for file in ("none.json", "rates.json"):
        taskset = {"id": "harbor_env", "tasks_dir": "tasks", "difficulty": file, "min_pass_rate": 0.5}
        yield machine_checks.check_tasks(plan(sources=[{"env": {"taskset": taskset}}]))


def hub_mistakes(plan, monkeypatch, tmp_path):
    """Findings on a model of the hub."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield model_files.check_hub(plan(model={"name": "a/b"}))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    yield model_files.check_hub(plan(model={"name": "a/b"}))
    monkeypatch.setattr(httpx, "get", lambda *_, **__: SimpleNamespace(status_code=404))
    yield model_files.check_hub(plan(model={"name": "a/b"}))


def without_room(plan, tmp_path):
    """Runs whose model does not fit: too long, too large, also after a warm-up, an adapter on unknown modules."""
    folder = tmp_path / "four"
    Qwen3Config(hidden_size=2560, intermediate_size=9728, max_position_embeddings=40_960).save_pretrained(folder)
    model, lora = {"name": str(folder)}, {"model": {"lora": {"target_modules": ["nothing"]}}}
    yield plan(gpus=[Gpu("A", 36_864)], model=model, seq_len=40_960)
    yield plan(gpus=[Gpu("A", 8_192)], model=model)
    yield plan(gpus=[Gpu("A", 8_192)], warmup={"model": str(folder)})
    yield plan(gpus=[Gpu("A", 49_152)], model=model, trainer=lora)


def machine_mistakes(plan, source, monkeypatch, tmp_path):
    """Findings on a machine that cannot run the config."""
    big, small = {"name": "Qwen/Qwen3-235B"}, [Gpu("A", 24000)] * 2
    yield gpus.check(plan(model=big))
    yield gpus.check(plan(model=big, trainer={}))
    yield from (gpus.check(run) for run in without_room(plan, tmp_path))
    yield gpus.check(plan(gpus=small, inference={"engine": "vllm"}, model={"name": "me/mine-7B"}))
    yield engine_checks.check_vllm(plan(inference={"engine": "vllm"}))
    yield engine_checks.check_vllm(plan(gpus=small, model={"name": "me/mine-0.6B"}))
    with monkeypatch.context() as without:
        without.setattr(engine_choice, "find_spec", lambda name: None)
        yield list(model_files.check_quantization(plan(model={"name": "me/mine-7B", "quantization": "nf4"})))
    yield gpus.check(plan("prime-rl", inference={}, model=big))
    yield gpus.check(plan("prime-rl", gpus=small, inference={}, model=big))
    yield gpus.check(plan("prime-rl", gpus=small, inference={}, model={"name": "me/mine"}))
    monkeypatch.setattr(machine_checks, "missing_tools", lambda: ["tmux"])
    yield machine_checks.check_tools(plan())
    monkeypatch.setattr(machine_checks, "missing_tools", list)

    async def cannot() -> str:
        return "no namespaces"

    monkeypatch.setattr(machine_checks, "problem", cannot)
    yield machine_checks.check_tools(plan())
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield machine_checks.check_ports(
            plan("prime-rl", orchestrator={"env_server_base_port": server.getsockname()[1]})
        )
    monkeypatch.setattr(machine_checks, "raise_open_files_limit", lambda: 1024)
    yield machine_checks.check_open_files(plan(orchestrator={"concurrency": {"max_inflight": 512}}))
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    yield machine_checks.check_proxies(plan())
    monkeypatch.delenv("ALL_PROXY")
    usage = SimpleNamespace(free=0)
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda folder: usage)
    yield machine_checks.check_disk(plan())
    usage.free = machine_checks.GIB
    yield machine_checks.check_disk(plan())
    yield machine_checks.check_disk(plan(sources=[source(trials_dir=f"{__file__}/trials")]))
    monkeypatch.setattr(machine_checks.os, "access", lambda folder, mode: False)
    yield machine_checks.check_disk(plan())


def key_mistakes(plan, source, monkeypatch):
    """Findings on API keys."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run = plan("prime-rl", monitors={"wandb": {}})
    yield credentials.check_dotenv(run)
    yield credentials.check_wandb(run)
    with monkeypatch.context() as patched:
        patched.setattr("harbortrainer.runs.monitors.find_spec", lambda name: None)
        yield list(credentials.check_wandb(plan("local", monitors={"wandb": {}})))
    monkeypatch.setattr(credentials, "provider_problem", lambda name: "no key")
    yield credentials.check_providers(plan(sources=[source("modal")]))


def format_mistakes(plan, tmp_path):
    """Findings on the chat format."""
    build_tiny_tokenizer().save_pretrained(tmp_path / "words")
    for name in ("qwen3", "default"):
        yield policy_checks.check_chat_format(plan(model={"name": "words"}, orchestrator={"renderer": {"name": name}}))
    Qwen3Config(vocab_size=200).save_pretrained(tmp_path / "words")
    yield policy_checks.check_chat_format(plan(model={"name": "words"}))
    (tmp_path / "words" / "tokenizer.json").write_text("{}")
    yield policy_checks.check_chat_format(plan(model={"name": "words"}))


def slow_sampling(plan, source, tmp_path):
    """Findings on the speed of sampling, estimated and measured."""
    task = tmp_path / "short" / "one"
    task.mkdir(parents=True)
    (task / "task.toml").write_text("[agent]\ntimeout_sec = 1\n")
    (task / "instruction.md").write_text("do it")
    env = source()["env"] | {"taskset": {"id": "harbor_env", "tasks_dir": "short"}}
    big = {"name": "Qwen/Qwen3-8B"}
    yield pace.check(plan("prime-rl", inference={}, model=big, sources=[{"env": env}], orchestrator={"batch_size": 8}))
    Qwen3Config().save_pretrained(tmp_path / "empty")
    yield sampling_speed.check(plan(model={"name": "empty"}, sources=[{"env": env}]))


DAEMON = {"ServerVersion": "1", "SecurityOptions": ["name=seccomp,profile=default", "name=userns"]}
NOT_SEEN = "Error response from daemon: invalid mount config for type: bind source path does not exist: /x"


def docker_mistakes(plan, source, monkeypatch, tmp_path):
    """Findings on Docker."""
    run = plan(sources=[source("docker", on_tampering="drop")])
    monkeypatch.setattr(docker_daemon, "daemon", lambda: "docker is not installed")
    yield docker_daemon.check(run)
    monkeypatch.setattr(docker_daemon, "daemon", lambda: DaemonInfo.model_validate(DAEMON))
    monkeypatch.setattr(docker_daemon, "program_output", lambda *arguments: None)
    monkeypatch.setattr(docker_daemon, "error_output", lambda *arguments: NOT_SEEN)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "none"))
    yield docker_daemon.check(run)
    yield docker_daemon.needed("run.toml: environment_type", closed=True)


def prime_rl_mistakes(plan, monkeypatch, tmp_path):
    """Findings on the installation of Prime-RL."""
    root = tmp_path / "prime-rl"
    run = plan("prime-rl", checkout=Checkout(root))
    yield engine_checks.check_prime_rl(run)
    (root / ".venv" / "bin").mkdir(parents=True)
    (root / "pyproject.toml").write_text("")
    (root / ".venv" / "bin" / "rl").write_text("")
    yield engine_checks.check_prime_rl(run)
    (root / SCHEMA).parent.mkdir(parents=True)
    (root / SCHEMA).write_text("constant_trainer_batch_size: bool")
    yield engine_checks.check_prime_rl(run)


def test_every_red_and_yellow_finding_has_remedy_and_key(recorded_findings, plan, source, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    scenarios = chain(
        file_mistakes(plan, source, tmp_path, monkeypatch),
        hub_mistakes(plan, monkeypatch, tmp_path),
        several_machines(plan, source, monkeypatch),
        key_mistakes(plan, source, monkeypatch),
        format_mistakes(plan, tmp_path),
        slow_sampling(plan, source, tmp_path),
        docker_mistakes(plan, source, monkeypatch, tmp_path),
        prime_rl_mistakes(plan, monkeypatch, tmp_path),
        machine_mistakes(plan, source, monkeypatch, tmp_path),
    )
    for found in scenarios:
        list(found)
    assert calls() - set(recorded_findings) == set(), "add a scenario for the new finding"
    for finding in recorded_findings.values():
        assert finding.do, finding
        has_no_key = finding.about in THE_MACHINE_ALONE or "passed `tasks check`" in finding.what
        assert finding.where.startswith("run.toml: ") != has_no_key, finding
