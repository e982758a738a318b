"""An export is the policy that was trained, as plain transformers and peft load it; what cannot be is one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from eval_folders import evaluation
from peft import AutoPeftModelForCausalLM, PeftModel
from trained_run import COMMIT, SECRET, TrainedRun, as_prime_rl, logprobs_of, trained_run
from transformers import AutoModelForCausalLM

from harbortrainer.cli import main
from harbortrainer.engines.pretrained import load_tokenizer
from harbortrainer.evaluation.candidate import LocalModel
from harbortrainer.evaluation.eval_folder import ABOUT
from harbortrainer.evaluation.policy_files import PolicyFiles
from harbortrainer.export.vllm_fit import hindrances, served_rank


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    return trained_run(tmp_path_factory.mktemp("hub"), on_hub=True)


@pytest.fixture(scope="module")
def homemade(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    return trained_run(tmp_path_factory.mktemp("homemade"), on_hub=False)


def names_nothing_of_here(folder: Path, root: Path) -> bool:
    return not any(
        word.encode() in path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
        for word in (str(root), SECRET)
    )


def told(capfd: pytest.CaptureFixture[str], *words: object) -> str:
    """A command that must fail as a user's mistake; the one line that it said."""
    capfd.readouterr()
    assert main(["export", *map(str, words)]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def test_an_adapter_loads_in_plain_peft_and_is_the_policy_that_was_trained(run: TrainedRun, tmp_path: Path) -> None:
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
    assert names_nothing_of_here(out, run.path.parents[1])


@pytest.mark.parametrize("on_hub", [True, False])
def test_a_run_that_trained_every_weight_is_exported_as_the_model_it_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], on_hub: bool
) -> None:
    run, out = trained_run(tmp_path, on_hub=on_hub, every_weight=True), tmp_path / "out"
    assert "the run trained every weight" in told(capfd, run.path, "--adapter", "--out", out)
    assert main(["export", str(run.path), "--out", str(out)]) == 0
    assert torch.equal(logprobs_of(AutoModelForCausalLM.from_pretrained(out)), run.logprobs)
    assert load_tokenizer(out, where="").chat_template == load_tokenizer(run.model, where="").chat_template
    assert "every weight of" in (out / "README.md").read_text()
    assert not (out / "learner.pt").exists()
    assert names_nothing_of_here(out, tmp_path)
    found = PolicyFiles.find(str(run.path))
    assert torch.equal(logprobs_of(AutoModelForCausalLM.from_pretrained(found.base)), run.logprobs)


