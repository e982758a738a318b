"""Rewards with `verifier_tools = "image"`: forged ones become true, honest ones stay. Real trials, shared sandbox.

Each attack first shows that it forges the reward where the verifier uses the agent's tools.
"""

import shutil
from pathlib import Path

import pytest
from fakes import make_task
from image_setup import needs_images
from reward_attacks import SETUP, TEST, TOOLS, build_libraries

from harbortrainer.trials import Outcome, TrialSpec, run_trial

pytestmark = pytest.mark.e2e

ATTACKS = (
    "a program replaced",
    "a program in front",
    "a folder of programs replaced by a link",
    "a link at the top replaced by a folder",
    "a library for all programs",
    "the standard library replaced by a link",
    "a package beside a module",
    "a file that Python runs",
    "Git's configuration of the user",
)
"""Attacks of each run; `--long` plays all."""
OTHERS = sorted(set(TOOLS) - set(ATTACKS))
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
ROOTS = ["host", pytest.param("build", marks=needs_images)]


def make_oracle(folder: Path, solution: str, test: str = TEST) -> Path:
    """Write a task with the solution; return its folder."""
    dockerfile = "FROM debian:12-slim\nRUN mkdir -p /app\nWORKDIR /app\n"
    task_dir = make_task(folder / "task", test=test, dockerfile=dockerfile)
    (task_dir / "solution" / "solve.sh").write_text(f"#!/bin/bash\n{solution}\n")
    return task_dir


async def play(task_dir: Path, root: str, **kwargs: object) -> tuple[Outcome, float | None]:
    """Run a trial of the task's solution; return its outcome and reward."""
    kwargs["image"] = root
    folder = task_dir.parent / f"trials{len(list(task_dir.parent.iterdir()))}"
    spec = TrialSpec(task_dir=task_dir, trials_dir=folder, agent="oracle", environment_kwargs=kwargs)
    record = await run_trial(spec)
    return record.outcome, record.reward


async def forges_with_agents_tools_only(task_dir: Path, root: str) -> bool:
    agent, image = await play(task_dir, root), await play(task_dir, root, verifier_tools="image")
    return (agent, image) == ((Outcome.completed, 1.0), (Outcome.completed, 0.25))


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of libraries that forge the reward."""
    build_libraries(folder := tmp_path_factory.mktemp("libraries"))
    return folder


@needs_gcc
@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("case", [*ATTACKS, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)])
async def test_attack_on_tools_forges_no_reward(tmp_path: Path, case: str, root: str, libraries: Path):
    task_dir = make_oracle(tmp_path, SETUP + TOOLS[case])
    shutil.copytree(libraries, task_dir / "solution", dirs_exist_ok=True)
    assert await forges_with_agents_tools_only(task_dir, root)


@needs_gcc
@pytest.mark.parametrize("root", ROOTS)
async def test_all_attacks_together_forge_no_reward(tmp_path: Path, root: str, libraries: Path):
    task_dir = make_oracle(tmp_path, "\n".join([SETUP, *TOOLS.values()]))
    shutil.copytree(libraries, task_dir / "solution", dirs_exist_ok=True)
    assert await play(task_dir, root, verifier_tools="image") == (Outcome.completed, 0.25)


async def test_leftover_process_cannot_change_tools(tmp_path: Path):
    """A program that the verifier has just installed is out of reach too."""
    test = (
        "mkdir -p /usr/local/bin; cp /usr/bin/sleep /usr/local/bin/sleep; touch /app/grading; "
        f"until test -e /app/changed; do :; done; {TEST}"
    )
    change = (
        "until test -e /app/grading; do :; done; cp --remove-destination /evil/bin/sleep /usr/local/bin/sleep; "
        "touch /app/changed"
    )
    attack = f"{SETUP}mkdir -p /app /usr/local/bin; setsid bash -c '{change}' > /dev/null 2>&1 < /dev/null &"
    assert await forges_with_agents_tools_only(make_oracle(tmp_path, attack, test), "host")


ODD = {
    "odd files at the top": (
        "mkfifo /pipe /root/pipe /var/lib/pipe; ln -s loop /loop; touch $'/\\xff' $'/a\\nb' /root/-rf; mkdir -p /a/b; "
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"/socket\")'"
    ),
    "thousands of files at the top": (
        "mkdir /x; cd /x; touch {1..3000}; cp -a /x /root/x; find /x -type f | xargs mv -t /; mv /root/x/* /root"
    ),
    "thousands of folders at the top": "mkdir /{1..3000} /root/{1..3000} /var/lib/{1..3000}",
    "folders replaced by links": "rm -rf /root /var; ln -s / /var; ln -s /app /root; rm -rf /etc; ln -s /app /etc",
    "folders replaced by files": "rm -rf /root /var /etc /opt /home; touch /root /var /etc /opt /home",
    "everything else removed": (
        "perl -e 'system(\"rm -rf --no-preserve-root /[b-z]* 2>/dev/null\"); for (qw(/bin /tmp)) { symlink($_, $_) }'"
    ),
}


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("case", ODD)
async def test_no_file_of_agent_prevents_grading(tmp_path: Path, case: str, root: str):
    task_dir = make_oracle(tmp_path, ODD[case])
    assert await play(task_dir, root, verifier_tools="image") == (Outcome.completed, 0.25)


async def test_agent_that_hides_its_work_among_thousands_gets_zero(tmp_path: Path):
    """Grading shows a part of such a folder; the agent cannot void its trial by that."""
    task_dir = make_oracle(tmp_path, "cd /; rm -rf /app; mkdir /{1..3000}")
    assert await play(task_dir, "host", verifier_tools="image") == (Outcome.self_inflicted, 0.0)


SOLVES = """mkdir -p /app /root/work /srv/data /var/lib/mine; cd /app
echo 1 > answer; echo 1 > /top.txt; echo 1 > /root/work/answer; echo 1 > /root/file; echo 1 > /srv/data/answer
echo 1 > /var/lib/mine/answer; echo 1 > /tmp/answer; ln -s /app/answer /link
setsid python3 -c '
import socket
server = socket.socket(socket.AF_UNIX)
server.bind("/run/answer")
server.listen()
while True:
    client, _ = server.accept()
    client.send(b"1")
    client.close()
