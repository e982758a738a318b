"""What a resume notices: other weights, other tasks, other releases under the same names."""

from pathlib import Path

import pytest

from harbortrainer.errors import UserError
from harbortrainer.runs import ingredients as subject
from harbortrainer.runs.ingredients import (
    Ingredients,
    TaskOrigin,
    check_ingredients,
    fingerprint,
    hub_folder,
    ingredients,
    releases,
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
    assert check_ingredients(run, ingredients(str(model), tasks), resume=False) == []


def resume(run, model, tasks=TASKS):
    return check_ingredients(run, ingredients(str(model), tasks), resume=True)


def test_the_same_is_the_same_wherever_and_whenever_it_was_written(tmp_path, model):
    start(tmp_path, model)
    moved = model.rename(tmp_path / "elsewhere")
    (moved / "README.md").write_text("another word")
    (moved / "config.json").touch()
    assert resume(tmp_path, moved) == []


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_other_weights_are_refused(name, tmp_path, model):
    start(tmp_path, model)
    content = bytearray((model / name).read_bytes())
    content[len(content) // 2] ^= 1
    (model / name).write_bytes(content)
    with pytest.raises(
        UserError, match=f"the policy's files have changed since this run was started: {name} is another"
    ):
        resume(tmp_path, model)


@pytest.mark.parametrize(
    ("now", "what"),
    [
        ({"fix": "k1", "sort": "k3"}, "sort is another"),
        ({"fix": "k1"}, "sort is gone"),
        ({"fix": "k1", "new": "k", "sort": "k2"}, "new is new"),
    ],
)
def test_other_tasks_are_refused(now, what, tmp_path, model):
    start(tmp_path, model)
    with pytest.raises(UserError, match=rf"made_of.json: the tasks of source 'train' have changed .*: {what}"):
        resume(tmp_path, model, {"train": now})


def test_other_releases_are_told_once(tmp_path, model, monkeypatch):
    start(tmp_path, model)
    monkeypatch.setattr(subject, "releases", lambda: {**releases(), "torch": "99.0"})
    (line,) = resume(tmp_path, model)
    assert "torch" in line
    assert line.endswith("-> 99.0")
    assert resume(tmp_path, model) == []


def test_a_run_of_an_older_release_goes_on(tmp_path, model):
    assert resume(tmp_path, model) == []
    assert resume(tmp_path, model) == []


def test_a_broken_list_is_one_line(tmp_path, model):
    (tmp_path / subject.FILE).write_text('{"weights": ')
    with pytest.raises(UserError, match=r"made_of\.json: cannot be read; put it back"):
        resume(tmp_path, model)


def test_a_large_file_is_read_in_parts_and_its_ends_are_among_them(tmp_path, monkeypatch):
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


def test_all_that_computes_is_named():
    assert {"torch", "transformers", "peft", "verifiers", "harbor", "harbortrainer"} == set(
        Ingredients(packages=releases()).packages
    )


def test_where_tasks_came_from_and_what_was_left_out_is_written_down(tmp_path, model):
    origin = TaskOrigin(source="own/registry.json#set@1.0", left_out=["tasks/bad: not valid TOML"])
    check_ingredients(tmp_path, ingredients(str(model), TASKS, {"train": origin}), resume=False)
    kept = Ingredients.model_validate_json((tmp_path / subject.FILE).read_text())
    assert kept.tasks == TASKS and kept.origins == {"train": origin}


def test_the_hubs_cache_is_where_huggingface_hub_has_it():
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    assert hub_folder("a/b") == Path(HF_HUB_CACHE) / repo_folder_name(repo_id="a/b", repo_type="model")
