"""One run on Prime-RL, from a checked run file to an exit code.

Contract: the file that `rl` gets is the user's own when Prime-RL can read it as it is, else a copy in today's
spelling in `<run>/configs/`, where Prime-RL allows files before a run. On every end nothing of the run is left.
"""

import os
import shutil
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from harbortrainer.config.document import Document
from harbortrainer.config.keys import OURS
from harbortrainer.config.overrides import parse
from harbortrainer.config.reader import RawRun
from harbortrainer.engines.prime_rl.cleanup import clean_up
from harbortrainer.engines.prime_rl.command import build, environment, printed
from harbortrainer.engines.prime_rl.place import Place
from harbortrainer.engines.prime_rl.process import GRACE_S, Child
from harbortrainer.engines.prime_rl.remote import end_remote
from harbortrainer.engines.prime_rl.report import report
from harbortrainer.errors import UserError

LOG = "job_rl.log"
"""Name of the log in the run's folder; one that Prime-RL does not take for an artifact of an earlier run."""


def start(
    raw: RawRun,
    place: Place,
    overrides: Sequence[str],
    *,
    resume: bool = False,
    dry_run: bool = False,
    grace_s: float = GRACE_S,
) -> int:
    """Run `rl` to its end; returns its exit code.

    Raises:
        UserError: Something in the file that only the embedded engine knows, or a resume of a run without a name.
    """
    check(raw, overrides, resume=resume, dry_run=dry_run)
    place.need()
    name = run_name(raw)
    run_dir = Path(raw.get("output_dir", "outputs")) / raw.get("run.dir", name)
    options = [*overrides, *([] if raw.get("run.name") else ["--run.name", name])]
    options += ["--resume"] * resume + ["--dry-run"] * dry_run
    if raw.get("clean") and not resume:
        clean(run_dir)
        options.append("--no-clean")
    file = prepared(raw, run_dir)
    print(f"the same without the wrapper: {printed(place, file, options)}")
    identity = f"{name}-{uuid.uuid4().hex[:8]}"
    variables = environment(place, run=identity, trials=run_dir.resolve() / "trials")
    child = Child(build(place, file, options), variables, run_dir / LOG, grace_s=grace_s)
    try:
        code = child.run()
    finally:
        left = clean_up(identity)
        told = [str(left), *end_remote(identity, remote_types(raw), place.environment / "bin" / "python")]
        print(*filter(None, told), sep="\n", end="\n" * any(told), file=sys.stderr)
    if code and not child.interrupted:
        print(report(run_dir, child.tail, run_dir / LOG, code), file=sys.stderr)
    return code


def check(raw: RawRun, overrides: Sequence[str], *, resume: bool, dry_run: bool) -> None:
    """Refuse what Prime-RL cannot do with this file.

    Raises:
        UserError: See `start`.
    """
    for key, _ in parse(overrides):
        if key.split(".")[0] in OURS:
            raise UserError("is for the embedded engine", where=f"command line: --{key}", do="remove it")
    if dry_run and raw.get("clean"):
        do = "drop clean, or --dry-run"
        raise UserError("clean would delete the run's folder in a dry run", where=f"{raw.file}: clean", do=do)
    if raw.get("warmup") is not None:
        do = "run `harbortrainer warmup` first, name its folder in [model] name, and remove [warmup]"
        raise UserError("[warmup] is for the embedded engine", where=f"{raw.file}: warmup", do=do)
    if resume and raw.get("run.name") is None:
        do = 'set [run] name = "..." or pass --run.name'
        raise UserError("a resume needs to know which run", where=f"{raw.file}: run.name", do=do)


def clean(run_dir: Path) -> None:
    """Delete an earlier run's folder, as Prime-RL would, but before our log lies in it.

    Raises:
        UserError: The folder holds the current one.
    """
    if Path.cwd().is_relative_to(run_dir.resolve()):
        raise UserError("clean would delete the current folder", where=str(run_dir), do="set [run] name")
    if run_dir.exists() and not os.environ.get("NEVER_CLEAN"):
        shutil.rmtree(run_dir)


def run_name(raw: RawRun) -> str:
    """The run's name; made as Prime-RL makes it when the file gives none."""
    if raw.get("run.name") is not None:
        return str(raw.get("run.name"))
    sources = raw.get("orchestrator.train.source", [])
    names = [source.get("name") or source.get("env", {}).get("taskset", {}).get("id", "") for source in sources]
    model = str(raw.get("model.name", "Qwen/Qwen3-0.6B")).rstrip("/").split("/")[-1]
    return f"{'+'.join(dict.fromkeys(names)) or 'no-env'}--{model}--{uuid.uuid4().hex[:8]}".lower()


def remote_types(raw: RawRun) -> list[str]:
    """Where the sandboxes of a run file's sources run, other than on this machine."""
    sources = [*raw.get("orchestrator.train.source", []), *raw.get("orchestrator.eval.source", [])]
    agents = [source.get("env", {}).get("agent") or {} for source in sources]
    kinds = [(agent.get("harness") or {}).get("environment_type", "docker") for agent in agents]
    return [kind for kind in dict.fromkeys(kinds) if kind not in ("local", "docker") and ":" not in kind]


def prepared(raw: RawRun, run_dir: Path) -> Path:
    """The file that `rl` gets: the user's, or a copy of it in the run's folder when Prime-RL could not read it."""
    text = Path(raw.file).read_text(encoding="utf-8")
    document = Document(raw.upgraded or text)
    document.pop("seed")
    if document.text == text:
        return Path(raw.file)
    copy = run_dir / "configs" / "harbortrainer.toml"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(document.text, encoding="utf-8")
    return copy
