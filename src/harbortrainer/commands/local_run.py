"""`harbortrainer train` on the embedded engine: create the run folder, run the warm-up, train.

The environment servers start first and import their packages during the warm-up.

An ended run is also written as a Harbor job, so `harbor view` on the folder of runs shows it. Harbor expects trials
directly in the job folder, so each kept trial gets a link there. The job's statistics cover all trials of the run. A
job that cannot be written is a warning: the run has ended all the same.
"""

import contextlib
import importlib
import shutil
import sys
import time
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from harbortrainer.config.prime_rl_run import plugin_envs, sources_of, trial_folders
from harbortrainer.config.runfile import RunConfig
from harbortrainer.engines.cleanup import clean_up_predecessor, end_sandboxes, print_lines
from harbortrainer.engines.engine_choice import require_bitsandbytes, require_extra
from harbortrainer.engines.prime_rl.checkout import apply_dotenv
from harbortrainer.errors import EXIT_INTERRUPTED
from harbortrainer.runs.disk_faults import disk_faults
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.label import run_label
from harbortrainer.runs.locks import refuse_in_use
from harbortrainer.runs.monitors import require_monitors
from harbortrainer.runs.trial_row import read_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from harbortrainer.runs.display import Display
    from harbortrainer.runs.summary import Status

MOST_LINKS = 1000
"""Most kept trials that are linked, the newest first."""


def show_as_job(config: RunConfig, run: RunFolder, *, finished: bool) -> None:
    """Write the files that make the run folder a Harbor job; nothing where no trial was kept."""
    if not run.trials.is_dir():
        return
    try:
        rows = [row for path in run.rollouts.glob("*.jsonl") for row in read_rows(path)]
        names = link_trials(run, {row.trial for row in rows})
        if names:
            rewards = [row.reward for row in rows if row.kind == "train" and row.reward is not None]
            mean = fmean(rewards) if rewards else None
            _write(config, run, names, total=len(rows), mean=mean, finished=finished)
    except OSError as error:
        print(f"warning: `harbor view` cannot show {run.path}: {error}", file=sys.stderr)


def link_trials(run: RunFolder, listed: Container[str]) -> list[str]:
    """Link the newest kept trials among `listed` into the run folder and remove other links; returns their names."""
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
    """Yield each kept trial with its modification time."""
    for path in run.trials.glob("*/result.json"):
        with contextlib.suppress(FileNotFoundError):  # an environment server may remove old trials now
            if path.parent.name in listed:
                yield path.parent.stat().st_mtime, path.parent


def _links(run: RunFolder) -> Iterator[Path]:
    inside = Path(run.trials.name)
    return (path for path in run.path.iterdir() if path.is_symlink() and path.readlink().parent == inside)


def _write(
    config: RunConfig, run: RunFolder, names: list[str], *, total: int, mean: float | None, finished: bool
) -> None:
    from harbortrainer.harbor_compat.job_folder import write_job
    from harbortrainer.sandbox.environment_types import environment_config

    env = next(iter(plugin_envs(config, str(run.config_file)).values()), None)
    if env is None or env.agent.harness is None:
        return
    write_job(
        run.path,
        tasks_dir=Path(env.taskset.tasks_dir) if env.taskset else Path(),
        agent=env.agent.harness.agent,
        model=config.model.name,
        environment=environment_config(env.agent.harness.environment_type),
        attempts=config.orchestrator.group_size,
        total=total,
        counted=names,
        mean=mean,
        pass_at_k={},
        finished=finished,
    )


def run_here(config: RunConfig, *, resume: bool, kinds: Sequence[str]) -> int:
    """Train on the embedded engine; returns 0. An interrupted run ends the process.

    Args:
        config: The run file.
        resume: Continue the run in its folder.
        kinds: Environment types whose sandboxes are ended at the end, and those of a killed start at the beginning.

    Raises:
        UserError: The config is not possible, or the run folder is in use or belongs to another run.
        RunStoppedError: The run cannot continue, for example because the disk is full.
    """
    require_extra("torch", "transformers", "peft", "fastapi", "uvicorn")
    if config.model.quantization is not None:
        require_bitsandbytes()
    require_monitors(config)
    from harbortrainer.engines.local.session import exit_now

    apply_dotenv()
    sources = sources_of(config).values()
    if config.clean and not resume and (config.run_dir / "config.toml").is_file():
        refuse_in_use(config.run_dir)
        earlier = RunFolder(config.run_dir)
        print_lines(clean_up_predecessor(earlier.path, kinds, trial_folders(sources, earlier.trials)))
        shutil.rmtree(config.run_dir)
    with disk_faults(config.run_dir.absolute()):
        run = RunFolder.create(config.output_dir, config.run.dir, config_text=config.resolved(), resume=resume)
        trials = trial_folders(sources, run.trials)
        print_lines(clean_up_predecessor(run.path, kinds, trials))
        label = run_label(run.path)  # read now: a run that does not start removes its folder

        def release(status: "Status") -> None:
            print_lines(end_sandboxes(label, kinds, trials=trials))
            if status != "interrupted":
                show_as_job(config, run, finished=status == "finished")
            run.release()

        status: Status = "stopped"
        try:
            status = train(config, run, resume=resume, kinds=kinds, release=release)
        finally:
            release(status)
    if status == "interrupted":
        exit_now(EXIT_INTERRUPTED)
    return 0


def train(
    config: RunConfig, run: RunFolder, *, resume: bool, kinds: Sequence[str], release: "Callable[[Status], object]"
) -> "Status":
    """Start or resume the run and return its status. `release` is called if the process ends without returning."""
    from harbortrainer.engines.local.session import local_run
    from harbortrainer.environment.renderers_compat import with_chat_format

    config = with_chat_format(config)
    with local_run(config, run, resume=resume, kinds=kinds) as session:
        session.before_exit = release
        if not session.complete:
            session.start_servers()
            with session.display.phase("loading torch, transformers and peft"):
                importlib.import_module("harbortrainer.engines.local.learner.learner")
            started = time.monotonic()
            try:
                make_policy(config, run, session.display)
            finally:
                session.progress.warmup_s += time.monotonic() - started
            session.train(config.model.name if config.warmup is None else str(run.model))
    return session.status


def make_policy(config: RunConfig, run: RunFolder, display: "Display") -> None:
    """Run the warm-up if the config has one that was not finished before."""
    if config.warmup is None or run.model.is_dir():
        return
    from harbortrainer.warmup.warmup import rollouts_of, warm_up

    started = time.monotonic()
    # One phase around all of it: loading the model and the real trials have none of their own.
    with display.bar("warm-up", plain=False):
        warm_up(config.warmup, run.model, rollouts=rollouts_of(config), seed=config.seed, display=display)
    display.line(f"warm-up finished in {time.monotonic() - started:.0f} s: {run.model}")
