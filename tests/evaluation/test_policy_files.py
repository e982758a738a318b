"""A model, an adapter, a checkpoint, a run: what is named is found, and what is not there is one line."""

import json
from pathlib import Path

import pytest

from harbortrainer.errors import UserError
from harbortrainer.evaluation.candidate import Candidate, Endpoint, LocalModel, NoModel, choose
from harbortrainer.evaluation.play_rules import PlayRules, read_run, run_file
from harbortrainer.evaluation.policy_files import PolicyFiles
from harbortrainer.runs.checkpoint_files import list_files

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
    list_files(folder)
    return folder


def test_a_model_and_a_hub_id_stand_for_themselves(tmp_path: Path) -> None:
    assert PolicyFiles.find(str(model(tmp_path / "m"))) == PolicyFiles(str(tmp_path / "m"))
    assert PolicyFiles.find("Qwen/Qwen3-0.6B") == PolicyFiles("Qwen/Qwen3-0.6B")
    assert PolicyFiles(str(tmp_path / "m")).context_limit(32768) == 512


def test_an_adapter_comes_with_its_base(tmp_path: Path) -> None:
    base = model(tmp_path / "m")
    found = PolicyFiles.find(str(adapter(tmp_path / "lora", str(base))))
    assert (found.base, found.adapter) == (str(base), tmp_path / "lora")


def test_a_run_that_trained_every_weight_is_the_model_of_its_last_whole_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        folder = model(tmp_path / "run" / "checkpoints" / f"step_{step}")
        (folder / "progress.json").write_text(json.dumps({"step": step}))
        list_files(folder)
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
        ("orphan", "its base model /nowhere is not there"),
        ("half", r"no adapter_model\.safetensors"),
        ("run", "no whole checkpoint in this run"),
    ],
)
def test_what_is_no_policy_is_told(tmp_path: Path, named: str, told: str) -> None:
    for folder in ("none", "empty", "run/checkpoints"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "file.txt").write_text("")
    adapter(tmp_path / "baseless", None)
    adapter(tmp_path / "orphan", "/nowhere")
    (adapter(tmp_path / "half", "a/b") / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match=told):
        PolicyFiles.find(str(tmp_path / named))


def test_a_run_stands_for_its_last_good_checkpoint(tmp_path: Path) -> None:
    base = model(tmp_path / "run" / "model")
    checkpoint(tmp_path / "run", 3, base)
    (checkpoint(tmp_path / "run", 10, base) / "adapter_model.safetensors").write_text("damaged")
    found = PolicyFiles.find(str(tmp_path / "run"))
    assert found.adapter == tmp_path / "run" / "checkpoints" / "step_3"


def test_a_policy_of_a_run_is_played_as_the_run_evaluates(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoint(run, 1, model(run / "model"))
    (run / "config.toml").write_text((ROOT / "configs/quickstart.toml").read_text())
    for policy in (run, run / "model", run / "checkpoints" / "step_1"):
        assert run_file(str(policy), None) == run / "config.toml"
    assert run_file(str(run), Path("other.toml")) == Path("other.toml")
    assert run_file(str(tmp_path), None) is None
    rules = PlayRules.of(read_run(run / "config.toml"))
    assert (rules.renderer["name"], rules.max_model_len, rules.agent["max_turns"]) == ("qwen3", 512, 3)
    assert (rules.sampling.temperature, rules.sampling.max_completion_tokens) == (1.0, 64)
    assert rules.agent["harness"]["keep_trials"] == "all"
    other = rules.changed(temperature=0.0, max_tokens=None, max_turns=9, max_model_len=256)
    assert (other.sampling.temperature, other.sampling.max_completion_tokens) == (0.0, 64)
    assert (other.agent["max_turns"], other.max_model_len) == (9, 256)


def test_the_command_line_names_one_candidate(tmp_path: Path) -> None:
    def chosen(*, model: str | None = None, base_url: str | None = None, agent: str | None = None) -> Candidate:
        return choose(model=model, base_url=base_url, agent=agent, key_var="K")

    assert isinstance(chosen(agent="oracle"), NoModel)
    assert isinstance(chosen(model=str(model(tmp_path / "m"))), LocalModel)
    assert chosen(model="m", base_url="http://h/v1/", agent="terminus-2") == Endpoint("http://h/v1", "m", "K")
    for words, told in (
        ({}, "nothing to evaluate"),
        ({"base_url": "http://h/v1"}, "nothing to evaluate"),
        ({"agent": "nop", "model": "m"}, "asks no model"),
        ({"model": "m", "base_url": "h:8000"}, "is no URL"),
    ):
        with pytest.raises(UserError, match=told):
            chosen(**words)


def test_other_weights_are_another_identity(tmp_path: Path) -> None:
    base = model(tmp_path / "m")
    named = str(adapter(tmp_path / "lora", str(base)))
    before = LocalModel(PolicyFiles.find(named)).identity()
    assert before == LocalModel(PolicyFiles.find(named)).identity()
    (tmp_path / "lora" / "adapter_model.safetensors").write_text("other")
    assert LocalModel(PolicyFiles.find(named)).identity() != before
