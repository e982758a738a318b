"""What the doctor says of a run's pace, its evaluation and its adapter before it starts."""

from pathlib import Path

import pytest

from harbortrainer.config.plugin import TasksetKeys
from harbortrainer.doctor import evaluation_size, gpus, pace, served_adapter
from harbortrainer.doctor.finding import Level
from harbortrainer.engines.engine_choice import Gpu
from harbortrainer.tasks.task_folder import load_folder
from harbortrainer.tasks.task_limits import agent_seconds, played_by

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
    ("count", "level", "said"), [(1, Level.YELLOW, "0.50"), (99, Level.YELLOW, "0.05"), (100, Level.GREEN, "0.05")]
)
def test_an_evaluation_whose_standard_error_is_above_a_twentieth_is_told(a_run, tmp_path, count, level, said):
    (finding,) = evaluation_size.check(a_run(held_out=tasks(tmp_path / "held", count), parser="qwen3"))
    assert finding.level is level and finding.what.endswith(f"up to {said}")
    assert level is Level.GREEN or "orchestrator.eval.source[0].env.taskset" in finding.where


def test_an_evaluation_that_gets_thinking_with_its_answers_is_told(a_run, tmp_path):
    found = list(evaluation_size.check(a_run(held_out=tasks(tmp_path / "held", 100))))
    assert "reasoning_parser" in found[-1].do and found[-1].level is Level.YELLOW


def test_a_time_that_cannot_hold_a_trial_is_told_and_its_own_remedy_holds(a_run):
    told, warned = pace.check(a_run())
    assert told.level is Level.GREEN and "128 trials, 24 at once" in told.what and "H100" in told.what
    assert warned.level is Level.YELLOW and "a task's agent has 300 s" in warned.what
    raised = float(warned.do.partition("to ")[2].partition(",")[0])
    assert 2 < raised <= 3, "what configs/harbor_8b.toml says"
    (told,) = pace.check(a_run(folder=SAMPLES, multiplier=raised))
    assert told.level is Level.GREEN


def test_a_step_takes_longer_on_a_slower_card_and_shorter_with_more_of_them(a_run, tmp_path):
    def seconds(number: int, **changes) -> float:
        run = a_run(folder=tasks(tmp_path / str(number), 1), **changes)
        found = pace.pace_of(run.run, run.gpus, changes.get("inflight", 24), 20)
        assert found is not None
        return found.trial_seconds()

    here = seconds(1)
    assert seconds(2, gpus=(Gpu("NVIDIA A100-SXM4-80GB", 81920),) * 2) > here > seconds(3, inflight=8)
    unknown = a_run(folder=tasks(tmp_path / "4", 1), gpus=(Gpu("Abacus 9", 1),) * 2)
    assert list(pace.check(unknown)) == [], "no figure for a card that is not known"


@pytest.mark.parametrize(
    ("lora", "level", "said"),
    [
        ({"rank": 1024}, Level.RED, "rank 1024 is above"),
        ({"rank": 16, "target_modules": ["q_proj", "lm_head"]}, Level.YELLOW, "no adapter on lm_head"),
        ({"rank": 16, "target_modules": ["embed_tokens"]}, Level.YELLOW, "embed_tokens"),
    ],
)
def test_an_adapter_that_vllm_cannot_serve_is_told(a_run, lora, level, said):
    (finding,) = served_adapter.check(a_run(lora=lora))
    assert finding.level is level and said in finding.what and finding.do
    assert list(served_adapter.check(a_run(folder=SAMPLES, lora={"rank": 512}))) == []


def test_an_adapter_that_vllm_cannot_serve_is_told_on_the_embedded_engine_too(plan):
    lora = {"model": {"lora": {"rank": 1024}}}
    (finding,) = served_adapter.check(plan(inference={"engine": "vllm"}, trainer=lora))
    assert finding.level is Level.RED and finding.where == "run.toml: trainer.model.lora.rank"
    assert list(served_adapter.check(plan(trainer=lora))) == []


@pytest.mark.parametrize(("share", "who"), [(None, None), (0.15, "vLLM needs"), (0.8, "the learner needs")])
def test_a_model_has_to_fit_twice_where_vllm_samples(plan, share, who):
    inference = {"engine": "vllm"} | ({} if share is None else {"vllm": {"gpu_memory_utilization": share}})
    (finding,) = gpus.check(plan(gpus=[Gpu("L40S", 46_068)], model={"name": "me/mine-4B"}, inference=inference))
    assert finding.level is (Level.GREEN if who is None else Level.RED)
    assert who is None or (who in finding.what and "gpu_memory_utilization" in finding.where)


def test_a_task_whose_agent_may_work_for_ever_is_not_told_to_be_short(a_run, tmp_path):
    folder = tasks(tmp_path / "endless", 1)
    for file in folder.rglob("task.toml"):
        file.write_text('version = "1.0"\n')
    assert agent_seconds(load_folder(folder)) == [float("inf")]
    (told,) = pace.check(a_run(folder=folder))
    assert told.level is Level.GREEN


def test_the_time_of_a_task_is_that_of_all_its_steps():
    everything = TasksetKeys(tasks_dir=SAMPLES)
    tables = {side: everything.model_copy(update={"split": side}) for side in ("all", "train", "eval")}
    played = played_by(tables)
    assert min(agent_seconds(played["all"])) == 300 and max(agent_seconds(played["all"])) == 400
    assert len(played["train"]) + len(played["eval"]) == len(played["all"]) == 13
