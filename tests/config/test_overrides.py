"""Command-line overrides: parsed as by Prime-RL, refused if ambiguous, and named in errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prime_rl_schema import SCHEMA

from harbortrainer.config.overrides import parse
from harbortrainer.config.prime_rl_run import prime_run
from harbortrainer.config.reader import load, read
from harbortrainer.engines.prime_rl.checkout import SOURCE as PLUGIN
from harbortrainer.engines.prime_rl.checkout import Checkout
from harbortrainer.engines.prime_rl.start import plan_attempt
from harbortrainer.errors import UserError, parts_of

SHIPPED = Path(__file__).parents[2] / "configs" / "harbor_8b.toml"
SOURCE = "--orchestrator.train.source.0"
AS_PRIME_RL = """
import json
import sys
from prime_rl.configs.rl import RLConfig
from prime_rl.utils.config import cli
config = cli(RLConfig, args=sys.argv[1:])
lora = config.trainer.model.lora
print(json.dumps({
    "tasks": str(config.orchestrator.train.source[0].env.taskset.tasks_dir), "modules": lora.target_modules,
    "rank": lora.rank, "algo": config.orchestrator.algo.type, "lr": config.trainer.optim.lr,
    "steps": config.max_steps, "ckpt": config.ckpt and config.ckpt.interval,
}))
"""


def for_prime_rl(path, words):
    raw = read(path, words)
    with raw.locating_errors():
        return prime_run(raw)


ENGINES = pytest.mark.parametrize("engine", [load, for_prime_rl])


def error_message(engine, *words: str) -> str:
    with pytest.raises(UserError) as caught:
        engine(SHIPPED, words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@ENGINES
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trainer.optim.lr"], "command line: --trainer.optim.lr: needs a value"),
        (["--seed"], "command line: --seed: needs a value"),
        (["--max-steps", "--clean"], "command line: --max-steps: needs a value"),
        ([f"{SOURCE}.env.agent.max-turns"], "max-turns: needs a value"),
        (["--no-trainer.optim.lr"], "command line: --no-trainer.optim.lr: is neither a switch"),
        (["--no-trainer"], "is neither a switch nor an optional table"),
        (["--clean", "maybe"], "command line: --clean: must be true or false"),
        (["--trainer.optim.lr", "fast"], "command line: --trainer.optim.lr: must be a number, not 'fast'"),
        (["--max-steps", "1e3"], "command line: --max-steps: must be an integer"),
        (["--max-steps", "3", "4"], "command line: --max-steps: takes one value"),
        (["--trainer.optim.lr", "inf"], "command line: --trainer.optim.lr: must be finite"),
        (["--trainer.optim.lr", "1e999"], "command line: --trainer.optim.lr: must be finite"),
        (["--trainer.loss.kl-tau", "NaN"], "command line: --trainer.loss.kl-tau: must be finite"),
        ([f"{SOURCE}.env.timeout", '{"episode": Infinity}'], "must be finite"),
        ([f"{SOURCE}.env.timeout.episode", "-inf"], "must be finite"),
        (["--trainer.optim.betas1", "1.5"], "command line: --trainer.optim.betas1: input should be less than 1"),
        (["--trainer.optim.betas2", "1"], "command line: --trainer.optim.betas2: input should be less than 1"),
        (["--model.name="], "command line: --model.name: must not be empty"),
        ([f"{SOURCE}.name="], f"command line: {SOURCE}.name: must not be empty"),
        ([f"{SOURCE}.env.taskset.id="], "must not be empty"),
        (["--run.name="], "command line: --run.name: must not be empty"),
        (["--run.name", "../../evil"], "command line: --run.name: '../../evil' is not a valid folder name"),
        (["--run.name", "/tmp/evil"], "is not a valid folder name"),
        (["--run.dir", "a/b"], "command line: --run.dir: 'a/b' is not a valid folder name"),
        (["--run.name", ".."], "is not a valid folder name"),
        (["--trainer.optim.lrr", "1"], "--trainer.optim.lrr: no such key; did you mean --trainer.optim.lr?"),
        (["--max-stepz", "1"], "command line: --max-stepz: no such key; did you mean --max-steps?"),
        (["--engin", "local"], "did you mean --engine?"),
        ([f"{SOURCE}.group-sizes", "4"], f"did you mean {SOURCE}.group-size?"),
        (["--orchestrator.train.source.1.name", "x"], "the list has no entry '1': it has 1 (0 to 0)"),
        (["--orchestrator.train.source.name", "x"], "'source' is a list"),
        (["--trainer", "@", "other.toml"], "would be read as a file"),
        (["--trainer.optim", "[1"], "not valid JSON"),
        (["--trainer.optim", "7"], "must be a table, not '7'"),
        (["--orchestrator.train.source", "[1]"], "each entry must be a table"),
        (["--orchestrator.batch-size", "0"], "command line: --orchestrator.batch-size: input should be greater"),
    ],
)
def test_ambiguous_override_is_refused_and_names_the_command_line(engine, words, message):
    assert message in error_message(engine, *words)
    assert "command line" in error_message(engine, *words)


@ENGINES
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trainer.optim]\nlr = inf\n", "run.toml: trainer.optim.lr: must be finite"),
        ("[trainer.optim]\nlr = true\n", "run.toml: trainer.optim.lr: must be a number, not true"),
        ("seq_len = true\n", "run.toml: seq_len: must be an integer, not true"),
        ("[run]\nname = '../../evil'\n", "run.toml: run.name: '../../evil' is not a valid folder name"),
        ("[model]\nname = ''\n", "run.toml: model.name: "),
        ("orchestrator = 'x'\n", "run.toml: orchestrator: must be a table, not 'x'"),
        ("orchestrator = [1]\n", "run.toml: orchestrator: must be a table, not a list"),
        ("[orchestrator]\ntrain = { source = ['x'] }\n", "each entry must be a table"),
        ("[[orchestrator.train.source]]\nenv = { taskset = [''] }\n", "env.taskset: must be a table, not a list"),
        ("[[orchestrator.train.source]]\nenv = { taskset = { id = 5 } }\n", "env.taskset.id"),
        (
            "[[orchestrator.train.source]]\nenv = { taskset = { id = 'harbor_env', eval_share = nan } }\n",
            "eval_share: must be finite",
        ),
    ],
)
def test_ambiguous_value_in_file_is_refused_with_its_key(tmp_path, monkeypatch, engine, text, message):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(text)
    with pytest.raises(UserError) as caught:
        engine("run.toml", [])
        raise AssertionError("read")
    about_key = [
        error
        for error in map(str, parts_of(caught.value))
        if not error.startswith("run.toml: orchestrator: is missing")
    ]
    assert len(about_key) == 1 and message in about_key[0] and "\n" not in about_key[0]


@ENGINES
def test_keys_of_a_source_can_be_overridden(engine):
    words = [f"{SOURCE}.env.taskset.tasks_dir", "X", f"{SOURCE}.env.agent.harness.agent-kwargs.max_cut_answers", "5"]
    source = engine(SHIPPED, words).orchestrator.train.source[0]
    assert source.env["taskset"]["tasks_dir"] == "X"
    assert source.env["agent"]["harness"]["agent_kwargs"] == {"interleaved_thinking": True, "max_cut_answers": 5}


def test_error_in_table_names_the_override():
    error = error_message(load, "--orchestrator.batch-size", "12")
    assert f"{SHIPPED}: orchestrator with --orchestrator.batch-size: batch_size (12) must be a multiple" in error


def test_switches_and_tables_are_parsed():
    config = load(SHIPPED, ["--clean", "true", "--no-ckpt", "--orchestrator.eval.skip-first-step", "--max-steps=7"])
    assert (config.clean, config.ckpt, config.max_steps) == (True, None, 7)
    assert config.orchestrator.eval is not None and config.orchestrator.eval.skip_first_step
    assert not load(SHIPPED, ["--clean", "false"]).clean
    assert load(SHIPPED, ["--ckpt", "None"]).ckpt is None
    assert (
        load(SHIPPED, ["--orchestrator.concurrency.max-inflight", "None"]).orchestrator.concurrency.max_inflight is None
    )


@pytest.mark.skipif(not SCHEMA.is_dir(), reason="the submodule prime-rl/ is not populated")
@pytest.mark.parametrize(
    ("more", "found"),
    [
        ([f"{SOURCE}.env.taskset.tasks_dir", "datasets/quickstart/train"], {"tasks": "datasets/quickstart/train"}),
        (["--trainer.model.lora.target-modules", "q_proj", "v_proj"], {"modules": ["q_proj", "v_proj"]}),
        (["--trainer.model.lora.rank=4", "--no-ckpt"], {"rank": 4, "ckpt": None}),
        (["--orchestrator.algo", '{"type": "max_rl"}'], {"algo": "max_rl"}),
        (["--trainer.model.lora.rank", "4"], {"rank": 4}),
    ],
)
def test_prime_rl_reads_the_same_values_as_we_do(tmp_path, more, found):
    """Words that its parser refuses at the pin go through a copy of the file."""
    words = [*more, "--trainer.optim.lr", "3e-5", "--max-steps", "7", "--output-dir", str(tmp_path)]
    raw = read(SHIPPED, words)
    checkout = Checkout(tmp_path / "prime-rl")
    attempt = plan_attempt(prime_run(raw), raw, checkout, parse(words), resume=False, dry_run=True)
    done = subprocess.run(
        [sys.executable, "-c", AS_PRIME_RL, "@", str(attempt.file), *attempt.options],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(SCHEMA), str(PLUGIN)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    values = json.loads(done.stdout.splitlines()[-1])
    assert values | found | {"lr": 3e-5, "steps": 7} == values
