"""Exports load in plain transformers and peft with the policy's log-probabilities; errors are one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from eval_folders import evaluation, row
from peft import AutoPeftModelForCausalLM, PeftModel
from prime_rl_runs import StreamRun, arrived, episode
from trained_run import (
    COMMIT,
    SECRET,
    TrainedRun,
    logprobs_of,
    move_to_newer_layout,
    write_prime_rl_run,
    write_trained_run,
)
from transformers import AutoModelForCausalLM
from view_runs import write_rows

from harbortrainer.cli import main
from harbortrainer.engines.models import load_tokenizer
from harbortrainer.evaluation.candidate import LocalModel
from harbortrainer.evaluation.eval_folder import ABOUT
from harbortrainer.evaluation.eval_rules import EvalRules, read_run, run_file
from harbortrainer.evaluation.policy_files import PolicyFiles
from harbortrainer.export.model_export import ModelExport
from harbortrainer.export.trained_weights import TrainedWeights
from harbortrainer.export.vllm_fit import served_rank, vllm_obstacles
from harbortrainer.runs.curve import TRAIN_KEY
from harbortrainer.runs.durable import write_lines
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.provenance import FILE, Provenance
from harbortrainer.view.overview import evaluations_of
from harbortrainer.view.run_folders import open_store


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """Run whose base model is in the hub's cache."""
    return write_trained_run(tmp_path_factory.mktemp("hub"), on_hub=True)


@pytest.fixture(scope="module")
def local_base_run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """Run whose base model is a local folder."""
    return write_trained_run(tmp_path_factory.mktemp("local_base"), on_hub=False)


def has_no_local_path_or_secret(folder: Path, root: Path) -> bool:
    """Return whether no file under `folder` contains the path `root` or the API key."""
    return not any(
        text.encode() in path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
        for text in (str(root), SECRET)
    )


