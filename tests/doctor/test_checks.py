"""Levels of the doctor's findings; each that is not green has a remedy."""

import json
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file
from task_sets import make_task

from harbortrainer.doctor import (
    credentials,
    docker_daemon,
    engine_checks,
    gpus,
    machine_checks,
    model_files,
    run_file_checks,
)
from harbortrainer.doctor.checks import examine_file, examine_machine
from harbortrainer.doctor.docker_daemon import AddressPool, DaemonInfo
from harbortrainer.doctor.finding import Level, red, show, stop_on_red, yellow
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.engines.engine_choice import EngineChoice, Gpu
from harbortrainer.engines.prime_rl.checkout import Checkout
from harbortrainer.errors import UserError
from harbortrainer.tasks.measured_rates import MeasuredRate, MeasuredRates, write_rates
from harbortrainer.tasks.passed_checks import record_passed
from harbortrainer.tasks.task_folder import load_folder, load_task

pytestmark = pytest.mark.process

SAMPLES = Path(__file__).parents[2] / "datasets/harbor_tasks"
GREEN, YELLOW, RED = Level.GREEN, Level.YELLOW, Level.RED


def levels(findings) -> list[Level]:
    found = list(findings)
    assert all(finding.do for finding in found if finding.level is not GREEN), (
        "each finding that is not green has a remedy"
    )
    return [finding.level for finding in found]


def test_first_red_finding_stops_a_launch():
    with pytest.raises(UserError) as caught:
        stop_on_red([yellow("a", "b", "c"), red("Docker", "no daemon", "start it"), red("x", "y", "z")])
    assert str(caught.value) == "Docker: no daemon; start it\nx: y; z"
    stop_on_red([yellow("a", "b", "c")])


@pytest.mark.parametrize(
    ("pools", "free"),
    [
        ([], 31),
        ([{"Base": "10.200.0.0/16", "Size": 24}], 256),
        ([{"Base": "172.17.0.0/16", "Size": 16}, {"Base": "192.168.0.0/16", "Size": 20}], 17),
    ],
)
def test_docker_network_capacity(pools, free):
    assert docker_daemon.capacity([AddressPool.model_validate(pool) for pool in pools]) == free


def test_more_trials_than_networks_is_yellow():
    assert docker_daemon.networks(DaemonInfo(), 30, used=1, where="run.toml: a").level is GREEN
    finding = docker_daemon.networks(DaemonInfo(), 31, used=1, where="run.toml: a")
    assert finding.level is YELLOW and "default-address-pools" in finding.do and "max_inflight" in finding.do


def test_dead_docker_daemon_is_the_only_finding(source, plan, tmp_path, monkeypatch):
    (tmp_path / "docker").write_text("#!/bin/sh\necho '{}'; exit 1\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (finding,) = docker_daemon.check(plan(sources=[source("docker")]))
    assert finding.level is RED and "does not answer" in finding.what


def test_docker_is_not_checked_for_local_sandboxes(plan):
    assert list(docker_daemon.check(plan())) == []


def test_missing_docker_login_is_yellow(tmp_path):
    assert docker_daemon.login(tmp_path / "config.json").level is YELLOW
    (tmp_path / "config.json").write_text('{"auths": {"https://index.docker.io/v1/": {}}}')
    assert docker_daemon.login(tmp_path / "config.json").level is GREEN


def test_parallel_trials_use_the_smallest_limit(source, plan):
    assert plan().parallel == 1024
    assert plan(orchestrator={"concurrency": {"max_inflight": 24}}).parallel == 24
    assert (
        plan(sources=[{"name": "a"} | source(n_parallel_envs=8), {"name": "b"} | source(n_parallel_envs=6)]).parallel
        == 8
    )


def test_port_in_use_is_red(plan):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        run = plan(orchestrator={"model": {"client": {"base_url": f"http://localhost:{port}/v1"}}})
        (finding,) = machine_checks.check_ports(run)
        assert finding.level is RED and str(port) in finding.what
    assert levels(machine_checks.check_ports(run)) == [GREEN]


def test_ports_of_prime_rl(plan):
    run = plan("prime-rl", inference={}, orchestrator={"env_server_base_port": 6000})
    assert [(name, port) for name, port, _ in run.ports] == [("env server 1", 6000), ("inference", 8000)]


def test_missing_program_is_red_with_its_package(source, plan, monkeypatch):
    assert levels(machine_checks.check_tools(plan())) == [GREEN]
    monkeypatch.setattr(machine_checks, "missing_tools", lambda: ["tmux"])
    (finding,) = machine_checks.check_tools(plan())
    assert finding.level is RED and "apt-get install tmux" in finding.do
    assert list(machine_checks.check_tools(plan(sources=[source("docker")]))) == []


def test_low_disk_is_yellow_then_red(tmp_path, monkeypatch):
    usage = SimpleNamespace(free=30 * machine_checks.GIB)
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda folder: usage)
    assert machine_checks.disk("d", tmp_path, 20).level is GREEN
    usage.free = 5 * machine_checks.GIB
    assert machine_checks.disk("d", tmp_path, 20).level is YELLOW
    usage.free = machine_checks.GIB
    assert machine_checks.disk("d", tmp_path, 20).level is RED


