"""What the doctor finds: green, yellow or red, and each red says what to do."""

import json
import socket
from types import SimpleNamespace

import pytest

from harbortrainer.config.preflight import credentials, docker, doctor, gpus, machine, model, numbers, prime_rl, tasks
from harbortrainer.config.preflight.facts import Facts
from harbortrainer.config.preflight.finding import Level, red, yellow
from harbortrainer.config.reader import RawRun
from harbortrainer.engines.choice import Choice, Engine, Gpu
from harbortrainer.engines.prime_rl.place import Place
from harbortrainer.errors import UserError
from harbortrainer.sandbox.check import MissingTool
from harbortrainer.tasks.checked import remember

GREEN, YELLOW, RED = Level.GREEN, Level.YELLOW, Level.RED


def source(environment_type: str = "local", **harness) -> dict:
    return {
        "env": {"taskset": {"id": "harbor_env"}, "agent": {"harness": {"environment_type": environment_type} | harness}}
    }


@pytest.fixture
def facts(tmp_path):
    """Facts of a run file given as tables."""

    def make(engine: Engine = "local", gpus=(), sources=None, place=None, **data) -> Facts:
        orchestrator = data.pop("orchestrator", {})
        orchestrator["train"] = orchestrator.get("train", {}) | {"source": sources or [source()]}
        raw = RawRun("run.toml", data | {"orchestrator": orchestrator})
        return Facts(raw, Choice(engine, "test"), place or Place(tmp_path / "prime-rl"), list(gpus))

    return make


def levels(findings) -> list[Level]:
    found = list(findings)
    assert all(finding.do for finding in found if finding.level is not GREEN), "what is not green says what to do"
    return [finding.level for finding in found]


def test_the_first_red_stops_a_launch_in_one_line():
    with pytest.raises(UserError) as caught:
        doctor.stop_on_red([yellow("a", "b", "c"), red("Docker", "no daemon", "start it"), red("x", "y", "z")])
    assert str(caught.value) == "Docker: no daemon (and 1 more; `harbortrainer doctor` shows all); start it"
    doctor.stop_on_red([yellow("a", "b", "c")])


@pytest.mark.parametrize(
    ("pools", "free"),
    [
        ([], 31),
        ([{"Base": "10.200.0.0/16", "Size": 24}], 256),
        ([{"Base": "172.17.0.0/16", "Size": 16}, {"Base": "192.168.0.0/16", "Size": 20}], 17),
    ],
)
def test_the_networks_that_fit_into_dockers_pools_are_counted(pools, free):
    assert docker.capacity(pools) == free


def test_more_parallel_trials_than_networks_are_red():
    assert docker.networks({}, 30, used=1).level is GREEN
    finding = docker.networks({}, 31, used=1)
    assert finding.level is RED and "default-address-pools" in finding.do and "max_inflight" in finding.do


