"""`harbortrainer serve-env`: run the trials of a run that trains on another machine."""

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from harbortrainer.commands.opening import open_run
from harbortrainer.config.orchestrator_config import SourceConfig
from harbortrainer.config.plugin import HarnessKeys
from harbortrainer.config.prime_rl_run import sources_of, trial_folders
from harbortrainer.config.reader import read
from harbortrainer.doctor import verifiers_config
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.doctor.preflight import refused_tasks
from harbortrainer.engines.cleanup import clean_up, clean_up_predecessor, end_sandboxes, print_lines
from harbortrainer.engines.env_server import (
    EnvServer,
    keep_serving,
    refuse_rollout_details,
    server_key,
    server_variables,
)
from harbortrainer.engines.prime_rl.checkout import apply_dotenv
from harbortrainer.environment.request_check import require_shared_key
from harbortrainer.errors import UserError
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.interrupt import stop_event
from harbortrainer.runs.label import run_label
from harbortrainer.runs.locks import RunLock
from harbortrainer.tasks.local_tasks import LOCAL_TASKS_VARIABLE, LocalTasks
from harbortrainer.tasks.task_errors import inspected
from harbortrainer.tasks.task_folder import TaskRef
from harbortrainer.tasks.task_selection import select_tasks
from harbortrainer.trials.start_watch import watch_starts

_ADDRESS = re.compile(r"tcp://[^\s/]+:\d{1,5}")


def serve_env(file: Path, overrides: Sequence[str], *, address: str | None, source: str | None, engine: str) -> int:
    """Serve sources of a run file until SIGINT or SIGTERM. Call it from the main thread, which handles the signals.

    Args:
        file: The run file, the same as on the machine that trains.
        overrides: Keys of the run file, as for `train`.
        address: `tcp://HOST:PORT` to listen on; None means the source's `serve.address`.
        source: Name of a source; sources that differ only in their tasks are served with it. None if all sources with a
            `serve.address` do.
        engine: As for `train`.

    Raises:
        UserError: A mistake in the file or the options, there is no run key, or no task can run here.
        RunStoppedError: The server ended.
    """
    apply_dotenv()
    raw = read(file, overrides)
    with raw.locating_errors():
        plan = open_run(raw, engine=engine)
        sources = choose_sources(plan, source)
        key, first = next(iter(sources.items()))
        listen = address or str(first.serve.get("address") or "")
        if not listen:
            what = f"{first.resolved_name!r} has none"
            do = 'set serve = { address = "tcp://HOST:PORT" } in this source, or pass --address'
            raise UserError(what, where=plan.where(f"{key}.serve.address"), do=do)
        if not _ADDRESS.fullmatch(listen):
            where = "command line: --address" if address else plan.where(f"{key}.serve.address")
            raise UserError(f"{listen} is not an address", where=where, do="write tcp://HOST:PORT")
        require_shared_key()
        verifiers_config.check_sources(sources, plan.file)
        tasks, kinds = tasks_of(plan, sources)
    assert plan.run is not None
    port = listen.rpartition(":")[2]
    folder = RunFolder(plan.run.run_dir.with_name(f"{plan.run.run_dir.name}-env-{port}"))
    trials = trial_folders(sources.values(), folder.trials)
    for part in (*trials, folder.trials, folder.log):
        try:
            part.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            do = "set output_dir, or trials_dir in env.agent.harness, to a folder that can be written"
            raise UserError(f"cannot be made: {error.strerror}", where=str(part), do=do) from error
    lock = RunLock(folder.path)
    print_lines(clean_up_predecessor(folder.path, kinds, trials))
    _, variables = server_variables(folder.path, folder.trials, folder.log)
    listed = folder.log / "tasks.json"
    LocalTasks({task.key: str(task.path) for task in tasks}).write(listed)
    log = folder.log / "env.log"
    names = _names(sources.values())
    server = EnvServer(
        names, first.env, first.serve, log=log, variables=variables | {LOCAL_TASKS_VARIABLE: str(listed)}, listen=listen
    )
    label = run_label(folder.path)
    try:
        message = f"serving {names} ({len(tasks)} tasks) at {{}}; log: {log}"
        asyncio.run(serve(server, message, lambda owner: clean_up(label, kinds, owner=owner), trials))
    finally:
        server.stop()
        print_lines(end_sandboxes(label, kinds, trials=trials))
        lock.release()
    return 0


