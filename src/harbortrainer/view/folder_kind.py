"""Which kind of folder it is that somebody wants to look at."""

from pathlib import Path

from harbortrainer.errors import UserError
from harbortrainer.view.embedded_folder import EmbeddedFolder
from harbortrainer.view.evaluation_folder import EvaluationFolder
from harbortrainer.view.index_queries import IndexedRun
from harbortrainer.view.prime_rl_folder import PrimeRLFolder, is_prime_rl
from harbortrainer.view.run_kind import RunKind, need_folder
from harbortrainer.view.trial_store import TrialStore


def open_store(folder: Path) -> TrialStore:
    """A folder, read.

    Raises:
        UserError: It is no run and no evaluation, or one of its files cannot be read.
    """
    store = IndexedRun(folder, kind_of(folder))
    store.refresh()
    return store


def kind_of(folder: Path) -> RunKind:
    """How to read a folder. Raises `UserError` when it holds no run."""
    need_folder(folder)
    if (folder / "evaluation.json").is_file():
        return EvaluationFolder()
    if (folder / "config.toml").is_file() and (folder / "rollouts").is_dir():
        return EmbeddedFolder()
    if is_prime_rl(folder):
        return PrimeRLFolder()
    runs = sorted(path.parent.name for path in folder.glob("*/config.toml"))
    do = (
        f"name one of its runs: {', '.join(runs[:5])}"
        if runs
        else "name the folder of a run (outputs/NAME) or of an evaluation"
    )
    raise UserError("holds no run and no evaluation", where=str(folder), do=do)
