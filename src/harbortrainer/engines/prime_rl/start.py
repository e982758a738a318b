"""One run on Prime-RL, from a checked run file to an exit code.

Contract: the file that `rl` gets is the user's own when Prime-RL can read it as it is, else a copy in today's
spelling in `<run>/configs/`, where Prime-RL allows files before a run. On every end nothing of the run is left.
"""

import os
import shutil
import sys
import tomllib
from collections.abc import Sequence
from functools import reduce
from operator import getitem
from pathlib import Path

import tomlkit

from harbortrainer.config.fates import OURS
from harbortrainer.config.overrides import Override, apply, parse
from harbortrainer.config.prime_rl_run import PrimeRun, plugin_envs, prime_run, sources_of
from harbortrainer.config.reader import RawRun
from harbortrainer.config.table import lookup, spelled_out
from harbortrainer.engines.prime_rl.attempt import Attempt, providers
from harbortrainer.engines.prime_rl.checkout import Checkout
from harbortrainer.engines.prime_rl.command import printed
from harbortrainer.engines.prime_rl.process import GRACE_S
from harbortrainer.errors import UserError
from harbortrainer.runs.ingredients import TaskOrigin, check_ingredients, ingredients
from harbortrainer.runs.run_lock import RunLock, refuse_in_use
from harbortrainer.tasks.longest_trial import longest_episode_s
from harbortrainer.tasks.played_tasks import played_tasks
from harbortrainer.tasks.task_store import fetch

LOCK = "configs/.lock"
"""Where Prime-RL does not take it for an artifact of an earlier run."""


def start(
    raw: RawRun,
    checkout: Checkout,
    overrides: Sequence[str],
    *,
    resume: bool = False,
    dry_run: bool = False,
    restarts: int = 0,
    grace_s: float = GRACE_S,
) -> int:
    """Run `rl` to its end; returns its exit code, never 0 for a run that stood still.

    Args:
        raw: The run file.
        checkout: Prime-RL.
        overrides: Words for `rl`.
        resume: Go on from the last checkpoint.
        dry_run: Let `rl` check its file alone.
        restarts: How often a run that failed or stood still goes on from its last checkpoint by itself.
        grace_s: Seconds that `rl` gets to end.

    Raises:
        UserError: Something in the file that only the embedded engine knows, a resume of a run without a name, or a
            folder that another run is writing into.
    """
    run = prime_run(raw, resume=resume, dry_run=dry_run)
    if restarts:
        need_checkpoints(raw)
    checkout.need()
    attempt = planned(run, raw, checkout, parse(overrides), resume=resume, dry_run=dry_run)
    words = [*attempt.options, *["--resume"] * resume]
    print(f"the same without the wrapper: {printed(checkout, attempt.file, words)}")
    if attempt.watched:
        print(expectation(attempt.longest_s))
    (run.run_dir / LOCK).parent.mkdir(parents=True, exist_ok=True)
    lock = RunLock(run.run_dir, LOCK)
    try:
        if not dry_run:
            write_down(run, raw.file, resume=resume)
        for left in range(restarts, -1, -1):
            code, interrupted = attempt.play(resume=resume, grace_s=grace_s)
            if code == 0 or interrupted or not left:
                break
            print(f"goes on from the last checkpoint ({left} of {restarts} restarts left)", file=sys.stderr)
            resume = True
    finally:
        lock.release()
    return code


def write_down(run: PrimeRun, file: str, *, resume: bool) -> None:
    """Leave in the run's folder what it trains on, and hold a resume to it.

    Raises:
        UserError: The policy's files or the tasks are others than when the run was started.
    """
    envs = plugin_envs(run, file)
    played = {key: played_tasks(env.taskset) for key, env in envs.items()}
    origins = {key: TaskOrigin(source=one.source, left_out=one.left_out) for key, one in played.items()}
    made_of = ingredients(str(run.model.name), {key: one.keys for key, one in played.items()}, origins)
    for line in check_ingredients(run.run_dir / LOCK.partition("/")[0], made_of, resume=resume):
        print(line)


