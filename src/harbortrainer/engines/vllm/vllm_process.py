"""The `vllm` program: finds it, checks its release, builds its command line, and runs `vllm serve`.

vLLM is not imported: it pins its own torch and is best installed in a separate environment.

Contract of the process: it leads a process group of its own, which is ended as a whole. If this process is killed, the
kernel sends it SIGTERM. Only `stop` reaps it, so its pid cannot be reused before.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from harbortrainer.engines.programs import program_output, terminate_with_parent
from harbortrainer.errors import RunStoppedError, UserError

POLL_S = 0.2
LAST_LINES = 3
"""Lines of the log in an error message."""


class VllmProcess:
    """A running `vllm serve`. Start it from the main thread: it ends when the thread that started it ends.

    Args:
        command: The command line.
        variables: Environment variables in addition to this process's own.
        log: File for its output.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                list(command),
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=terminate_with_parent(),
            )

    @property
    def pid(self) -> int:
        """The id of the process and of its group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        if self._process.returncode is not None:
            return False
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `ready` returns true.

        Raises:
            RunStoppedError: The process ended, or was not ready in time; with the last lines of its log.
        """
        deadline = time.monotonic() + timeout_s
        while not ready():
            if not self.alive:
                raise self.exit_error()
            if time.monotonic() > deadline:
                raise self._failure(f"was not ready after {timeout_s:.0f} s")
            time.sleep(POLL_S)

    def exit_error(self) -> RunStoppedError:
        """Build the error for a vLLM process that has ended."""
        return self._failure("ended")

    def _failure(self, what: str) -> RunStoppedError:
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        last = " | ".join(lines[-LAST_LINES:])[-600:] if lines else "no output"
        return RunStoppedError(f"vllm serve {what}: {last}", do=f"see {self.log}")

    def terminate(self) -> None:
        """Send SIGTERM to the process group, without waiting."""
        if self._process.returncode is None:
            self._signal(signal.SIGTERM)

    def stop(self, timeout_s: float) -> None:
        """End the process group, and kill what remains after `timeout_s` seconds. Safe to call twice."""
        if self._process.returncode is not None:
            return
        self.terminate()
        deadline = time.monotonic() + timeout_s
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.05)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


MIN_RELEASE = (0, 26)
"""The release of the pinned Prime-RL, whose sources this code follows. Needed from it: /inference/v1/generate with
token ids and log-probabilities, log-probabilities of the prompt, and loading adapters while serving."""

_SCALE_OUT_RELEASE = (0, 30)
"""From this release on, /inference/v1/generate needs the option `--enable-scale-out`, which older ones do not have."""

KEY = "inference.engine"
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that `--max-lora-rank` accepts."""

VARIABLES = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True)
class VllmProgram:
    """A `vllm` program on this machine."""

    path: str
    version: str
    """The full version, such as 0.26.1+cu129."""
    release: tuple[int, int]
    """Major and minor version."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Settings of `vllm serve`.

    Args:
        model: A folder or a hub id; also the base's name in requests.
        socket: The Unix socket it listens on, at most 107 characters. Without a port only this user can reach it.
        dtype: The learner's dtype.
        max_model_len: Longest prompt plus completion, in tokens.
        memory_share: Share of the GPU's memory for weights, cache and everything else.
        lora_rank: The adapters' rank.
        lora_layers: Names of the adapted layers, the last part of their paths. By default vLLM would reserve memory in
            every layer and in the output matrix, and could not score prompts on a CPU.
    """

    model: str
    socket: Path
    dtype: str
    max_model_len: int
    memory_share: float
    lora_rank: int
    lora_layers: Sequence[str]
    seed: int = 0

    def command(self, program: VllmProgram) -> list[str]:
        """Return the command line."""
        options: dict[str, object] = {
            "uds": self.socket,
            "dtype": self.dtype,
            "max-model-len": self.max_model_len,
            "gpu-memory-utilization": self.memory_share,
            "seed": self.seed,
            "max-lora-rank": served_rank(self.lora_rank),
            # Requests of the previous version continue next to requests of the newest.
            "max-loras": 2,
            "max-cpu-loras": 8,
            # Log-probabilities of the distribution that the token was drawn from, after temperature.
            "logprobs-mode": "processed_logprobs",
            # Ignore the model's own sampling settings: requests set all of them.
            "generation-config": "vllm",
            "uvicorn-log-level": "warning",
        }
        enabled = ["--enable-lora", *(["--enable-scale-out"] if program.release >= _SCALE_OUT_RELEASE else [])]
        layers = ["--lora-target-modules", *self.lora_layers]
        return [program.path, "serve", self.model, *enabled, *layers, *_as_arguments(options)]


def served_rank(rank: int) -> int:
    """Return the smallest `--max-lora-rank` for adapters of this rank.

    Raises:
        UserError: There is none.
    """
    for served in LORA_RANKS:
        if rank <= served:
            return served
    what = f"vLLM does not serve adapters of rank {rank}"
    raise UserError(what, where="trainer.model.lora.rank", do=f"set it to {LORA_RANKS[-1]} or less")


def find_vllm() -> str:
    """Return the program's path: on the PATH, else next to this Python.

    Raises:
        UserError: There is none.
    """
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    found = shutil.which("vllm", path=places)
    if found is None:
        do = f"install vLLM {_dotted(MIN_RELEASE)} or later so that `vllm` is on the PATH, or remove the key"
        raise UserError("the program `vllm` was not found", where=KEY, do=do)
    return found


def require_vllm() -> VllmProgram:
    """Return the program, after checking its release.

    Raises:
        UserError: It is missing, its release is unknown, or it is too old.
    """
    return _inspect(find_vllm())


@cache  # its imports take ten seconds
def _inspect(path: str) -> VllmProgram:
    output = program_output(path, "--version", timeout_s=180) or ""
    found = re.search(r"^v?(\d+)\.(\d+)\S*", output.strip(), re.MULTILINE)
    if found is None:
        do = "run that command to see why"
        raise UserError(f"`{path} --version` prints no version", where=KEY, do=do)
    program = VllmProgram(path, found[0], (int(found[1]), int(found[2])))
    if program.release < MIN_RELEASE:
        what = f"vLLM {program.version} is too old: it lacks the token-id interface that this engine needs"
        raise UserError(what, where=KEY, do=f"install vLLM {_dotted(MIN_RELEASE)} or later")
    return program


def _as_arguments(options: dict[str, object]) -> Sequence[str]:
    return [argument for name, value in options.items() for argument in (f"--{name}", str(value))]


def _dotted(release: Sequence[int]) -> str:
    return ".".join(map(str, release))
