"""Changes to files that were uploaded for grading are detected."""

import io
import tarfile
from pathlib import Path

import pytest

from harbortrainer.sandbox.uploaded_tests import changed_uploads, is_intact, uploaded_files


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


async def test_names_removed_and_changed_files(tmp_path: Path):
    content = {"/tests/kept": b"1", "/tests/other": b"9"}

    async def read(path: str) -> bytes | None:
        return content.get(path)

    uploads = [(write_folder(tmp_path / "a", kept="1", other="2", gone="3"), "/tests")]
    assert await changed_uploads(uploads, read) == [
        "/tests/gone was removed while it was graded",
        "/tests/other was changed while it was graded",
    ]
