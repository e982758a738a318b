"""Faults through Prime-RL's real orchestrator and env server: what it writes of each, and what reaches its trainer.

A task is about one fault, and is played until Prime-RL has written its trial down and shipped another batch after it.
Faults that ask for settings of their own are a source each, with an env server of its own.
"""

import copy
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PrimeRL
from fakes import make_task
from faulty_engine import FAULTS
from faulty_policy import FaultyPolicy
from scripted_engine import Answer
from server_fates import GOES_ON, SHORT, documented, fates
from stand_in_trainer import StandInTrainer
from test_orchestrator import VERDICT, free_port, tail, write_configs
from troubles import TROUBLES, about, answers, subject_of

from harbortrainer.environment.attempts import TrialRetriedError
from harbortrainer.environment.verifiers_side import retries
from harbortrainer.trials.outcome import Outcome

pytestmark = pytest.mark.prime_rl

PLACE = "Prime-RL"
PATIENCE_S = 1500
MAX_LENGTH = 16_384
GOOD = tuple(f"good-{number}" for number in range(1, 5))
"""A source of their own, played as often as all the others: Prime-RL ends after ten batches' worth of trials with
nothing to learn from, and most faults leave nothing."""
CLOCK_S = 24.0
APART = tuple(name for name, trouble in TROUBLES.items() if trouble.agent or trouble.harness)


def script(prompt: str) -> Answer:
    """A policy that goes on where the server is to show a fault."""
    return (GOES_ON if subject_of(prompt) in FAULTS else answers)(prompt)


def expected() -> dict[str, str]:
    """The documented outcome of each task's trials."""
    return fates(PLACE) | documented("what happened", PLACE) | dict.fromkeys(GOOD, "completed")


def tasks_of(folder: Path, name: str) -> Path:
    """The folder that the source of this task reads."""
    if name in APART:
        return folder / "apart" / name
    return folder / ("good" if name in GOOD else "tasks")


def make_tasks(folder: Path) -> None:
    for name in expected():
        if name in FAULTS:
            about(make_task, tasks_of(folder, name), name, agent_timeout_s=CLOCK_S)
        elif name in GOOD:
            about(make_task, tasks_of(folder, name), name, test=VERDICT)
        else:
            about(TROUBLES[name].task, tasks_of(folder, name), name)


def another(source: dict, name: str, tasks: Path, ratio: int) -> dict:
    """One more source, with an env server of its own."""
    serve = {"address": f"tcp://127.0.0.1:{free_port()}", "pool": {"type": "static", "num_workers": 1}}
    own: dict = copy.deepcopy(source)
    own |= {"name": name, "serve": serve, "ratio": ratio}
    own["env"]["taskset"]["tasks_dir"] = str(tasks)
    return own


def apart(source: dict, folder: Path, name: str) -> dict:
    """The source of one fault, with the settings that it asks for."""
    own, trouble = another(source, name, tasks_of(folder, name), 1), TROUBLES[name]
    own["env"]["agent"] |= trouble.agent
    own["env"]["agent"]["harness"] |= trouble.harness
    return own


def write_faulty_configs(folder: Path, policy: Path, url: str) -> tuple[Path, list[Path]]:
    """The orchestrator's file and the env servers': as for a run without faults, with the clocks cut short and each
    failure tried once more."""
    path = write_configs(folder, policy, url)[0]
    config = json.loads(path.read_text())
    (source,) = config["train"]["source"]
    agent = {"retries": retries(TrialRetriedError, 1).model_dump(), "max_turns": None}
    harness = SHORT | {"stall_min_s": 8.0, "n_parallel_envs": 12, "keep_trials": "all"}
    source["env"]["agent"] |= agent | {"harness": source["env"]["agent"]["harness"] | harness}
    faults = len(expected()) - len(GOOD)
    source["ratio"] = faults - len(APART)  # so that each fault is as likely as another
    config["train"]["source"].append(another(source, "good", tasks_of(folder, GOOD[0]), faults))
    config["train"]["source"] += [apart(source, folder, name) for name in APART]
    config |= {"max_steps": 1000, "seq_len": MAX_LENGTH, "batch_size": 4, "group_size": 2}
    config["max_off_policy_steps"] = 1000  # no long trial is dropped for its age
    config["train"]["sampling"] = {"max_completion_tokens": 512}
    config["concurrency"] = {"initial_inflight": 12, "max_inflight": 12}
    path.write_text(json.dumps(config))
    servers = [folder / f"env_server_{source['name']}.json" for source in config["train"]["source"]]
    for server, source in zip(servers, config["train"]["source"], strict=True):
        told = {key: source[key] for key in ("env", "serve")} | {"output_dir": str(folder / "outputs" / source["name"])}
        server.write_text(json.dumps(told))
    return path, servers


