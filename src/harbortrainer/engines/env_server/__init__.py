"""Environment servers: verifiers' `serve_env`, each in its own process, as in Prime-RL.

Each source has its own server. Sources of our plugin that differ only in their tasks share one: their requests contain
the task, and each server costs an import of litellm (seconds of CPU, 250 MB).

The process (`env_main`) reads its config from stdin and writes its address to stdout. The address is a Unix socket in a
folder that only this user can open, and requests are signed with the run's key (`request_check`). Its stdin is a pipe
from this process. When this process ends, the server reads end-of-file and ends with its workers.

Invariant: for our own plugin it does not import torch.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import psutil

from harbortrainer.config.orchestrator_config import SourceConfig
from harbortrainer.config.plugin import PLUGIN_ID
from harbortrainer.engines.programs import WatchedProcess
from harbortrainer.engines.socket_folder import SocketFolder
from harbortrainer.environment.request_check import RUN_KEY_FILE, RUN_KEY_FILE_VARIABLE, RunKey
from harbortrainer.errors import RunStoppedError, UserError
from harbortrainer.harbor_compat import LITELLM_OFFLINE
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.label import RUN_VARIABLE, TRIALS_DIR_VARIABLE, owner_of_process, run_label
from harbortrainer.runs.log_files import last_lines

STARTUP_S = 600.0
STOP_S = 6.0
WATCH_S = 1.0
RESTART_PAUSES_S = (1.0, 5.0, 15.0, 60.0)
"""Seconds before each further start of a server that ended."""
FORGET_S = 1800.0
"""Seconds of service after which earlier ends no longer count."""
QUIET = {**LITELLM_OFFLINE, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


class EnvServer:
    """One environment server.

    Args:
        name: The source's name, for messages and the log file.
        env: The `env` table of the source.
        serve: Its `serve` table; if it has an `address`, that external server is used and none is started.
        log: Log file of the server.
        variables: Additional environment variables.
        listen: ZMQ address to listen on; None means a private socket, or no server if `serve` has an `address`.
    """

    def __init__(
        self,
        name: str,
        env: Mapping[str, object],
        serve: Mapping[str, object],
        *,
        log: Path,
        variables: Mapping[str, str],
        listen: str | None = None,
    ) -> None:
        self.name, self.env, self.serve, self.log = name, env, serve, log
        self.variables, self._listen = variables, listen
        self.process: subprocess.Popen[str] | None = None
        self.serving = False
        self.restarts = 0
        self._ends: list[float] = []
        """Monotonic times at which the server ended lately."""
        self.owner = ""
        """The server's process, as the owner of its sandboxes."""
        self._sockets: SocketFolder | None = None

    def start(self) -> None:
        """Start the process without waiting for it, so that its imports overlap with other work."""
        address = self._listen
        if address is None:
            if self.serve.get("address"):
                return
            self._sockets = self._sockets or SocketFolder("env-server-", name_length=len("/s"))
            address = f"ipc://{self._sockets.path}/s"
        with self.log.open("a", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"{__name__}.env_main"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**QUIET, **os.environ, **self.variables},
                # Ctrl-C must reach only the loop, which stops its servers.
                start_new_session=True,
            )
        self.serving = False
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
            self.owner = owner_of_process(self.process.pid)
        assert self.process.stdin is not None
        request = {"env": self.env, "serve": self.serve, "address": address}
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def address(self) -> str:
        """Wait for the server's address and return it.

        Raises:
            RunStoppedError: The server exited first.
        """
        if self.process is None:
            return str(self.serve["address"])
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise self.exit_error()
        self.serving = True
        return line

    @property
    def alive(self) -> bool:
        """Whether the server runs; always true for an external server."""
        return self.process is None or self.process.poll() is None

    def exit_error(self) -> RunStoppedError:
        """Return the error of a server that exited."""
        lines = [line for line in last_lines(self.log) if line.strip()]
        last = lines[-1].strip()[:300] if lines else "no output"
        code = self.process.poll() if self.process else None
        if code is not None and code < 0:
            last = f"killed by signal {-code}; its log ends with: {last}"
        return RunStoppedError(f"the environment server of {self.name!r} exited: {last}", do=f"see {self.log}")

    def close(self) -> None:
        """Request the server to stop: it cancels its trials and ends their sandboxes."""
        if self.process is None or self.process.stdin is None:
            return
        if not self.serving:
            # Still importing: it has no sandboxes, and would not notice the end-of-file.
            _kill(self.process)
        with contextlib.suppress(BrokenPipeError):  # it ended before it read its request
            self.process.stdin.close()

    def stop(self, within: float = STOP_S) -> None:
        """Stop the server; kill it after `within` seconds."""
        self.close()
        if self.process is None:
            return
        try:
            self.process.wait(within)
        except subprocess.TimeoutExpired:
            _kill(self.process)
            self.process.wait()
        if self._sockets is not None:
            self._sockets.remove()

    def next_pause_s(self) -> float:
        """Count an end of the server, and return the seconds to wait before it is started again.

        Raises:
            RunStoppedError: It never served, or has ended too often.
        """
        now = time.monotonic()
        self._ends = [end for end in self._ends if now - end < FORGET_S]
        if not (self.serving or self._ends) or len(self._ends) >= len(RESTART_PAUSES_S):
            raise self.exit_error()
        self._ends.append(now)
        self.restarts += 1
        return RESTART_PAUSES_S[len(self._ends) - 1]