def test_the_card_tells_base_evaluation_curve_and_tasks(run: TrainedRun, tmp_path: Path) -> None:
    assert main(["export", str(run.path), "--step", "1", "--out", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\n") and "base_model: org/tiny\n" in card
    assert "There is no evaluation with an interval up to this step" in card
    for words in ("| 1 | 0.300 |", "| own | .../tasks | 2 |", "--max-lora-rank 8", COMMIT):
        assert words in card
    assert "| 2 | 0.500 |" not in card, "what came after this step is not its curve"
    assert json.loads((tmp_path / "out" / "tasks.lock.json").read_text()) == {"own": {"sort": "key-1", "join": "key-2"}}
    assert main(["export", str(run.path), "--out", str(tmp_path / "two")]) == 0
    assert "| 2 | 0.750 | 0.690 to 0.810 (32 tasks, 64 trials) |" in (tmp_path / "two" / "README.md").read_text()


def test_the_card_tells_that_the_base_was_quantized(run: TrainedRun, tmp_path: Path) -> None:
    config = run.path / "config.toml"
    whole = config.read_text()
    config.write_text(whole.replace("[model]\n", '[model]\nquantization = "nf4"\n'))
    try:
        assert main(["export", str(run.path), "--out", str(tmp_path / "out")]) == 0
    finally:
        config.write_text(whole)
    assert "trained on the base in nf4 (bitsandbytes)" in (tmp_path / "out" / "README.md").read_text()


def test_on_a_folder_of_this_machine_the_export_is_a_whole_model(homemade: TrainedRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["export", str(homemade.path), "--out", str(out)]) == 0
    found = logprobs_of(AutoModelForCausalLM.from_pretrained(out))
    assert torch.allclose(found, homemade.logprobs, atol=1e-4)
    assert names_nothing_of_here(out, homemade.path.parents[1])
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1
    assert main(["export", str(homemade.path), "--adapter", "--out", str(tmp_path / "lora")]) == 0
    assert json.loads((tmp_path / "lora" / "adapter_config.json").read_text())["base_model_name_or_path"] is None
    assert names_nothing_of_here(tmp_path / "lora", homemade.path.parents[1])
    assert "model.safetensors" in (tmp_path / "lora" / "README.md").read_text(), "the base by its files"


def test_what_prime_rl_leaves_is_exported_by_names_that_peft_finds(homemade: TrainedRun, tmp_path: Path) -> None:
    prime, out = as_prime_rl(homemade, tmp_path), tmp_path / "out"
    assert main(["export", str(prime), "--adapter", "--out", str(out)]) == 0
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(homemade.model), str(out))
    assert torch.equal(logprobs_of(loaded), homemade.logprobs)
    assert "after 2 steps" in (out / "README.md").read_text(), "step 3 was not written to its end"


def test_an_export_is_evaluated_like_any_adapter(run: TrainedRun, tmp_path: Path) -> None:
    assert main(["export", str(run.path), "--out", str(tmp_path / "out")]) == 0
    assert PolicyFiles.find(str(tmp_path / "out")).base == "org/tiny"
    config = tmp_path / "out" / "adapter_config.json"
    told = json.loads(config.read_text()) | {"base_model_name_or_path": str(run.model), "revision": None}
    config.write_text(json.dumps(told))
    assert torch.equal(logprobs_of(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")), run.logprobs)


def test_the_card_tells_of_an_evaluation_of_these_weights_and_of_no_other(
    run: TrainedRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = evaluation(tmp_path / "eval", {"sort": [1.0, 0.0], "join": [1.0, 1.0]}).path
    assert "is of another policy (m)" in told(capfd, run.path, "--out", tmp_path / "out", "--eval", folder)
    about = json.loads((folder / ABOUT).read_text())
    about["identity"] = LocalModel(PolicyFiles.find(str(run.path / "checkpoints" / "step_2"))).identity()
    (folder / ABOUT).write_text(json.dumps(about))
    assert main(["export", str(run.path), "--out", str(tmp_path / "out"), "--eval", str(folder)]) == 0
    assert "mean reward     0.750" in (tmp_path / "out" / "README.md").read_text()


def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(
    run: TrainedRun, homemade: TrainedRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", tmp_path / "out")
    copy = tmp_path / "copy"
    assert "no such folder" in told(capfd, copy, *out)
    assert "no run here" in told(capfd, run.model, *out)
    assert "is there already" in told(capfd, run.path, "--out", tmp_path)
    assert "step 7 is not kept here; choose --step among 1, 2" in told(capfd, run.path, "--step", 7, *out).replace(
        f"{run.path}/checkpoints: ", ""
    )
    shutil.copytree(run.path, copy)
    weights = copy / "checkpoints" / "step_2" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert "step_2: adapter_model.safetensors is not as it was written" in told(capfd, copy, "--step", 2, *out)
    (copy / "config.toml").write_text("not = = toml")
    assert "config.toml: cannot be read" in told(capfd, copy, *out)
    shutil.rmtree(copy / "checkpoints")
    assert "no trained weights in this run" in told(capfd, copy, *out)
    moved = homemade.model.rename(homemade.model.with_name("moved"))
    assert "is not there any more" in told(capfd, homemade.path, *out)
    shutil.copytree(moved, homemade.model)
    (homemade.model / "config.json").write_text((moved / "config.json").read_text() + " ")
    assert "another model than the run started from: config.json is another" in told(capfd, homemade.path, *out)
    shutil.rmtree(homemade.model)
    moved.rename(homemade.model)
    tokenizers = [path.rename(path.with_name("away")) for path in homemade.model.glob("tokenizer.json")]
    shutil.copy(homemade.path / "made_of.json", tmp_path / "made_of.json")
    (homemade.path / "made_of.json").unlink()
    assert "there is no tokenizer" in told(capfd, homemade.path, *out)
    tokenizers[0].rename(homemade.model / "tokenizer.json")
    shutil.copy(tmp_path / "made_of.json", homemade.path / "made_of.json")
    assert not [path for path in tmp_path.iterdir() if path.name in ("out", ".out.new")]


def test_it_is_said_when_vllm_cannot_serve_an_adapter(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plain = {"r": 16, "bias": "none", "modules_to_save": None, "alpha_pattern": {}}
    assert hindrances(plain, ["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]) == []
    assert hindrances(plain, ["base_model.model.lm_head.lora_A.weight"]) == ["it changes lm_head"]
    assert hindrances(plain | {"r": 1024, "alpha_pattern": {"q_proj": 2}}, []) == [
        "it has alpha_pattern",
        "its rank 1024 is above 512",
    ]
    assert [served_rank(rank) for rank in (4, 16, 17, 400)] == [8, 16, 32, 512]
    run = trained_run(tmp_path / "head", on_hub=True, targets=("q_proj", "lm_head"))
    assert main(["export", str(run.path), "--out", str(tmp_path / "out")]) == 0
    assert "vLLM cannot serve this adapter (it changes lm_head)" in capfd.readouterr().out
    assert "vLLM cannot serve it as an adapter: it changes lm_head" in (tmp_path / "out" / "README.md").read_text()
    assert "shares with its embeddings" in told(capfd, run.path, "--merged", "--out", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
