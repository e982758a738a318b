"""Findings on a run's pace, evaluation size, adapter and sampler."""

from pathlib import Path

import pytest

from harbortrainer.config.plugin import TasksetKeys
from harbortrainer.doctor import engine_checks, gpus, pace, run_file_checks
from harbortrainer.doctor.finding import Level
from harbortrainer.engines.engine_choice import Gpu
from harbortrainer.tasks.task_folder import load_folder
from harbortrainer.tasks.task_limits import agent_seconds, tasks_by_taskset

SAMPLES = Path(__file__).parents[2] / "datasets" / "harbor_tasks"
H100 = Gpu("NVIDIA H100 80GB HBM3", 81559)


def tasks(folder: Path, count: int, seconds: float = 300.0) -> Path:
    for number in range(count):
        task = folder / f"task-{number}"
        task.mkdir(parents=True)
        (task / "task.toml").write_text(f"[agent]\ntimeout_sec = {seconds}\n")
        (task / "instruction.md").write_text(f"do {number}")
    return folder


def source(folder: Path, **harness) -> dict:
    agent = {"max_turns": 20, "harness": {"environment_type": "local"} | harness}
    return {"env": {"taskset": {"id": "harbor_env", "tasks_dir": str(folder)}, "agent": agent}}


@pytest.fixture
def a_run(plan, tmp_path):
    """An 8B run on Prime-RL; keywords change its numbers."""

    def make(*, held_out=None, folder=None, multiplier=1.0, inflight=24, gpus=(H100, H100), lora=None, parser=None):
        folder = folder or tasks(tmp_path / "tasks", 2)
        orchestrator = {
            "batch_size": 128,
            "group_size": 8,
            "concurrency": {"max_inflight": inflight},
            "train": {"sampling": {"max_completion_tokens": 4096}},
        }
        if held_out:
            orchestrator["eval"] = {"source": [source(held_out)]}
        return plan(
            "prime-rl",
            gpus=gpus,
            sources=[source(folder, timeout_multiplier=multiplier)],
            model={"name": "Qwen/Qwen3-8B"},
            seq_len=32768,
            inference={"vllm": {"reasoning_parser": parser}},
            trainer={"model": {"lora": lora or {"rank": 32}}},
            orchestrator=orchestrator,
        )

    return make


@pytest.mark.parametrize(
    ("count", "level", "error"), [(1, Level.YELLOW, "0.50"), (19, Level.YELLOW, "0.11"), (100, Level.GREEN, "0.05")]
)
def test_small_evaluation_is_yellow(a_run, tmp_path, count, level, error):
    (finding,) = run_file_checks.check_evaluation_size(a_run(held_out=tasks(tmp_path / "held", count), parser="qwen3"))
    assert finding.level is level and finding.what.endswith(f"(standard error up to {error})")
    assert ("may be noise" in finding.what) == (count < 100)
    assert level is Level.GREEN or "orchestrator.eval.source[0].env.taskset" in finding.where


def test_evaluation_warns_where_a_key_can_change_it(a_run, tmp_path):
    held_out, trained = tasks(tmp_path / "held", 32), tasks(tmp_path / "tasks", 2)

    def finding(**changes):
        run = a_run(held_out=held_out, folder=trained, parser="qwen3")
        source = run.run.orchestrator.eval.source[0]
        source.num_examples = changes.pop("num_examples", -1)
        for key, value in changes.items():
            setattr(run.tasksets["orchestrator.eval.source[0].env.taskset"], key, value)
        (found,) = run_file_checks.check_evaluation_size(run)
        return found

    assert finding().level is Level.GREEN and "32 held-out tasks" in finding().what
    assert finding(num_examples=32).level is Level.GREEN
    cut = finding(num_examples=25)
    assert cut.level is Level.YELLOW and "only 25" in cut.what and cut.do.startswith("raise num_examples")
    assert finding(split="eval").do.startswith("raise eval_share")


@pytest.mark.parametrize(
    ("agent", "keys"),
    [
        ({}, ["agent.harness.environment_type", "agent.harness.timeout_multiplier", "agent.max_turns"]),
        ({"max_turns": 20, "harness": {"environment_type": "local", "timeout_multiplier": 2.0}}, []),
        ({"max_turns": 20, "harness": {"environment_type": "local", "timeout_multiplier": 2, "starts_per_s": 1}}, []),
        (
            {"max_turns": 20, "harness": {"agent_kwargs": {"a": 1, "b": 2}, "environment_type": "local"}},
            ["agent.harness.agent_kwargs.b"],
        ),
        ({"max_turns": 9, "harness": {"id": "bash"}}, []),
    ],
)
@pytest.mark.parametrize("engine", ["local", "prime-rl"])
def test_evaluation_of_other_trials_names_the_keys(plan, tmp_path, engine, agent, keys):
    trained = [
        source(tmp_path, timeout_multiplier=2.0) | {"name": "slow"},
        source(tmp_path, agent_kwargs={"a": 1}) | {"name": "quick"},
    ]
    env = {"taskset": {"id": "harbor_env"}} | ({"agent": agent} if agent else {})
    run = plan(engine, sources=trained, orchestrator={"eval": {"source": [{"env": env}]}})
    found = list(run_file_checks.check_same_trials(run))
    assert [finding.where for finding in found] == [f"run.toml: orchestrator.eval.source[0].env.{key}" for key in keys]
    assert all(finding.level is Level.YELLOW for finding in found)


