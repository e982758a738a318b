"""Checks of this machine: local sandboxes, ports, tasks on disk, run folder, free disk, image builder and network."""

import asyncio
import json
import os
import shlex
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

from harbortrainer.config.environment_table import environment_entry
from harbortrainer.config.plugin import HarnessKeys, TasksetKeys
from harbortrainer.config.redacted_config import is_omitted
from harbortrainer.config.runfile import RunConfig
from harbortrainer.doctor.finding import Finding, green, red, yellow
from harbortrainer.doctor.gpus import parameters
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.environment.request_check import require_shared_key
from harbortrainer.errors import UserError
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.open_files import needed_open_files, raise_open_files_limit, trials_within
from harbortrainer.sandbox import network_choice
from harbortrainer.sandbox.images.image_choice import INSTALL, builder_for, builder_problem
from harbortrainer.sandbox.layer_store import Store
from harbortrainer.sandbox.probe import missing_tools, problem
from harbortrainer.tasks.measured_rates import filter_by_pass_rate, read_rates, unmeasured
from harbortrainer.tasks.task_folder import BadTasksError, TaskRef
from harbortrainer.tasks.task_store import is_available, load_source
from harbortrainer.trials.http_proxies import proxy_variables, unusable_proxies


def check_tools(plan: LaunchPlan) -> Iterator[Finding]:
    """Check that a local sandbox can start, by starting one."""
    where = plan.key_of_type(lambda entry: entry.needs_namespaces)
    if where is not None:
        yield local_sandbox(where)


def local_sandbox(where: str) -> Finding:
    """Start and stop a local sandbox. `where` is the key that selects it."""
    if missing := missing_tools():
        do = f"run `sudo apt-get install {' '.join(missing)}`"
        return red("local sandbox", f"{', '.join(missing)} not found", do, where)
    if reason := asyncio.run(problem()):
        other = "--environment docker" if where.startswith("--") else 'environment_type = "docker"'
        do = f"see docs/sandbox.md, or use {other}"
        return red("local sandbox", f"a local sandbox cannot start on this machine: {reason}", do, where)
    return green("local sandbox", "a test sandbox started and stopped")


def check_ports(plan: LaunchPlan) -> Iterator[Finding]:
    """Check that the run's ports are free."""
    if isinstance(plan.run, RunConfig) and not is_own((client := plan.run.orchestrator.model.client).host):
        do = "name an address of this machine, which serves the policy itself, or run with --engine prime-rl"
        where = plan.where("orchestrator.model.client.base_url")
        yield red("ports", f"{client.host} is not an address of this machine", do, where)
        return
    taken = [(name, port, key) for name, port, key in plan.ports if not is_free(port)]
    for name, port, key in taken:
        do = "stop the program that listens there, or set another port"
        yield red("ports", f"port {port} ({name}) is in use", do, plan.where(key))
    if plan.ports and not taken:
        yield green("ports", f"free: {', '.join(str(port) for _, port, _ in plan.ports)}")


def check_open_files(plan: LaunchPlan) -> Iterator[Finding]:
    """Check that the trials in flight may open their files and sockets."""
    if plan.parallel is None:
        return
    needed, limit = needed_open_files(plan.parallel), raise_open_files_limit()
    if needed > limit:
        what = f"{plan.parallel} trials at once need up to {needed} open files; a process may have {limit}"
        do = f"raise the hard limit (`ulimit -Hn`, LimitNOFILE of a service), or set it to {trials_within(limit)}"
        yield yellow("open files", what, do, plan.where("orchestrator.concurrency.max_inflight"))


def check_proxies(plan: LaunchPlan) -> Iterator[Finding]:
    """Say what goes through the proxies of the environment."""
    del plan
    if unusable := unusable_proxies():
        do = "run `pip install socksio`, or unset the variable"
        yield yellow("proxies", f"{', '.join(unusable)}: a SOCKS proxy needs socksio, so it is ignored", do)
    if names := [name for name in proxy_variables() if name not in unusable]:
        what = "the hub, W&B, sandbox providers and https:// model servers; http:// model servers are reached directly"
        yield green("proxies", f"through {', '.join(names)} go {what}")


def check_env_servers(plan: LaunchPlan) -> Iterator[Finding]:
    """Check that the environment servers on other machines know the run's key and reach the embedded sampler."""
    about = "env servers"
    for key, address in plan.remote_servers.items():
        where = plan.where(f"{key}.serve.address")
        try:
            require_shared_key()
        except UserError as error:
            yield red(about, f"{error.where} {error.what}", error.do, where)
            return
        host = urlsplit(address).hostname or ""
        if isinstance(plan.run, RunConfig) and host not in _THIS_MACHINE:
            policy = plan.run.orchestrator.model.client.host
            if policy in _THIS_MACHINE:
                do = "set [orchestrator.model.client] base_url to an address of this machine that it reaches"
                yield yellow(about, f"{host} cannot reach the sampler, which listens on {policy} only", do, where)
                return
    if plan.remote_servers:
        yield green(about, f"at {', '.join(dict.fromkeys(plan.remote_servers.values()))}; not contacted yet")