def test_docker_folder_need_not_be_writable(plan, source, tmp_path, monkeypatch):
    for name in ("docker", "mine"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(machine_checks, "DOCKER_ROOT", tmp_path / "docker")
    monkeypatch.setattr(machine_checks.os, "access", lambda path, mode: path.is_relative_to(tmp_path / "mine"))
    usage = SimpleNamespace(free=30 * machine_checks.GIB)
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda folder: usage)
    assert (
        levels(machine_checks.check_disk(plan(sources=[source("docker")], output_dir=str(tmp_path / "mine"))))
        == [GREEN] * 2
    )
    run, images = machine_checks.check_disk(plan(sources=[source("docker")], output_dir=str(tmp_path)))
    assert (run.level, images.level) == (RED, GREEN)
    assert run.what == f"{tmp_path} cannot be written to" and run.where.endswith("output_dir")


def test_trials_dir_of_this_machine_must_be_writable(plan, source, tmp_path):
    (tmp_path / "file").write_text("")
    impossible = source(trials_dir=str(tmp_path / "file" / "trials"))
    *_, finding = machine_checks.check_disk(plan(sources=[impossible], output_dir=str(tmp_path)))
    assert finding.level is RED and finding.what == f"{tmp_path / 'file'} is not a folder"
    assert finding.where == "run.toml: orchestrator.train.source[0].env.agent.harness.trials_dir"
    possible = source(trials_dir=str(tmp_path / "new" / "trials"))
    elsewhere = impossible | {"serve": {"address": "tcp://h:1"}}
    for one in (possible, elsewhere):
        assert RED not in levels(machine_checks.check_disk(plan(sources=[one], output_dir=str(tmp_path))))