def test_a_dead_docker_daemon_is_red_and_nothing_more_is_asked(facts, tmp_path, monkeypatch):
    (tmp_path / "docker").write_text("#!/bin/sh\necho '{}'; exit 1\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (finding,) = docker.check(facts(sources=[source("docker")]))
    assert finding.level is RED and "does not answer" in finding.what


def test_docker_is_not_asked_for_local_sandboxes(facts):
    assert list(docker.check(facts())) == []


def test_no_login_is_a_warning(tmp_path):
    assert docker.login(tmp_path / "config.json").level is YELLOW
    (tmp_path / "config.json").write_text('{"auths": {"https://index.docker.io/v1/": {}}}')
    assert docker.login(tmp_path / "config.json").level is GREEN


def test_parallel_trials_are_bounded_by_the_smallest_cap(facts):
    assert facts().parallel == 1024
    assert facts(orchestrator={"concurrency": {"max_inflight": 24}}).parallel == 24
    assert facts(sources=[source(n_parallel_envs=8), source(n_parallel_envs=6)]).parallel == 8


def test_a_port_in_use_is_red(facts):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        run = facts(orchestrator={"model": {"client": {"base_url": f"http://localhost:{port}/v1"}}})
        (finding,) = machine.check_ports(run)
        assert finding.level is RED and str(port) in finding.what
    assert levels(machine.check_ports(run)) == [GREEN]


def test_prime_rls_ports_are_its_servers(facts):
    run = facts("prime-rl", inference={}, orchestrator={"env_server_base_port": 6000})
    assert run.ports == {"env server 1": 6000, "inference": 8000}


def test_a_missing_system_tool_is_red_with_the_package(facts, monkeypatch):
    assert levels(machine.check_tools(facts())) == [GREEN]
    monkeypatch.setattr(machine, "missing_tools", lambda: [MissingTool("tmux", "tmux")])
    (finding,) = machine.check_tools(facts())
    assert finding.level is RED and "apt-get install tmux" in finding.do
    assert list(machine.check_tools(facts(sources=[source("docker")]))) == []


def test_little_disk_is_told_before_it_is_none(tmp_path, monkeypatch):
    usage = SimpleNamespace(free=30 * machine.GIB)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: usage)
    assert machine.disk("d", tmp_path, 20).level is GREEN
    usage.free = 5 * machine.GIB
    assert machine.disk("d", tmp_path, 20).level is YELLOW
    usage.free = machine.GIB
    assert machine.disk("d", tmp_path, 20).level is RED


