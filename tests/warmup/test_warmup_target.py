"""A warm-up with a target stops when real trials reach it, and says so when they never do. Trials are scripted here;
`tests/e2e/test_sampled_trials.py` and `test_warmup_trials.py` play real ones."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch")

from harbortrainer.config.run_sections import WarmupConfig
from harbortrainer.errors import UserError
from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.record import TrialRecord
from harbortrainer.trials.trial_spec import TrialSpec
from harbortrainer.warmup import sampled_trials, warmup

TASKS = Path(__file__).parents[2] / "datasets/quickstart/train"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """The rewards of the measurements to come; each measurement takes the first."""
    rewards: list[list[float]] = []

    async def replay(tasks: list, **_: object) -> list:
        return [((task.instruction, "sort a > b"),) for task in tasks]

    monkeypatch.setattr(warmup, "replay", replay)
    monkeypatch.setattr(warmup, "measure_rewards", lambda *_, **__: rewards.pop(0))
    return rewards


def config(folder: Path, **keys: object) -> WarmupConfig:
    table = {"tasks": TASKS, "model": str(folder), "agent": "plain", "target": 0.5, "steps": 12, "batch_size": 2}
    return WarmupConfig.model_validate(table | keys)


def test_stops_at_the_first_measurement_that_reaches_the_target(
    folder: Path, tmp_path: Path, measured: list[list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    measured += [[0.0, 0.5], [0.5, 0.5], [1.0]]
    made = warmup.warm_up(config(folder), tmp_path / "warm")
    assert measured == [[1.0]] and (made / "model.safetensors").is_file()
    assert "10 steps" in capsys.readouterr().out


def test_target_that_is_not_reached_is_an_error(folder: Path, tmp_path: Path, measured: list[list[float]]) -> None:
    measured += [[0.0], [0.0], [0.25]]
    with pytest.raises(UserError, match=r"after 12 steps is 0\.25, below the target 0\.5"):
        warmup.warm_up(config(folder), tmp_path / "warm")
    assert not measured and not (tmp_path / "warm").exists()


def test_lora_goes_on_training_after_a_measurement(folder: Path, tmp_path: Path, measured: list[list[float]]) -> None:
    measured += [[0.0], [1.0]]
    made = warmup.warm_up(config(folder, lora_rank=2), tmp_path / "warm")
    assert not measured and not list(made.glob("adapter*")), "the adapter is merged"


def test_answers_that_the_run_cannot_sample_are_not_learned(
    folder: Path, tmp_path: Path, measured: list[list[float]]
) -> None:
    with pytest.raises(UserError, match=r"max_completion_tokens: the run samples at most 3 tokens of an answer"):
        warmup.warm_up(config(folder), tmp_path / "warm", rollouts=warmup.Rollouts(answer_length=3))


def test_task_in_a_category_is_trusted_by_its_whole_name(
    folder: Path, tmp_path: Path, measured: list[list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("files/one", "other/two", "two"):
        task = shutil.copytree(next(path for path in TASKS.iterdir() if path.is_dir()), tmp_path / "tasks" / name)
        (task / "instruction.md").write_text(f"Do {name}.")
    played: dict[str, bool] = {}
    root = tmp_path / "tasks"

    def run(policy: Path, specs: Sequence[TrialSpec], *_: int) -> list[TrialRecord]:
        played.update({str(spec.task_dir.relative_to(root)): spec.trusted for spec in specs})
        return [TrialRecord(outcome=Outcome.completed, task="", trial_name="", reward=1.0) for _ in specs]

    monkeypatch.setattr(warmup, "measure_rewards", sampled_trials.measure_rewards)
    monkeypatch.setattr(sampled_trials, "_run", run)
    table = config(folder, tasks=root, trusted_tasks=["files/*", "two"], trials=30)
    warmup.warm_up(table, tmp_path / "warm")
    assert played == {"files/one": True, "other/two": False, "two": True}


def test_trials_sample_as_the_run_does(
    folder: Path, tmp_path: Path, measured: list[list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling: list[object] = []

    def run(policy: Path, specs: Sequence[TrialSpec], *_: int) -> list[TrialRecord]:
        sampling.extend(spec.agent_kwargs for spec in specs)
        return [TrialRecord(outcome=Outcome.completed, task="", trial_name="", reward=1.0) for _ in specs]

    monkeypatch.setattr(warmup, "measure_rewards", sampled_trials.measure_rewards)
    monkeypatch.setattr(sampled_trials, "_run", run)
    rollouts = warmup.Rollouts(answer_length=24, temperature=0.6)
    warmup.warm_up(config(folder, trials=1), tmp_path / "warm", rollouts=rollouts)
    assert sampling == [{"temperature": 0.6, "llm_kwargs": {"max_tokens": 24}}]
