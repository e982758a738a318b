"""What was uploaded for grading is compared with what is there."""

import io
import tarfile
from pathlib import Path

import pytest

from harbortrainer.sandbox.uploaded_tests import changed, files_of, is_whole


def folder(path: Path, **files: str) -> Path:
    path.mkdir()
    for name, text in files.items():
        (path / name).write_text(text)
    return path


def archive(**files: str | None) -> io.BytesIO:
    """Of /tests, as a container gives it; None stands for a link."""
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


def test_the_later_of_two_uploads_to_one_path_counts(tmp_path: Path):
    shared, step = folder(tmp_path / "a", test="1", other="2"), folder(tmp_path / "b", test="3")
    found = files_of([(shared, "/tests"), (step, "/tests/")])
    assert found == {"/tests/test": step / "test", "/tests/other": shared / "other"}


@pytest.mark.parametrize(
    ("there", "whole"),
    [
        (archive(test="1", more="x"), True),
        (archive(test="2"), False),
        (archive(test=None), False),
        (archive(more="x"), False),
        (io.BytesIO(b"no archive"), False),
    ],
)
def test_an_archive_is_whole_when_every_file_is_as_it_was_put(tmp_path: Path, there: io.BytesIO, whole: bool):
    assert is_whole(there, "/tests", [(folder(tmp_path / "a", test="1"), "/tests")]) is whole


async def test_what_was_removed_or_changed_is_named(tmp_path: Path):
    there = {"/tests/kept": b"1", "/tests/other": b"9"}

    async def read(path: str) -> bytes | None:
        return there.get(path)

    uploads = [(folder(tmp_path / "a", kept="1", other="2", gone="3"), "/tests")]
    assert await changed(uploads, read) == [
        "/tests/gone was removed while it was graded",
        "/tests/other was changed while it was graded",
    ]