def episodes(outputs: Path, subset: str) -> Iterator[dict]:
    """What Prime-RL wrote of the episodes that arrived (`all`), or that trained (`effective`)."""
    for path in sorted(outputs.glob(f"rollouts/step_*/train/{subset}/traces.jsonl")):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)


def arrived(outputs: Path) -> set[str]:
    return {episode["task"]["data"]["name"] for episode in episodes(outputs, "all")}


def shipped(outputs: Path) -> int:
    """The last step whose batch went to the trainer."""
    steps = [int(path.parent.name.removeprefix("step_")) for path in outputs.glob("rollouts/step_*/rank_0.bin")]
    return max(steps, default=0)


def play(prime_rl: PrimeRL, folder: Path, policy: Path, url: str) -> None:
    """Until each task has come back and two more batches were shipped."""
    outputs, names = folder / "outputs", set(expected())
    config, servers = write_faulty_configs(folder, policy, url)
    path = f"{prime_rl.path}:{Path(__file__).parents[1]}"  # one of the agents is of these tests
    logs = [server.with_suffix(".log") for server in servers] + [folder / "orchestrator.log"]
    running = [prime_rl.start("env-server", *of, PYTHONPATH=path) for of in zip(servers, logs[:-1], strict=True)]
    running.append(prime_rl.start("orchestrator", config, logs[-1]))
    deadline, last = time.monotonic() + PATIENCE_S, None
    try:
        while last is None or shipped(outputs) < last:
            time.sleep(1)
            if last is None and names <= arrived(outputs):
                last = shipped(outputs) + 2
            ended = [process.args for process in running if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                missing = names - arrived(outputs)
                pytest.fail("\n".join([f"ended: {ended}, missing: {missing}", *map(tail, reversed(logs))]))
    finally:
        end(running)


def end(running: list[subprocess.Popen[bytes]]) -> None:
    """The last that was started first."""
    for process in reversed(running):
        process.terminate()
    for process in reversed(running):
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def record(trace: dict) -> dict:
    return trace["info"]["harbor"]


def outcomes(outputs: Path) -> dict[str, set[str]]:
    """The outcomes of each task's trials."""
    found: dict[str, set[str]] = {}
    for episode in episodes(outputs, "all"):
        for trace in episode["traces"]:
            found.setdefault(episode["task"]["data"]["name"], set()).add(record(trace)["outcome"])
    return found


def test_no_fault_reaches_the_trainer_as_a_reward_of_0(prime_rl: PrimeRL, policy: Path, tmp_path: Path) -> None:
    make_tasks(tmp_path)
    outputs = tmp_path / "outputs"
    trainer = StandInTrainer(policy, outputs, 1000)
    with FaultyPolicy(policy, script, model=str(policy), down_s=1.0) as engine:
        trainer.start()
        play(prime_rl, tmp_path, policy, engine.url)
    assert outcomes(outputs) == {name: {outcome} for name, outcome in expected().items()}
    lost = {name for name, outcome in expected().items() if not Outcome(outcome).trains}
    for episode in episodes(outputs, "all"):
        (trace,) = episode["traces"]
        told = record(trace)
        assert trace["ok"] == episode["ok"] == Outcome(told["outcome"]).trains
        assert (told["reward"] is not None) == Outcome(told["outcome"]).trains
        assert trace["ok"] or not trace["rewards"], "a trial that failed has no reward, not even 0"
    assert not lost & {episode["task"]["data"]["name"] for episode in episodes(outputs, "effective")}
    trained = {
        subject_of(engine.tokenizer.decode(sequence.token_ids)) for batch in trainer.batches for sequence in batch
    }
    assert trained and trained <= expected().keys() - lost
    assert set(GOOD) & trained
    assert set(FAULTS) <= engine.asked.keys()
    print(f"{sum(1 for _ in episodes(outputs, 'all'))} trials, {len(trainer.batches)} batches of {sorted(trained)}")
