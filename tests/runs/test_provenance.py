"""A resume detects changed weights, tasks and packages."""

from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from prime_rl_configs import write_prime_rl_configs

from harbortrainer.errors import UserError
from harbortrainer.evaluation.candidate import LocalModel
from harbortrainer.evaluation.policy_files import PolicyFiles
from harbortrainer.runs import provenance as subject
from harbortrainer.runs.provenance import (
    Provenance,
    TaskOrigin,
    check_provenance,
    collect_provenance,
    engine_of,
    fingerprint,
    hub_folder,
    named_model,
    package_versions,
    run_config,
)

TASKS = {"train": {"fix": "k1", "sort": "k2"}}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("a model")
    return folder


def start(run, model, tasks=TASKS):
    assert check_provenance(run, collect_provenance(str(model), tasks), resume=False) == []


def resume(run, model, tasks=TASKS):
    return check_provenance(run, collect_provenance(str(model), tasks), resume=True)


def test_fingerprint_depends_on_content_only(tmp_path, model):
    start(tmp_path, model)
    moved = model.rename(tmp_path / "elsewhere")
    (moved / "README.md").write_text("another word")
    (moved / "config.json").touch()
    assert resume(tmp_path, moved) == []


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_changed_weights_are_refused(name, tmp_path, model):
    start(tmp_path, model)
    content = bytearray((model / name).read_bytes())
    content[len(content) // 2] ^= 1
    (model / name).write_bytes(content)
    with pytest.raises(UserError, match=f"the policy's files have changed since this run was started: {name} differs"):
        resume(tmp_path, model)


@pytest.mark.parametrize(
    ("now", "what"),
    [
        ({"fix": "k1", "sort": "k3"}, "sort differs"),
        ({"fix": "k1"}, "sort is missing"),
        ({"fix": "k1", "new": "k", "sort": "k2"}, "new was added"),
    ],
)
def test_changed_tasks_are_refused(now, what, tmp_path, model):
    start(tmp_path, model)
    with pytest.raises(UserError, match=rf"made_of.json: the tasks of source 'train' have changed .*: {what}"):
        resume(tmp_path, model, {"train": now})


def test_changed_packages_are_reported_once(tmp_path, model, monkeypatch):
    start(tmp_path, model)
    monkeypatch.setattr(subject, "package_versions", lambda: {**package_versions(), "torch": "99.0"})
    (line,) = resume(tmp_path, model)
    assert "torch" in line
    assert line.endswith("-> 99.0")
    assert resume(tmp_path, model) == []


def test_run_of_older_release_resumes(tmp_path, model):
    assert resume(tmp_path, model) == []
    assert resume(tmp_path, model) == []


def test_reports_unreadable_provenance(tmp_path, model):
    (tmp_path / subject.FILE).write_text('{"weights": ')
    with pytest.raises(UserError, match=r"made_of\.json: cannot be read; restore the file"):
        resume(tmp_path, model)


def test_large_file_fingerprint_includes_both_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(subject, "WHOLE_MB", 0)
    monkeypatch.setattr(subject, "BLOCK", 16)
    path = tmp_path / "big.safetensors"
    path.write_bytes(bytes(64 * 1024))
    before = fingerprint(path)
    for place in (0, -1):
        content = bytearray(64 * 1024)
        content[place] = 1
        path.write_bytes(content)
        assert fingerprint(path) != before
    path.write_bytes(bytes(64 * 1024 + 1))
    assert fingerprint(path) != before


def test_lists_all_relevant_packages():
    assert {"torch", "transformers", "peft", "verifiers", "harbor", "harbortrainer"} == set(
        Provenance(packages=package_versions()).packages
    )


def test_records_origins_and_left_out_tasks(tmp_path, model):
    origin = TaskOrigin(source="own/registry.json#set@1.0", left_out=["tasks/bad: not valid TOML"])
    check_provenance(tmp_path, collect_provenance(str(model), TASKS, {"train": origin}), resume=False)
    kept = Provenance.model_validate_json((tmp_path / subject.FILE).read_text())
    assert kept.tasks == TASKS and kept.origins == {"train": origin}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that answers with the commit `c0ffee`, and an empty cache."""
    answer = SimpleNamespace(sha="c0ffee")
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: answer)  # its import reads the variable
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))


def test_first_start_records_commit_of_hub_model(tmp_path, hub):
    """It was recorded before the model was downloaded, as none; the resume then found that the policy had changed."""
    start(tmp_path, "org/model")
    recorded = Provenance.model_validate_json((tmp_path / subject.FILE).read_bytes())
    assert recorded.weights == {"commit": "c0ffee"}
    downloaded = hub_folder("org/model") / "refs/main"
    downloaded.parent.mkdir(parents=True)
    downloaded.write_text("c0ffee")
    assert resume(tmp_path, "org/model") == []


def test_run_that_recorded_no_commit_resumes(tmp_path, hub):
    check_provenance(tmp_path, Provenance(tasks=TASKS, packages=package_versions()), resume=False)
    assert resume(tmp_path, "org/model") == []
    assert Provenance.model_validate_json((tmp_path / subject.FILE).read_bytes()).weights == {"commit": "c0ffee"}


def test_hub_that_does_not_answer_gives_no_commit(tmp_path, monkeypatch):
    def model_info(*_, **__):
        raise httpx.ConnectError("the hub cannot be reached")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    assert collect_provenance("org/model", TASKS).weights == {}
    policies = [LocalModel(PolicyFiles.find(name)).identity() for name in ("org/model", "org/other")]
    assert policies == [{"base model": "org/model"}, {"base model": "org/other"}], "they are not the same policy"


def test_hub_folder_equals_huggingface_hubs():
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    assert hub_folder("a/b") == Path(HF_HUB_CACHE) / repo_folder_name(repo_id="a/b", repo_type="model")


def test_prime_rl_config_has_a_table_per_process(tmp_path):
    write_prime_rl_configs(tmp_path, "org/base")
    config = run_config(tmp_path)
    assert config.keys() == {"trainer", "orchestrator"}
    assert config["orchestrator"]["train"]["source"][0]["name"] == "own"
    assert (engine_of(tmp_path), named_model(tmp_path)) == ("prime-rl", "org/base")
    (tmp_path / "configs/inference.json").write_text('{"server": {"port": 1}}')
    assert run_config(tmp_path)["inference"] == {"server": {"port": 1}}


def test_folder_without_config_is_refused(tmp_path):
    (tmp_path / "configs/envs").mkdir(parents=True)
    for read in (run_config, named_model, engine_of):
        with pytest.raises(UserError, match=r"no run here \(neither config.toml nor configs/trainer.json\)"):
            read(tmp_path)
    (tmp_path / "configs/trainer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        named_model(tmp_path)
    (tmp_path / "configs/trainer.json").write_text('{"model": null}')
    with pytest.raises(UserError, match="does not name the model"):
        named_model(tmp_path)