def _kill(server: subprocess.Popen[str]) -> None:
    """Kill a server with its workers, which would otherwise keep waiting for work."""
    if server.poll() is None:  # otherwise the process id may have been reused
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # its session includes the workers


def server_key(source: SourceConfig) -> str:
    """Return a key that is equal for sources that can share a server."""
    env, taskset = source.env, source.env.get("taskset") or {}
    if taskset.get("id") == PLUGIN_ID:
        env = env | {"taskset": {key: taskset[key] for key in ("id", "task") if key in taskset}}
    return json.dumps([env, source.serve], sort_keys=True, default=str)


def server_variables(folder: Path, trials: Path, log: Path) -> tuple[RunKey, dict[str, str]]:
    """Make the run's key, and return it with the environment variables of the run's servers.

    Args:
        folder: The run's folder.
        trials: Folder for the trials.
        log: Folder for the key file.
    """
    file = log / RUN_KEY_FILE
    key = RunKey.create(file)
    variables = {RUN_VARIABLE: run_label(folder), TRIALS_DIR_VARIABLE: str(trials)}
    return key, variables | {RUN_KEY_FILE_VARIABLE: str(file), key.sampler_variable: key.sampler_key}


def plan_servers(sources: Iterable[SourceConfig], run: RunFolder, variables: Mapping[str, str]) -> dict[str, EnvServer]:
    """Return the servers of these sources by `server_key`, without starting them.

    Args:
        sources: The sources.
        run: The run's folder.
        variables: Environment variables of the servers.

    Raises:
        UserError: A source uses capture = "rollout_details".
    """
    servers: dict[str, EnvServer] = {}
    for source in sources:
        refuse_rollout_details(source)
        key = server_key(source)
        if key not in servers:
            name = f"{source.resolved_name}-{len(servers)}"
            log = run.log / f"env_{name}.log"
            servers[key] = EnvServer(name, source.env, source.serve, log=log, variables=variables)
    return servers


def refuse_rollout_details(source: SourceConfig) -> None:
    """Refuse capture = "rollout_details": the completion log cannot attribute direct calls to a trial.

    Raises:
        UserError: The source uses it.
    """
    harness = (source.env.get("agent") or {}).get("harness") or {}
    if harness.get("capture") == "rollout_details":
        raise UserError(
            'the embedded engine records tokens at its interception endpoint; it does not support "rollout_details"',
            where=f"source {source.resolved_name!r}: env.agent.harness.capture",
            do="remove capture, or use the engine prime-rl",
        )


async def watch(servers: Sequence[WatchedProcess]) -> None:
    """Raise the exit error of the first server that exits; its rollouts would never return."""
    while True:
        for server in servers:
            if not server.alive:
                raise server.exit_error()
        await asyncio.sleep(WATCH_S)


async def keep_serving(
    server: EnvServer, clean_up: Callable[[str], Sequence[str]], report: Callable[[str], None]
) -> NoReturn:
    """Start a server again whenever it ends: when it is killed, or one of its workers is.

    Args:
        server: The started server; an external one is not watched.
        clean_up: Ends the processes and sandboxes of an owner; returns messages for the user.
        report: Prints a line.

    Raises:
        RunStoppedError: It ended before it served, or too often.
    """
    while True:
        await asyncio.sleep(WATCH_S)
        if server.alive:
            continue
        pause_s = server.next_pause_s()
        report(f"{server.exit_error()}; starting it again in {pause_s:.0f} s")
        for line in await asyncio.to_thread(clean_up, server.owner):
            report(line)
        await asyncio.sleep(pause_s)
        with contextlib.suppress(RunStoppedError, OSError):  # it ended again, or no process could be started
            server.start()
            await asyncio.to_thread(server.address)
