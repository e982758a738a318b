"""An export goes to the hub through the hub's own client; when it cannot, the folder stays and one line says why."""

from pathlib import Path

import pytest
from hub_models import hub_for_models

from harbortrainer.errors import UserError
from harbortrainer.export.hub_push import HubRepo


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What was exported, and a token beside it."""
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    (tmp_path / "out").mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json", "README.md"):
        (tmp_path / "out" / name).write_text(f"{name} of this")
    return tmp_path / "out"


def test_what_is_pushed_is_private_and_its_weights_are_the_only_ones(
    export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_for_models() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        assert HubRepo("org/policy").push(export) == f"{hub.url}/org/policy"
        assert hub.private == {"org/policy": True}
        files = hub.files["org/policy"]
        assert {name: files[name].decode() for name in files if name != "LICENSE"} == {
            path.name: path.read_text() for path in export.iterdir()
        }
        HubRepo("org/open", public=True).push(export)
        assert hub.private["org/open"] is False
        (export / "README.md").write_text("another")
        with pytest.raises(UserError, match="org/open is there and public; add --public"):
            HubRepo("org/open").push(export)
        assert hub.files["org/open"]["README.md"] == b"README.md of this"


def test_a_hub_that_refuses_or_is_not_there_is_one_line_and_the_folder_stays(
    export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_text() for path in export.iterdir()}
    with hub_for_models() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        with pytest.raises(UserError, match=r"did not take org/policy: .*401") as refused:
            HubRepo("org/policy").push(export)
    with pytest.raises(UserError, match="cannot be reached") as gone:
        HubRepo("org/policy").push(export)
    for told in (str(refused.value), str(gone.value)):
        assert "\n" not in told and "hf_wrong" not in told
        assert told.endswith(f"try again with `hf upload --private org/policy {export}`")
    assert {path.name: path.read_text() for path in export.iterdir()} == before


def test_a_name_or_a_token_that_is_missing_is_told_before_anything_is_written(
    export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    HubRepo("org/policy").check()
    for name in ("policy", "org/", "a/b/c", "../b", "org/a--b"):
        with pytest.raises(UserError, match="is no name of a repository; write ORG/NAME"):
            HubRepo(name).check()
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UserError, match="no token of the hub"):
        HubRepo("org/policy").check()
