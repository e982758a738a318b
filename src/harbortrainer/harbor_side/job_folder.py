"""The files that make a folder of trials a job of Harbor's, so that `harbor view` and its other tools read it.

Written with Harbor's own classes, which differ between its releases; the trials' folders are Harbor's already. What
counts, the mean and pass@k, is given: Harbor's own would take a trial without a reward for 0.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from pydantic import ValidationError

from harbortrainer.couplings import Couplings
from harbortrainer.harbor_side import WRITTEN_FOR, keep_litellm_offline

if TYPE_CHECKING:
    from harbor.models.job.config import JobConfig
    from harbor.models.job.result import JobResult
    from harbor.models.trial.result import TrialResult

JOBS = Couplings(
    library="harbor",
    written_for=WRITTEN_FOR,
    used_by="harbortrainer.harbor_side.job_folder",
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
    """Write `config.json` and `result.json` of a job.

    Args:
        folder: Of the job; the trials' folders are in it.
        tasks_dir: Where its tasks are.
        agent: Harbor's name for the agent, or `module:Class`.
        model: The model's name; None for an agent without one.
        environment: Fields of Harbor's EnvironmentConfig.
        attempts: At each task.
        total: Trials that the job has when it is done.
        counted: Names of the trials that are in its figures.
        mean: Mean reward.
        pass_at_k: By k.
        finished: Whether every trial was played.
    """
    keep_litellm_offline()
    JOBS.check()
    config = _config(folder, agent, model, tasks_dir, environment, attempts)
    results = [found for name in counted if (found := _trial(folder / name)) is not None]
    job = _result(_before(folder), results, total, finished=finished)
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

    # A job is called by its agent's name; where that is a class, the name is what Harbor's tables show.
    player = AgentConfig(name=agent.rpartition(":")[2], model_name=model)
    return JobConfig(
        job_name=folder.name,
        jobs_dir=folder.parent,
        n_attempts=attempts,
        agents=[player],
        datasets=[DatasetConfig(path=tasks_dir)],
        environment=EnvironmentConfig.model_validate(environment),
    )


def _result(before: "JobResult | None", results: "list[TrialResult]", total: int, *, finished: bool) -> "JobResult":
    from harbor.models.job.result import JobResult, JobStats

    now = datetime.now(UTC)
    begun = min((found.started_at for found in results if found.started_at is not None), default=now)
    return JobResult(
        id=before.id if before else uuid4(),
        started_at=before.started_at if before else begun,
        updated_at=now,
        finished_at=now if finished else None,
        n_total_trials=total,
        stats=JobStats.from_trial_results(results, n_total_trials=total),
    )


def _trial(folder: Path) -> "TrialResult | None":
    from harbor.models.trial.result import TrialResult

    try:
        return TrialResult.model_validate_json((folder / "result.json").read_bytes())
    except (OSError, ValidationError):
        return None  # its line is in trials.jsonl; a user may have removed the folder


def _before(folder: Path) -> "JobResult | None":
    from harbor.models.job.result import JobResult

    try:
        return JobResult.model_validate_json((folder / "result.json").read_bytes())
    except (OSError, ValidationError):
        return None
