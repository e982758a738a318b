"""Checks of the model's files: in a folder, in the hub cache, or on the hub."""

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from harbortrainer.config.run_sections import WarmupConfig
from harbortrainer.config.runfile import RunConfig
from harbortrainer.doctor.credentials import value
from harbortrainer.doctor.finding import Finding, green, red
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.engines.engine_choice import require_bitsandbytes
from harbortrainer.engines.model_folder import missing_files
from harbortrainer.errors import UserError
from harbortrainer.runs.provenance import hub_folder
from harbortrainer.tasks.task_folder import BadTasksError, TaskRef
from harbortrainer.warmup.tasks_with_solution import TRAINING_TASKS, tasks_with_solution, with_solution

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
TIMEOUT_S = 5.0
HUB = "hub"
"""Subject of a finding on the hub instead of the model: it was not asked."""


def check(plan: LaunchPlan) -> Iterator[Finding]:
    """Check the model's folder or the warm-up that creates it. `check_hub` checks a model of the hub."""
    if plan.run is None:
        return
    if isinstance(plan.run, RunConfig) and plan.run.warmup is not None:
        own_tasks = plan.run.warmup.learns_solutions and plan.run.warmup.tasks is None
        yield from check_warmup(plan.run.warmup, plan.where, plan.training_tasks if own_tasks else ())
        return
    name, where = plan.run.model.name, plan.where("model.name")
    if Path(name).is_dir():
        yield in_folder(Path(name), where)
    elif not is_hub_id(name):
        yield red("model", f"no such folder: {name}", "set [model] name to a folder or a hub id", where)


def check_quantization(plan: LaunchPlan) -> Iterator[Finding]:
    """Check that the quantization library is installed, if the run needs it."""
    if not isinstance(plan.run, RunConfig) or plan.run.model.quantization is None:
        return
    try:
        require_bitsandbytes()
    except UserError as error:
        yield red("quantization", error.what, error.do, plan.where(error.where))


def check_hub(plan: LaunchPlan) -> Iterator[Finding]:
    """Check that a hub model, or the one that the warm-up starts from, is in the cache or on the hub."""
    if plan.run is None:
        return
    name, key = plan.run.starting_model if isinstance(plan.run, RunConfig) else (plan.run.model.name, "model.name")
    if not Path(name).is_dir() and is_hub_id(name):
        yield on_hub(name, plan.where(key))


def check_warmup(
    warmup: WarmupConfig, where: Callable[[str], str], trained: Sequence[TaskRef] = ()
) -> Iterator[Finding]:
    """Check the inputs of a warm-up.

    Args:
        warmup: The table.
        where: Names the place of a key, for messages.
        trained: The run's training tasks; empty if they are unknown.
    """
    named = {"family": warmup.family, "tasks": warmup.tasks, "heldout": warmup.heldout, "run": warmup.run}
    if warmup.model is not None and "/" in warmup.model and not is_hub_id(warmup.model):
        named["model"] = Path(warmup.model)
    missing = {key: path for key, path in named.items() if path is not None and not path.exists()}
    for key, path in missing.items():
        yield red("warm-up", f"no such file or folder: {path}", "correct the path", where(f"warmup.{key}"))
    if missing:
        return
    if warmup.model is not None and Path(warmup.model).is_dir():
        yield in_folder(Path(warmup.model), where("warmup.model"))
    if warmup.learns_solutions and (error := solution_error(warmup.tasks, trained)):
        yield red("warm-up", f"{error.where}: {error.what}", error.do, where("warmup.tasks"))
        return
    yield green("model", "created by [warmup]")


def solution_error(folder: Path | None, trained: Sequence[TaskRef]) -> UserError | None:
    """Return why the solutions of a folder, or else of the training tasks, cannot be learned; None if they can."""
    try:
        if folder is not None:
            tasks_with_solution(folder)
        elif trained:
            with_solution(trained, TRAINING_TASKS)
    except BadTasksError as errors:
        return errors.problems[0]
    except UserError as error:
        return error
    return None


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a hub id."""
    return HUB_ID.fullmatch(name) is not None and not name.startswith(".")


def in_folder(folder: Path, where: str) -> Finding:
    """Check that a model folder has a config, weights and a tokenizer."""
    if missing := missing_files(folder):
        return red("model", f"{missing[0]} in {folder}", missing[1], where)
    if not has_tokenizer(folder):
        do = "copy tokenizer.json and tokenizer_config.json into it"
        return red("model", f"no tokenizer in {folder}", do, where)
    return green("model", f"{folder}: config, weights and tokenizer found")


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has the files of a tokenizer."""
    return any(folder.glob("tokenizer*.json"))


def on_hub(name: str, where: str) -> Finding:
    """Check that a model is in the hub cache or on the hub."""
    if any(hub_folder(name).glob("snapshots/*/config.json")):
        return green("model", f"{name} is in the hub cache")
    do = f"run `hf download {name}` with network access"
    if os.environ.get("HF_HUB_OFFLINE") in ("1", "true", "True"):
        return red(HUB, f"{name} is not in the cache and HF_HUB_OFFLINE is set", do, where)
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    status = _status(f"{endpoint}/api/models/{name}")
    if status is None:
        return red(HUB, f"{name} is not in the cache and {endpoint} cannot be reached", do, where)
    if status in (401, 403, 404):
        do = "check the name, and for a private or gated model set HF_TOKEN in .env"
        return red("model", f"the hub does not provide {name} (HTTP {status})", do, where)
    return green("model", f"{name} is on the hub")


def _status(url: str) -> int | None:
    """Return the HTTP status of a page of the hub; None without an answer within `TIMEOUT_S`, name look-up included."""
    import httpx  # slow to import

    token = value("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    found: list[int] = []

    def request() -> None:
        with suppress(httpx.HTTPError, httpx.InvalidURL):
            found.append(httpx.get(url, headers=headers, timeout=TIMEOUT_S).status_code)

    # httpx limits each step: the name look-up not at all, the connection for each address, and each part of the answer.
    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    return found[0] if found else None