def is_own(host: str) -> bool:
    """Whether an address or a name is this machine's."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def is_free(port: int) -> bool:
    """Whether a local port is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


_THIS_MACHINE = ("127.0.0.1", "localhost")

GIB = 1024**3
LITTLE_GIB, LITTLE_IMAGES_GIB = 2, 20
"""Free disk below which there is a finding: for the run's trials and layers, and for Docker's images."""

CHECKPOINTS, CHECKPOINT_BYTES = 3, 14
"""Full fine-tuning: two kept checkpoints and one that is being written, and the bytes per parameter of each."""

RED_SHARE = 0.1
_SHOWN = 3
"""Tasks left out by `skip_bad` that are named."""
DOCKER_ROOT = Path("/var/lib/docker")


def check_tasks(plan: LaunchPlan) -> Iterator[Finding]:
    """Check that each source of tasks loads, and whether its tasks passed `tasks check`."""
    seen: list[TasksetKeys] = []
    tasks: dict[str, list[TaskRef]] = {}
    commands: dict[str, str] = {}
    reported: set[str] = set()
    loaded: set[str] = set()
    for key, table in plan.tasksets.items():
        if table in seen:
            continue
        seen.append(table)
        where = plan.where(f"{key}.{'tasks_dir' if table.dataset is None else 'dataset'}")
        skipped: list[UserError] = []
        source = str(table.source)
        quoted = shlex.quote(source)
        try:
            if not is_available(table.source):
                do = f"the run will fetch it; to fetch it now, run `harbortrainer tasks fetch {quoted}`"
                yield yellow("tasks", f"{source} is not on this machine yet", do, where)
                continue
            found = load_source(table.source, table.include, table.exclude, skip=skipped.append)
        except BadTasksError as errors:
            skipped, found = errors.problems, []
        except UserError as error:
            yield red("tasks", f"{error.where}: {error.what}", error.do, where)
            continue
        new = [error for error in skipped if str(error) not in reported]
        reported |= {*map(str, new)}
        goes_on = bool(table.skip_bad and found)
        for error in new[:_SHOWN] if goes_on else new:
            yield (yellow if goes_on else red)("tasks", f"{error.where}: {error.what}", error.do, where)
        if goes_on and len(new) > _SHOWN:
            what = f"{source}: {len(new) - _SHOWN} more tasks are unreadable or duplicates"
            yield yellow("tasks", what, f"`harbortrainer tasks list {quoted}` names them", where)
        yield from check_pass_rates(table, found, plan.where(f"{key}.difficulty"))
        if source not in loaded:
            loaded.add(source)
            count = f"{len(found)} of {len(found) + len(skipped)}" if skipped else f"{len(found)}"
            yield green("tasks", f"{source}: {count} task{'s' * (len(found) + len(skipped) != 1)} loaded")
        if not (table.checked_only or table.audited):
            tasks.setdefault(source, []).extend(found)
            sandbox = plan.envs[key.removesuffix(".taskset")].agent.harness or HarnessKeys()
            options = sandbox.environment_type, sandbox.environment_kwargs, sandbox.trusted_tasks
            commands.setdefault(source, check_words(source, *options))
    yield from unchecked(tasks, commands)


def check_pass_rates(table: TasksetKeys, found: list[TaskRef], where: str) -> Iterator[Finding]:
    """Check how many tasks of a taskset its pass rate limits select."""
    if table.difficulty is None or not found:
        return
    try:
        unknown = unmeasured(found, read_rates(table.difficulty).tasks)
        chosen = filter_by_pass_rate(found, table)
    except UserError as error:
        yield red("pass rates", f"{error.where}: {error.what}", error.do, where)
        return
    what = f"{len(chosen)} of {len(found)} tasks of {table.source} are selected by pass rate"
    if unknown:
        do = f"measure them with `harbortrainer eval {shlex.quote(str(table.source))} --difficulty FILE ...`"
        yield yellow("pass rates", f"{what}; {len(unknown)} have no measured pass rate", do, where)
    else:
        yield green("pass rates", what)


def unchecked(tasks: Mapping[str, list[TaskRef]], commands: Mapping[str, str]) -> Iterator[Finding]:
    """Warn about sources with tasks that did not pass `tasks check` on this machine, and would be used.

    Args:
        tasks: The used tasks of each source.
        commands: The arguments of `tasks check` for each source.
    """
    from harbortrainer.tasks.passed_checks import passed_keys

    good = passed_keys()
    sources = [source for source, found in tasks.items() if any(task.key not in good for task in found)]
    if sources:
        what = f"not all tasks of {', '.join(sources)} passed `tasks check` on this machine"
        do = " and ".join(f"`harbortrainer tasks check {commands[source]}`" for source in sources)
        do = f"run {do}, or set checked_only = true"
        yield yellow("tasks", what, do)


