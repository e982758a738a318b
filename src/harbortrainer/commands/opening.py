"""The first steps of a command on a run file: choose the engine, read the file as that engine does, print its notes."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager

from harbortrainer.config.plugin import missing_folders
from harbortrainer.config.prime_rl_key_names import Release
from harbortrainer.config.prime_rl_run import plugin_envs, prime_run
from harbortrainer.config.reader import RawRun, from_raw
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.doctor.run_file_checks import NO_GROUP
from harbortrainer.engines.engine_choice import choose, find_gpus
from harbortrainer.engines.prime_rl.checkout import find
from harbortrainer.errors import UserError, joined


def open_run(raw: RawRun | None, *, engine: str, resume: bool = False, dry_run: bool = False) -> LaunchPlan:
    """Read the run, choose its engine and inspect this machine.

    Args:
        raw: The run file; None to check only the machine.
        engine: "auto", "prime-rl" or "local".
        resume: Continue an earlier run.
        dry_run: The run will not be started.

    Raises:
        UserError: There is no such engine, the engine refuses the file, or a run without a name is resumed.
    """
    checkout, gpus = find(), find_gpus()
    has_table = {table: raw is not None and raw.get(table) is not None for table in ("warmup", "slurm")}
    choice = choose(engine, checkout, gpus, warmup=has_table["warmup"], cluster=has_table["slurm"])
    print(f"engine: {choice.engine} ({choice.reason})")
    if raw is None:
        return LaunchPlan(choice=choice, checkout=checkout, gpus=gpus)
    with also_reporting(mistakes_of_values(raw)):
        if choice.engine == "prime-rl":
            run = prime_run(raw, release=checkout.release, resume=resume, dry_run=dry_run)
            notes = [*raw.notes, *assumed_note(raw, checkout.release)]
        else:
            if resume and raw.get("run.name") is None and raw.get("run.dir") is None:
                do = 'set [run] name = "..." or pass --run.name'
                raise UserError("--resume needs the name of the run", where=f"{raw.file}: run.name", do=do)
            run = from_raw(raw)
            notes = run.notes
    envs = plugin_envs(run, raw.file)
    for note in notes:
        print(note)
    return LaunchPlan(
        choice=choice,
        checkout=checkout,
        gpus=gpus,
        file=raw.file,
        release=raw.release,
        run=run,
        envs=envs,
        resume=resume,
        overrides=raw.overrides,
    )


def assumed_note(raw: RawRun, release: Release) -> list[str]:
    """Return the message that a file without a key of one release is read as the newer checkout reads it."""
    if not raw.assumed or release == "pin":
        return []
    return [f"no key of {raw.file} tells its release: Prime-RL {release} reads it, with its own defaults"]


@contextmanager
def also_reporting(others: Iterable[UserError]) -> Generator[None]:
    """Context manager: an error of the block is raised together with the other mistakes."""
    try:
        yield
    except UserError as error:
        raise joined([error, *others]) or error from error.__cause__


def mistakes_of_values(raw: RawRun) -> Iterator[UserError]:
    """Yield the mistakes of a run file that the doctor reports once the file is valid."""
    yield from missing_folders(raw.data, raw.file)
    if raw.get("orchestrator.group_size") == 1:
        what, do = NO_GROUP
        yield UserError(what, where=f"{raw.file}: orchestrator.group_size", do=do)
