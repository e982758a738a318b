"""Runs one real trial with a scripted model that abuses its sandbox."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fakes import SOLVED, Scripted, ScriptedModel, make_task

from harbortrainer.trials import ModelEndpoint, TrialRecord, TrialSpec, run_trial

LOOPS = {
    "a link to itself where the tests go": "rm -rf /tests; ln -s /tests /tests",
    "links to themselves in the folders": (
        "rm -rf /tests /logs/verifier/*; mkdir /tests; ln -s l /tests/l; ln -s l /logs/verifier/l"
    ),
}
LEAVES_LOOPS = (
    'perl -e \'system("rm -rf --no-preserve-root / 2>/dev/null"); '
    "for (qw(/tests /logs /bin /tmp)) { rmdir; symlink($_, $_) }'"
)
"""Removes everything and leaves links to themselves."""


@dataclass(frozen=True)
class Played:
    """A finished trial."""

    record: TrialRecord
    prompts: list[str]
    """The last message of each model call."""


async def play(
    folder: Path, script: Sequence[Scripted], *, test: str = SOLVED, task: dict[str, Any] | None = None, **spec: Any
) -> Played:
    """Run a new task, to create /app/answer, with a model that answers `script`."""
    task_dir = make_task(folder / "task", test=test, **(task or {}))
    async with ScriptedModel(list(script)).serve() as model:
        endpoint = ModelEndpoint(name="scripted", base_url=model.url)
        wanted = TrialSpec(task_dir=task_dir, trials_dir=folder / "trials", model=endpoint, **spec)
        record = await run_trial(wanted)
    return Played(record, [body["messages"][-1]["content"] for body in model.requests])
