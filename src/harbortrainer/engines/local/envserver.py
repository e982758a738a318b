"""Environment servers: verifiers' own `serve_env`, each in a process of its own, as Prime-RL starts them.

The process (`envserver_main`) reads its config from stdin and writes its address to stdout. Its stdin stays open as
long as we live: when we end, however we end, it reads end-of-file and takes itself and its workers down.
Invariant: for our own plugin it does not import torch.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harbortrainer.engines.local.stop import RunStoppedError

STARTUP_S = 600.0
STOP_S = 6.0
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


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
        self, name: str, env: dict[str, Any], serve: dict[str, Any], *, log: Path, variables: dict[str, str]
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
                [sys.executable, "-m", "harbortrainer.engines.local.envserver_main"],
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
        if self.process is not None and not self.serving:
            # Still importing: there is nothing to tear down, and nobody who would notice the end-of-file.
            self.process.kill()
        if self.process is not None and self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()

    def stop(self, within: float = STOP_S) -> None:
        """Wait until the server is down; kill it when it takes longer than `within` seconds."""
        self.close()
        if self.process is None:
            return
        try:
            self.process.wait(within)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
