"""Merging of small layers: the result shows the same files as an overlay of all layers."""

import os
import stat
from pathlib import Path

import pytest

from harbortrainer.sandbox.images.layers import merge_small_layers

OPAQUE = "user.overlay.opaque"


@pytest.fixture
def layers(tmp_path: Path):
    """Return a function that creates layer folders, topmost first, from lists of names.

    `name/` is a folder, `name/!` an opaque folder, `-name` a whiteout, else a file that contains its layer's number.
    """

    def make(*entry_names: list[str]) -> list[str]:
        for number, names in enumerate(entry_names):
            (tmp_path / str(number)).mkdir()
            for name in names:
                write_entry(tmp_path / str(number) / name.rstrip("/!"), name, number)
        return [str(tmp_path / str(number)) for number in range(len(entry_names))]

    return make


def write_entry(path: Path, name: str, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.startswith("-"):
        os.mknod(path.with_name(path.name[1:]), stat.S_IFCHR, os.makedev(0, 0))
    elif name.endswith(("/", "!")):
        path.mkdir(exist_ok=True)
        if name.endswith("!"):
            os.setxattr(path, OPAQUE, b"y")
    else:
        path.write_text(str(number))


def describe_entries(folder: Path) -> dict[str, str]:
    """Describe a folder's entries: a file's content, `-` for a whiteout, `/` for a folder, `!` for an opaque one."""
    entries = {}
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        if stat.S_ISCHR(info.st_mode):
            entries[str(path.relative_to(folder))] = "-"
        elif path.is_dir():
            entries[str(path.relative_to(folder))] = "!" if OPAQUE in os.listxattr(path) else "/"
        else:
            entries[str(path.relative_to(folder))] = path.read_text()
    return entries


@pytest.mark.parametrize(
    ("top", "middle", "merged"),
    [
        (["d/a"], ["d/a", "d/b"], {"d": "/", "d/a": "0", "d/b": "1"}),
        (["d/-a"], ["d/a"], {"d": "/"}),
        (["in/-low"], ["in/a"], {"in": "/", "in/a": "1", "in/low": "-"}),
        (["in/!", "in/-low"], [], {"in": "!"}),
        (["d/a"], ["d/-a"], {"d": "/", "d/a": "0"}),
        (["-d"], ["d/a"], {}),
        (["-in"], ["in/a"], {"in": "-"}),
        (["d/!", "d/b"], ["d/a"], {"d": "!", "d/b": "0"}),
        (["d/b"], ["d/!", "d/a"], {"d": "!", "d/a": "1", "d/b": "0"}),
        (["d/b"], ["-d"], {"d": "!", "d/b": "0"}),
        (["x/b"], ["x"], {"x": "!", "x/b": "0"}),
        (["x"], ["x/b"], {"x": "0"}),
    ],
)
def test_merge_matches_overlay(layers, tmp_path, top, middle, merged):
    lowers = layers(top, middle, ["in/low"])
    assert merge_small_layers(lowers, tmp_path / "merged/root") == lowers[2:]
    assert describe_entries(tmp_path / "merged/root") == merged


def test_merge_keeps_links_modes_and_times(layers, tmp_path):
    lowers = layers(["d/a"], ["low"])
    os.link(tmp_path / "0/d/a", tmp_path / "0/b")
    (tmp_path / "0/link").symlink_to("/nowhere")
    (tmp_path / "0/d/a").chmod(0o4700)
    (tmp_path / "0/d").chmod(0o711)
    os.utime(tmp_path / "0/d", (5, 5))
    merge_small_layers(lowers, tmp_path / "merged")
    assert (tmp_path / "merged/d/a").samefile(tmp_path / "merged/b")
    assert stat.S_IMODE((tmp_path / "merged/b").stat().st_mode) == 0o4700
    assert (tmp_path / "merged/link").readlink() == Path("/nowhere")
    folder = (tmp_path / "merged/d").stat()
    assert (stat.S_IMODE(folder.st_mode), folder.st_mtime) == (0o711, 5)


def test_lowest_and_large_layers_are_not_merged(layers, tmp_path):
    assert merge_small_layers(["only"], tmp_path / "none") == ["only"]
    many_files = layers(["a"], [str(number) for number in range(300)], ["b"], ["low"])
    assert merge_small_layers(many_files, tmp_path / "merged") == many_files[1:]
    assert describe_entries(tmp_path / "merged") == {"a": "0"}
    (tmp_path / "0/a").write_bytes(b"x" * (5 << 20))
    assert merge_small_layers(many_files, tmp_path / "none") == many_files
    assert not (tmp_path / "none").exists()
