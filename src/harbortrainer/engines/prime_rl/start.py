"""One run on Prime-RL, from a checked run file to an exit code; each attempt runs `rl` once.

Contract: `rl` gets the user's own file if Prime-RL can read it. Otherwise it gets a copy with current key names in
`<run>/configs/`, where Prime-RL allows files before a run. However an attempt ends, its processes and sandboxes are
ended, and a failure is reported.
"""

import os
import shutil
import sys
import tomllib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path

import tomlkit

from harbortrainer.config.overrides import Override, apply, parse, renamed
from harbortrainer.config.prime_rl_releases import to_newer
from harbortrainer.config.prime_rl_run import PrimeRun, plugin_envs, prime_run, sources_of, trial_folders
from harbortrainer.config.prime_rl_schema import OWN_KEYS
from harbortrainer.config.reader import RawRun
from harbortrainer.config.runfile import RunConfig
from harbortrainer.config.table import TomlTable, lookup, nulls_as_text
from harbortrainer.engines.cleanup import clean_up, clean_up_predecessor, print_lines
from harbortrainer.engines.prime_rl.checkout import Checkout, printed_command, rl_command, rl_environment
from harbortrainer.engines.prime_rl.failure_report import child_that_failed, report, stall_report
from harbortrainer.engines.prime_rl.model_servers import model_servers
from harbortrainer.engines.prime_rl.process import GRACE_S, Child
from harbortrainer.engines.prime_rl.process_monitor import ProcessMonitor
from harbortrainer.engines.prime_rl.resume import Checkpoints, resume_options
from harbortrainer.environment.request_check import RUN_KEY_FILE, RunKey
from harbortrainer.errors import EXIT_STOPPED, UserError
from harbortrainer.runs.comparable_evaluations import prime_rl_result_lines
from harbortrainer.runs.episode_limit import episodes_limited
from harbortrainer.runs.label import LABEL_FILE, run_label, this_owner
from harbortrainer.runs.locks import RunLock, refuse_in_use
from harbortrainer.runs.log_files import old_parts_freed
from harbortrainer.runs.provenance import TaskOrigin, check_provenance, collect_provenance
from harbortrainer.tasks.task_limits import max_episode_s
from harbortrainer.tasks.task_selection import select_tasks
from harbortrainer.tasks.task_store import fetch

LOG = "job_rl.log"
"""Name of the log in the run's folder; the pinned commit does not treat it as an artifact of an earlier run."""


@dataclass(frozen=True)
class Attempt:
    """Settings that all attempts of a run share.

    Args:
        run: The run as Prime-RL reads it.
        checkout: Prime-RL.
        file: The run file that `rl` gets.
        options: Further arguments of `rl`.
        episode_limit_s: Maximum seconds of an episode, None if there is no limit.
        watched: Whether its processes are on this machine.
        resumable: Whether it writes checkpoints.
        checkpoints: The checkpoints to choose from for a resume; None if the run file or a SLURM job chooses.
        kinds: Environment types whose sandboxes are ended at the end.
    """

    run: PrimeRun
    checkout: Checkout
    file: Path
    options: Sequence[str]
    episode_limit_s: float | None
    watched: bool
    resumable: bool
    checkpoints: Checkpoints | None
    kinds: Sequence[str]

    @property
    def log(self) -> Path:
        """The log; newer releases accept a new run's folder with `configs/` only."""
        return self.run.run_dir / ("" if self.checkout.release == "pin" else "configs") / LOG

    def label(self) -> str:
        """Return the run's label; for a SLURM job, which nobody here sees end, one that no other start has."""
        if self.watched:
            return run_label(self.run.run_dir, LABEL)
        return f"{self.run.run.name}-{uuid.uuid4().hex[:8]}"

    def resume_options(self, *, restart: bool = False) -> list[str]:
        """Return the options of `rl` that resume the run. Raises `UserError` if no checkpoint is complete."""
        return ["--resume"] if self.checkpoints is None else resume_options(self.checkpoints, restart=restart)

    def run_rl(self, resume: Sequence[str], *, grace_s: float) -> tuple[int, bool]:
        """Run `rl` to its end, with these options of a resume.

        Returns:
            Its exit code, never 0 after a stall, and whether a restart may help.
        """
        run_dir = self.run.run_dir
        label, owner = self.label(), this_owner() if self.watched else ""
        folder = run_dir.resolve()
        variables = rl_environment(
            self.checkout, run=label, owner=owner, trials=folder / "trials", key_file=folder / KEY_FILE
        )
        words = rl_command(self.checkout, self.file, [*self.options, *resume])
        trials = trial_folders(sources_of(self.run).values(), folder / "trials")
        check = ProcessMonitor(label, run_dir, self.episode_limit_s, trials).check if self.watched else None
        child = Child(words, variables, self.log, grace_s=grace_s, check_stall=check)
        try:
            with old_parts_freed(run_dir / "logs"), episodes_limited(run_dir, self.run.transcripts_mb):
                code = child.run()
        finally:
            print_lines(clean_up(label, self.kinds, [self.checkout.python], trials=trials))
        if child.stall is not None:
            code = code or EXIT_STOPPED
        if code and (child.stall is not None or not child.interrupted):
            print(self._failure(child, code), file=sys.stderr)
        return code, not child.interrupted and (child.stall is None or child.stall.restart_helps)

    def _failure(self, child: Child, code: int) -> str:
        """Return the failure report; a failed child of `rl` takes precedence over a stall, which it may have caused."""
        if child.stall is None or child_that_failed(child.tail) is not None:
            return report(self.run.run_dir, child.tail, self.log, code)
        return stall_report(child.stall, self.log, resumable=self.resumable)


