"""The arm with verifiers' own taskset: an image with its agent's packages, and a process with verifiers 0.4.

verifiers' agent installs itself in each container. The image has its packages already, where the agent expects them, so
each episode only pays for uv's check.
"""

import asyncio
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

from trial_arms import Arm, Setting
from verifiers_rival import CACHED

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-today" / "bin" / "python"
_IMAGE = "harbortrainer-bench-rival"
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_PROGRAM = (
    "import sys; from verifiers.v1.harnesses.bash.harness import CHAT_PROGRAM_SOURCE as text; sys.stdout.write(text)"
)
_DOCKERFILE = """
RUN command -v python3 || (apt-get update && apt-get install -y python3)
ENV SSL_CERT_FILE=/certificates.crt
COPY uv /usr/local/bin/uv
COPY certificates.crt /
COPY program.py {program}
RUN uv sync -q --script {program} --no-config
"""


def missing() -> str:
    """Return why this arm cannot run here; "" if it can."""
    return "" if PYTHON.is_file() else f"{PYTHON} does not exist; run `make setup-today`"


@asynccontextmanager
async def rival(setting: Setting, tokenizer: Path, renderer: str, home: Path) -> AsyncGenerator[Arm]:
    """Keep one process while the block runs; each call runs one episode."""
    if why := missing():
        raise SystemExit(why)
    await asyncio.to_thread(_prepare, setting.task, home)
    script = Path(__file__).with_name("verifiers_rival.py")
    process = await asyncio.create_subprocess_exec(
        str(PYTHON), str(script), setting.url, str(tokenizer), renderer, env=os.environ | {"HOME": str(home)},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    asked, names = process.stdin, count()
    answers: dict[str, asyncio.Future[str]] = {}

    async def one(_: Setting) -> int:
        name = f"episode{next(names)}"
        answer = answers[name] = asyncio.get_running_loop().create_future()
        asked.write(f"{name}\n".encode())
        said = await answer
        if not said.isdecimal():
            raise RuntimeError(f"an episode of verifiers' own taskset failed: {said[:1500]}")
        return int(said)

    reading = asyncio.create_task(_read(process, answers))
    try:
        yield one
    finally:
        asked.close()
        await asyncio.wait_for(process.wait(), 60)
        reading.cancel()
        await asyncio.to_thread(_output, "docker", "rmi", "--force", _IMAGE)


async def _read(process: asyncio.subprocess.Process, answers: dict[str, asyncio.Future[str]]) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        name, _, said = line.decode().strip().partition(" ")
        if name in answers:
            answers.pop(name).set_result(said)
    for waiting in answers.values():
        waiting.set_exception(RuntimeError("the process of verifiers' own taskset ended; its output is above"))


def _prepare(task: Path, home: Path) -> None:
    """Build the image, and put the task, with the image's name, where the taskset looks for it."""
    context = home / "image"
    context.mkdir(parents=True)
    base = (task / "environment" / "Dockerfile").read_text()
    program = _output(str(PYTHON), "-c", _PROGRAM)
    place = (
        f"/tmp/vf-scripts/{hashlib.sha256(program.encode()).hexdigest()}.py"  # the path that verifiers' runtimes use
    )
    (context / "Dockerfile").write_text(base + _DOCKERFILE.format(program=place))
    (context / "program.py").write_text(program)
    shutil.copy(ROOT / ".tools" / "uv", context / "uv")
    shutil.copy(_CERTIFICATES, context / "certificates.crt")
    _output("docker", "build", "-q", "-t", _IMAGE, str(context))
    own = home / CACHED / task.name
    shutil.copytree(task, own, ignore=shutil.ignore_patterns("Dockerfile"))
    with (own / "task.toml").open("a") as file:
        file.write(f'[environment]\ndocker_image = "{_IMAGE}"\n')


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)[:200]} failed: {done.stderr[-1500:]}")
    return done.stdout