' > /dev/null 2>&1 < /dev/null &
until test -S /run/answer; do :; done
"""
EXPECTS = r"""
cat > /usr/local/bin/tool <<'EOF'
#!/usr/bin/env python3
import installed, pathlib, socket
client = socket.socket(socket.AF_UNIX)
client.connect("/run/answer")
names = "/app/answer", "/top.txt", "/root/work/answer", "/root/file", "/srv/data/answer", "/var/lib/mine/answer"
found = [pathlib.Path(name).read_text().strip() for name in (*names, "/tmp/answer", "/link")]
print(int({*found, client.recv(1).decode()} == {"1"}))
EOF
chmod +x /usr/local/bin/tool
site=$(python3 -c 'import site; print(site.getsitepackages()[0])'); mkdir -p $site; touch $site/installed.py
mv /app/answer /app/moved && mv /app/moved /app/answer
tool > /logs/verifier/reward.txt
"""


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("tools", ["agent", "image"])
async def test_verifier_sees_work_and_can_install(tmp_path: Path, tools: str, root: str):
    solved = make_oracle(tmp_path / "solved", SOLVES, EXPECTS)
    failed = make_oracle(tmp_path / "failed", SOLVES.replace("echo 1 > /top.txt", "echo 2 > /top.txt"), EXPECTS)
    assert await play(solved, root, verifier_tools=tools) == (Outcome.completed, 1.0)
    assert await play(failed, root, verifier_tools=tools) == (Outcome.completed, 0.0)


async def test_installed_program_counts_for_system_tasks_only(tmp_path: Path):
    """Without the exception, the reward of an honest installation is lost."""
    solution = "mkdir -p /usr/local/bin; cd /usr/local/bin; printf '#!/bin/sh\\necho 1\\n' > greet; chmod +x greet"
    task_dir = make_oracle(tmp_path, solution, "(greet || echo 0) > /logs/verifier/reward.txt")
    assert await play(task_dir, "host") == (Outcome.completed, 1.0)
    assert await play(task_dir, "host", verifier_tools="image") == (Outcome.completed, 0.0)
    named = {"verifier_tools": "image", "system_tasks": ["other", "tas*"]}
    assert await play(task_dir, "host", **named) == (Outcome.completed, 1.0)