def environment_types(run: RunConfig | PrimeRun, file: str) -> list[str]:
    """Return the environment types of a run."""
    harnesses = [env.agent.harness for env in plugin_envs(run, file).values()]
    return list(dict.fromkeys(harness.environment_type for harness in harnesses if harness is not None))


LOCK, LABEL, KEY_FILE = "configs/.lock", f"configs/{LABEL_FILE}", f"configs/{RUN_KEY_FILE}"
"""Paths of the lock, the run's label and its key; Prime-RL does not treat them as artifacts of an earlier run."""


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
    """Run `rl` to its end, and return its exit code; never 0 after a stall.

    Args:
        raw: The run file.
        checkout: Prime-RL.
        overrides: Command line overrides for `rl`.
        resume: Continue from the last complete checkpoint.
        dry_run: Only let `rl` check its file.
        restarts: Maximum automatic restarts from the last complete checkpoint after a failure or a stall.
        grace_s: Seconds that `rl` has to end after a signal.

    Raises:
        UserError: The file has keys of the embedded engine only, a run without a name is resumed, or another run
            writes into the folder. No checkpoint to resume from is complete.
    """
    run = prime_run(raw, release=checkout.release, resume=resume, dry_run=dry_run)
    resume = resume or run.resume is not None
    if restarts:
        require_checkpoints(raw)
    checkout.require_installed()
    attempt = plan_attempt(run, raw, checkout, parse(overrides), resume=resume, dry_run=dry_run)
    options = attempt.resume_options() if resume and not dry_run else []
    print(f"the same without the wrapper: {printed_command(checkout, attempt.file, [*attempt.options, *options])}")
    if attempt.watched:
        print(watch_message(attempt.episode_limit_s))
    (run.run_dir / LOCK).parent.mkdir(parents=True, exist_ok=True)
    lock = RunLock(run.run_dir, LOCK)
    RunKey.create(run.run_dir / KEY_FILE, model_servers(raw))
    try:
        if attempt.watched:
            end_predecessor(run, raw.file, checkout)
        if not dry_run:
            record_provenance(run, raw.file, resume=resume)
        if attempt.watched and run.resume:
            checkpoints = Checkpoints.of(run)
            if (step := checkpoints.named_step(run.resume)) is not None:
                checkpoints.set_aside_after(step)
        for left in range(restarts, -1, -1):
            code, restart_helps = attempt.run_rl(options, grace_s=grace_s)
            if code == 0 or not restart_helps or not left:
                break
            print(f"restarting ({left} of {restarts} restarts left)", file=sys.stderr)
            options = attempt.resume_options(restart=True)
    finally:
        lock.release()
    if code == 0 and attempt.watched:
        for line in prime_rl_result_lines(run.run_dir):
            print(line)
    return code


def record_provenance(run: PrimeRun, file: str, *, resume: bool) -> None:
    """Record the model and tasks in the run's folder; a resume checks them.

    Raises:
        UserError: The policy's files or the tasks have changed since the run was started.
    """
    envs = plugin_envs(run, file)
    selections = {key: select_tasks(env.taskset) for key, env in envs.items()}
    origins = {key: TaskOrigin(source=one.source, left_out=one.left_out) for key, one in selections.items()}
    made_of = collect_provenance(str(run.model.name), {key: one.keys for key, one in selections.items()}, origins)
    for line in check_provenance(run.run_dir / LOCK.partition("/")[0], made_of, resume=resume):
        print(line)


def plan_attempt(
    run: PrimeRun, raw: RawRun, checkout: Checkout, found: Sequence[Override], *, resume: bool, dry_run: bool
) -> Attempt:
    """Prepare the shared settings of all attempts, and write the file for `rl` if it needs one."""
    translated = checkout.release != raw.release and not raw.assumed
    found = [renamed(override, checkout.release) for override in found if override.key not in OWN_KEYS]
    # All or none go into a copy of the file: a later one decides.
    in_copy = found if any(override.for_a_copy for override in found) else []
    options = [] if translated or in_copy else [word for override in found for word in override.words]
    options += [] if raw.get("run.name") else ["--run.name", str(run.run.name)]
    options += dry_run_options(run, resume=resume) if dry_run else []
    refuse_in_use(run.run_dir, LOCK)
    if run.clean and not resume:
        end_predecessor(run, raw.file, checkout)
        delete_earlier_run(run.run_dir, Checkpoints.of(run).trainer)
        options.append("--no-clean")
    watched = not dry_run and run.slurm is None
    return Attempt(
        run=run,
        checkout=checkout,
        file=translate_file(raw, run.run_dir) if translated else prepare_file(raw, run.run_dir, in_copy),
        options=options,
        episode_limit_s=episode_limit_s(run, raw.file) if watched else None,
        watched=watched,
        resumable=bool(raw.get("run.name") and raw.get("ckpt.interval")),
        checkpoints=Checkpoints.of(run) if watched and not run.resume else None,
        kinds=environment_types(run, raw.file),
    )


