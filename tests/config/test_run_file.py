"""Reading a run file for the embedded engine: defaults, inheritance and one-line errors."""

from pathlib import Path

import pytest

from harbortrainer.config import overrides
from harbortrainer.config.prime_rl_run import prime_run
from harbortrainer.config.reader import from_raw, load, read
from harbortrainer.config.trainer_table import DefaultLoss
from harbortrainer.errors import UserError, parts_of

MINIMAL = """
[run]
name = "r"
[trainer.model.lora]
[orchestrator]
batch_size = 8
group_size = 4
[[orchestrator.train.source]]
env = { taskset = { id = "harbor_env" } }
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str = "", base: str = MINIMAL) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text + base)
        return path

    return write


def error_of(path: Path, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        load(path, overrides)
    assert all("\n" not in str(error) for error in parts_of(caught.value))
    return caught.value


def test_unset_keys_have_prime_rl_defaults(write):
    config = load(write())
    assert (config.model.name, config.seq_len, config.max_steps) == ("Qwen/Qwen3-0.6B", 2048, None)
    assert (config.trainer.optim.lr, config.trainer.optim.weight_decay, config.trainer.optim.max_norm) == (
        1e-6,
        0.01,
        1,
    )
    assert config.trainer.loss == DefaultLoss(dppo_mask_low=0.2, dppo_mask_high=0.2, adv_tau=1.0, kl_tau=1e-3)
    assert config.lora is not None
    assert (config.lora.rank, config.lora.alpha) == (16, 32.0)
    assert config.orchestrator.max_off_policy_steps == 8
    assert config.orchestrator.train.sampling.temperature == 1.0
    assert config.ckpt is None and config.orchestrator.eval is None


def test_source_inherits_unset_keys(write):
    text = """
    [orchestrator.train.sampling]
    max_completion_tokens = 64
    [orchestrator.eval]
    interval = 5
    group_size = 2
    [orchestrator.eval.sampling]
    temperature = 0.6
    [[orchestrator.eval.source]]
    env = { taskset = { id = "harbor_env" } }
    group_size = 3
    """
    config = load(write(base=MINIMAL + text))
    source = config.orchestrator.train.source[0]
    assert (source.group_size, source.sampling.max_completion_tokens, source.resolved_name) == (4, 64, "harbor_env")
    assert config.orchestrator.eval is not None
    held_out = config.orchestrator.eval.source[0]
    assert (held_out.interval, held_out.group_size, held_out.sampling.temperature) == (5, 3, 0.6)


def test_env_table_is_kept_as_written(write):
    base = MINIMAL.replace('id = "harbor_env" }', 'id = "harbor_env", tasks_dir = "t" }, agent = { max_turns = 3 }')
    config = load(write(base=base))
    assert config.orchestrator.train.source[0].env == {
        "taskset": {"id": "harbor_env", "tasks_dir": "t"},
        "agent": {"max_turns": 3},
    }


def test_training_samples_from_the_whole_distribution(write):
    config = load(write("[orchestrator.train.sampling]\ntemperature = 0.8\n"))
    assert config.orchestrator.train.sampling.to_sampling_args() == {
        "temperature": 0.8,
        "top_p": 1.0,
        "logprobs": True,
        "extra_body": {"top_k": -1, "min_p": 0.0, "return_token_ids": True},
    }


def test_shared_setting_is_read_from_any_table(write):
    config = load(
        write("[trainer.ckpt]\ninterval = 5\n[orchestrator.model]\nname = 'm/m'\n[inference.vllm]\nmodel='m/m'\n")
    )
    assert config.model.name == "m/m"
    assert config.ckpt is not None and config.ckpt.interval == 5


def test_contradicting_shared_settings_are_refused(write):
    error = error_of(write("[model]\nname = 'a/a'\n[trainer.model]\nname = 'b/b'\n"))
    assert "trainer.model.name" in error.where and "keep one" in error.do


def test_dtype_of_half_precision_is_vllms_alone(write):
    file = write("[inference.vllm]\ndtype = 'float16'\n")
    assert "'float16' is not one of 'auto', 'bfloat16', 'float32'" in error_of(file).what
    assert prime_run(read(file)).inference is not None


def test_text_none_is_null(write):
    assert load(write("[trainer.optim]\nmax_norm = 'None'\n")).trainer.optim.max_norm is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nquantization = 'nf4'\n", "a quantized base model cannot be fully fine-tuned"),
        ("[inference]\nengine = 'vllm'\n", "vLLM only loads adapters"),
    ],
)
def test_full_fine_tuning_without_lora_table_where_supported(write, text, message):
    every_weight = MINIMAL.replace("[trainer.model.lora]\n", "")
    error = error_of(write(text, base=every_weight))
    assert message in error.what
    assert error.do.startswith("add [trainer.model.lora]")
    assert load(write(base=every_weight)).lora is None


def test_ignored_keys_are_listed_once(write):
    config = load(write("[deployment]\nnum_train_gpus = 2\n[monitors.prime]\nname = 'p'\n[trainer.log]\nlevel = 'x'\n"))
    (note,) = [note for note in config.notes if note.startswith("ignored")]
    assert all(key in note for key in ("deployment", "monitors", "trainer.log"))


def test_overrides_take_precedence_over_the_file(write):
    words = ["--orchestrator.batch-size", "12", "--trainer.optim.lr=3e-4", "--clean", "--ckpt", "--max_steps", "3"]
    config = load(write(), words)
    assert (config.orchestrator.batch_size, config.trainer.optim.lr, config.clean, config.max_steps) == (
        12,
        3e-4,
        True,
        3,
    )
    assert config.ckpt is not None and config.ckpt.interval is None
    assert load(write("[ckpt]\ninterval = 2\n"), ["--no-ckpt"]).ckpt is None
    lora = load(write(), ["--trainer.model.lora.target-modules", "q_proj", "v_proj"]).lora
    modules = lora.target_modules if lora else []
    assert modules == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("max_stepps = 3\n", "max_stepps", "max_steps"),
        ("[trainer.optim]\nlearning_rate = 1\n", "trainer.optim.learning_rate", "no such key"),
        ("[orchestrator.concurrency]\nmax_inflght = 1\n", "orchestrator.concurrency.max_inflght", "max_inflight"),
        ("[trainer.model.ac]\nfreqq = 1\n", "trainer.model.ac.freqq", "trainer.model.ac.freq"),
        ("[trainer.optim]\ntype = 'muon'\n", "trainer.optim.type", "adamw"),
        ("[trainer.optim]\nlr = -1\n", "trainer.optim.lr", "greater than or equal to 0"),
        ("[trainer.loss]\ntype = 'custom'\n", "trainer.loss.type", "run with --engine prime-rl"),
        ("[orchestrator.algo]\ntype = 'opd'\n", "orchestrator.algo.type", "grpo, echo, max_rl, or run with --engine"),
        ("[orchestrator.algo]\ntype = 'rae'\n", "orchestrator.algo.type", "rae needs several agents"),
        ("[orchestrator.algo]\ntype = 'hierarchical_grpo'\n", "orchestrator.algo.type", "needs a proposer"),
        (
            "[orchestrator.algo]\ntype = 'ppo'\n",
            "orchestrator.algo.type",
            "unknown algorithm 'ppo'; set grpo, echo",
        ),
        ("[orchestrator.algo]\nroles = { user = {} }\n", "orchestrator.algo", "grpo has no roles"),
        ("[orchestrator.algo]\ntype = 'echo'\nroles = {}\n", "orchestrator.algo.roles", "set one of user"),
        ("[orchestrator.algo]\ntype = 'max_rl'\nlength_penalty = {}\n", "orchestrator.algo", "no length_penalty"),
        ("[trainer.model]\nseq_len = 'long'\n", "seq_len", "integer"),
        ("[resume]\nstep = 3\n", "resume", "--resume"),
        ("[tokenizer]\nchat_template = 'x'\n", "tokenizer", "own tokenizer"),
        ("[trainer.scheduler]\ntype = 'linear'\n", "run.toml", "needs max_steps"),
        ("[trainer.scheduler]\ntype = 'linear'\nwarmup_steps = 0\ndecay_steps = 0\n", "run.toml", "use type constant"),
        ("[trainer.scheduler]\ntype = 'steps'\n", "trainer.scheduler", "constant"),
        ("[orchestrator.train.sampling]\ntemperature = 0\n", "temperature", "greater than 0"),
        ("[orchestrator.train.sampling]\nextra_body = { top_k = 5 }\n", "extra_body", "no further sampling"),
        ("[orchestrator.concurrency]\nmax_inflight = 2\n", "orchestrator", "at least group_size"),
        ("[orchestrator.model.client]\nbase_url = 'http://localhost/v1'\n", "model.client", "has no port"),
        ("[orchestrator.model.client]\nbase_url = 'http://localhost:port/v1'\n", "model.client", "could not be cast"),
    ],
)
def test_error_names_key_and_advice(write, text, key, message):
    error = error_of(write(text))
    assert "run.toml" in error.where and key in error.where
    assert message in f"{error.what}; {error.do}"


def test_all_mistakes_of_a_file_are_reported_at_once(write):
    text = (
        "max_stepps = 3\nseq_len = 'long'\n[trainer.scheduler]\ntype = 'liner'\n[trainer.loss]\ntype = 'custom'\n"
        "[resume]\nstep = 3\n[orchestrator.eval]\n[[orchestrator.eval.source]]\n"
        "env = { taskset = { id = 'harbor_env', task_dir = 'x' }, "
        "agent = { harness = { environment_type = 'dokcer' } } }\n"
    )
    errors = [str(error).partition("run.toml: ")[2] for error in parts_of(error_of(write(text)))]
    assert sorted(error.split(":")[0] for error in errors) == [
        "max_stepps",
        "orchestrator.eval.source[0].env.agent.harness.environment_type",
        "orchestrator.eval.source[0].env.taskset.task_dir",
        "resume",
        "seq_len",
        "trainer.loss.type",
        "trainer.scheduler",
    ]
    advice = {error.split(":")[0]: error.rpartition("; ")[2] for error in errors}
    assert advice["trainer.scheduler"] == "did you mean 'linear'?"
    source = "orchestrator.eval.source[0].env"
    assert advice[f"{source}.agent.harness.environment_type"] == "did you mean 'docker'?"
    assert advice[f"{source}.taskset.task_dir"] == f"did you mean {source}.taskset.tasks_dir?"


def test_all_mistaken_options_are_reported_at_once(write):
    errors = parts_of(error_of(write(), "fast", "--seq-len", "long", "--max-stepps", "3", "--clean"))
    assert [error.where.removeprefix("command line") for error in errors] == ["", ": --seq-len", ": --max-stepps"]


WARMUP = "[warmup]\nfamily = 'make_tasks.py'\n"


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (WARMUP, ("--model.name", "a/b"), "command line: --model.name: the run would train the model that [warmup]"),
        (WARMUP + "[model]\nname = 'a/b'\n", (), "run.toml: model.name: "),
        (WARMUP.replace("family", "run") + "model = 'c/d'\n", ("--model.name", "a/b"), "set warmup.model = 'a/b'"),
    ],
)
def test_refuses_a_model_that_the_warmup_would_replace(write, text, words, message):
    with pytest.raises(UserError) as caught:
        raw = read(write(text), words)
        with raw.locating_errors():
            from_raw(raw)
    assert message in str(caught.value)


def test_accepts_the_warmups_own_model(write):
    assert load(write(WARMUP)).warmup is not None
    assert load(write(WARMUP), ["--model.name", "warmup"]).model.name == "warmup"
    assert load(write(WARMUP.replace("family", "run") + "model = 'a/b'\n"), ["--model.name", "a/b"])


def test_batch_size_must_be_a_multiple_of_group_size(write):
    assert "multiple of group_size" in error_of(write(), "--orchestrator.batch-size", "10").what


def test_invalid_toml_is_reported_with_its_line(write):
    assert "line 2" in error_of(write("a = 1\nb = = 2\n")).what


def test_missing_file_is_reported(tmp_path):
    assert "no such file" in error_of(tmp_path / "none.toml").what
    assert error_of(tmp_path).what == "is a folder"


def test_stray_word_is_reported(write):
    assert "'fast'" in error_of(write(), "fast").what


def test_override_through_a_value_is_reported(write):
    assert (
        "'orchestrator' is not a table"
        in error_of(write(base="orchestrator = 5\n"), "--orchestrator.seq-len", "1").what
    )


def test_sources_with_the_same_name_are_refused(write):
    again = '[[orchestrator.train.source]]\nenv = { taskset = { id = "harbor_env" } }\n'
    assert "two training sources" in error_of(write(base=MINIMAL + again)).what


def test_run_name_is_generated(write):
    base = MINIMAL.replace('name = "r"\n', "")
    first, second = load(write(base=base)), load(write(base=base))
    assert first.run.name != second.run.name
    assert str(first.run.name).startswith("harbor_env--qwen3-0.6b--")
    assert first.run_dir == Path("outputs") / str(first.run.name)


def test_resolved_run_reads_as_the_same_run(write, tmp_path):
    held_out = "[orchestrator.eval]\n[[orchestrator.eval.source]]\nenv = { taskset = { id = 'harbor_env' } }\n"
    config = load(write("[trainer.optim]\nmax_norm = 'None'\n" + held_out))
    path = tmp_path / "resolved.toml"
    path.write_text(config.resolved())
    assert load(path).model_dump() == config.model_dump()
    assert load(path).resolved() == config.resolved()


def test_clean_is_not_part_of_the_resolved_run(write):
    assert load(write(), ["--clean"]).resolved() == load(write()).resolved()


def test_override_does_not_modify_its_input():
    data = {"model": {"name": "a"}, "list": [{"x": 1}]}
    assert overrides.apply(data, overrides.parse(["--model.name", "b", "--run.name", "r"]))["model"]["name"] == "b"
    assert data == {"model": {"name": "a"}, "list": [{"x": 1}]}


def test_unknown_key_suggests_a_similar_name_only(write):
    text = "[trainer]\nlr = 1e-5\n[trainer.optim]\nschedular = 'linear'\nlearning_rates = 1e-5\n"
    advice = {error.where.rpartition(" ")[2]: error.do for error in parts_of(error_of(write(text)))}
    assert advice == {
        "trainer.lr": "did you mean trainer.optim.lr?",
        "trainer.optim.schedular": "did you mean trainer.scheduler?",
        "trainer.optim.learning_rates": "remove it",
    }