def planned(
    run: PrimeRun, raw: RawRun, checkout: Checkout, found: Sequence[Override], *, resume: bool, dry_run: bool
) -> Attempt:
    """What every attempt has in common: the words and the file that `rl` gets, which is there then."""
    options = [word for override in found if not override.in_a_list for word in override.words]
    options += [] if raw.get("run.name") else ["--run.name", str(run.run.name)]
    options += ["--dry-run"] * dry_run
    refuse_in_use(run.run_dir, LOCK)
    if run.clean and not resume:
        clean(run.run_dir)
        options.append("--no-clean")
    watched = not dry_run and run.slurm is None
    return Attempt(
        run=run,
        checkout=checkout,
        file=prepared(raw, run.run_dir, [override for override in found if override.in_a_list]),
        options=options,
        longest_s=longest_s(run, raw.file) if watched else None,
        watched=watched,
        resumable=bool(raw.get("run.name") and raw.get("ckpt.interval")),
        kinds=providers(run, raw.file),
    )


def clean(run_dir: Path) -> None:
    """Delete an earlier run's folder, as Prime-RL would, but before our log lies in it.

    Raises:
        UserError: The folder holds the current one.
    """
    if Path.cwd().is_relative_to(run_dir.resolve()):
        raise UserError("clean would delete the current folder", where=str(run_dir), do="set [run] name")
    if run_dir.exists() and not os.environ.get("NEVER_CLEAN"):
        shutil.rmtree(run_dir)


def need_checkpoints(raw: RawRun) -> None:
    """Refuse restarts that would have nothing to go on from.

    Raises:
        UserError: The run has no name of its own, or writes no checkpoints.
    """
    where = "command line: --restarts"
    if raw.get("run.name") is None:
        raise UserError("a run goes on only under its name", where=where, do='set [run] name = "..."')
    if raw.get("ckpt.interval") is None:
        raise UserError("there are no checkpoints to go on from", where=where, do="set [ckpt] interval = ...")


def expectation(longest: float | None) -> str:
    """What the watch over progress goes by, for the user."""
    if longest is None:
        return "nothing bounds how long a trial may take: a run in which none comes back goes on until it is stopped"
    return (
        f"a trial may take {longest / 60:.0f} min with its retries; a run in which none comes back for longer is ended"
    )


def longest_s(run: PrimeRun, file: str) -> float | None:
    """The longest that an episode of any source may take, in seconds; None where nothing bounds one of them."""
    envs = plugin_envs(run, file)
    longest = 0.0
    for key, source in sources_of(run).items():
        env, limits = envs.get(f"{key}.env"), source.env.get("timeout")
        limit = limits.get("episode") if isinstance(limits, dict) else None
        episode_s = float(limit) if isinstance(limit, int | float) else None
        if env is None or env.agent.harness is None:
            bound = episode_s
        else:
            factor = env.agent.harness.timeout_multiplier
            bound = longest_episode_s(fetch(env.taskset.source).folder, multiplier=factor, episode_s=episode_s)
        if bound is None:
            return None
        longest = max(longest, bound)
    return longest


def prepared(raw: RawRun, run_dir: Path, entries: Sequence[Override] = ()) -> Path:
    """The file that `rl` gets: the user's, or a copy of it in the run's folder when Prime-RL could not read it.

    Args:
        raw: The user's file.
        run_dir: The run's folder.
        entries: Overrides of entries of lists. Prime-RL's own parser has no such thing, so they stand in the copy.
    """
    text = raw.upgraded or Path(raw.file).read_text(encoding="utf-8")
    document = tomllib.loads(text) if entries else tomlkit.parse(text)
    ours = [key for key in OURS if lookup(document, key) is not None]
    if raw.upgraded is None and not entries and not ours:
        return Path(raw.file)
    for *tables, name in (key.split(".") for key in ours):
        reduce(getitem, tables, document).pop(name)
    document = spelled_out(apply(document, entries)) if entries else document
    copy = run_dir / "configs" / "harbortrainer.toml"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(tomlkit.dumps(document), encoding="utf-8")
    return copy
