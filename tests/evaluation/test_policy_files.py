"""Finding a model, adapter, checkpoint or run; a missing one is one line of error."""

import json
import tomllib
from pathlib import Path

import pytest
from eval_folders import eval_spec
from prime_rl_configs import write_prime_rl_configs

from harbortrainer.commands.evaluate import default_parallel
from harbortrainer.config.orchestrator_config import APPENDING_TEMPLATE
from harbortrainer.config.reader import load
from harbortrainer.config.redacted_config import redact
from harbortrainer.errors import UserError
from harbortrainer.evaluation.candidate import Candidate, Endpoint, LocalModel, NoModel, choose_candidate
from harbortrainer.evaluation.eval_rules import EvalRules, read_run, run_file
from harbortrainer.evaluation.measuring import env_table
from harbortrainer.evaluation.policy_files import PolicyFiles
from harbortrainer.export.trained_weights import TrainedWeights
from harbortrainer.runs.checkpoints import write_file_list
from harbortrainer.runs.provenance import FILE, Provenance, model_fingerprints

ROOT = Path(__file__).parents[2]


def model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"max_position_embeddings": 512}')
    (folder / "model.safetensors").write_text("")
    return folder


def adapter(folder: Path, base: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    (folder / "adapter_model.safetensors").write_text("")
    return folder


def checkpoint(run: Path, step: int, base: Path) -> Path:
    folder = adapter(run / "checkpoints" / f"step_{step}", str(base))
    progress = {"step": step}
    (folder / "progress.json").write_text(json.dumps(progress))
    write_file_list(folder)
    return folder


def test_finds_model_folder_and_hub_id(tmp_path: Path) -> None:
    assert PolicyFiles.find(str(model(tmp_path / "m"))) == PolicyFiles(str(tmp_path / "m"))
    assert PolicyFiles.find("Qwen/Qwen3-0.6B") == PolicyFiles("Qwen/Qwen3-0.6B")
    assert PolicyFiles(str(tmp_path / "m")).context_limit(32768) == 512


def test_finds_base_of_adapter(tmp_path: Path) -> None:
    base = model(tmp_path / "m")
    found = PolicyFiles.find(str(adapter(tmp_path / "lora", str(base))))
    assert (found.base, found.adapter) == (str(base), tmp_path / "lora")


def test_finds_last_checkpoint_of_fully_fine_tuned_run(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        folder = model(tmp_path / "run" / "checkpoints" / f"step_{step}")
        (folder / "progress.json").write_text(json.dumps({"step": step}))
        write_file_list(folder)
    (folder / "model.safetensors").unlink()
    last = str(tmp_path / "run" / "checkpoints" / "step_2")
    assert PolicyFiles.find(str(tmp_path / "run")) == PolicyFiles(last)
    assert PolicyFiles.find(last) == PolicyFiles(last)


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("none/model", "no such folder"),
        ("file.txt", "no such folder"),
        ("empty", r"no config\.json here"),
        ("baseless", "no base_model_name_or_path"),
        ("orphan", "its base model /nowhere does not exist"),
        ("half", r"no adapter_model\.safetensors"),
        ("run", "no intact checkpoint in this run"),
    ],
)
def test_reports_missing_policy(tmp_path: Path, named: str, told: str) -> None:
    for folder in ("none", "empty", "run/checkpoints"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "file.txt").write_text("")
    adapter(tmp_path / "baseless", None)
    adapter(tmp_path / "orphan", "/nowhere")
    (adapter(tmp_path / "half", "a/b") / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match=told):
        PolicyFiles.find(str(tmp_path / named))


def test_finds_last_intact_checkpoint_of_run(tmp_path: Path) -> None:
    base = model(tmp_path / "run" / "model")
    checkpoint(tmp_path / "run", 3, base)
    (checkpoint(tmp_path / "run", 10, base) / "adapter_model.safetensors").write_text("damaged")
    found = PolicyFiles.find(str(tmp_path / "run"))
    kept = tmp_path / "run" / "checkpoints"
    assert found.adapter == kept / "step_3"
    what = "adapter_model.safetensors has changed since it was written"
    assert found.passed_over == (f"passed over {kept / 'step_10'}: {what}",)
    (kept / "step_3" / "files.json").unlink()
    (kept / "step_3" / "progress.json").unlink()
    with pytest.raises(UserError, match=rf"no intact checkpoint in this run \(step_10: {what}\)"):
        PolicyFiles.find(str(tmp_path / "run"))