def test_evaluation_without_reasoning_parser_is_yellow(a_run, tmp_path):
    findings = list(run_file_checks.check_evaluation_size(a_run(held_out=tasks(tmp_path / "held", 100))))
    assert "reasoning_parser" in findings[-1].do and findings[-1].level is Level.YELLOW


def test_short_timeout_is_yellow_and_its_remedy_works(a_run):
    estimate, warning = pace.check(a_run())
    assert estimate.level is Level.GREEN
    assert "128 trials, 24 in parallel" in estimate.what and "H100" in estimate.what
    assert warning.level is Level.YELLOW and "a task's agent has 300 s" in warning.what
    raised = float(warning.do.partition("to ")[2].partition(",")[0])
    assert 2 < raised <= 3, "the multiplier of configs/harbor_8b.toml"
    (estimate,) = pace.check(a_run(folder=SAMPLES, multiplier=raised))
    assert estimate.level is Level.GREEN


def test_pace_depends_on_gpu_and_trials_in_flight(a_run, tmp_path):
    def seconds(number: int, **changes) -> float:
        run = a_run(folder=tasks(tmp_path / str(number), 1), **changes)
        estimate = pace.pace_of(run.run, run.gpus, changes.get("inflight", 24), 20)
        assert estimate is not None
        return estimate.trial_seconds()

    default = seconds(1)
    assert seconds(2, gpus=(Gpu("NVIDIA A100-SXM4-80GB", 81920),) * 2) > default > seconds(3, inflight=8)
    unknown = a_run(folder=tasks(tmp_path / "4", 1), gpus=(Gpu("Abacus 9", 1),) * 2)
    assert list(pace.check(unknown)) == [], "no estimate for an unknown GPU"


@pytest.mark.parametrize(
    ("lora", "level", "expected"),
    [
        ({"rank": 1024}, Level.RED, "rank 1024 is above"),
        ({"rank": 16, "target_modules": ["q_proj", "lm_head"]}, Level.YELLOW, "no adapter on lm_head"),
        ({"rank": 16, "target_modules": ["embed_tokens"]}, Level.YELLOW, "embed_tokens"),
    ],
)
def test_adapter_that_vllm_cannot_serve_is_reported(a_run, lora, level, expected):
    (finding,) = run_file_checks.check_served_adapter(a_run(lora=lora))
    assert finding.level is level and expected in finding.what and finding.do
    assert list(run_file_checks.check_served_adapter(a_run(folder=SAMPLES, lora={"rank": 512}))) == []


def test_adapter_that_vllm_cannot_serve_is_reported_on_embedded_engine(plan):
    lora = {"model": {"lora": {"rank": 1024}}}
    (finding,) = run_file_checks.check_served_adapter(plan(inference={"engine": "vllm"}, trainer=lora))
    assert finding.level is Level.RED and finding.where == "run.toml: trainer.model.lora.rank"
    assert list(run_file_checks.check_served_adapter(plan(trainer=lora))) == []


@pytest.mark.parametrize(("share", "expected"), [(None, None), (0.15, "vLLM needs"), (0.8, "the learner needs")])
def test_model_must_fit_twice_beside_vllm(plan, share, expected):
    inference = {"engine": "vllm"} | ({} if share is None else {"vllm": {"gpu_memory_utilization": share}})
    (finding,) = gpus.check(plan(gpus=[Gpu("L40S", 46_068)], model={"name": "me/mine-4B"}, inference=inference))
    assert finding.level is (Level.GREEN if expected is None else Level.RED)
    assert expected is None or (expected in finding.what and "gpu_memory_utilization" in finding.where)


@pytest.mark.parametrize(
    ("changes", "proposed"),
    [
        ({}, True),
        ({"model": {"name": "me/mine"}}, True),
        ({"gpus": []}, False),
        ({"model": {"name": "me/mine-70B"}}, False),
        ({"model": {"name": "me/mine-4B", "quantization": "nf4"}}, False),
        ({"trainer": {}}, False),
        ({"model": {}, "warmup": {"tasks": "tasks", "model": "a/b"}}, False),
    ],
)
def test_vllm_is_proposed_where_it_can_sample(plan, changes, proposed):
    run = {"gpus": [Gpu("L40S", 46_068)], "model": {"name": "me/mine-4B"}} | changes
    findings = list(engine_checks.check_vllm(plan(**run)))
    assert [finding.level for finding in findings] == ([Level.YELLOW] if proposed else [])
    for finding in findings:
        assert 'engine = "vllm"' in finding.do and finding.where == "run.toml: inference.engine"


def test_task_without_agent_timeout_has_no_timeout_finding(a_run, tmp_path):
    folder = tasks(tmp_path / "endless", 1)
    for file in folder.rglob("task.toml"):
        file.write_text('version = "1.0"\n')
    assert agent_seconds(load_folder(folder)) == [float("inf")]
    (estimate,) = pace.check(a_run(folder=folder))
    assert estimate.level is Level.GREEN


def test_agent_seconds_add_up_over_steps():
    everything = TasksetKeys(tasks_dir=SAMPLES)
    tables = {side: everything.model_copy(update={"split": side}) for side in ("all", "train", "eval")}
    selected = tasks_by_taskset(tables)
    assert min(agent_seconds(selected["all"])) == 300 and max(agent_seconds(selected["all"])) == 400
    assert len(selected["train"]) + len(selected["eval"]) == len(selected["all"]) == 13
