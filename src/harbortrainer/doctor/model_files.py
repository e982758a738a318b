"""The policy's files: in a folder, in the hub's cache, or on the hub."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from harbortrainer.config.runfile import RunConfig
from harbortrainer.config.warmup_table import WarmupConfig
from harbortrainer.doctor.credentials import value
from harbortrainer.doctor.finding import Finding, green, red
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.engines.engine_choice import need_bitsandbytes
from harbortrainer.engines.model_folder import lack
from harbortrainer.errors import UserError
from harbortrainer.runs.ingredients import hub_folder
from harbortrainer.tasks.task_folder import BadTasksError
from harbortrainer.warmup.solved_tasks import solved_tasks

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
TIMEOUT_S = 5.0


def check(plan: LaunchPlan) -> Iterator[Finding]:
    """Whether the policy's folder can be loaded, or the policy made; see `check_hub` for a model of the hub."""
    if plan.run is None:
        return
    if isinstance(plan.run, RunConfig) and plan.run.warmup is not None:
        yield from made_by(plan.run.warmup, plan.where)
        return
    name, where = plan.run.model.name, plan.where("model.name")
    if Path(name).is_dir():
        yield in_folder(Path(name), where)
    elif not is_hub_id(name):
        yield red("model", f"no such folder: {name}", "set [model] name to a folder or a hub id", where)


def check_quantization(plan: LaunchPlan) -> Iterator[Finding]:
    """Whether the library is there that keeps a base in few bits, where the run wants one."""
    if not isinstance(plan.run, RunConfig) or plan.run.model.quantization is None:
        return
    try:
        need_bitsandbytes()
    except UserError as error:
        yield red("quantization", error.what, error.do, plan.where(error.where))


def check_hub(plan: LaunchPlan) -> Iterator[Finding]:
    """Whether a policy of the hub can be had; the hub is asked when the cache has none."""
    made = isinstance(plan.run, RunConfig) and plan.run.warmup is not None
    if plan.run is None or made or Path(plan.run.model.name).is_dir() or not is_hub_id(plan.run.model.name):
        return
    yield on_hub(plan.run.model.name, plan.where("model.name"))


def made_by(warmup: WarmupConfig, where: Callable[[str], str]) -> Iterator[Finding]:
    """Whether what the warm-up reads is there; `where` says where a key was set."""
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
    if warmup.tasks is not None and (why := unlearnable(warmup.tasks)):
        yield red("warm-up", f"{why.where}: {why.what}", why.do, where("warmup.tasks"))
        return
    yield green("model", "made by [warmup]")


def unlearnable(tasks: Path) -> UserError | None:
    """What is wrong with the tasks whose solutions are to be learned."""
    try:
        solved_tasks(tasks)
    except BadTasksError as errors:
        return errors.problems[0]
    except UserError as error:
        return error
    return None


def is_hub_id(name: str) -> bool:
    """Whether a name can be one of the hub's."""
    return HUB_ID.fullmatch(name) is not None and not name.startswith(".")


def in_folder(folder: Path, where: str) -> Finding:
    """A model folder is a config, weights and a tokenizer."""
    if missing := lack(folder):
        return red("model", f"{missing[0]} in {folder}", missing[1], where)
    if not has_tokenizer(folder):
        do = "copy tokenizer.json and tokenizer_config.json there"
        return red("model", f"no tokenizer in {folder}", do, where)
    return green("model", f"{folder}: config, weights and tokenizer are there")


def has_tokenizer(folder: Path) -> bool:
    """Whether there are files of one."""
    return any(folder.glob("tokenizer*.json"))


def on_hub(name: str, where: str) -> Finding:
    """In the cache, or to be had."""
    if any(hub_folder(name).glob("snapshots/*/config.json")):
        return green("model", f"{name} is in the hub's cache")
    do = f"run `hf download {name}` where there is a network"
    if os.environ.get("HF_HUB_OFFLINE") in ("1", "true", "True"):
        return red("model", f"{name} is not in the cache and HF_HUB_OFFLINE is set", do, where)
    import httpx  # takes longer than all other checks of a file

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    token = value("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(f"{endpoint}/api/models/{name}", headers=headers, timeout=TIMEOUT_S)
    except httpx.HTTPError:
        return red("model", f"{name} is not in the cache and {endpoint} cannot be reached", do, where)
    if answer.status_code in (401, 403, 404):
        do = "check the name, or set HF_TOKEN in .env"
        return red("model", f"the hub gives no {name} ({answer.status_code})", do, where)
    return green("model", f"{name} is on the hub")