def test_wandb_key_is_required_and_never_printed(plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    run = plan("prime-rl", monitors={"wandb": {"project": "p"}})
    assert levels(credentials.check_wandb(run)) == [RED]
    (tmp_path / ".env").write_text("WANDB_API_KEY=hush-hush\n")
    found = [*credentials.check_wandb(run), *credentials.check_dotenv(run)]
    assert levels(found) == [GREEN, GREEN]
    assert "WANDB_API_KEY" in str(found) and "hush" not in str(found)
    for monitors, level in (({"wandb": {}}, GREEN), ({"wandb": {"offline": True}}, GREEN), ({}, None)):
        found = list(credentials.check_wandb(plan("local", monitors=monitors)))
        assert levels(found) == ([level] if level is not None else [])
    (tmp_path / ".env").unlink()
    assert levels(credentials.check_wandb(plan("local", monitors={"wandb": {}}))) == [RED]
    assert levels(credentials.check_wandb(plan("local", monitors={"wandb": {"offline": True}}))) == [GREEN]
    assert list(credentials.check_wandb(plan("prime-rl"))) == []


def test_provider_without_credentials_is_red(source, plan, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
        monkeypatch.delenv(name, raising=False)
    (finding,) = credentials.check_providers(plan(sources=[source("modal")]))
    assert finding.level is RED and "modal" in finding.about.lower()


def test_model_folder_needs_config_weights_and_tokenizer(tmp_path):
    for name, missing in [
        ("config.json", "config.json"),
        ("model.safetensors", "weights"),
        ("tokenizer.json", "token"),
    ]:
        finding = model_files.in_folder(tmp_path, "run.toml: model.name")
        assert finding.level is RED and missing in finding.what
        (tmp_path / name).write_text("{}")
    assert model_files.in_folder(tmp_path, "run.toml: model.name").level is GREEN


def test_hub_model_is_found_in_the_cache(plan, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run = plan(model={"name": "a/b"})
    assert levels(model_files.check_hub(run)) == [RED]
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert levels(model_files.check_hub(run)) == [GREEN]


def test_unreachable_hub_is_red(plan, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    (finding,) = model_files.check_hub(plan(model={"name": "a/b"}))
    assert finding.level is RED and "cannot be reached" in finding.what


def test_slow_hub_is_given_up_in_time(plan, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(model_files, "TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        ended = threading.Event()

        def answer_slowly() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                for sign in b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 2:
                    connection.send(bytes([sign]))
                    if ended.wait(0.5):
                        return

        thread = threading.Thread(target=answer_slowly)
        thread.start()
        began = time.monotonic()
        (finding,) = model_files.check_hub(plan(model={"name": "a/b"}))
        ended.set()
        thread.join()
    assert finding.level is RED and "cannot be reached" in finding.what
    assert time.monotonic() - began < 6


def test_model_created_by_warmup_need_not_exist(plan):
    assert levels(
        model_files.check(plan(model={"name": "warmup"}, warmup={"tasks": str(SAMPLES), "model": "a/b"}))
    ) == [GREEN]
    assert levels(model_files.check(plan(model={"name": "nowhere"}))) == [RED]


def test_warmup_needs_solutions_of_the_training_tasks(plan):
    def found(folder):
        taskset = {"id": "harbor_env", "tasks_dir": str(folder)}
        run = plan(model={"name": "warmup"}, warmup={"model": "a/b"}, sources=[{"env": {"taskset": taskset}}])
        return levels(model_files.check(run))

    assert found(SAMPLES) == [GREEN]
    assert found(SAMPLES / "incident-two-steps") == [RED]


def test_missing_tasks_are_red_and_unchecked_tasks_yellow(plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = plan(sources=[{"env": {"taskset": {"id": "harbor_env", "tasks_dir": "t"}}}])
    assert levels(machine_checks.check_tasks(run)) == [RED]
    (tmp_path / "t" / "one").mkdir(parents=True)
    (tmp_path / "t" / "one" / "task.toml").write_text('version = "1.0"\n')
    (tmp_path / "t" / "one" / "instruction.md").write_text("do it")
    loaded, _ = machine_checks.check_tasks(run)
    assert (loaded.level, loaded.what) == (GREEN, "t: 1 task loaded")
    record_passed(load_folder("t"))
    assert levels(machine_checks.check_tasks(run)) == [GREEN]
    (tmp_path / "t" / "one" / "instruction.md").write_text("do it otherwise")
    assert levels(machine_checks.check_tasks(run)) == [GREEN, YELLOW], "a changed task is another task"
    run = plan(sources=[{"env": {"taskset": {"id": "harbor_env", "tasks_dir": "t", "checked_only": True}}}])
    assert levels(machine_checks.check_tasks(run)) == [GREEN], "the run does not use it"


def test_unchecked_sources_get_a_command_each(plan, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sources = [
        source(environment_kwargs={"image": "host"}, trusted_tasks=["a b"]),
        source("docker", environment_kwargs={"api_key": "s3cret"}),
    ]
    for name, table in zip(("first", "second"), sources, strict=True):
        make_task(tmp_path / name / "one", f"do {name}")
        table |= {"name": name, "env": table["env"] | {"taskset": {"id": "harbor_env", "tasks_dir": name}}}
    (finding,) = [one for one in machine_checks.check_tasks(plan(sources=sources)) if one.level is YELLOW]
    assert finding.do.startswith(
        "run `harbortrainer tasks check first --environment local --ek image=host --trust 'a b'`"
        " and `harbortrainer tasks check second --environment docker`, or"
    )


def test_each_bad_task_is_red_or_with_skip_bad_yellow(plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("good", "do it"), ("silent", ""), ("torn", "do it")):
        (tmp_path / "t" / name).mkdir(parents=True)
        (tmp_path / "t" / name / "task.toml").write_text("version = " if name == "torn" else 'version = "1.0"')
        (tmp_path / "t" / name / "instruction.md").write_text(text)
    run = plan(sources=[{"env": {"taskset": {"id": "harbor_env", "tasks_dir": "t"}}}])
    found = list(machine_checks.check_tasks(run))
    assert [finding.level for finding in found] == [RED, RED, GREEN, YELLOW]
    assert ["silent" in found[0].what, "torn" in found[1].what, "1 of 3 tasks loaded" in found[2].what] == [True] * 3
    run = plan(sources=[{"env": {"taskset": {"id": "harbor_env", "tasks_dir": "t", "skip_bad": True}}}])
    assert levels(machine_checks.check_tasks(run)) == [YELLOW, YELLOW, GREEN, YELLOW]


def test_tasks_left_out_are_named_once_and_three_at_most(plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("good", "bad-1", "bad-2", "bad-3", "bad-4", "bad-5"):
        (tmp_path / "t" / name).mkdir(parents=True)
        (tmp_path / "t" / name / "task.toml").write_text("version = 1" if name == "good" else "version = ")
        (tmp_path / "t" / name / "instruction.md").write_text("do it")
    table = {"id": "harbor_env", "tasks_dir": "t", "skip_bad": True}
    run = plan(sources=[{"name": side, "env": {"taskset": table | {"split": side}}} for side in ("train", "eval")])
    found = list(machine_checks.check_tasks(run))
    assert [finding.level for finding in found] == [*[YELLOW] * 4, GREEN, YELLOW]
    assert [f"bad-{n}" in found[n - 1].what for n in (1, 2, 3)] == [True] * 3
    assert found[3].what == "t: 2 more tasks are unreadable or duplicates" and "tasks list t" in found[3].do
    run = plan(sources=[{"env": {"taskset": table | {"skip_bad": False}}}])
    assert levels(machine_checks.check_tasks(run))[:5] == [RED] * 5, "all are named that must be corrected"


def test_commands_on_tasks_work_as_printed(plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        make_task(tmp_path / "my tasks" / name, f"do {name}")
    for number in range(4):
        (tmp_path / "my tasks" / f"bad-{number}").mkdir()
        (tmp_path / "my tasks" / f"bad-{number}" / "task.toml").write_text("version = ")
    measured = MeasuredRate(name="one", attempts=1, pass_rate=1.0, mean_reward=1.0)
    key = load_task(tmp_path / "my tasks" / "one").key
    write_rates(tmp_path / "rates.json", MeasuredRates(tasks={key: measured}))
    rates = {"difficulty": "rates.json", "min_pass_rate": 0.0}
    here = {"id": "harbor_env", "tasks_dir": "my tasks", "skip_bad": True} | rates
    there = {"id": "harbor_env", "dataset": f"https://h.org/o/r@{'0' * 40}#my tasks"}
    sources = [{"name": name, "env": {"taskset": table}} for name, table in (("a", here), ("b", there))]
    advice = " ".join(finding.do for finding in machine_checks.check_tasks(plan(sources=sources)))
    for command in ("tasks list 'my tasks'", "eval 'my tasks' --difficulty FILE", "tasks check 'my tasks'"):
        assert f"`harbortrainer {command}" in advice
    assert f"`harbortrainer tasks fetch 'https://h.org/o/r@{'0' * 40}#my tasks'`" in advice


@pytest.mark.parametrize(
    ("data", "level", "expected"),
    [
        ({"seq_len": 1000, "inference": {"vllm": {"max_model_len": 2000}}}, YELLOW, "cut before training"),
        ({"seq_len": 100, "orchestrator": {"train": {"sampling": {"max_completion_tokens": 100}}}}, RED, "no room"),
        ({"orchestrator": {"batch_size": 10, "group_size": 4}}, RED, "multiple"),
        ({"orchestrator": {"group_size": 1}}, RED, "nothing is learned"),
        ({"orchestrator": {"group_size": 8, "concurrency": {"max_inflight": 4}}}, RED, "less than group_size"),
    ],
)
def test_inconsistent_numbers_are_reported(plan, data, level, expected):
    data["orchestrator"] = {"group_size": 4} | data.get("orchestrator", {})
    (finding,) = run_file_checks.check_numbers(plan("prime-rl", **data))
    assert finding.level is level and expected in finding.what


def test_agent_context_above_model_context_is_red(source, plan):
    kwargs = {"model_info": {"max_input_tokens": 9000}}
    run = plan(sources=[source(agent_kwargs=kwargs)], seq_len=4096, orchestrator={"group_size": 4})
    (finding,) = run_file_checks.check_numbers(run)
    assert finding.level is RED and "9000" in finding.what


ECHO = {"type": "echo"}


@pytest.mark.parametrize("engine", ["local", "prime-rl"])
@pytest.mark.parametrize(
    ("algo", "own", "agent", "blamed"),
    [
        (ECHO, {}, {}, "orchestrator.algo.roles"),
        (ECHO | {"roles": {"tool": {"alpha": 0.1}}}, {}, {}, "orchestrator.algo.roles"),
        ({}, {"algo": ECHO}, {}, "orchestrator.train.source[0].algo.roles"),
        (ECHO | {"roles": {"user": {"alpha": 0.1}}}, {}, {}, None),
        (ECHO, {}, {"agent": "mini-swe-agent"}, None),
        ({}, {}, {}, None),
    ],
)
def test_echo_without_user_role_is_yellow(plan, source, engine, algo, own, agent, blamed):
    found = run_file_checks.check_echo_roles(plan(engine, sources=[source(**agent) | own], orchestrator={"algo": algo}))
    assert [finding.where for finding in found] == ([f"run.toml: {blamed}"] if blamed else [])


def test_too_few_gpus_is_red(plan):
    run = plan("prime-rl", gpus=[Gpu("A", 81000)], inference={}, model={"name": "Qwen/Qwen3-8B"})
    (finding,) = gpus.check(run)
    assert finding.level is RED and "this machine has 1" in finding.what


@pytest.mark.parametrize(("memory", "level"), [(81559, GREEN), (24000, RED)])
def test_model_too_large_for_prime_rl_is_red(plan, memory, level):
    run = plan("prime-rl", gpus=[Gpu("A", memory)] * 2, inference={}, model={"name": "Qwen/Qwen3-8B"})
    assert levels(gpus.check(run)) == [GREEN, level]


def test_advice_to_install_the_plugin_quotes_a_path_with_a_blank(tmp_path):
    finding = engine_checks.plugin(Checkout(tmp_path / "my prime-rl"), [])
    assert f"--python '{tmp_path / 'my prime-rl'}/.venv/bin/python' 'harbor" in finding.do


def test_model_too_large_for_embedded_engine_is_red(plan):
    gpu = [Gpu("A", 24000)]
    assert levels(gpus.check(plan(gpus=gpu, model={"name": "Qwen/Qwen3-0.6B"}))) == [GREEN]
    (finding,) = gpus.check(plan(gpus=gpu, model={"name": "Qwen/Qwen3-8B"}))
    assert finding.level is RED and "on the GPU" in finding.what
    (finding,) = gpus.check(plan(model={"name": "Qwen/Qwen3-235B"}))
    assert finding.level is RED and "on the CPU" in finding.what


def test_estimate_of_a_small_model_is_in_mib_and_names_its_source(plan):
    (small,) = gpus.check(plan(gpus=[Gpu("A", 24000)], model={"name": "me/tiny-1M"}))
    assert "needs about 3 MiB on the GPU, estimated by its number of parameters; " in small.what
    (larger,) = gpus.check(plan(gpus=[Gpu("A", 24000)], model={"name": "Qwen/Qwen3-0.6B"}))
    assert "needs about 1.7 GiB on the GPU, " in larger.what


def test_model_size_from_weights_or_name(tmp_path):
    assert gpus.parameters("Qwen/Qwen3-0.6B") == 6e8
    assert gpus.parameters("org/unknown") is None
    weights = {"a": np.zeros((3, 5), np.float32), "b": np.zeros(7, np.float16)}
    save_file(weights, tmp_path / "model.safetensors")
    assert gpus.parameters(str(tmp_path)) == 22
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 2000}}))
    assert gpus.parameters(str(tmp_path)) == 1000
    index.write_text(json.dumps({"metadata": {"total_parameters": 500, "total_size": 2000}}))
    assert gpus.parameters(str(tmp_path)) == 500


def test_model_size_is_unknown_if_weights_are_damaged(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    assert gpus.parameters(str(tmp_path)) is None


def test_missing_submodule_is_red_on_prime_rl_only(plan):
    (finding,) = engine_checks.check_prime_rl(plan("prime-rl"))
    assert finding.level is RED and "git submodule update" in finding.do
    assert list(engine_checks.check_prime_rl(plan("local"))) == []


def test_checks_run_without_a_run_file(tmp_path):
    plan = LaunchPlan(choice=EngineChoice("local", "test"), checkout=Checkout(tmp_path), gpus=[])
    findings = [*examine_file(plan), *examine_machine(plan)]
    assert RED not in levels(findings)


def test_table_shows_long_paths_whole(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    show([yellow("tasks", "/a" * 60 + "/end", where="k" * 90, do="change it")])
    output = "".join(line.split("│")[-1].strip() for line in capfd.readouterr().out.splitlines())
    assert output == "/a" * 60 + "/end" + "k" * 90 + "-> change it"