async def serve(
    server: EnvServer, message: str, clean_up: Callable[[str], Sequence[str]], starts: Sequence[Path]
) -> None:
    """Serve until a signal, and print the message with the server's address once it is ready.

    Args:
        server: The server; it is started again if it ends.
        message: The message, with `{}` for the address.
        clean_up: Ends the processes and sandboxes of an owner; returns messages for the user.
        starts: Folders with the states of starts at providers.

    Raises:
        RunStoppedError: The server ended before it was ready, or too often; or a provider of sandboxes is given up.
    """
    stopping = stop_event()  # the handlers stay after the loop's end, for the cleanup
    server.start()
    stop = asyncio.create_task(asyncio.to_thread(stopping.wait))
    ready = asyncio.create_task(asyncio.to_thread(server.address))

    def show(line: str) -> None:
        print_lines([line])

    watches = [asyncio.create_task(it) for it in (keep_serving(server, clean_up, show), watch_starts(starts, show))]
    try:
        await asyncio.wait({stop, ready}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            print(message.format(ready.result()), flush=True)
        await asyncio.wait({stop, *watches}, return_when=asyncio.FIRST_COMPLETED)
        for watch in watches:
            if watch.done():
                watch.result()
    finally:
        stopping.set()
        for watch in watches:
            watch.cancel()
        server.close()  # which ends the wait for its address


def choose_sources(plan: LaunchPlan, name: str | None) -> dict[str, SourceConfig]:
    """Return the sources of one server by dotted key.

    Args:
        plan: The run.
        name: Name of one of them; None means the first with a `serve.address`, if the others share its server.

    Raises:
        UserError: There is no such source, or the sources need several servers.
    """
    assert plan.run is not None
    every = sources_of(plan.run)
    if name is not None:
        named = [source for source in every.values() if source.resolved_name == name]
        missing = f"no source is named {name!r}; the file has {_names(every.values())}"
    else:
        named = [source for source in every.values() if source.serve.get("address")]
        missing = "no source has a serve.address"
    if not named:
        set_address = 'set serve = { address = "tcp://HOST:PORT" } in the source whose trials this machine runs'
        raise UserError(missing, where=plan.file, do="name one of them with --source" if name else set_address)
    servers = {server_key(source) for source in named}
    if len(servers) > 1:
        what = f"these sources need a server each: {_names(named)}"
        raise UserError(what, where=plan.file, do="name one with --source")
    chosen = {key: source for key, source in every.items() if server_key(source) in servers}
    for source in chosen.values():
        refuse_rollout_details(source)
    return chosen


def _names(sources: Iterable[SourceConfig]) -> str:
    return ", ".join(dict.fromkeys(source.resolved_name for source in sources))


def tasks_of(plan: LaunchPlan, sources: Mapping[str, SourceConfig]) -> tuple[list[TaskRef], list[str]]:
    """Return the tasks of the sources and their environment types; a task set that is not here is fetched.

    Raises:
        UserError: The tasks cannot be read, or none of them can run here.
    """
    tasks: list[TaskRef] = []
    kinds: dict[str, None] = {}
    for key in sources:
        env, where = plan.envs.get(f"{key}.env"), plan.where(f"{key}.env.agent.harness.environment_type")
        if env is None:  # another plugin's tasks
            continue
        found = select_tasks(env.taskset).tasks
        harness = env.agent.harness or HarnessKeys()
        placed = list(inspected(found, harness.environment_type, harness.environment_kwargs))
        print_lines([f"warning: {error}" for error in refused_tasks(placed, where).values()])
        kinds |= dict.fromkeys(choice.kind for _, choice, _ in placed)
        tasks += found
    return tasks, list(kinds)
