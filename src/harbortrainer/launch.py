"""What each command does, between the command line and the parts that do the work.

Contract: nothing is written before everything was checked. Functions return exit codes; mistakes are `UserError`.
"""

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from harbortrainer.config import sources
from harbortrainer.config.explain import explain
from harbortrainer.config.overrides import apply, parse
from harbortrainer.config.preflight import doctor
from harbortrainer.config.preflight.facts import Facts
from harbortrainer.config.preflight.finding import Finding, Level
from harbortrainer.config.reader import RawRun, check_known, read
from harbortrainer.config.runfile import RunConfig, from_raw
from harbortrainer.engines.choice import Choice, choose, find_gpus
from harbortrainer.engines.prime_rl import place as prime_rl
from harbortrainer.engines.prime_rl.cleanup import end_containers
from harbortrainer.engines.prime_rl.command import dotenv
from harbortrainer.engines.prime_rl.start import check as check_for_prime_rl
from harbortrainer.engines.prime_rl.start import start
from harbortrainer.errors import EXIT_USER_ERROR, UserError
from harbortrainer.warmup.config import WarmupConfig

EXIT_INTERRUPTED = 130


def launch(file: Path, overrides: Sequence[str], *, engine: str, resume: bool, dry_run: bool) -> int:
    """Check a run, choose its engine, start it and wait for its end."""
    raw = read(file, overrides)
    facts = look(raw, engine)
    print(f"engine: {facts.choice.engine} ({facts.choice.why})")
    config, notes = checked(raw, facts.choice, overrides, resume=resume, dry_run=dry_run)
    for note in notes:
        print(note)
    findings = list(doctor.examine(facts))
    if dry_run:
        doctor.show(findings)
        return rehearse(raw, facts, overrides, findings)
    doctor.warn(findings)
    doctor.stop_on_red(findings)
    if config is None:
        return start(raw, facts.place, overrides, resume=resume)
    return run_here(config, resume=resume, docker="docker" in facts.environment_types)


def rehearse(raw: RawRun, facts: Facts, overrides: Sequence[str], findings: list[Finding]) -> int:
    """A dry run: Prime-RL checks its own file; a red finding is the exit code, but stops nothing."""
    code = 0
    if facts.prime_rl:
        code = start(raw, facts.place, overrides, dry_run=True)
    doctor.stop_on_red(findings)
    if code == 0:
        print(f"{raw.file}: fine; nothing was started")
    return code


def look(raw: RawRun | None, engine: str) -> Facts:
    """The run, the engine for it, and this machine."""
    place, gpus = prime_rl.find(), find_gpus()
    has = {table: raw is not None and raw.get(table) is not None for table in ("warmup", "slurm")}
    return Facts(raw, choose(engine, place, gpus, warmup=has["warmup"], cluster=has["slurm"]), place, gpus)


def checked(
    raw: RawRun, choice: Choice, overrides: Sequence[str], *, resume: bool = False, dry_run: bool = False
) -> tuple[RunConfig | None, tuple[str, ...]]:
    """The run as the engine sees it (none for Prime-RL, which reads its file itself), and what to tell the user."""
    if choice.engine == "prime-rl":
        check_known(raw.data, raw.file)
        check_for_prime_rl(raw, overrides, resume=resume, dry_run=dry_run)
        config, notes = None, raw.notes
    else:
        config = from_raw(raw)
        notes = config.notes
    sources.check(raw)
    return config, notes


def run_here(config: RunConfig, *, resume: bool, docker: bool) -> int:
    """Train on the embedded engine; with Docker, no container of the run is left."""
    _need_extra("torch", "transformers", "peft", "fastapi", "uvicorn")
    from harbortrainer.engines.local.loop import train
    from harbortrainer.runs.folder import RunFolder
    from harbortrainer.runs.label import run_label

    os.environ.update({key: value for key, value in dotenv().items() if key not in os.environ})
    if config.clean and not resume and (config.run_dir / "config.toml").is_file():
        shutil.rmtree(config.run_dir)
    run = RunFolder.create(config.output_dir, config.run.dir, config_text=config.resolved(), resume=resume)
    try:
        summary = train(config, run, resume=resume)
    finally:
        if docker:
            end_containers(run_label(run.path))
    return EXIT_INTERRUPTED if summary.status == "interrupted" else 0


