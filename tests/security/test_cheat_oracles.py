"""Oracles that forge a reward instead of solving get the real one. Real trials with a shared sandbox."""

import os
from pathlib import Path
from typing import Any

import pytest
from fakes import make_task
from reward_attacks import FORGED, LEFTOVERS, leftover

from harbortrainer.sandbox.errors_and_changes import ChangedFile
from harbortrainer.trials import Outcome, TrialRecord, TrialSpec, run_trial

pytestmark = pytest.mark.e2e

GRADES = "sleep 0.4; test -f /app/answer || echo 0.25 > /logs/verifier/reward.txt; sleep 0.4"


async def oracle(folder: Path, solution: str, *, test: str = GRADES, **spec: Any) -> TrialRecord:
    """Run a trial whose solution cheats; return its record."""
    task_dir = make_task(folder / "task", test=test)
    (task_dir / "solution" / "solve.sh").write_text(f"#!/bin/bash\n{solution}\n")
    return await run_trial(TrialSpec(task_dir=task_dir, trials_dir=folder / "trials", agent="oracle", **spec))


@pytest.mark.parametrize("case", LEFTOVERS)
async def test_leftover_process_cannot_change_reward(tmp_path: Path, case: str):
    record = await oracle(tmp_path, leftover(LEFTOVERS[case]))
    assert (record.outcome, record.reward) == (Outcome.completed, 0.25), record


@pytest.fixture
def examined(environment_type: str) -> str:
    """Each environment type whose changed tools are found."""
    if environment_type == "docker" and os.geteuid() != 0:
        pytest.skip("only root reads the layers of containers")
    return environment_type


TOOLS = {
    "bash replaced": ("printf '#!/bin/sh\\n%s\\n' \"$FORGE\" > /b; chmod +x /b; mv /b /usr/bin/bash", "/usr/bin/bash"),
    "the loader's hook": ("echo /evil.so > /etc/ld.so.preload", "/etc/ld.so.preload"),
    "a program in front": ("cp /bin/true /usr/local/bin/sleep", "/usr/local/bin/sleep"),
    "a hook of Python's": (
        "d=$(python3 -c 'import site; print(site.getsitepackages()[0])'); mkdir -p $d; echo 'import os' > $d/x.pth",
        "/x.pth",
    ),
}


@pytest.mark.parametrize("case", TOOLS)
async def test_names_tampered_tools(tmp_path: Path, case: str, examined: str):
    attack, named = TOOLS[case]
    record = await oracle(tmp_path, f"FORGE='{FORGED}'\n{attack}", environment_type=examined)
    assert [tool for tool in record.changed_tools if named in tool], record
    assert record.metrics()["changed_tools"] == 1.0
    assert named in "".join(file.path for file in record.changed_files or [])


async def test_honest_oracle_has_no_tampered_tools(tmp_path: Path, examined: str):
    work = "mkdir -p /app; echo x > /app/other; echo y > /usr/local/bin/mine"
    record = await oracle(tmp_path, work, environment_type=examined)
    assert (record.outcome, record.reward, record.changed_tools) == (Outcome.completed, 0.25, [])
    assert record.metrics()["changed_tools"] == 0.0
    assert ChangedFile("/app/other", "added", 2, None, "x\n") in (record.changed_files or [])


async def test_reports_changes_with_separate_verifier(tmp_path: Path):
    task_dir = make_task(tmp_path / "task", test="echo 0.5 > /logs/verifier/reward.txt")
    toml = (task_dir / "task.toml").read_text()
    (task_dir / "task.toml").write_text(toml.replace("[verifier]", '[verifier]\nenvironment_mode = "separate"'))
    (task_dir / "tests" / "Dockerfile").write_text("FROM debian:12-slim\nCOPY . /tests\nRUN chmod +x /tests/test.sh\n")
    (task_dir / "solution" / "solve.sh").write_text("mkdir -p /app; echo > /app/answer; rm /usr/bin/env")
    record = await run_trial(
        TrialSpec(
            task_dir=task_dir,
            trials_dir=tmp_path / "trials",
            agent="oracle",
            environment_kwargs={"image": "host", "cache_dir": str(tmp_path / "cache")},
        )
    )
    assert (record.outcome, record.reward) == (Outcome.completed, 0.5), record
    assert {file.path for file in record.changed_files or []} >= {"/usr/bin/env", "/app/answer"}
    assert record.changed_tools == ["the program /usr/bin/env was removed"]


async def test_kills_leftovers_if_configured(tmp_path: Path):
    test = "sleep 0.2; pgrep -f 'sleep 777' > /dev/null && r=1 || r=0; echo $r > /logs/verifier/reward.txt"
    for leftovers, reward in (("keep", 1.0), ("kill", 0.0)):
        folder = tmp_path / leftovers
        record = await oracle(folder, "setsid sleep 777 > /dev/null 2>&1 < /dev/null &", test=test, leftovers=leftovers)
        assert (record.outcome, record.reward) == (Outcome.completed, reward), record


async def test_each_step_is_graded_out_of_reach(tmp_path: Path):
    """Leftovers of the first step cannot change the second step's grade either."""
    steps = {"one": GRADES, "two": GRADES}
    task_dir = make_task(tmp_path / "task", steps=steps)
    for name in steps:
        solution = task_dir / "steps" / name / "solution" / "solve.sh"
        solution.parent.mkdir(parents=True, exist_ok=True)
        solution.write_text(f"#!/bin/bash\n(while :; do {FORGED}; done) > /dev/null 2>&1 < /dev/null &\n")
    record = await run_trial(TrialSpec(task_dir=task_dir, trials_dir=tmp_path / "trials", agent="oracle"))
    assert (record.outcome, record.reward) == (Outcome.completed, 0.25), record
    assert [step.rewards for step in record.steps] == [{"reward": 0.25}, {"reward": 0.25}]


@pytest.mark.docker
async def test_kills_leftovers_in_container_if_configured(tmp_path: Path, container: str):
    started = f"(while :; do {FORGED}; done) > /dev/null 2>&1 < /dev/null &"
    record = await oracle(tmp_path, started, environment_type=container, leftovers="kill")
    assert (record.outcome, record.reward, record.changed_tools) == (Outcome.completed, 0.25, []), record