def check_words(source: str, kind: str, kwargs: Mapping[str, object], trusted: Sequence[str]) -> str:
    """Return the arguments of `tasks check` for a source in a type of sandbox with its options, without secrets."""
    shown = {key: value for key, value in kwargs.items() if not is_omitted(key, value)}
    options = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in shown.items()]
    words = [["--environment", kind], *(["--ek", one] for one in options), *(["--trust", name] for name in trusted)]
    return shlex.join([source, *chain.from_iterable(words)])


def check_run_folder(plan: LaunchPlan) -> Iterator[Finding]:
    """Check that the run folder is new, or the resumed run's own. Prime-RL checks its folders itself."""
    run = plan.run
    if not isinstance(run, RunConfig) or (run.clean and not plan.resume):
        return
    try:
        RunFolder.checked(run.output_dir, run.run.dir, config_text=run.resolved(), resume=plan.resume)
    except UserError as error:
        yield red("run folder", f"{error.where}: {error.what}", error.do, plan.where("run.name"))


def check_disk(plan: LaunchPlan) -> Iterator[Finding]:
    """Check that the run and its trials can be written, and free disk space for trials, checkpoints and images."""
    folder = existing(plan.run.run_dir if plan.run else Path.cwd())
    where = plan.where("output_dir") if plan.run else ""
    if fault := _write_fault(folder):
        yield red("disk for the run", fault, "set output_dir to a folder that you can write to", where)
    else:
        yield disk("disk for the run", folder, LITTLE_GIB + checkpoints_gib(plan), where)
    for key, harness in plan.harnesses.items():
        if harness.trials_dir is None or key.removesuffix(".env.agent.harness") in plan.remote_servers:
            continue
        if fault := _write_fault(existing(harness.trials_dir)):
            do = "set trials_dir to a folder that you can write to"
            yield red("disk for trials", fault, do, plan.where(f"{key}.trials_dir"))
    # Only the daemon writes there, so the folder need not be writable.
    if plan.key_of_type(lambda entry: entry.needs_docker) and DOCKER_ROOT.is_dir():
        yield disk("disk for images", DOCKER_ROOT, LITTLE_IMAGES_GIB)


def checkpoints_gib(plan: LaunchPlan) -> float:
    """Size of the checkpoints of full fine-tuning, in GiB; 0 for a LoRA, whose checkpoints are small."""
    run = plan.run
    if not isinstance(run, RunConfig) or run.lora is not None or run.warmup is not None:
        return 0.0
    return CHECKPOINTS * CHECKPOINT_BYTES * (parameters(run.model.name) or 0.0) / GIB


def disk(about: str, folder: Path, little_gib: float, where: str = "") -> Finding:
    """Check the free space of a folder's disk."""
    free = shutil.disk_usage(folder).free / GIB
    what = f"{free:.1f} GiB free at {folder}"
    if free < little_gib * RED_SHARE:
        return red(
            about, what, f"free {little_gib:.3g} GiB" + (", or set output_dir elsewhere" if where else ""), where
        )
    if free < little_gib:
        return yellow(about, what, f"keep {little_gib:.3g} GiB free", where)
    return green(about, what)


def _write_fault(folder: Path) -> str:
    """Say why no file can be made in an existing folder; "" if one can."""
    if not folder.is_dir():
        return f"{folder} is not a folder"
    return "" if os.access(folder, os.W_OK) else f"{folder} cannot be written to"


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def check_image_builder(plan: LaunchPlan) -> Iterator[Finding]:
    """Check that images can be built and that the network setting is valid."""
    reported: set[str] = set()
    for key, harness in plan.harnesses.items():
        entry, where = environment_entry(harness.environment_type), plan.where(f"{key}.environment_kwargs")
        root = _root_filesystem(harness, where) if entry.builds_images else None
        network = _network(harness, where) if entry.shares_ports else None
        for finding in (root, network):
            if finding is not None and finding.what not in reported:
                reported.add(finding.what)
                yield finding


def _network(harness: HarnessKeys, where: str) -> Finding | None:
    try:
        network_choice.slirp4netns_path(harness.environment_kwargs.get("network", "auto"))
    except ValueError as error:
        return red("network", str(error), "correct this key", where)
    return None


def _root_filesystem(harness: HarnessKeys, where: str) -> Finding | None:
    setting = str(harness.environment_kwargs.get("image", "auto"))
    rootfs = Path(str(harness.environment_kwargs.get("rootfs", "/")))
    return image_builder(setting, rootfs, where)


def image_builder(setting: str = "auto", rootfs: Path = Path("/"), where: str = "") -> Finding | None:
    """Check that task images can be built; None if the settings do not need it. `where` is the settings' key."""
    try:
        builder = builder_for(setting, rootfs, Store())
    except ValueError as error:
        return red("images", str(error), "correct this key", where)
    if builder is not None:
        return green("images", f"task images are built with {builder.kind}")
    if setting == "auto" and rootfs == Path("/"):
        what = f"{builder_problem()}; sandboxes use this machine's root filesystem instead of the tasks' images"
        return yellow("images", what, f"{INSTALL}, or accept it: environment_kwargs = {{ image = 'host' }}", where)
    return None
