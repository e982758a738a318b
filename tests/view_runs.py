"""Synthetic run and evaluation folders for tests of the pages."""

import json
import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from harbortrainer.runs.provenance import FILE, Provenance

CONFIG = 'max_steps = 3\n[model]\nname = "org/policy"\n[run]\nname = "made-up"\n'


def trial_row(trial: str, *, step: int = 1, **fields: object) -> dict[str, object]:
    """Return a line of `rollouts/` in the embedded engine's format."""
    timings = {"environment_setup": 1.0, "agent_setup": 0.5, "agent_execution": 6.0, "model": 4.0, "verifier": 2.0}
    row = {
        "step": step,
        "kind": "train",
        "group": f"group{step}",
        "advantage": 0.5,
        "not_trained": None,
        "source": "made",
        "task": "sort",
        "task_key": f"key-{fields.get('task', 'sort')}",
        "trial": trial,
        "outcome": "completed",
        "reward": 1.0,
        "rewards": {"reward": 1.0},
        "turns": 2,
        "branches": 1,
        "tokens": {"input": 70, "output": 30, "total": 100},
        "truncated": False,
        "cut": {"samples": 0, "tokens": 0},
        "timings": timings | {"total": 10.0},
        "version": step - 1,
        "steps": [],
        "error": None,
    }
    return row | fields


def eval_row(trial: str, *, step: int, **fields: object) -> dict[str, object]:
    """Return a line of an evaluation file in `rollouts/`."""
    row = trial_row(trial, step=step, **fields) | {"kind": "eval", "version": step}
    return {key: value for key, value in row.items() if key not in ("group", "advantage", "not_trained")}


def write_rows(file: Path, rows: Iterable[object]) -> None:
    """Write a file of JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_folder(folder: Path, rows: Sequence[dict], *, metrics: Sequence[dict] = (), summary: bool = True) -> Path:
    """Write a run folder with these trials."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG)
    (folder / "rollouts").mkdir()
    by_file: dict[str, list[dict]] = {}
    for row in rows:
        by_file.setdefault(f"{'eval_' if row['kind'] == 'eval' else ''}step_{row['step']}.jsonl", []).append(row)
    for name, own in by_file.items():
        write_rows(folder / "rollouts" / name, own)
    write_rows(folder / "metrics.jsonl", metrics)
    if summary:
        (folder / "summary.json").write_text(json.dumps({"status": "finished", "wall_s": 61.0, "model": "policy"}))
    return folder


def trains_on_evaluated_tasks(folder: Path) -> None:
    """Make the run one that evaluates a task that it trains on."""
    sources = "".join(f'[[orchestrator.{kind}.source]]\nname = "{kind}"\n' for kind in ("train", "eval"))
    (folder / "config.toml").write_text(CONFIG + sources)
    (folder / FILE).write_text(Provenance(tasks={"train": {"sort": "1"}, "eval": {"sort": "1"}}).model_dump_json())


def hold_lock(folder: Path) -> None:
    """Make this process the one of an active run."""
    holder = {"pid": os.getpid(), "host": os.uname().nodename, "started": datetime.now(UTC).isoformat()}
    (folder / ".lock").write_text(json.dumps(holder))


def eval_folder(folder: Path, rows: Sequence[dict]) -> Path:
    """Write an evaluation folder with these lines."""
    folder.mkdir(parents=True)
    tasks = {str(row["task"]): str(row["task_key"]) for row in rows}
    about = {"policy": "org/policy", "identity": {}, "tasks_dir": "tasks", "tasks": tasks, "attempts": 2, "rules": {}}
    (folder / "evaluation.json").write_text(json.dumps(about))
    write_rows(folder / "trials.jsonl", rows)
    return folder


def two_steps(folder: Path) -> Path:
    """Write a run of two steps and two evaluations that is small enough to check by hand.

    Training: step 1 has rewards 1 and 0 (trained) and one failed trial; step 2 has rewards 1 and 1 (no signal).
    Held-out: four tasks with rewards 0, 0, 0, 1 before and 1, 1, 1, 1 after.
    """
    train = [
        trial_row("sort__a1", advantage=0.5),
        trial_row("sort__a2", reward=0.0, rewards={"reward": 0.0}, advantage=-0.5),
        trial_row(
            "sort__a3",
            outcome="sandbox_error",
            reward=None,
            rewards=None,
            advantage=None,
            not_trained="failed",
            error="no",
        ),
        *(
            trial_row(f"count__b{index}", step=2, task="count", advantage=None, not_trained="no signal in its group")
            for index in (1, 2)
        ),
    ]
    held_out = [
        eval_row(f"held{task}__v{step}", step=step, task=f"held{task}", reward=reward)
        for step, rewards in ((0, (0.0, 0.0, 0.0, 1.0)), (2, (1.0, 1.0, 1.0, 1.0)))
        for task, reward in enumerate(rewards)
    ]
    metrics = [
        {"step": 1, "train/agg/all/agent/reward/mean": 0.5, "progress/rollouts": 3, "time/step": 10.0}
        | {"time/wait_for_rollouts": 6.0, "time/forward_backward": 3.0, "time/other_versions": 1.0},
        {"step": 2, "train/agg/all/agent/reward/mean": 1.0, "progress/rollouts": 2, "time/step": 10.0}
        | {"time/wait_for_rollouts": 8.0, "time/forward_backward": 2.0, "staleness/mean": 1.0, "cost/total": 1.5},
        {"step": 2, "eval/mean_reward": 1.0, "eval/n": 4, "time/eval": 5.0},
    ]
    return run_folder(folder, [*train, *held_out], metrics=metrics)
