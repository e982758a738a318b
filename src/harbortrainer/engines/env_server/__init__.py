"""Environment servers: verifiers' own `serve_env`, each in a process of its own, as Prime-RL starts them.

One a source, as in Prime-RL, except that sources of our own plugin which differ only in the tasks they choose share
one: their requests carry the task, and each server costs an import of litellm (seconds of CPU, 250 MB).
The process (`env_main`) reads its config from stdin and writes its address to stdout. Its stdin stays open as long as
we live: when we end, however we end, it reads end-of-file and takes itself and its workers down.
Invariant: for our own plugin it does not import torch.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from harbortrainer.config.plugin import PLUGIN_ID
from harbortrainer.config.source_table import SourceConfig
from harbortrainer.engines.programs import WatchedProcess
from harbortrainer.errors import RunStoppedError, UserError
from harbortrainer.harbor_side import LITELLM_OFFLINE
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.label import RUN_VARIABLE, TRIALS_DIR_VARIABLE, run_label

STARTUP_S = 600.0
STOP_S = 6.0
WATCH_S = 1.0
QUIET = {**LITELLM_OFFLINE, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


class EnvServer:
    """One environment server.

    Args:
        name: The source's name, for messages and the log file.
        env: The `env` table of the source.
        serve: Its `serve` table; with `address` set the server is somebody else's and nothing is started.
        log: File for what the server says.
        variables: Environment variables for it.
    """

    def __init__(
        self,
        name: str,
        env: Mapping[str, object],
        serve: Mapping[str, object],
        *,
        log: Path,
        variables: Mapping[str, str],
    ) -> None:
        self.name, self.env, self.serve, self.log = name, env, serve, log
        self.variables = variables
        self.process: subprocess.Popen[str] | None = None
        self.serving = False

    def start(self) -> None:
        """Start the process; returns at once, so that its imports overlap with other work."""
        if self.serve.get("address"):
            return
        with self.log.open("a", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"{__name__}.env_main"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**QUIET, **os.environ, **self.variables},
                # The terminal's Ctrl-C is for the loop: it decides what its servers do.
                start_new_session=True,
            )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"env": self.env, "serve": self.serve}) + "\n")
        self.process.stdin.flush()

    def address(self) -> str:
        """The server's address; blocks until it is there.

        Raises:
            RunStoppedError: The server ended before it had one.
        """
        if self.process is None:
            return str(self.serve["address"])
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise self.ended()
        self.serving = True
        return line

    @property
    def alive(self) -> bool:
        """Whether the server still runs, as far as we can know."""
        return self.process is None or self.process.poll() is None

    def ended(self) -> RunStoppedError:
        """The error of a server that is gone."""
        lines = [line for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        last = lines[-1].strip()[:300] if lines else "it said nothing"
        return RunStoppedError(f"the environment server of {self.name!r} ended: {last}", do=f"see {self.log}")

    def close(self) -> None:
        """Let the server go down: it cancels its trials and tears their sandboxes down."""
        if self.process is None or self.process.stdin is None:
            return
        if not self.serving:
            # Still importing: there is nothing to tear down, and nobody who would notice the end-of-file.
            _kill(self.process)
        self.process.stdin.close()

    def stop(self, within: float = STOP_S) -> None:
        """Wait until the server is down; kill it when it takes longer than `within` seconds."""
        self.close()
        if self.process is None:
            return
        try:
            self.process.wait(within)
        except subprocess.TimeoutExpired:
            _kill(self.process)
            self.process.wait()


def _kill(server: subprocess.Popen[str]) -> None:
    """Kill a server with its workers: they would live on, with a sandbox helper each, waiting for work."""
    if server.poll() is None:  # else the number may be another's by now
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # the session that it leads


def server_key(source: SourceConfig) -> str:
    """Sources with the same key can share a server."""
    env, taskset = source.env, source.env.get("taskset") or {}
    if taskset.get("id") == PLUGIN_ID:
        env = env | {"taskset": {key: taskset[key] for key in ("id", "task") if key in taskset}}
    return json.dumps([env, source.serve], sort_keys=True, default=str)


def plan_servers(sources: Iterable[SourceConfig], run: RunFolder) -> dict[str, EnvServer]:
    """The servers of these sources, by `server_key`; none is started.

    Raises:
        UserError: A source reads its tokens where the embedded engine cannot prove them.
    """
    variables = {RUN_VARIABLE: run_label(run.path), TRIALS_DIR_VARIABLE: str(run.trials)}
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
    """Direct calls to the sampler carry no session, so their tokens could not be told apart in its ledger."""
    harness = (source.env.get("agent") or {}).get("harness") or {}
    if harness.get("capture") == "rollout_details":
        raise UserError(
            'the embedded engine reads tokens at the interception endpoint only, not with capture = "rollout_details"',
            where=f"source {source.resolved_name!r}: env.agent.harness.capture",
            do="leave capture out, or use the engine prime-rl",
        )


async def watch(servers: Sequence[WatchedProcess]) -> None:
    """Raise when one of the servers is gone; its rollouts would never come back."""
    while True:
        for server in servers:
            if not server.alive:
                raise server.ended()
        await asyncio.sleep(WATCH_S)
