"""A training run as a job of Harbor's: `harbor view` on the folder of runs shows it, with the trials that were kept.

Harbor looks for trials right inside a job's folder, so each kept one gets a link there. Contract: the figures beside
them are the run's own, over all of its trials; an end of a run that cannot be shown so is none the less an end.
"""

import contextlib
import sys
from collections.abc import Container, Iterator
from pathlib import Path
from statistics import fmean

from harbortrainer.config.prime_rl_run import plugin_envs
from harbortrainer.config.runfile import RunConfig
from harbortrainer.runs.durable import read_lines
from harbortrainer.runs.folder import RunFolder

MOST_LINKS = 1000
"""The newest of the trials that were kept."""


def show_as_job(config: RunConfig, run: RunFolder, *, finished: bool) -> None:
    """Write what makes the run's folder a job of Harbor's; nothing where no trial was kept."""
    if not run.trials.is_dir():
        return
    try:
        rows = [row for path in run.rollouts.glob("*.jsonl") for row in read_lines(path)]
        names = link_trials(run, {row["trial"] for row in rows})
        if names:
            rewards = [row["reward"] for row in rows if row["kind"] == "train" and row["reward"] is not None]
            mean = fmean(rewards) if rewards else None
            _write(config, run, names, total=len(rows), mean=mean, finished=finished)
    except OSError as error:
        print(f"`harbor view` will not show {run.path}: {error}", file=sys.stderr)


def link_trials(run: RunFolder, listed: Container[str]) -> list[str]:
    """Link the newest kept trials of those that are listed into the run's folder; their names. Other links go."""
    newest = [path for _, path in sorted(_kept(run, listed))][-MOST_LINKS:]
    wanted = {path.name for path in newest if not (run.path / path.name).exists()}
    kept = {path.name for path in newest}
    for link in _links(run):
        if link.name not in kept:
            link.unlink()
    for name in wanted:
        (run.path / name).symlink_to(Path(run.trials.name) / name, target_is_directory=True)
    return [path.name for path in newest]


def _kept(run: RunFolder, listed: Container[str]) -> Iterator[tuple[float, Path]]:
    """Each with the time of its last change."""
    for path in run.trials.glob("*/result.json"):
        with contextlib.suppress(FileNotFoundError):  # an environment server may be removing old ones
            if path.parent.name in listed:
                yield path.parent.stat().st_mtime, path.parent


def _links(run: RunFolder) -> Iterator[Path]:
    inside = Path(run.trials.name)
    return (path for path in run.path.iterdir() if path.is_symlink() and path.readlink().parent == inside)


def _write(
    config: RunConfig, run: RunFolder, names: list[str], *, total: int, mean: float | None, finished: bool
) -> None:
    from harbortrainer.harbor_side.job_folder import write_job
    from harbortrainer.sandbox.environment_types import environment_config

    played = next(iter(plugin_envs(config, str(run.config_file)).values()), None)
    if played is None or played.agent.harness is None:
        return
    write_job(
        run.path,
        tasks_dir=Path(played.taskset.tasks_dir) if played.taskset else Path(),
        agent=played.agent.harness.agent,
        model=config.model.name,
        environment=environment_config(played.agent.harness.environment_type),
        attempts=config.orchestrator.group_size,
        total=total,
        counted=names,
        mean=mean,
        pass_at_k={},
        finished=finished,
    )
