"""Runs with the vLLM engine: real trials, learner and log-probability check, with `vllm_stand_in` instead of vLLM.

One test runs with vLLM itself, if `HARBORTRAINER_VLLM` is the path of its `vllm` program.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import mini_run
import psutil
import pytest
from tiny_model import build_tiny_model
from vllm_stand_in import write_stand_in

pytestmark = [pytest.mark.e2e, pytest.mark.long]
VLLM_TABLE = '[inference]\nengine = "vllm"\n'
PATIENCE_S = 600
VLLM_PROGRAM = os.environ.get("HARBORTRAINER_VLLM", "")


def play(config: Path, *arguments: str, program: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Execute a whole run with a `vllm` on the PATH, by default the stand-in."""
    folder = Path(program).parent if program else write_stand_in(config.parent / "bin")
    path = f"{folder}:{os.environ['PATH']}"
    command = [sys.executable, mini_run.__file__, str(config), *arguments]
    environment = mini_run.ENVIRONMENT | {"PATH": path} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def steps(run: Path) -> list[dict]:
    """Return the metrics of each trained step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def remaining_processes(folder: Path) -> list[str]:
    """Return the command lines of processes that contain the folder's path."""
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return [line for line in commands if str(folder) in line]


def test_run_trains_and_resume_loads_adapter(tmp_path):
    config = mini_run.write_run(tmp_path, steps=2, evaluates=False, tail=VLLM_TABLE)
    first = play(config)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "starting vLLM" in first.stdout
    resumed = play(config, "--resume", "--max-steps", "3")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    run = tmp_path / "outputs" / "mini"
    rows = steps(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["tokens/trained"] > 0
        assert row["proof/logprob_diff/max"] < 1e-3
    # One trial in eight is rescored. A group with four equal random rewards is not trained on, so a step may have none.
    assert sum(row["proof/rescored"] for row in rows) > 0
    # The first rescoring after a start measures the noise. In float32 it is far below the assumed noise.
    assert "proof/spread" in rows[-1]
    assert not (run / "served_adapters").exists()
    assert remaining_processes(tmp_path) == []


@pytest.mark.skipif(not VLLM_PROGRAM, reason="HARBORTRAINER_VLLM is not set")
def test_run_with_real_vllm_trains(tmp_path):
    memory_share = "[inference.vllm]\ngpu_memory_utilization = 0.3\n"
    config = mini_run.write_run(tmp_path, steps=2, evaluates=False, tail=VLLM_TABLE + memory_share)
    # vLLM on a CPU does not support the small head dimension of the other tests' model.
    build_tiny_model(tmp_path / "model", hidden=128, head_dim=64, max_position_embeddings=8192)
    done = play(config, program=VLLM_PROGRAM, VLLM_CPU_KVCACHE_SPACE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = steps(tmp_path / "outputs" / "mini")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["tokens/trained"] > 0
        assert row["proof/logprob_diff/max"] < 1e-3
    assert remaining_processes(tmp_path) == []


def test_logprob_check_stops_run_if_vllm_keeps_sampling_with_base(tmp_path):
    config = mini_run.write_run(tmp_path, steps=4, evaluates=False, tail=VLLM_TABLE)
    config.write_text(config.read_text().replace("lr = 1e-3", "lr = 1e-2"))
    done = play(config, STAND_IN_FAULT="stale")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "was sampled under policy version" in done.stderr or "weights were never updated" in done.stderr
    # The first step is trained on samples of version 0, the base, which are correct.
    assert [row["step"] for row in steps(tmp_path / "outputs" / "mini")][:1] == [1]
    assert remaining_processes(tmp_path) == []