def export_error(capfd: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run an `export` command that must fail, and return its one-line error."""
    capfd.readouterr()
    assert main(["export", *map(str, arguments)]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def test_exported_adapter_loads_in_plain_peft(run: TrainedRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["export", str(run.path), "--out", str(out)]) == 0
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/tiny", COMMIT)
    base = AutoModelForCausalLM.from_pretrained(run.model)
    assert (logprobs_of(base) - run.logprobs).abs().max() > 0.1
    loaded = PeftModel.from_pretrained(base, str(out))
    assert torch.equal(logprobs_of(loaded), run.logprobs)
    templates = [load_tokenizer(folder, where="").chat_template for folder in (out, run.model)]
    assert templates[0] == templates[1] is not None
    assert has_no_local_path_or_secret(out, run.path.parents[1])


@pytest.mark.parametrize("on_hub", [True, False])
def test_full_fine_tuning_exports_whole_model(tmp_path: Path, capfd: pytest.CaptureFixture[str], on_hub: bool) -> None:
    run, out = write_trained_run(tmp_path, on_hub=on_hub, full_fine_tuning=True), tmp_path / "out"
    assert "the run trained all weights and has no adapter" in export_error(capfd, run.path, "--adapter", "--out", out)
    assert main(["export", str(run.path), "--out", str(out)]) == 0
    assert torch.equal(logprobs_of(AutoModelForCausalLM.from_pretrained(out)), run.logprobs)
    assert load_tokenizer(out, where="").chat_template == load_tokenizer(run.model, where="").chat_template
    assert "full fine-tuning of" in (out / "README.md").read_text()
    assert not (out / "learner.pt").exists()
    assert has_no_local_path_or_secret(out, tmp_path)
    policy = PolicyFiles.find(str(run.path))
    assert torch.equal(logprobs_of(AutoModelForCausalLM.from_pretrained(policy.base)), run.logprobs)


def test_model_card_has_base_evaluation_curve_and_tasks(run: TrainedRun, tmp_path: Path) -> None:
    assert main(["export", str(run.path), "--step", "1", "--out", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\n") and "base_model: org/tiny\n" in card
    assert "There is no evaluation up to this step" in card
    assert "# mini-step_1\n\n**Not evaluated on the run's held-out tasks.**\n\nA language-model agent" in card
    assert "the Harbor agent `terminus-2`, with prompts by the renderer `qwen3`" in card
    assert "`harbortrainer eval TASKS --model HERE`" in card and "license: apache-2.0\n" in card
    for text in ("| 1 | 0.300 |", "| own | .../tasks | 2 |", "--max-lora-rank 8", COMMIT):
        assert text in card
    assert "| 2 | 0.500 |" not in card, "the curve ends at the exported step"
    assert json.loads((tmp_path / "out" / "tasks.lock.json").read_text()) == {"own": {"sort": "key-1", "join": "key-2"}}
    assert main(["export", str(run.path), "--out", str(tmp_path / "two")]) == 0
    card = (tmp_path / "two" / "README.md").read_text()
    assert "| 2 | 0.750 | 0.690 to 0.810 (32 tasks, 64 trials) |" in card
    result = "**Mean reward on 32 held-out tasks: 0.750 after step 2 (95 % interval 0.690 to 0.810).**"
    assert f"# mini-step_2\n\n{result}\n" in card


def test_model_card_compares_evaluations_of_the_same_sources(run: TrainedRun, tmp_path: Path) -> None:
    """Sources with other intervals than each other: step 1 evaluates one of the two sources of step 0."""
    metrics = run.path / "metrics.jsonl"
    original, lines = metrics.read_text(), []
    for step, mean, sources in ((0, 0.1, ("easy", "hard")), (1, 0.6, ("easy",)), (2, 0.4, ("easy", "hard"))):
        by_source = {f"eval/{name}/all/agent/avg@2": mean for name in sources}
        result = {"eval/mean_reward": mean, "eval/n": 8, "eval/tasks": 4 * len(sources)}
        lines.append(json.dumps({"step": step, **result, **by_source}))
    metrics.write_text(original.splitlines()[0] + "\n" + "\n".join(lines) + "\n")
    try:
        for step in (1, 2):
            assert main(["export", str(run.path), "--step", str(step), "--out", str(tmp_path / f"out{step}")]) == 0
    finally:
        metrics.write_text(original)
    one, two = ((tmp_path / f"out{step}" / "README.md").read_text() for step in (1, 2))
    assert "**Mean reward on 4 held-out tasks: 0.600 after step 1.**" in one and "| 0 | 0.100" not in one
    assert "**Mean reward on 8 held-out tasks: 0.100 after step 0, 0.400 after step 2.**" in two


def test_model_card_says_which_evaluated_tasks_were_trained_on(run: TrainedRun, tmp_path: Path) -> None:
    file, config = run.path / FILE, run.path / "config.toml"
    original, text = file.read_text(), config.read_text()
    made_of = Provenance.model_validate_json(original)
    own = made_of.tasks["own"]
    tasks = {"own": own, "again": own | {"new": "key-3"}}
    file.write_text(made_of.model_copy(update={"tasks": tasks}).model_dump_json())
    config.write_text(text + '\n[[orchestrator.eval.source]]\nname = "again"\n')
    try:
        assert main(["export", str(run.path), "--out", str(tmp_path / "out")]) == 0
    finally:
        file.write_text(original)
        config.write_text(text)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "**Mean reward on 32 evaluation tasks: 0.750 after step 2" in card
    assert "2 of these tasks were trained on.**" in card and "held-out" not in card


def test_model_card_mentions_quantized_base(run: TrainedRun, tmp_path: Path) -> None:
    config = run.path / "config.toml"
    original = config.read_text()
    config.write_text(original.replace("[model]\n", '[model]\nquantization = "nf4"\n'))
    try:
        assert main(["export", str(run.path), "--out", str(tmp_path / "out")]) == 0
    finally:
        config.write_text(original)
    assert "trained on the base quantized to nf4 (bitsandbytes)" in (tmp_path / "out" / "README.md").read_text()


def test_run_on_local_base_exports_whole_model(local_base_run: TrainedRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["export", str(local_base_run.path), "--out", str(out)]) == 0
    exported = logprobs_of(AutoModelForCausalLM.from_pretrained(out))
    assert torch.allclose(exported, local_base_run.logprobs, atol=1e-4)
    assert has_no_local_path_or_secret(out, local_base_run.path.parents[1])
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1
    assert main(["export", str(local_base_run.path), "--adapter", "--out", str(tmp_path / "lora")]) == 0
    assert json.loads((tmp_path / "lora" / "adapter_config.json").read_text())["base_model_name_or_path"] is None
    assert has_no_local_path_or_secret(tmp_path / "lora", local_base_run.path.parents[1])
    card = (tmp_path / "lora" / "README.md").read_text()
    assert "model.safetensors" in card, "the card identifies the base by its file hashes"
    assert "license: apache-2.0\n" in card and "Its own card names the license `apache-2.0`." in card


@pytest.mark.parametrize("newer", [False, True])
def test_prime_rl_weights_get_peft_names(local_base_run: TrainedRun, tmp_path: Path, newer: bool) -> None:
    prime_rl_run, out = write_prime_rl_run(local_base_run, tmp_path), tmp_path / "out"
    if newer:
        move_to_newer_layout(prime_rl_run)
    assert main(["export", str(prime_rl_run), "--adapter", "--out", str(out)]) == 0
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(local_base_run.model), str(out))
    assert torch.equal(logprobs_of(loaded), local_base_run.logprobs)
    card = (out / "README.md").read_text()
    assert "after 2 steps" in card, "step 3 is incomplete"
    config = json.loads((out / "run_config.json").read_text())
    assert config.keys() == {"trainer", "orchestrator"} and config["trainer"]["model"]["lora"]["rank"] == 4
    assert has_no_local_path_or_secret(out, tmp_path)


@pytest.mark.parametrize("root", [".", "monitors/file"])
def test_model_card_has_training_curve_of_prime_rl(local_base_run: TrainedRun, tmp_path: Path, root: str) -> None:
    prime_rl_run, out = write_prime_rl_run(local_base_run, tmp_path), tmp_path / "out"
    rewards = [{"step": step, TRAIN_KEY: 0.25 * step} for step in (1, 2, 3)]
    write_rows(prime_rl_run / root / "metrics.jsonl", [*rewards, {"step": None, "inference/running": 4}])
    card = ModelExport.plan(TrainedWeights.find(prime_rl_run, None), merged=False, out=out).card([])
    assert card.curve.train == [(1, 0.25), (2, 0.5)], "the exported step is 2"


@pytest.mark.parametrize("stream", [False, True])
def test_model_card_has_evaluations_of_prime_rl(local_base_run: TrainedRun, tmp_path: Path, stream: bool) -> None:
    """The card and the run's page agree. Step N's folder has the evaluation of policy version N - 1."""
    prime_rl_run, out = write_prime_rl_run(local_base_run, tmp_path), tmp_path / "out"
    for version, rewards in ((0, (0.0, 0.0, 1.0)), (2, (1.0, 0.0, 1.0))):
        lines = [
            episode(f"e{version}-{task}", reward=reward, task=task, task_key=task)
            for task, reward in zip(("sort", "join", "count"), rewards, strict=True)
        ]
        failed = episode(f"f{version}", ok=False, outcome="sandbox_error", reward=None, rewards=None)
        if stream:
            StreamRun(prime_rl_run).add(arrived(one, "eval", version) for one in (*lines, failed))
        else:
            write_rows(prime_rl_run / f"rollouts/step_{version + 1}/eval/all/traces.jsonl", [*lines, failed])
    assert main(["export", str(prime_rl_run), "--adapter", "--out", str(out)]) == 0
    shown = evaluations_of(open_store(prime_rl_run))
    assert list(shown.steps) == [0, 2]
    first, last = shown.estimates
    assert last.mean == pytest.approx(2 / 3) and last.low is not None and last.high is not None
    card = (out / "README.md").read_text()
    interval = f"95 % interval {last.low:.3f} to {last.high:.3f}"
    assert f"**Mean reward on 3 held-out tasks: {first.mean:.3f} after step 0, 0.667 after step 2 ({interval})" in card
    gain = shown.gain
    assert gain is not None and gain.mean == pytest.approx(1 / 3) and gain.low is not None and gain.high is not None
    assert f". Gain: +0.333 [{gain.low:+.3f}, {gain.high:+.3f}] (95 % interval, paired over 3 tasks).**" in card
    assert "Not evaluated" not in card and (out / "reward.png").is_file()


def test_model_card_begins_with_the_gain(run: TrainedRun, tmp_path: Path) -> None:
    metrics, folder = run.path / "metrics.jsonl", RunFolder(run.path)
    original = metrics.read_text()
    write_lines(
        metrics, [{"step": step, "eval/mean_reward": mean, "eval/n": 4} for step, mean in ((0, 0.25), (2, 1.0))]
    )
    folder.rollouts.mkdir()
    for step, rewards in ((0, (0.0, 0.0, 0.0, 1.0)), (2, (1.0, 1.0, 1.0, 1.0))):
        write_lines(
            folder.eval_file(step),
            [row(f"task-{n}", 0, reward).model_dump(mode="json") for n, reward in enumerate(rewards)],
        )
    try:
        assert main(["export", str(run.path), "--out", str(tmp_path / "out")]) == 0
    finally:
        metrics.write_text(original)
        shutil.rmtree(folder.rollouts)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "0.250 after step 0, 1.000 after step 2. Gain: +0.750 [" in card and "paired over 4 tasks).**" in card


def test_export_is_evaluated_with_the_settings_of_its_run(local_base_run: TrainedRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["export", str(local_base_run.path), "--out", str(out)]) == 0
    file = run_file(str(out), None)
    assert file == out / "run_config.json"
    exported, original = (EvalRules.of(read_run(one)) for one in (file, local_base_run.path / "config.toml"))
    original.agent["harness"].pop("agent_kwargs")
    assert exported == original and exported.renderer["name"] == "qwen3"


def test_export_can_be_evaluated(run: TrainedRun, tmp_path: Path) -> None:
    assert main(["export", str(run.path), "--out", str(tmp_path / "out")]) == 0
    assert PolicyFiles.find(str(tmp_path / "out")).base == "org/tiny"
    config = tmp_path / "out" / "adapter_config.json"
    local_config = json.loads(config.read_text()) | {"base_model_name_or_path": str(run.model), "revision": None}
    config.write_text(json.dumps(local_config))
    assert torch.equal(logprobs_of(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")), run.logprobs)


def test_model_card_accepts_only_evaluations_of_exported_weights(
    run: TrainedRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = evaluation(tmp_path / "eval", {"sort": [1.0, 0.0], "join": [1.0, 1.0]}).path
    assert "evaluates another policy (m)" in export_error(capfd, run.path, "--out", tmp_path / "out", "--eval", folder)
    spec = json.loads((folder / ABOUT).read_text())
    spec["identity"] = LocalModel(PolicyFiles.find(str(run.path / "checkpoints" / "step_2"))).identity()
    (folder / ABOUT).write_text(json.dumps(spec))
    assert main(["export", str(run.path), "--out", str(tmp_path / "out"), "--eval", str(folder)]) == 0
    assert "mean reward     0.750" in (tmp_path / "out" / "README.md").read_text()


def test_failed_export_leaves_no_output(
    run: TrainedRun, local_base_run: TrainedRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", tmp_path / "out")
    copy = tmp_path / "copy"
    assert "no such folder" in export_error(capfd, copy, *out)
    assert "config.toml: not a folder" in export_error(capfd, local_base_run.path / "config.toml", *out)
    assert "no run here" in export_error(capfd, run.model, *out)
    assert "already exists" in export_error(capfd, run.path, "--out", tmp_path)
    error = export_error(capfd, run.path, "--step", 7, *out)
    assert "step 7 is not kept here; choose --step among 1, 2" in error.replace(f"{run.path}/checkpoints: ", "")
    shutil.copytree(run.path, copy)
    weights = copy / "checkpoints" / "step_2" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    error = export_error(capfd, copy, "--step", 2, *out)
    assert "step_2: adapter_model.safetensors has changed since it was written" in error
    (copy / "config.toml").write_text("not = = toml")
    assert "config.toml: cannot be read" in export_error(capfd, copy, *out)
    shutil.rmtree(copy / "checkpoints")
    assert "no trained weights in this run" in export_error(capfd, copy, *out)
    moved = local_base_run.model.rename(local_base_run.model.with_name("moved"))
    assert "no longer exists" in export_error(capfd, local_base_run.path, *out)
    shutil.copytree(moved, local_base_run.model)
    (local_base_run.model / "config.json").write_text((moved / "config.json").read_text() + " ")
    error = export_error(capfd, local_base_run.path, *out)
    assert "differs from the model that the run started from: config.json differs" in error
    shutil.rmtree(local_base_run.model)
    moved.rename(local_base_run.model)
    tokenizers = [path.rename(path.with_name("away")) for path in local_base_run.model.glob("tokenizer.json")]
    shutil.copy(local_base_run.path / "made_of.json", tmp_path / "made_of.json")
    (local_base_run.path / "made_of.json").unlink()
    assert "there is no tokenizer" in export_error(capfd, local_base_run.path, *out)
    tokenizers[0].rename(local_base_run.model / "tokenizer.json")
    shutil.copy(tmp_path / "made_of.json", local_base_run.path / "made_of.json")
    assert not [path for path in tmp_path.iterdir() if path.name in ("out", ".out.new")]


def test_copied_run_of_a_warmup_exports_without_a_warning(
    local_base_run: TrainedRun, tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(local_base_run.path, copy)
    shutil.copytree(local_base_run.model, copy / "model")
    with (copy / "config.toml").open("a") as file:
        file.write('[warmup]\ntasks = "tasks"\n')
    assert main(["export", str(copy), "--out", str(tmp_path / "out")]) == 0
    assert "merged into a base model" in capfd.readouterr().out
    assert [str(one.message) for one in recwarn if one.category is UserWarning] == []


def test_export_names_checkpoints_that_it_passed_over(
    run: TrainedRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy)
    kept = copy / "checkpoints"
    weights = kept / "step_2" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    (kept / "step_3").mkdir()
    assert main(["export", str(copy), "--out", str(tmp_path / "out")]) == 0
    printed = capfd.readouterr()
    assert [line for line in printed.err.splitlines() if "passed over" in line] == [
        f"warning: passed over {kept / 'step_3'}: files.json is missing",
        f"warning: passed over {kept / 'step_2'}: adapter_model.safetensors has changed since it was written",
    ]
    assert f"wrote {tmp_path / 'out'}: step 1, a LoRA" in printed.out
    assert main(["export", str(copy), "--step", "1", "--out", str(tmp_path / "chosen")]) == 0
    assert "passed over" not in capfd.readouterr().err


def test_model_card_warns_if_vllm_cannot_serve_adapter(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plain = {"r": 16, "bias": "none", "modules_to_save": None, "alpha_pattern": {}}
    assert vllm_obstacles(plain, ["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]) == []
    assert vllm_obstacles(plain, ["base_model.model.lm_head.lora_A.weight"]) == ["it changes lm_head"]
    assert vllm_obstacles(plain | {"r": 1024, "alpha_pattern": {"q_proj": 2}}, []) == [
        "it has alpha_pattern",
        "its rank 1024 is above 512",
    ]
    assert [served_rank(rank) for rank in (4, 16, 17, 400)] == [8, 16, 32, 512]
    run = write_trained_run(tmp_path / "head", on_hub=True, targets=("q_proj", "lm_head"))
    assert main(["export", str(run.path), "--out", str(tmp_path / "out")]) == 0
    assert "vLLM cannot serve this adapter (it changes lm_head)" in capfd.readouterr().out
    assert "vLLM cannot serve this adapter (it changes lm_head" in (tmp_path / "out" / "README.md").read_text()
    assert "ties to its embeddings" in export_error(capfd, run.path, "--merged", "--out", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