def dry_run_options(run: PrimeRun, *, resume: bool) -> list[str]:
    """Return the options of a dry run.

    In the folder of a resumed run, `rl` would delete the steps after the checkpoint. So a dry run of a resume checks a
    new run in another folder.
    """
    if not resume:
        return ["--dry-run"]
    folder = str(run.run_dir / "configs" / "dry_run")
    checkpoints = ["--ckpt.output-dir", folder] if run.ckpt and run.ckpt.output_dir else []
    return ["--dry-run", "--no-resume", "--output-dir", folder, *checkpoints]


def end_predecessor(run: RunConfig | PrimeRun, file: str, checkout: Checkout) -> None:
    """End what an earlier launcher of this run left, if it was killed."""
    kinds, trials = environment_types(run, file), trial_folders(sources_of(run).values(), run.run_dir / "trials")
    print_lines(clean_up_predecessor(run.run_dir, kinds, trials, [checkout.python], label_file=LABEL))


def delete_earlier_run(run_dir: Path, checkpoints: Path) -> None:
    """Delete an earlier run's folder and checkpoints, as Prime-RL would, but before our log is in it.

    Raises:
        UserError: One of the folders holds the current one.
    """
    for folder in (run_dir, checkpoints):
        if Path.cwd().is_relative_to(folder.resolve()):
            raise UserError("clean would delete the current folder", where=str(folder), do="set [run] name")
    for folder in (run_dir, checkpoints):
        if folder.exists() and not os.environ.get("NEVER_CLEAN"):
            shutil.rmtree(folder)


def require_checkpoints(raw: RawRun) -> None:
    """Check that a run can be restarted from a checkpoint.

    Raises:
        UserError: The run has no name, writes no checkpoints, or always starts at a checkpoint of its own.
    """
    where = "command line: --restarts"
    if raw.get("run.name") is None:
        raise UserError("only a run with a name can continue", where=where, do='set [run] name = "..."')
    if raw.get("ckpt.interval") is None:
        raise UserError("the run writes no checkpoints to continue from", where=where, do="set [ckpt] interval = ...")
    for key in ("resume.step", "resume.dir"):
        if raw.get(key) is not None:
            what = f"each restart would go back to the checkpoint of {key}"
            raise UserError(what, where=where, do=f"remove {key} or --restarts")


def watch_message(episode_limit_s: float | None) -> str:
    """Return the message about the stall detection, for the user."""
    if episode_limit_s is None:
        return "trials have no time limit: a run in which no trial returns continues until you stop it"
    minutes = f"{episode_limit_s / 60:.0f} min"
    return f"a trial may take {minutes} with retries; a run in which no trial returns for longer is ended"


def episode_limit_s(run: PrimeRun, file: str) -> float | None:
    """Return the maximum seconds of an episode of any source; None if one of them has no limit."""
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
            bound = max_episode_s(fetch(env.taskset.source).folder, multiplier=factor, episode_s=episode_s)
        if bound is None:
            return None
        longest = max(longest, bound)
    return longest


def translate_file(raw: RawRun, run_dir: Path) -> Path:
    """Write the file for `rl` with the keys of the other release, overrides included, and return its path."""
    data, notes = (raw.data, []) if raw.release != "pin" else to_newer(raw.data, raw.file)
    for note in notes:
        print(note)
    return write_copy(data, run_dir)


def prepare_file(raw: RawRun, run_dir: Path, overrides: Sequence[Override] = ()) -> Path:
    """Return the file for `rl`: the user's, or a copy in the run's folder if Prime-RL cannot read it.

    Args:
        raw: The user's file.
        run_dir: The run's folder.
        overrides: Overrides that Prime-RL's parser does not support; the copy has them.
    """
    written = raw.upgraded or Path(raw.file).read_text(encoding="utf-8")
    text = written.removeprefix("\ufeff")  # the mark of some editors, which Prime-RL refuses
    document = tomllib.loads(text) if overrides else tomlkit.parse(text)
    ours = any(lookup(document, key) is not None for key in OWN_KEYS)
    if raw.upgraded is None and not overrides and not ours and text == written:
        return Path(raw.file)
    return write_copy(apply(document, overrides) if overrides else document, run_dir)


def write_copy(document: TomlTable, run_dir: Path) -> Path:
    """Write tables to a file for `rl` in the run's folder, without our own keys."""
    document = document if isinstance(document, tomlkit.TOMLDocument) else nulls_as_text(document)
    for *tables, name in (key.split(".") for key in OWN_KEYS if lookup(document, key) is not None):
        reduce(getitem, tables, document).pop(name)
    copy = run_dir / "configs" / "harbortrainer.toml"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(tomlkit.dumps(document), encoding="utf-8")
    return copy