def test_run_without_a_checkpoint_is_refused_as_such(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[model]\nname = 'org/model'\n")
    with pytest.raises(UserError, match="no intact checkpoint in this run; pass a model or an adapter"):
        PolicyFiles.find(str(tmp_path))


@pytest.fixture
def prime_rl_run(tmp_path: Path) -> Path:
    """A run of Prime-RL: sharded checkpoints, the base as broadcast 0, an adapter without base name, a torn one."""
    run, base = tmp_path / "prime", model(tmp_path / "base")
    harness = {"id": "harbor_env", "environment_type": "local", "n_parallel_envs": None, "capture": "interception"}
    agent = {"max_turns": 7, "harness": harness, "model": None}
    write_prime_rl_configs(run, str(base), env={"taskset": {"id": "harbor_env"}, "agent": agent})
    (run / "checkpoints/step_2").mkdir(parents=True)
    for step in (0, 2, 3):
        adapter(run / f"broadcasts/step_{step}", None)
        (run / f"broadcasts/step_{step}/STABLE").touch()
    (run / "broadcasts/step_3/STABLE").unlink()
    return run


def test_finds_last_complete_adapter_of_prime_rl_run(prime_rl_run: Path, tmp_path: Path) -> None:
    found = PolicyFiles.find(str(prime_rl_run))
    assert (found.base, found.adapter) == (str(tmp_path / "base"), prime_rl_run / "broadcasts/step_2")
    assert [
        line.endswith("step_3: STABLE or .finished is missing, so it is incomplete") for line in found.passed_over
    ] == [True]
    assert PolicyFiles.find(str(found.adapter)) == found
    with pytest.raises(UserError, match=r"no complete weights \(step_3: STABLE or .finished is missing"):
        PolicyFiles.find(str(prime_rl_run / "broadcasts/step_3"))
    (prime_rl_run / "broadcasts/step_2/adapter_config.json").unlink()
    with pytest.raises(UserError, match=f"without its config; run `harbortrainer export {prime_rl_run}`"):
        PolicyFiles.find(str(prime_rl_run))
    moved = prime_rl_run.rename(tmp_path / "my run")
    with pytest.raises(UserError, match=f"run `harbortrainer export '{moved}'`"):
        PolicyFiles.find(str(moved))


def test_newer_prime_rl_run_has_other_marks_and_config_folders(prime_rl_run: Path, tmp_path: Path) -> None:
    configs = prime_rl_run / "configs"
    configs.rename(prime_rl_run / "resolved")
    (configs / "attempt_1").mkdir(parents=True)
    (prime_rl_run / "resolved").rename(configs / "attempt_1/resolved")
    (configs / "latest").symlink_to("attempt_1")
    for step, marks in ((2, (".sender_ready", ".started", ".finished")), (3, (".sender_ready", ".started"))):
        (prime_rl_run / f"broadcasts/step_{step}/STABLE").unlink(missing_ok=True)
        for mark in marks:
            (prime_rl_run / f"broadcasts/step_{step}" / mark).touch()
    found = PolicyFiles.find(str(prime_rl_run))
    assert (found.base, found.adapter) == (str(tmp_path / "base"), prime_rl_run / "broadcasts/step_2")
    assert "step_3: STABLE or .finished is missing" in found.passed_over[0]
    assert TrainedWeights.find(prime_rl_run).step == 2
    file = run_file(str(prime_rl_run), None)
    assert file == configs / "latest/resolved/orchestrator.json"
    run = read_run(file)
    assert run is not None and run.model.name == str(tmp_path / "base")
    assert EvalRules.of(run).agent["max_turns"] == 7


def test_rules_come_from_the_prime_rl_run(prime_rl_run: Path) -> None:
    file = prime_rl_run / "configs/orchestrator.json"
    for policy in (prime_rl_run, prime_rl_run / "broadcasts/step_2"):
        assert run_file(str(policy), None) == file
    config = json.loads(file.read_text())
    config |= {"seq_len": 4096, "renderer": {"name": "qwen3"}, "concurrency": {"max_inflight": 5}}
    config["train"]["source"][0]["sampling"] = {"temperature": 0.9, "seed": None, "max_completion_tokens": 50}
    held_out = config["train"]["source"][0] | {"sampling": {"temperature": 0.4, "top_p": None, "top_k": 9}}
    for sources, expected in (([], (0.9, 50, None)), ([held_out], (0.4, None, 9))):
        file.write_text(json.dumps(config | {"eval": {"source": sources} if sources else None}))
        run = read_run(file)
        rules = EvalRules.of(run)
        sampling = rules.sampling
        assert (sampling.temperature, sampling.max_completion_tokens, sampling.top_k) == expected
        assert (rules.renderer["name"], rules.max_model_len, rules.agent["max_turns"]) == ("qwen3", 4096, 7)
        assert rules.environment_type == "local" and "capture" not in rules.agent["harness"]
        assert run is not None and run.orchestrator.concurrency.max_inflight == 5
    file.write_text("{}")
    with pytest.raises(UserError, match=r"orchestrator\.json: orchestrator\.train: is missing"):
        read_run(file)


def test_rules_come_from_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoint(run, 1, model(run / "model"))
    (run / "config.toml").write_text((ROOT / "configs/quickstart.toml").read_text())
    for policy in (run, run / "model", run / "checkpoints" / "step_1"):
        assert run_file(str(policy), None) == run / "config.toml"
    assert run_file(str(run), Path("other.toml")) == Path("other.toml")
    assert run_file(str(tmp_path), None) is None
    rules = EvalRules.of(read_run(run / "config.toml"))
    assert (rules.renderer["name"], rules.max_model_len, rules.agent["max_turns"]) == ("qwen3", 512, 3)
    assert (rules.sampling.temperature, rules.sampling.max_completion_tokens) == (1.0, 64)
    assert rules.agent["harness"]["keep_trials"] == "all"
    laptop = EvalRules.of(read_run(ROOT / "configs/laptop.toml"))
    assert laptop.renderer == APPENDING_TEMPLATE
    other = rules.with_overrides(temperature=0.0, max_tokens=None, max_turns=9, max_model_len=256)
    assert (other.sampling.temperature, other.sampling.max_completion_tokens) == (0.0, 64)
    assert (other.agent["max_turns"], other.max_model_len) == (9, 256)


@pytest.mark.parametrize("config", ["quickstart", "laptop"])
def test_rules_of_an_export_are_those_of_its_run(tmp_path: Path, config: str) -> None:
    run = load(ROOT / f"configs/{config}.toml")
    file = tmp_path / "run_config.json"
    file.write_text(json.dumps(redact(tomllib.loads(run.resolved()))))
    assert run_file(str(tmp_path), None) == file and run_file(str(tmp_path), Path("own.toml")) == Path("own.toml")
    assert EvalRules.of(read_run(file)) == EvalRules.of(run)


def test_export_selects_neither_class_nor_access(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = {
        "id": "their.module",
        "agent": "os:system",
        "environment_type": "their.module:Sandbox",
        "environment_kwargs": {"network": "host"},
        "trusted_tasks": ["*"],
        "reward_key": "score",
    }
    env = {"id": "their.module", "taskset": {"id": "their.module"}, "agent": {"max_turns": 4, "harness": hostile}}
    found = {
        "model": {"name": "m"},
        "orchestrator": {"train": {"source": [{"env": env}]}, "renderer": {"name": "custom", "class": "os"}},
    }
    (tmp_path / "run_config.json").write_text(json.dumps(found))
    rules = EvalRules.of(read_run(tmp_path / "run_config.json"))
    harness = {"id": "harbor_env", "keep_trials": "all", "environment_type": "local", "reward_key": "score"}
    assert rules.agent == {"max_turns": 4, "harness": harness} and "taskset" not in rules.env
    assert "class" not in rules.renderer
    names = "agent, environment_kwargs, environment_type, renderer, trusted_tasks"
    assert f"not used: {names}; to use them, pass --config" in capsys.readouterr().err


def test_options_select_one_candidate(tmp_path: Path) -> None:
    def chosen(*, model: str | None = None, base_url: str | None = None, agent: str | None = None) -> Candidate:
        return choose_candidate(model=model, base_url=base_url, agent=agent, key_var="K")

    assert isinstance(chosen(agent="oracle"), NoModel)
    assert isinstance(chosen(model=str(model(tmp_path / "m"))), LocalModel)
    assert chosen(model="m", base_url="http://h/v1/", agent="terminus-2") == Endpoint("http://h/v1", "m", "K")
    for words, told in (
        ({}, "no model or agent given"),
        ({"base_url": "http://h/v1"}, "no model or agent given"),
        ({"agent": "nop", "model": "m"}, "uses no model"),
        ({"model": "m", "base_url": "h:8000"}, "is not a URL"),
    ):
        with pytest.raises(UserError, match=told):
            chosen(**words)


def test_identity_depends_on_weights(tmp_path: Path) -> None:
    base = model(tmp_path / "m")
    named = str(adapter(tmp_path / "lora", str(base)))
    before = LocalModel(PolicyFiles.find(named)).identity()
    assert before == LocalModel(PolicyFiles.find(named)).identity()
    (tmp_path / "lora" / "adapter_model.safetensors").write_text("other")
    assert LocalModel(PolicyFiles.find(named)).identity() != before


def warmed_up_run(run: Path, weights: str) -> Path:
    """Write a run that made its own model; its adapter names the model by its place."""
    (model(run / "model") / "model.safetensors").write_text(weights)
    checkpoint(run, 1, run / "model")
    (run / "config.toml").write_text((ROOT / "configs/quickstart.toml").read_text())
    made_of = Provenance(weights=model_fingerprints(str(run / "model")))
    (run / FILE).write_text(made_of.model_dump_json())
    return run


def test_moved_run_is_evaluated_on_its_own_model(tmp_path: Path) -> None:
    warmed_up_run(tmp_path / "run", "first").rename(tmp_path / "old")
    assert PolicyFiles.find(str(tmp_path / "old")).base == str(tmp_path / "old" / "model")
    warmed_up_run(tmp_path / "run", "second")
    assert PolicyFiles.find(str(tmp_path / "old")).base == str(tmp_path / "old" / "model")
    (tmp_path / "old" / "model" / "model.safetensors").write_text("third")
    with pytest.raises(UserError, match=r"differs from the one that the run started from: model\.safetensors differs"):
        PolicyFiles.find(str(tmp_path / "old" / "checkpoints" / "step_1"))


def test_settings_of_the_run_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = warmed_up_run(tmp_path / "run", "first")
    for folder, named in ((run / "checkpoints", "step_1"), (run / "checkpoints/step_1", "."), (run, ".")):
        monkeypatch.chdir(folder)
        found = run_file(named, None)
        assert found is not None and found.resolve() == run / "config.toml"


def test_rules_have_what_changes_the_answers(tmp_path: Path) -> None:
    text = (ROOT / "configs/quickstart.toml").read_text().replace("[model]\n", '[model]\nquantization = "nf4"\n')
    held_out = 'env = { taskset = { id = "harbor_env", tasks_dir = "datasets/quickstart/heldout" }'
    assert held_out in text
    timeout = 'env = { timeout = { episode = 60 }, taskset = { id = "harbor_env", system_prompt = "Hi" }'
    (tmp_path / "run.toml").write_text(text.replace(held_out, timeout) + '\n[inference.vllm]\ndtype = "bfloat16"\n')
    rules = EvalRules.of(read_run(tmp_path / "run.toml"))
    assert (rules.quantization, rules.dtype) == ("nf4", "bfloat16")
    spec = eval_spec(["a"]).model_copy(update={"rules": rules})
    table = env_table(spec)
    assert table["timeout"] == {"episode": 60}
    assert table["taskset"] == {
        "id": "harbor_env",
        "system_prompt": "Hi",
        "tasks_dir": spec.tasks_dir,
        "include": ["a"],
    }
    assert table["agent"] == rules.agent


@pytest.mark.parametrize(
    ("max_inflight", "n_parallel_envs", "parallel"), [(None, None, 8), (24, 4, 4), (None, 12, 12), (64, 64, 32)]
)
def test_runs_as_many_trials_at_once_as_the_run(
    max_inflight: int | None, n_parallel_envs: int | None, parallel: int
) -> None:
    run = read_run(ROOT / "configs/quickstart.toml")
    assert run is not None and run.orchestrator.eval is not None
    run.orchestrator.concurrency.max_inflight = max_inflight
    agent = {"harness": {"id": "harbor_env", "n_parallel_envs": n_parallel_envs}}
    run.orchestrator.eval.source[0].env["agent"] = agent
    rules = EvalRules.of(run)
    assert default_parallel(run, rules) == parallel
    table = env_table(eval_spec(["a"]).model_copy(update={"rules": rules}))
    assert "n_parallel_envs" not in table["agent"]["harness"], "it would limit --parallel"
