"""Faults under Prime-RL's real orchestrator and env server: the recorded outcomes, and the samples that are trained on.

Each task has one fault. The run lasts until Prime-RL has recorded a trial of each task and shipped two more batches.
A fault that needs its own settings gets its own source and env server.
"""

import copy
import json
import subprocess
import time
from pathlib import Path

import pytest
from batch_files import episodes, last_batch, sequences
from conftest import PrimeRL, free_port, trainer_config
from documented_outcomes import GOES_ON, SHORT, documented, fault_outcomes
from fakes import make_task
from faulty_engine import FAULTS
from faulty_policy import FaultyPolicy
from scripted_engine import Answer
from test_orchestrator import RANDOM_REWARD, tail, write_configs
from troubles import TROUBLES, about, answers, subject_of

from harbortrainer.environment.rollout_state import TrialRetriedError
from harbortrainer.environment.verifiers_compat import retries
from harbortrainer.trials.outcome import Outcome

pytestmark = pytest.mark.prime_rl

PLACE = "Prime-RL"
PATIENCE_S = 1500
MAX_LENGTH = 16_384
GOOD = tuple(f"good-{number}" for number in range(1, 5))
"""Tasks without a fault, in their own source, which is sampled as often as all faults together.

Prime-RL stops after ten batches' worth of untrainable trials, and most faults give untrainable trials.
"""
AGENT_TIMEOUT_S = 24.0
INFLIGHT = 24
"""Most trials at once; nearly all of them only wait."""
OWN_RATIO = 3
"""Share of each such source: Prime-RL draws sources at random, so that a share of 1 may wait for long."""
OWN_SETTINGS = tuple(name for name, trouble in TROUBLES.items() if trouble.agent or trouble.harness)


def script(prompt: str) -> Answer:
    """Return the model's answer; under a server fault the agent continues."""
    return (GOES_ON if subject_of(prompt) in FAULTS else answers)(prompt)


def expected() -> dict[str, str]:
    """Return the documented outcome of each task's trials."""
    return fault_outcomes(PLACE) | documented("what happened", PLACE) | dict.fromkeys(GOOD, "completed")


def tasks_dir(folder: Path, name: str) -> Path:
    """Return the tasks folder of this task's source."""
    if name in OWN_SETTINGS:
        return folder / "own-settings" / name
    return folder / ("good" if name in GOOD else "tasks")


def make_tasks(folder: Path) -> None:
    for name in expected():
        if name in FAULTS:
            about(make_task, tasks_dir(folder, name), name, agent_timeout_s=AGENT_TIMEOUT_S)
        elif name in GOOD:
            about(make_task, tasks_dir(folder, name), name, test=RANDOM_REWARD)
        else:
            about(TROUBLES[name].task, tasks_dir(folder, name), name)


def copy_source(source: dict, name: str, tasks: Path, ratio: int) -> dict:
    """Return a copy of a source with its own env server."""
    serve = {"address": f"tcp://127.0.0.1:{free_port()}", "pool": {"type": "static", "num_workers": 1}}
    own: dict = copy.deepcopy(source)
    own |= {"name": name, "serve": serve, "ratio": ratio}
    own["env"]["taskset"]["tasks_dir"] = str(tasks)
    return own


def own_settings_source(source: dict, folder: Path, name: str) -> dict:
    """Return the source of one fault that needs its own settings."""
    own, trouble = copy_source(source, name, tasks_dir(folder, name), OWN_RATIO), TROUBLES[name]
    own["env"]["agent"] |= trouble.agent
    own["env"]["agent"]["harness"] |= trouble.harness
    return own


def write_faulty_configs(folder: Path, policy: Path, url: str) -> tuple[Path, list[Path]]:
    """Write the configs of the orchestrator and the env servers, with short timeouts and one retry a failure."""
    path = write_configs(folder, policy, url)[0]
    config = json.loads(path.read_text())
    (source,) = config["train"]["source"]
    agent = {"retries": retries(TrialRetriedError, 1).model_dump(), "max_turns": None}
    harness = SHORT | {"stall_min_s": 8.0, "n_parallel_envs": INFLIGHT, "keep_trials": "all"}
    source["env"]["agent"] |= agent | {"harness": source["env"]["agent"]["harness"] | harness}
    faults = len(expected()) - len(GOOD)
    source["serve"]["pool"]["num_workers"] = 1
    source["curriculum"] = {"gates": {"signal": {}}}  # without a pool: each fault once, in the order of the tasks
    source["ratio"] = faults - len(OWN_SETTINGS)
    config["train"]["source"].append(copy_source(source, "good", tasks_dir(folder, GOOD[0]), faults))
    config["train"]["source"] += [own_settings_source(source, folder, name) for name in OWN_SETTINGS]
    config |= {"max_steps": 1000, "seq_len": MAX_LENGTH, "batch_size": 4, "group_size": 2}
    config["max_off_policy_steps"] = 1000  # so that no long trial is dropped as stale
    config["train"]["sampling"] = {"max_completion_tokens": 512}
    config["concurrency"] = {"initial_inflight": INFLIGHT, "max_inflight": INFLIGHT}
    path.write_text(json.dumps(config))
    servers = [folder / f"env_server_{source['name']}.json" for source in config["train"]["source"]]
    for server, source in zip(servers, config["train"]["source"], strict=True):
        server_config = {key: source[key] for key in ("env", "serve")} | {
            "output_dir": str(folder / "outputs" / source["name"])
        }
        server.write_text(json.dumps(server_config))
    return path, servers


