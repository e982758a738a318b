"""Changes to files that were uploaded for grading are detected."""

import io
import tarfile
from pathlib import Path

import pytest

from harbortrainer.sandbox.uploaded_tests import is_intact, uploaded_files


def write_folder(path: Path, **files: str) -> Path:
    path.mkdir()
    for name, text in files.items():
        (path / name).write_text(text)
    return path


def archive_of_tests(**files: str | None) -> io.BytesIO:
    """Return an archive of /tests as a container sends it; None makes a symbolic link."""
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"tests/{name}")
            if text is None:
                member.type, member.linkname = tarfile.SYMTYPE, "/app/x"
            else:
                member.size = len(text)
            tar.addfile(member, io.BytesIO((text or "").encode()))
    memory.seek(0)
    return memory


def test_later_upload_to_same_path_wins(tmp_path: Path):
    shared, step = write_folder(tmp_path / "a", test="1", other="2"), write_folder(tmp_path / "b", test="3")
    files_by_target = uploaded_files([(shared, "/tests"), (step, "/tests/")])
    assert files_by_target == {"/tests/test": step / "test", "/tests/other": shared / "other"}


@pytest.mark.parametrize(
    ("content", "intact"),
    [
        (archive_of_tests(test="1", more="x"), True),
        (archive_of_tests(test="2"), False),
        (archive_of_tests(test=None), False),
        (archive_of_tests(more="x"), False),
        (io.BytesIO(b"no archive"), False),
    ],
)
def test_archive_is_intact_if_every_uploaded_file_is_unchanged(tmp_path: Path, content: io.BytesIO, intact: bool):
    assert is_intact(content, "/tests", [(write_folder(tmp_path / "a", test="1"), "/tests")]) is intact


def test_links_of_tests_are_no_change(tmp_path: Path):
    folder = write_folder(tmp_path / "tests", test="1")
    (folder / "hard").hardlink_to(folder / "test")
    (folder / "soft").symlink_to("test")
    (folder / "broken").symlink_to("/nowhere")
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w") as tar:
        tar.add(folder, "tests")
        assert {tarfile.LNKTYPE, tarfile.SYMTYPE} <= {member.type for member in tar.getmembers()}
    memory.seek(0)
    assert is_intact(memory, "/tests", [(folder, "/tests")])
