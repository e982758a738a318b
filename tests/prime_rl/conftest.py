"""Where Prime-RL is, and with which Python its programs run; a test that needs what is not there says so."""

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SOURCE = Path(os.environ.get("HARBORTRAINER_PRIME_RL", REPOSITORY / "prime-rl"))
MAX_LENGTH = 2048
"""Tokens that the policy of these tests has room for."""

INSTALL = "make test-prime-rl makes one"


class PrimeRL:
    """Prime-RL's programs, as processes of their own."""

    def __init__(self, python: str) -> None:
        self.python = python
        parts = REPOSITORY / "src", SOURCE / "src", SOURCE / "packages/prime-rl-configs/src"
        self.path = ":".join(str(part) for part in parts)

    def start(self, program: str, config: Path, log: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Start `program` (see start.py) with a config file; everything it prints goes to `log`."""
        quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        command = [self.python, str(Path(__file__).with_name("start.py")), program, "@", str(config)]
        environment = {**os.environ, **quiet, "PYTHONPATH": self.path, **variables}
        with log.open("wb") as out:
            return subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=config.parent)


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with Qwen3's special tokens."""
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
    """Prime-RL where it is populated and has an environment; the test is skipped, with the reason, where not."""
    if not (SOURCE / "src/prime_rl").is_dir():
        pytest.skip("the submodule prime-rl is not populated: git submodule update --init prime-rl")
    python = os.environ.get("HARBORTRAINER_PRIME_PYTHON")
    if not python:
        pytest.skip(f"HARBORTRAINER_PRIME_PYTHON names no Python of Prime-RL's; {INSTALL}")
    # Its programs start in other folders. Not resolved: what a link leads to has not the environment's packages.
    return PrimeRL(str(Path(python).absolute()))
