"""Fixtures for tests against Prime-RL: its programs and a tiny policy. Tests without them are skipped."""

import json
import os
import socket
import subprocess
from collections.abc import Generator
from pathlib import Path

import cpu_programs
import pytest

REPOSITORY = Path(__file__).parents[2]
SOURCE = Path(os.environ.get("HARBORTRAINER_PRIME_RL", REPOSITORY / "prime-rl"))
MAX_LENGTH = 2048
"""Context length of the test policy, in tokens."""

INSTALL = "make test-prime-rl makes one"


class PrimeRL:
    """Starts Prime-RL's programs in separate processes."""

    def __init__(self, python: str) -> None:
        self.python = python
        tools = Path(cpu_programs.__file__).parent
        folders = REPOSITORY / "src", SOURCE / "src", SOURCE / "packages/prime-rl-configs/src", tools
        self.path = ":".join(str(folder) for folder in folders)

    def variables(self) -> dict[str, str]:
        """Return the environment variables of the programs; the trainer is one process, as torchrun starts it."""
        offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return {**os.environ, **offline, **ranks, **address, "PYTHONPATH": self.path}

    def start(self, program: str, config: Path, log: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Start a program of cpu_programs.py, or `float32-trainer`, with a config file; its output goes to `log`."""
        float32 = program == "float32-trainer"
        start = [Path(__file__).with_name("float32_trainer.py")] if float32 else [cpu_programs.__file__, program]
        command = [self.python, *map(str, start), "@", str(config)]
        with log.open("wb") as output:
            return subprocess.Popen(
                command, stdout=output, stderr=output, env=self.variables() | variables, cwd=config.parent
            )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def trainer_config(run: Path, policy: Path, *, steps: int, seq_len: int, **tables: object) -> Path:
    """Write the trainer's config file as `rl` does; returns its path."""
    model = {"name": str(policy), "seq_len": seq_len, "lora": {"rank": 4}}
    config = {
        "model": model | {"ac_offloading": None, "optim_cpu_offload": False},
        "output_dir": str(run),
        "max_steps": steps,
        "ckpt": {"interval": 1},
        "weight_broadcast": {"type": "filesystem"},
        "rollout_transport": {"type": "filesystem"},
    }
    path = run / "trainer.json"
    path.write_text(json.dumps(config | tables))
    return path


@pytest.fixture(scope="package", autouse=True)
def policy_key() -> Generator[None]:
    """The sampler's key, in the variable from which Prime-RL takes the key of the policy's server."""
    from sampler_setup import API_KEY

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", API_KEY)
        yield


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A randomly initialized Qwen3 model with Qwen3's special tokens."""
    from tiny_policy.architecture import fresh_model
    from tiny_policy.prompts import episode
    from tiny_policy.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("policy")
    tokenizer = train_tokenizer([episode("Create the file /app/answer.", ["touch /app/answer"])])
    fresh_model(tokenizer, seed=0, max_length=MAX_LENGTH).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def prime_rl() -> PrimeRL:
    """Prime-RL's programs; skips the test if the submodule or Prime-RL's Python is missing."""
    if not (SOURCE / "src/prime_rl").is_dir():
        pytest.skip("the submodule prime-rl is not populated: git submodule update --init prime-rl")
    python = os.environ.get("HARBORTRAINER_PRIME_PYTHON")
    if not python:
        pytest.skip(f"HARBORTRAINER_PRIME_PYTHON is not set to Prime-RL's Python; {INSTALL}")
    # The programs start in other folders. The path is not resolved: the target of a link lacks the packages.
    return PrimeRL(str(Path(python).absolute()))
