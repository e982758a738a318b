"""The launcher for a CPU refuses what it cannot run with one line, before anything starts. Prime-RL is not needed."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import train_on_cpu
from conftest import REPOSITORY

from harbortrainer.config.prime_rl_run import prime_run
from harbortrainer.config.reader import RawRun, load, read
from harbortrainer.config.runfile import RunConfig
from harbortrainer.doctor.finding import green
from harbortrainer.engines.engine_choice import Gpu
from harbortrainer.warmup import warmup
from harbortrainer.warmup.warmup import Rollouts

QUICKSTART = REPOSITORY / "configs/quickstart.toml"


def refusal(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the line with which the launcher refuses."""
    assert train_on_cpu.main(["--config", str(QUICKSTART), *words]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    return line


def commit(folder: Path) -> None:
    """Make a checkout at a commit of its own."""
    (folder / "pyproject.toml").write_text("")
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "x"]):
        subprocess.run(["git", *words], cwd=folder, check=True)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout that passes for Prime-RL at the pin, on a machine without a GPU."""
    folder = tmp_path / "prime-rl"
    folder.mkdir()
    monkeypatch.setenv("HARBORTRAINER_PRIME_RL", str(folder))
    monkeypatch.setattr(train_on_cpu, "find_gpus", list)
    monkeypatch.setattr(train_on_cpu, "pinned", lambda _: green("Prime-RL", "at the pin"))
    return folder


def test_gpu_is_refused(checkout, monkeypatch, capfd) -> None:
    monkeypatch.setattr(train_on_cpu, "find_gpus", lambda: [Gpu("NVIDIA H100", 81_559)])
    line = refusal(capfd)
    assert "without a GPU; this one has NVIDIA H100; run `harbortrainer train --engine prime-rl`" in line


def test_empty_checkout_and_other_commit_are_refused(checkout, monkeypatch, capfd) -> None:
    assert f"{checkout}: Prime-RL's source is missing; run `git submodule update --init prime-rl`" in refusal(capfd)
    monkeypatch.undo()
    monkeypatch.setenv("HARBORTRAINER_PRIME_RL", str(checkout))
    commit(checkout)
    line = refusal(capfd)
    assert f"{checkout}: Prime-RL is at commit " in line and "expected 559b44772; run `git submodule update`" in line


def test_installation_refuses_before_it_downloads(checkout, tmp_path, monkeypatch) -> None:
    (checkout / "src/prime_rl").mkdir(parents=True)
    commit(checkout)
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    environment = tmp_path / "environment"
    monkeypatch.setenv("PATH", str(smi.parent), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for gpus, expected in (("", "Prime-RL is at commit "), ("NVIDIA H100, 81559", "this one has NVIDIA H100; run ")):
        smi.write_text(f"#!/bin/sh\necho '{gpus}'\n")
        smi.chmod(0o755)
        done = subprocess.run([REPOSITORY / "tools/prime-rl", environment], capture_output=True, text=True, check=False)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2 and expected in line and not environment.exists()


def test_missing_python_and_packages_are_refused(checkout, monkeypatch, capfd) -> None:
    (checkout / "pyproject.toml").write_text("")
    monkeypatch.setenv("HARBORTRAINER_PRIME_PYTHON", str(checkout / "python"))
    assert f"{checkout / 'python'}: no Python with Prime-RL's packages; run `tools/prime-rl" in refusal(capfd)
    monkeypatch.setenv("HARBORTRAINER_PRIME_PYTHON", sys.executable)
    assert f"{sys.executable}: packages missing: torchdata modelexpress; run `tools/prime-rl" in refusal(capfd)
    monkeypatch.setattr(train_on_cpu, "NEEDED", ("torch",))
    assert "packages missing: vllm; run `tools/prime-rl .venv-prime-rl-vllm --vllm`" in refusal(capfd, "--vllm")


def test_existing_run_is_refused_before_the_warm_up(checkout, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(train_on_cpu, "check_machine", lambda *_, **__: None)
    (tmp_path / "outputs/r/rollouts").mkdir(parents=True)
    words = ["--output-dir", str(tmp_path / "outputs"), "--run.name", "r"]
    assert f"{tmp_path / 'outputs/r'}: this run exists; pass --resume, --clean true" in refusal(capfd, *words)


def test_clean_deletes_the_earlier_run_and_not_the_new_file(checkout, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(train_on_cpu, "check_machine", lambda *_, **__: None)
    monkeypatch.setattr(train_on_cpu, "write_programs", lambda *_: None)
    run = tmp_path / "outputs/r"
    (run / "rollouts").mkdir(parents=True)
    (run / "configs/policy").mkdir(parents=True)
    started: list[tuple[bool, bool]] = []

    def policy(config: RunConfig) -> Path:
        started.append((config.run_dir.exists(), False))
        return tmp_path

    def start(raw: RawRun, *_: object, **__: object) -> int:
        started.append((Path(raw.file).is_file(), bool(raw.get("clean"))))
        return 0

    monkeypatch.setattr(train_on_cpu, "make_policy", policy)
    monkeypatch.setattr(train_on_cpu, "start", start)
    monkeypatch.setattr(train_on_cpu, "variables", lambda *_: {})
    words = ["--output-dir", str(tmp_path / "outputs"), "--run.name", "r", "--clean", "true"]
    assert train_on_cpu.main(["--config", str(QUICKSTART), "--vllm", *words]) == 0
    assert started == [(False, False), (True, False)]


def test_warm_up_is_as_on_the_embedded_engine(tmp_path, monkeypatch) -> None:
    taken: list[Rollouts] = []
    monkeypatch.setattr(warmup, "warm_up", lambda *_, rollouts, **__: taken.append(rollouts) or tmp_path)
    config = load(REPOSITORY / "configs/laptop.toml", ["--output-dir", str(tmp_path)])
    assert train_on_cpu.make_policy(config) == tmp_path
    assert taken == [warmup.rollouts_of(config)] and taken[0].answer_length == 24


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", None])
def test_run_file_has_keys_of_prime_rl_and_its_launcher(tmp_path, url) -> None:
    file = tmp_path / "configs/cpu.toml"
    config = load(QUICKSTART)
    values = train_on_cpu.settings(config, Path("the/policy"), url)
    train_on_cpu.write_run_file(read(QUICKSTART, ["--transcripts-mb", "7"]), values, file)
    written = tomllib.loads(file.read_text())
    assert {"seed", "warmup"} & written.keys() == set()
    assert written["trainer"]["model"]["ac_offloading"] == "None"
    run = prime_run(read(file))
    assert (run.run_dir, run.model.name, run.transcripts_mb) == (config.run_dir, "the/policy", 7)
    assert (run.inference is None) == (url is not None), "rl starts vLLM, or nothing"
    port = run.inference.server.port if run.inference else 9
    assert written["orchestrator"]["model"]["client"]["base_url"] == f"http://127.0.0.1:{port}/v1"