def recorded_tasks(outputs: Path) -> set[str]:
    """Return the names of the tasks that have a recorded episode."""
    return {episode["task"]["data"]["name"] for episode in episodes(outputs, "all")}


def play(prime_rl: PrimeRL, folder: Path, policy: Path, url: str) -> None:
    """Run until each task has a recorded episode and two more batches were sent to the trainer."""
    outputs, names = folder / "outputs", set(expected())
    config, servers = write_faulty_configs(folder, policy, url)
    path = f"{prime_rl.path}:{Path(__file__).parents[1]}"  # an agent of the tests is imported from there
    logs = [server.with_suffix(".log") for server in servers]
    running = [prime_rl.start("env-server", *files, PYTHONPATH=path) for files in zip(servers, logs, strict=True)]
    outputs.mkdir(exist_ok=True)
    trainer = trainer_config(outputs, policy, steps=1000, seq_len=MAX_LENGTH, ckpt=None)
    for program, file in (("orchestrator", config), ("trainer", trainer)):
        logs.append(folder / f"{program}.log")
        running.append(prime_rl.start(program, file, logs[-1]))
    deadline, last_step = time.monotonic() + PATIENCE_S, None
    try:
        while last_step is None or last_batch(outputs) < last_step:
            time.sleep(1)
            if last_step is None and names <= recorded_tasks(outputs):
                last_step = last_batch(outputs) + 2
            ended = [process.args for process in running if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                missing = names - recorded_tasks(outputs)
                pytest.fail("\n".join([f"ended: {ended}, missing: {missing}", *map(tail, reversed(logs))]))
    finally:
        terminate(running)


def terminate(running: list[subprocess.Popen[bytes]]) -> None:
    """Terminate the processes in reverse order of their start."""
    for process in reversed(running):
        process.terminate()
    for process in reversed(running):
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def trial_record(trace: dict) -> dict:
    """Return our record of a trial from Prime-RL's trace."""
    return trace["info"]["harbor"]


def outcomes(outputs: Path) -> dict[str, set[str]]:
    """Return the outcomes of each task's trials."""
    found: dict[str, set[str]] = {}
    for episode in episodes(outputs, "all"):
        for trace in episode["traces"]:
            found.setdefault(episode["task"]["data"]["name"], set()).add(trial_record(trace)["outcome"])
    return found


def test_no_fault_is_trained_on_as_reward_0(prime_rl: PrimeRL, policy: Path, tmp_path: Path) -> None:
    make_tasks(tmp_path)
    outputs = tmp_path / "outputs"
    with FaultyPolicy(policy, script, model=str(policy), down_s=1.0) as engine:
        play(prime_rl, tmp_path, policy, engine.url)
    assert outcomes(outputs) == {name: {outcome} for name, outcome in expected().items()}
    untrainable = {name for name, outcome in expected().items() if not Outcome(outcome).trains}
    for episode in episodes(outputs, "all"):
        (trace,) = episode["traces"]
        record = trial_record(trace)
        assert trace["ok"] == episode["ok"] == Outcome(record["outcome"]).trains
        assert (record["reward"] is not None) == Outcome(record["outcome"]).trains
        assert trace["ok"] or not trace["rewards"], "a trial that failed has no reward, not even 0"
    assert not untrainable & {episode["task"]["data"]["name"] for episode in episodes(outputs, "effective")}
    batches = range(1, last_batch(outputs) + 1)
    samples = (sequence for step in batches for sequence in sequences(outputs, step))
    trained = {subject_of(engine.tokenizer.decode(sequence.token_ids)) for sequence in samples}
    assert trained and trained <= expected().keys() - untrainable
    assert set(GOOD) & trained
    assert set(FAULTS) <= engine.asked.keys()
    print(f"{sum(1 for _ in episodes(outputs, 'all'))} trials, {len(batches)} batches of {sorted(trained)}")