def test_a_wandb_key_is_needed_by_prime_rl_alone_and_never_shown(facts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    run = facts("prime-rl", monitors={"wandb": {"project": "p"}})
    assert levels(credentials.check_wandb(run)) == [RED]
    (tmp_path / ".env").write_text("WANDB_API_KEY=hush-hush\n")
    found = [*credentials.check_wandb(run), *credentials.check_dotenv(run)]
    assert levels(found) == [GREEN, GREEN]
    assert "WANDB_API_KEY" in str(found) and "hush" not in str(found)
    assert list(credentials.check_wandb(facts("local", monitors={"wandb": {}}))) == []
    assert list(credentials.check_wandb(facts("prime-rl"))) == []


def test_a_provider_without_credentials_is_red(facts, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
        monkeypatch.delenv(name, raising=False)
    (finding,) = credentials.check_providers(facts(sources=[source("modal")]))
    assert finding.level is RED and "modal" in finding.about.lower()


def test_a_model_folder_needs_config_weights_and_tokenizer(tmp_path):
    for name, missing in [
        ("config.json", "config.json"),
        ("model.safetensors", "weights"),
        ("tokenizer.json", "token"),
    ]:
        finding = model.in_folder(tmp_path)
        assert finding.level is RED and missing in finding.what
        (tmp_path / name).write_text("{}")
    assert model.in_folder(tmp_path).level is GREEN


def test_a_hub_model_is_looked_for_in_the_cache_first(facts, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run = facts(model={"name": "a/b"})
    assert levels(model.check(run)) == [RED]
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert levels(model.check(run)) == [GREEN]


def test_a_hub_that_cannot_be_reached_is_red(facts, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    (finding,) = model.check(facts(model={"name": "a/b"}))
    assert finding.level is RED and "cannot be reached" in finding.what


def test_a_model_that_the_warm_up_makes_is_not_looked_for(facts):
    assert levels(model.check(facts(model={"name": "nowhere"}, warmup={}))) == [GREEN]
    assert levels(model.check(facts(model={"name": "nowhere"}))) == [RED]


def test_tasks_that_do_not_load_are_red_and_unchecked_ones_yellow(facts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = facts(sources=[{"env": {"taskset": {"id": "harbor_env", "tasks_dir": "t"}}}])
    assert levels(tasks.check(run)) == [RED]
    (tmp_path / "t" / "one").mkdir(parents=True)
    (tmp_path / "t" / "one" / "task.toml").write_text('version = "1.0"\n')
    (tmp_path / "t" / "one" / "instruction.md").write_text("do it")
    assert levels(tasks.check(run)) == [GREEN, YELLOW]
    remember(tasks.load_folder("t"))
    assert levels(tasks.check(run)) == [GREEN]
    (tmp_path / "t" / "one" / "instruction.md").write_text("do it otherwise")
    assert levels(tasks.check(run)) == [GREEN, YELLOW], "a changed task is another task"


@pytest.mark.parametrize(
    ("data", "level", "told"),
    [
        ({"seq_len": 1000, "inference": {"vllm": {"max_model_len": 2000}}}, YELLOW, "cut before training"),
        ({"seq_len": 100, "orchestrator": {"train": {"sampling": {"max_completion_tokens": 100}}}}, RED, "no room"),
        ({"orchestrator": {"batch_size": 10, "group_size": 4}}, RED, "multiple"),
        ({"orchestrator": {"group_size": 1}}, RED, "nothing is learned"),
        ({"orchestrator": {"group_size": 8, "concurrency": {"max_inflight": 4}}}, RED, "less than group_size"),
    ],
)
def test_numbers_that_do_not_fit_are_told(facts, data, level, told):
    data["orchestrator"] = {"group_size": 4} | data.get("orchestrator", {})
    (finding,) = numbers.check(facts(**data))
    assert finding.level is level and told in finding.what


def test_a_context_that_the_agent_is_told_of_must_exist(facts):
    kwargs = {"model_info": {"max_input_tokens": 9000}}
    run = facts(sources=[source(agent_kwargs=kwargs)], seq_len=4096, orchestrator={"group_size": 4})
    (finding,) = numbers.check(run)
    assert finding.level is RED and "9000" in finding.what


def test_one_gpu_too_few_is_red(facts):
    run = facts("prime-rl", gpus=[Gpu("A", 81000)], inference={}, model={"name": "Qwen/Qwen3-8B"})
    (finding,) = gpus.check(run)
    assert finding.level is RED and "1 are there" in finding.what


@pytest.mark.parametrize(("memory", "level"), [(81559, GREEN), (24000, RED)])
def test_a_model_that_does_not_fit_is_red(facts, memory, level):
    run = facts("prime-rl", gpus=[Gpu("A", memory)] * 2, inference={}, model={"name": "Qwen/Qwen3-8B"})
    assert levels(gpus.check(run)) == [GREEN, level]


def test_a_model_that_does_not_fit_the_embedded_engine_is_red(facts):
    gpu = [Gpu("A", 24000)]
    assert levels(gpus.check(facts(gpus=gpu, model={"name": "Qwen/Qwen3-0.6B"}))) == [GREEN]
    (finding,) = gpus.check(facts(gpus=gpu, model={"name": "Qwen/Qwen3-8B"}))
    assert finding.level is RED and "on the GPU" in finding.what
    (finding,) = gpus.check(facts(model={"name": "Qwen/Qwen3-235B"}))
    assert finding.level is RED and "on the CPU" in finding.what


def test_a_models_size_comes_from_its_weights_or_its_name(tmp_path):
    assert gpus.parameters("Qwen/Qwen3-0.6B") == 6e8
    assert gpus.parameters("org/unknown") is None
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 2000}}))
    assert gpus.parameters(str(tmp_path)) == 1000


def test_a_missing_submodule_is_red_for_prime_rl_alone(facts):
    (finding,) = prime_rl.check(facts("prime-rl"))
    assert finding.level is RED and "git submodule update" in finding.do
    assert list(prime_rl.check(facts("local"))) == []


def test_every_check_runs_on_a_machine_without_a_run_file(tmp_path):
    findings = list(doctor.examine(Facts(None, Choice("local", "test"), Place(tmp_path))))
    assert RED not in levels(findings)
