"""Writes the files that turn a folder of trials into a Harbor job, for `harbor view` and Harbor's other tools.

The files are written with Harbor's classes, which differ between its releases. Mean and pass@k are parameters, since
Harbor would count a trial without a reward as 0.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from pydantic import BaseModel, ValidationError

from harbortrainer.harbor_compat import WRITTEN_FOR, keep_litellm_offline
from harbortrainer.private_apis import PrivateApi

if TYPE_CHECKING:
    from harbor.models.job.config import JobConfig
    from harbor.models.job.result import JobResult
    from harbor.models.trial.result import TrialResult

JOBS = PrivateApi(
    library="harbor",
    written_for=WRITTEN_FOR,
    used_by="harbortrainer.harbor_compat.job_folder",
    places=(
        "harbor.models.job.result:JobStats.from_trial_results(trial_results, n_total_trials, ...)",
        "harbor.models.job.result:AgentDatasetStats.metrics",
        "harbor.models.job.result:AgentDatasetStats.pass_at_k",
    ),
)


def write_job(
    folder: Path,
    *,
    tasks_dir: Path,
    agent: str,
    model: str | None,
    environment: Mapping[str, object],
    attempts: int,
    total: int,
    counted: Iterable[str],
    mean: float | None,
    pass_at_k: Mapping[int, float],
    finished: bool,
) -> None:
    """Write a job's `config.json` and `result.json`.

    Args:
        folder: The job's folder, which contains the trials' folders.
        tasks_dir: The folder of its tasks.
        agent: Harbor's name for the agent, or `module:Class`.
        model: The model's name; None for an agent without one.
        environment: Fields of Harbor's EnvironmentConfig.
        attempts: Trials per task.
        total: Trials of the finished job.
        counted: Names of the trials that its statistics include.
        mean: Mean reward.
        pass_at_k: pass@k by k.
        finished: Whether every trial has run.
    """
    keep_litellm_offline()
    JOBS.check()
    from harbor.models.job.result import JobResult
    from harbor.models.trial.result import TrialResult

    config = _config(folder, agent, model, tasks_dir, environment, attempts)
    # A user may have removed the folder of a trial; trials.jsonl still has the trial.
    results = [found for name in counted if (found := _read_result(folder / name, TrialResult)) is not None]
    job = _result(_read_result(folder, JobResult), results, total, finished=finished)
    for own in job.stats.evals.values():
        own.metrics = [] if mean is None else [{"mean": mean}]
        own.pass_at_k = dict(pass_at_k)
    (folder / "config.json").write_text(config.model_dump_json(indent=4), encoding="utf-8")
    (folder / "result.json").write_text(job.model_dump_json(indent=4, exclude={"trial_results"}), encoding="utf-8")


def _config(
    folder: Path, agent: str, model: str | None, tasks_dir: Path, environment: Mapping[str, object], attempts: int
) -> "JobConfig":
    from harbor.models.job.config import DatasetConfig, JobConfig
    from harbor.models.trial.config import AgentConfig, EnvironmentConfig

    # Harbor's tables show this name; of an import path it is the class.
    agent_config = AgentConfig(name=agent.rpartition(":")[2], model_name=model)
    return JobConfig(
        job_name=folder.name,
        jobs_dir=folder.parent,
        n_attempts=attempts,
        agents=[agent_config],
        datasets=[DatasetConfig(path=tasks_dir)],
        environment=EnvironmentConfig.model_validate(environment),
    )


def _result(before: "JobResult | None", results: "list[TrialResult]", total: int, *, finished: bool) -> "JobResult":
    from harbor.models.job.result import JobResult, JobStats

    now = datetime.now(UTC)
    started = min((found.started_at for found in results if found.started_at is not None), default=now)
    return JobResult(
        id=before.id if before else uuid4(),
        started_at=before.started_at if before else started,
        updated_at=now,
        finished_at=now if finished else None,
        n_total_trials=total,
        stats=JobStats.from_trial_results(results, n_total_trials=total),
    )


def _read_result[R: BaseModel](folder: Path, kind: type[R]) -> R | None:
    try:
        return kind.model_validate_json((folder / "result.json").read_bytes())
    except (OSError, ValidationError):
        return None
