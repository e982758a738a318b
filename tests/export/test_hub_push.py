"""Upload of an export to the Hugging Face hub; a failed upload keeps the local folder."""

from pathlib import Path

import pytest
from hub_models import serve_model_hub

from harbortrainer.errors import UserError
from harbortrainer.export.hub_push import BaseModelOrigin, HubRepo


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Exported folder, with a valid hub token in the environment."""
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    (tmp_path / "out").mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json", "README.md"):
        (tmp_path / "out" / name).write_text(f"first {name}")
    return tmp_path / "out"


def test_push_uploads_all_files_and_is_private_by_default(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_model_hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        assert HubRepo("org/policy").push(export) == f"{hub.url}/org/policy"
        assert hub.private == {"org/policy": True}
        files = hub.files["org/policy"]
        assert {name: files[name].decode() for name in files if name != "LICENSE"} == {
            path.name: path.read_text() for path in export.iterdir()
        }
        HubRepo("org/open", public=True).push(export)
        assert hub.private["org/open"] is False
        (export / "README.md").write_text("second README.md")
        with pytest.raises(UserError, match="org/open already exists and is public; add --public"):
            HubRepo("org/open").push(export)
        assert hub.files["org/open"]["README.md"] == b"first README.md"


def test_failed_push_keeps_local_folder(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_text() for path in export.iterdir()}
    with serve_model_hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        with pytest.raises(UserError, match=r"rejected org/policy: .*401") as rejected:
            HubRepo("org/policy").push(export)
    with pytest.raises(UserError, match="cannot be reached") as unreachable:
        HubRepo("org/policy").push(export)
    for message in (str(rejected.value), str(unreachable.value)):
        assert "\n" not in message and "hf_wrong" not in message
        assert message.endswith(f"try again with `hf upload --private org/policy {export}`")
    assert {path.name: path.read_text() for path in export.iterdir()} == before
    moved = export.rename(export.with_name("my export"))
    with pytest.raises(UserError, match=f"`hf upload --private org/policy '{moved}'`"):
        HubRepo("org/policy").push(moved)


def test_check_rejects_invalid_name_and_missing_token(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    HubRepo("org/policy").check()
    for name in ("policy", "org/", "a/b/c", "../b", "org/a--b"):
        with pytest.raises(UserError, match="is not a valid repository name; write ORG/NAME"):
            HubRepo(name).check()
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UserError, match="no token for the hub"):
        HubRepo("org/policy").check()


@pytest.mark.parametrize(
    ("folder", "hub", "expected"),
    [
        ("license: mit", "license: apache-2.0", "mit"),
        ("tags: [a]", "license: apache-2.0", "apache-2.0"),
        (None, "license: apache-2.0", "apache-2.0"),
        (None, "tags: [a]", None),
        ('license: "mit\\ntags: b"', None, None),
        ("license: [", None, None),
    ],
)
def test_license_is_that_of_the_base(
    export: Path, monkeypatch: pytest.MonkeyPatch, folder: str | None, hub: str | None, expected: str | None
) -> None:
    base = export.parent / "base"
    base.mkdir()
    if folder is not None:
        (base / "README.md").write_text(f"---\n{folder}\n---\n# base\n")
    origin = BaseModelOrigin(str(base), "org/base" if hub else None, None, {})
    with serve_model_hub() as models:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", models.url)
        models.private["org/base"] = False
        models.files["org/base"] = {"README.md": f"---\n{hub}\n---\n# base\n".encode()}
        assert origin.license() == expected
    if folder is None and hub:
        assert origin.license() is None, "the hub cannot be reached"