def diagnose(file: Path | None, overrides: Sequence[str], *, engine: str) -> int:
    """Print the checks of this machine, for a run file when there is one; 2 when one is red."""
    raw = None if file is None else read(file, overrides)
    facts = look(raw, engine)
    print(f"engine: {facts.choice.engine} ({facts.choice.why})")
    if raw is not None:
        _, notes = checked(raw, facts.choice, overrides)
        print(*notes, sep="\n", end="\n" if notes else "")
    findings = list(doctor.examine(facts))
    doctor.show(findings)
    return EXIT_USER_ERROR if any(finding.level is Level.RED for finding in findings) else 0


def warm_up(file: Path | None, words: Sequence[str], out: Path, *, model: str | None, tasks: Path | None) -> Path:
    """Make the policy that `[warmup]` describes, or one from a model and tasks; returns its folder."""
    config, seed = _warmup_of(file, words) if file else _warmup_from_words(words, model, tasks)
    _need_extra("torch", "transformers", "peft")
    from harbortrainer.warmup import warm_up as make

    return make(config, out, seed=seed)


def _warmup_of(file: Path, words: Sequence[str]) -> tuple[WarmupConfig, int]:
    raw = read(file, words)
    config = from_raw(raw)
    sources.check(raw)
    if config.warmup is None:
        raise UserError("no [warmup] in this file", where=str(file), do="add one, or see configs/quickstart.toml")
    return config.warmup, config.seed


def _warmup_from_words(words: Sequence[str], model: str | None, tasks: Path | None) -> tuple[WarmupConfig, int]:
    given = apply({"warmup": {"model": model, "tasks": tasks}}, parse(words))
    if model is None or tasks is None:
        raise UserError(
            "nothing to learn from", where="harbortrainer warmup", do="give --config, or --model and --tasks"
        )
    try:
        return WarmupConfig.model_validate(given["warmup"]), int(given.get("seed", 0))
    except ValidationError as error:
        raise explain(error, "command line", prefix="--warmup") from None


def serve_model(model: str, *, port: int, max_model_len: int, seed: int) -> int:
    """Serve a model with the embedded sampler until Ctrl-C."""
    _need_extra("torch", "transformers", "fastapi", "uvicorn")
    from harbortrainer.engines.local.sampler.serve import serve

    return serve(model, port=port, max_model_len=max_model_len, seed=seed)


def check_tasks(folder: Path, *, environment: str, parallel: int) -> int:
    """Run each task with the oracle and with an agent that does nothing; 1 when a task is not fit to train on."""
    from harbortrainer.tasks.check import Verdict
    from harbortrainer.tasks.check import check_tasks as check
    from harbortrainer.tasks.checked import remember
    from harbortrainer.tasks.source import load_folder

    found = load_folder(folder)

    def tell(verdict: Verdict) -> None:
        print(f"{'ok ' if not verdict.problem else 'BAD'} {verdict.task}  {verdict.problem}".rstrip(), flush=True)

    verdicts = asyncio.run(check(found, environment_type=environment, concurrency=parallel, on_verdict=tell))
    good = {verdict.task for verdict in verdicts if not verdict.problem}
    remember([task for task in found if task.name in good])
    print(f"{len(good)} of {len(verdicts)} tasks are fit to train on")
    return 0 if len(good) == len(verdicts) else 1


def _need_extra(*modules: str) -> None:
    """The embedded engine's packages are an extra; the plugin installs without them.

    Raises:
        UserError: One is missing.
    """
    from importlib.util import find_spec

    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        do = "run `uv sync --extra local`, or `pip install 'harbortrainer[local]'`"
        raise UserError(f"not installed: {', '.join(missing)}", where="the embedded engine", do=do)
